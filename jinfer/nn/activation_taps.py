"""Activation taps: values of a forward pass that are captured or edited, by their names (hooks).

Every value that a formula assigns or adds to `x`, modules' inputs and outputs and parts of some
pass a tap. Without taps in the batch it returns the value itself, so that programs do not change.
The names of captured and edited values are static, and part of a program's key; edits are arrays,
so other vectors and tokens need no new program.

Names, within a layer "decoder.3.", a stem "decoder.stem." or a head "decoder.head.":

    x, y           the formula's values; of several assignments `x` is the last one, and `x@1`,
                   `x@2` are those before, in order; a layer's result is called `x` in any case
    attn           a module's output; of several calls `act` is the last one, as above
    attn.input     a module's first argument
    attn.q         a part of a module
    attn.added     the part added to the residual stream: times a factor, after a norm

`embed`, the first layer's input, and the results `hidden`, `logits`, `pooled` and `classes` stand
alone; an encoder's names in an encoder-decoder are `encoder.embed` and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.nn.tensor_parallel import resolve_all_reduce

if TYPE_CHECKING:
    from jaxtyping import Float, Int

EVERY = ("*",)  # captures all values


class TapError(ValueError):
    """A value that cannot be edited: one line with its name."""


class ValueEdit(Protocol):
    """Edits of one value, row by row: a tree of arrays."""

    def applied(self, value: Float[Array, "batch tokens ..."]) -> Array:
        """Applies the edits to a value; keeps shape and type."""
        ...

    def select_rows(self, rows: Int[Array, " chosen"]) -> ValueEdit:
        """Selects the edits of some rows."""
        ...


@partial(jax.tree_util.register_dataclass, data_fields=["edits"], meta_fields=["capture"])
@dataclass(frozen=True)
class ActivationTaps:
    """Captures and edits of a forward pass.

    Attributes:
        capture: names of the values that it returns.
        edits: by the names of the values.
    """

    capture: tuple[str, ...] = ()
    edits: Mapping[str, ValueEdit] = field(default_factory=dict)

    def of(self, name: str) -> ActivationTaps | None:
        """Returns the taps of a layer such as "decoder.3", with names within it; None: no taps.

        Equal layers with equal parts are traced once.
        """
        prefix = f"{name}."
        own = tuple(n.removeprefix(prefix) for n in self.capture if n.startswith(prefix))
        edits = {n.removeprefix(prefix): e for n, e in self.edits.items() if n.startswith(prefix)}
        own = EVERY if self.capture == EVERY else own
        return ActivationTaps(own, edits) if own or edits else None

    def select_rows(self, rows: Int[Array, " chosen"]) -> ActivationTaps:
        """Selects the taps of some rows, such as those that a head computes."""
        edits = {name: edit.select_rows(rows) for name, edit in self.edits.items()}
        return ActivationTaps(self.capture, edits)


@dataclass(frozen=True)
class Tapping:
    """Taps during one trace of a layer, a stem or a head.

    Attributes:
        prefix: prefix of the names of current values.
        lead: shape of the axes of tokens; () where no module needs it.
        results: names of assigned values that have no prefix -> their names.
        captured: values captured so far, by name; filled in place.
    """

    taps: ActivationTaps
    prefix: str = ""
    lead: tuple[int, ...] = ()
    results: Mapping[str, str] = field(default_factory=dict)
    captured: dict[str, Array] = field(default_factory=dict)

    def wants(self, name: str) -> bool:
        """Whether a value is captured or edited."""
        full = self.prefix + name
        return self.taps.capture == EVERY or full in self.taps.capture or full in self.taps.edits

    def edits(self, name: str) -> bool:
        """Whether a value is edited."""
        return self.prefix + name in self.taps.edits

    def value(self, name: str, value: Any) -> Any:
        """Edits a value, and captures it if requested."""
        return self._value(self.prefix + name, value)

    def assigned(self, name: str, value: Any) -> Any:
        """Applies `value` to a value that a formula assigns."""
        return self._value(self.results.get(name, self.prefix + name), value)

    def called(self, name: str, module: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
        """Calls a module with taps of its first argument, its parts and its output."""
        if arguments:
            arguments = [self.value(f"{name}.input", arguments[0]), *arguments[1:]]
        token = _ACTIVE.set(replace(self, prefix=f"{self.prefix}{name}."))
        try:
            out = module(arguments)
        finally:
            _ACTIVE.reset(token)
        return self.value(name, out)

    def _value(self, full: str, value: Any) -> Any:
        if full in self.taps.edits:
            value = resolve_all_reduce(value)
        if not isinstance(value, Array) or not jnp.issubdtype(value.dtype, jnp.floating):
            return value  # a scalar, or tokens
        if (edits := self.taps.edits.get(full)) is not None:
            value = edits.applied(value)
        if self.taps.capture == EVERY or full in self.taps.capture:
            self.captured[full] = value
        return value


_ACTIVE: ContextVar[Tapping | None] = ContextVar("tapping", default=None)


@contextmanager
def tapping(taps: ActivationTaps | None, lead: tuple[int, ...]) -> Iterator[Tapping | None]:
    """Sets the taps of modules that this thread calls within the context."""
    token = _ACTIVE.set(None)
    try:
        yield None if taps is None else Tapping(taps, lead=lead)
    finally:
        _ACTIVE.reset(token)


def tapped(name: str, value: Any) -> Any:
    """Taps a module's part [batch, tokens, ...]; returns it edited, or unchanged without taps."""
    active = _ACTIVE.get()
    return value if active is None else active.value(name, value)


def tapped_rows(name: str, value: Float[Array, "rows ..."]) -> Float[Array, "rows ..."]:
    """Applies `tapped` to a part whose token axes are flattened."""
    active = _ACTIVE.get()
    if active is None or not active.wants(name):
        return value
    whole = value.reshape(*active.lead, *value.shape[1:])
    return active.value(name, whole).reshape(value.shape)


def observed(name: str, make: Callable[[], Array]) -> None:
    """Captures a value that the result does not depend on; it is only computed if requested.

    Raises:
        TapError: an edit is requested, which would have no effect.
    """
    active = _ACTIVE.get()
    if active is None or not active.wants(name):
        return
    if active.edits(name):
        full = active.prefix + name
        raise TapError(f"{full} does not take part in the forward pass and cannot be edited")
    active.captured[active.prefix + name] = make()


def observed_rows(name: str, make: Callable[[], Array]) -> None:
    """Applies `observed` to a part whose token axes are flattened."""
    active = _ACTIVE.get()
    if active is not None:
        lead = active.lead
        observed(name, lambda: (value := make()).reshape(*lead, *value.shape[1:]))


def is_tapped(*names: str) -> bool:
    """Whether any of these parts is captured or edited."""
    active = _ACTIVE.get()
    return active is not None and any(map(active.wants, names))


def is_edited(*names: str) -> bool:
    """Whether any of these parts is edited."""
    active = _ACTIVE.get()
    return active is not None and any(map(active.edits, names))
