"""The verbs of frozen-mtp: command line, DVC stages and Prefect flows."""
