"""One module per DVC stage; each runs as a plain process: python -m pipelines.stages.NAME."""
