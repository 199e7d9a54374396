"""Files in and out: model weights, checkpoints, metrics. No training logic, and no arithmetic beyond changes of type."""
