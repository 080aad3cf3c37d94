"""Prefect flows: build (the DVC stages, one task each) and release (gates, registry, alias)."""
