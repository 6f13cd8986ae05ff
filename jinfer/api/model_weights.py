"""Weights by name: a loaded model's parameters as NumPy arrays, and others in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jinfer.api.build_engine import place_parameters
from jinfer.engine.engine import Engine
from jinfer.engine.engine_thread import EngineThread
from jinfer.engine.requests import RequestError
from jinfer.loader.weights.grouped_blocks import described
from jinfer.loader.weights.plan_weights import WeightPlan
from jinfer.loader.weights.tensor_mapping import Origin
from jinfer.modelspec.spec_errors import nearest_hint
from jinfer.nn.lora_rows import is_adapter
from jinfer.ops.attention.kv_cache import nbytes
from jinfer.quant import OutlierTensor, QuantizedTensor, ReorderedTensor
from jinfer.quant.quantize_matrix import quantize
from jinfer.quant.scaled_tensor import ScaledTensor, to_e4m3

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Weight:
    """A parameter of a loaded model.

    Attributes:
        name: "decoder.3.attn.q.weight".
        values: its values, dequantized.
        format: how it is stored: "q4_b128", "float32".
        nbytes: bytes that it takes in memory.
        tensors: the tensors of the checkpoint that it was read from.
    """

    name: str
    values: Float[np.ndarray, ...]
    format: str
    nbytes: int
    tensors: tuple[str, ...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype, copy=copy)


@dataclass(frozen=True, repr=False)
class ModelWeights:
    """The weights of a loaded model by name; nothing is dequantized before it is asked for.

    Attributes:
        engine, thread: what runs the model.
        tensors: name of each parameter -> the tensors that it was read from.
        same: name of each parameter -> that of the first one which is the same array.
    """

    engine: Engine
    thread: EngineThread
    tensors: Mapping[str, tuple[str, ...]]
    same: Mapping[str, str]

    @classmethod
    def of(cls, engine: Engine, thread: EngineThread, plan: WeightPlan) -> ModelWeights:
        """Those of a model, loaded by a plan."""
        origins = plan.origins.items()
        tensors = {
            name: tuple(file.name for file in origin.tensors) if isinstance(origin, Origin) else ()
            for name, origin in origins
        }
        return cls(engine, thread, tensors, dict(plan.same))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.engine.runner.model.names if not is_adapter(name))

    def __contains__(self, name: object) -> bool:
        return name in (names := set(self)) or f"{name}.weight" in names

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Weight:
        """A parameter; "decoder.3.attn.q" is its weight.

        Raises:
            RequestError: there is none of that name.
            EngineError: the weights are in parts on several devices.
        """
        full = self._full(name)
        stored = self._stored(full)
        host = jax.tree.map(np.asarray, stored)
        codes = host.rounded if isinstance(host, OutlierTensor | ReorderedTensor) else host
        format = codes.format if isinstance(codes, QuantizedTensor) else None
        return Weight(
            full,
            host.dequantize() if format or isinstance(host, ScaledTensor) else host,
            str(host.dtype) if format is None else described(format),
            nbytes(stored),
            self.tensors.get(full, ()),
        )

    def rows(self, name: str, rows: Sequence[int]) -> Float[np.ndarray, "rows inputs"]:
        """Some rows of a matrix in float32, such as a token's of the embedding.

        Raises:
            RequestError, EngineError: as `[]`.
        """
        full = self._full(name)
        stored, chosen = self._stored(full), np.asarray(rows, np.int32)
        if isinstance(stored, QuantizedTensor | ScaledTensor):
            return np.asarray(stored.take(jax.numpy.asarray(chosen), np.float32))
        if isinstance(stored, OutlierTensor | ReorderedTensor):
            return np.asarray(self[full].values[chosen], np.float32)
        return np.asarray(stored[chosen], np.float32)

    def update(self, values: Mapping[str, Any]) -> None:
        """As `LLM.update_weights`."""
        changed = dict[str, Any]()
        for name, given in values.items():
            full = self._full(name)
            new = _stored_as(full, self._stored(full), given)
            first = self.same.get(full, full)
            changed |= {other: new for other in self if self.same.get(other, other) == first}
        self.thread.run(partial(_replace, changed))

    def _full(self, name: object) -> str:
        names = list(self)
        for full in (name, f"{name}.weight"):
            if isinstance(full, str) and full in names:
                return full
        raise RequestError(
            f"there is no weight {str(name)!r:.200}; {nearest_hint(str(name), names)}"
        )

    def _stored(self, name: str) -> Any:
        return self.engine.runner.parameters[self.engine.runner.model.names.index(name)]


def _stored_as(name: str, old: Any, given: Any) -> Any:
    """Values in the format of what they replace."""
    try:
        values = np.asarray(given)
        values = values if values.dtype.kind in "fiu" else values.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name}: the values are no array of numbers: {error}") from None
    if values.shape != tuple(old.shape):
        raise RequestError(f"{name} is {list(old.shape)}, and the values are {list(values.shape)}")
    if isinstance(old, OutlierTensor):
        raise RequestError(f"{name} has outliers apart from its codes, which cannot be updated")
    if isinstance(old, ReorderedTensor):
        order = np.asarray(old.order)
        ordered = np.take_along_axis(values, order[..., None, :], axis=-1)
        return ReorderedTensor(order, _stored_as(name, old.rounded, ordered))
    if isinstance(old, ScaledTensor):
        return to_e4m3(values.astype(np.float32), old)
    if not isinstance(old, QuantizedTensor):
        return np.ascontiguousarray(values, old.dtype)
    try:
        new = quantize(values.astype(np.float32), old.format, columns=old.columns)
    except ValueError as error:
        raise RequestError(f"{name} is stored as {described(old.format)}: {error}") from None
    return replace(new, activations=old.activations)


def _replace(changed: Mapping[str, Any], engine: Engine) -> None:
    if engine.busy:
        raise RequestError("requests run; update weights when none does")
    place_parameters(engine, changed)
    engine.scheduler.blocks.clear()
    engine.weights_key = token_hex(16)
    if engine.offload is not None:
        engine.offload.weights_changed()
