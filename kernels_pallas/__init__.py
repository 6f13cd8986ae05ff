"""GPU kernels in Pallas: quantized matmul, grouped matmul (MoE) and paged attention.

Raw arrays in, raw arrays out; imports only jax and numpy. `matmul` and `grouped_quantized_matmul`
multiply by quantized matrices as stored, `attend` reads a plain or quantized KV cache through block
tables. Each takes `backend`: the Triton-style kernels, or plain XLA; and `interpret`, which runs a
kernel without a GPU.
"""

import warnings

from kernels_pallas.attention.kv_layout import PackedKV
from kernels_pallas.attention.paged_attention import QueryBatch, ScoreModifiers, attend
from kernels_pallas.matmul.grouped import grouped_quantized_matmul
from kernels_pallas.matmul.quantized import matmul
from kernels_pallas.matmul.weight_layout import PackedMatrix
from kernels_pallas.triton_ops import Backend

# Known: XLA computes everything once JAX drops it.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

__all__ = [
    "Backend",
    "PackedKV",
    "PackedMatrix",
    "QueryBatch",
    "ScoreModifiers",
    "attend",
    "grouped_quantized_matmul",
    "matmul",
]
