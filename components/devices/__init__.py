"""Measurement on a machine: the benchmark and the card of the host it ran on."""
