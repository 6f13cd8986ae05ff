"""What may be turned off from outside, to find out whether it is to blame."""

import os


def kernels() -> bool:
    """Whether a GPU's kernels may be used; with JINFER_NO_KERNELS set XLA computes all."""
    return not os.environ.get("JINFER_NO_KERNELS")
