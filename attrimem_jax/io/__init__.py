"""Files in and out: model weights, checkpoints, metrics. No training logic and no text beyond names."""
