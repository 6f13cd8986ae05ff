"""Reading checkpoints of any format: `open_checkpoint(path)` gives named, lazily read tensors."""

from jinfer.loader.checkpoint.checkpoint_reader import Checkpoint, CheckpointError, Tensor
from jinfer.loader.checkpoint.open import open_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "Tensor", "open_checkpoint"]
