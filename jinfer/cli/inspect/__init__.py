"""`jinfer inspect`: what a checkpoint is, and which tensor is which parameter."""
