"""Block quantization of weights and of the KV cache: formats, packed tensors, quantizers."""

from jinfer.quant.quantized_tensor import QuantizedTensor
from jinfer.quant.reordered_tensor import ReorderedTensor
from jinfer.quant.sparse_matrix import OutlierTensor, SparseTensor
from jinfer.quant_format import FORMATS, QuantFormat, parse_format

__all__ = [
    "FORMATS",
    "OutlierTensor",
    "QuantFormat",
    "QuantizedTensor",
    "ReorderedTensor",
    "SparseTensor",
    "parse_format",
]
