"""From a checkpoint to a model's parameters."""
