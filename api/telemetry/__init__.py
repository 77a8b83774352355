"""Health, metrics, logs and traces of an API process."""
