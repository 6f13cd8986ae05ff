"""Linear block quantization: formats, packed tensors, and how numbers become codes."""

from jinfer.quant.format import FORMATS, QuantFormat, parse_format
from jinfer.quant.quantize import quantize, quantize_apart
from jinfer.quant.sparse import OutlierTensor, SparseTensor
from jinfer.quant.tensor import QuantizedTensor

__all__ = [
    "FORMATS",
    "OutlierTensor",
    "QuantFormat",
    "QuantizedTensor",
    "SparseTensor",
    "parse_format",
    "quantize",
    "quantize_apart",
]
