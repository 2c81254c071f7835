"""A run's life: settings to trainer, steps, checkpoints, logs and the report at its end."""
