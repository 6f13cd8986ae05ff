"""Layouts of quantized checkpoints: which tensors a matrix is made of, and how."""
