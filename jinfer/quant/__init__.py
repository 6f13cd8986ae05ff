"""Block quantization of weights and of the KV cache: formats, packed tensors, quantizers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jinfer.modelspec.quant_format import FORMATS, QuantFormat, parse_format

if TYPE_CHECKING:
    from jinfer.quant.quantized_tensor import QuantizedTensor
    from jinfer.quant.sparse_matrix import OutlierTensor, SparseTensor

# Imported lazily: a specification names formats, which must not import JAX.
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

if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'jinfer.quant' has no attribute {name!r}")
        globals()[name] = getattr(import_module(f"jinfer.quant.{_HOMES[name]}"), name)
        return globals()[name]
