"""Block quantization of weights and of the KV cache: formats, packed tensors, quantizers."""

from jinfer.modelspec.quant_format import FORMATS, QuantFormat, parse_format
from jinfer.quant.quantized_tensor import QuantizedTensor
from jinfer.quant.reordered_tensor import ReorderedTensor
from jinfer.quant.sparse_matrix import OutlierTensor, SparseTensor

__all__ = [
    "FORMATS",
    "OutlierTensor",
    "QuantFormat",
    "QuantizedTensor",
    "ReorderedTensor",
    "SparseTensor",
    "parse_format",
]
