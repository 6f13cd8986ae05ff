"""Linear block quantization: formats, packed tensors, and how numbers become codes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jinfer.modelspec.quant_format import FORMATS, QuantFormat, parse_format

if TYPE_CHECKING:
    from jinfer.quant.quantized_tensor import QuantizedTensor
    from jinfer.quant.sparse_matrix import OutlierTensor, SparseTensor

# Imported when they are first asked for: a specification names formats, and needs no JAX for that.
_HOMES = {
    "OutlierTensor": "sparse_matrix",
    "QuantizedTensor": "quantized_tensor",
    "SparseTensor": "sparse_matrix",
}

__all__ = [
    "FORMATS",
    "OutlierTensor",
    "QuantFormat",
    "QuantizedTensor",
    "SparseTensor",
    "parse_format",
]

if not TYPE_CHECKING:  # a type checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'jinfer.quant' has no attribute {name!r}")
        globals()[name] = getattr(import_module(f"jinfer.quant.{_HOMES[name]}"), name)
        return globals()[name]
