"""Weights: from a checkpoint to a model's parameters on its devices."""
