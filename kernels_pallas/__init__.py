"""GPU kernels in Pallas: raw arrays in, raw arrays out; imports only jax and numpy.

`matmul` and `expert_matmul` multiply by quantized matrices as they are stored, `attend` reads a
plain or quantized cache through tables of its blocks. Each takes `backend`, the one switch between
the Triton-style kernels, Mosaic GPU and plain XLA, and `interpret`, which runs a kernel where there
is no GPU.
"""

import warnings

from kernels_pallas.attention.batch import Queries, Scores
from kernels_pallas.attention.kv_layout import Kept
from kernels_pallas.attention.paged_attention import attend
from kernels_pallas.matmul.grouped_quantized import expert_matmul
from kernels_pallas.matmul.quantized import matmul
from kernels_pallas.matmul.weight_layout import Packed
from kernels_pallas.triton_ops import Backend

# Known, and what `backend` is for.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

__all__ = [
    "Backend",
    "Kept",
    "Packed",
    "Queries",
    "Scores",
    "attend",
    "expert_matmul",
    "matmul",
]
