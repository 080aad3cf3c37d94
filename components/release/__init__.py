"""Gates over evidence, MLflow tracking and the model registry."""
