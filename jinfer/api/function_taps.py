"""Activation taps of the pure function: named values captured, and edited by functions of JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jinfer.api.activation_names import matching
from jinfer.api.traced_edits import traced_edits
from jinfer.engine.requests import RequestError
from jinfer.engine.runner.edit_tables import edit_tables, taps_of
from jinfer.modelspec.spec_errors import show_value
from jinfer.nn.abstract_model import AbstractModel
from jinfer.nn.activation_shapes import ActivationShape
from jinfer.nn.activation_taps import ActivationTaps, ValueEdit
from jinfer.nn.row_edits import take_row_edits
from jinfer.ops.attention.kv_cache import BLOCK, ENCODER
from jinfer.sampling.activation_edits import Edit, Steer
from jinfer.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxtyping import Float, Int

type Functions = Mapping[str, Callable[[Array], ArrayLike] | ArrayLike]
type Edits = Functions | Edit | Steer | Sequence[Edit | Steer]

_BY_HEADS = ("heads", "tokens", "keys")  # as named; a tap has [batch, tokens, heads, keys]


@dataclass(frozen=True)
class FunctionTaps:
    """Which values of a text are captured and edited.

    Attributes:
        model: whose values they are.
        tokens, read: of the text, and of what the encoder of an encoder-decoder reads.
    """

    model: AbstractModel
    tokens: int
    read: int = 0

    def taps(self, capture: str | Sequence[str], edits: Edits) -> ActivationTaps | None:
        """What the forward pass is given; None: neither.

        Raises:
            RequestError: an unknown name, or an edit that gives no value of the right shape.
        """
        known = self.model.activations if capture or edits else {}
        if not isinstance(capture, Iterable):
            raise RequestError(f"capture is {show_value(capture)}; give names: ['decoder.*.x']")
        patterns = (capture,) if isinstance(capture, str) else tuple(capture)
        wanted = {name for pattern in patterns for name in matching(_text(pattern), known)}
        changed: Mapping[str, ValueEdit]
        if isinstance(edits, Mapping):
            changed = {
                name: self._edit(name, known[name], edit)
                for pattern, edit in edits.items()
                for name in matching(_text(pattern), known)
            }
        else:
            changed = self._row_edits(edits)
        names = tuple(name for name in known if name in wanted)
        return ActivationTaps(names, changed) if names or changed else None

    def named(self, captured: Mapping[str, Array], order: Sequence[str]) -> dict[str, Array]:
        """Captured values as they are named: float32, or whole numbers."""
        shapes = self.model.activations
        return {name: self._as_named(name, shapes[name], captured[name]) for name in order}

    def _as_named(self, name: str, shape: ActivationShape, value: Array) -> Array:
        value = value[0]
        if shape.axes == _BY_HEADS:
            value = value[..., : self._keys(name)].swapaxes(0, 1)
        return value.astype(jnp.float32) if jnp.issubdtype(value.dtype, jnp.floating) else value

    def _edit(self, name: str, shape: ActivationShape, edit: Any) -> TracedEdit:
        free = {"tokens": self._tokens(name), "keys": self._keys(name)}
        sizes = tuple(free[size] if isinstance(size, str) else size for size in shape.sizes)
        abstract = jax.ShapeDtypeStruct(sizes, jnp.float32)

        def changed(value: Array) -> Array:
            given = edit(value) if callable(edit) else edit
            try:
                new = jnp.asarray(given).astype(jnp.float32)
            except (TypeError, ValueError):
                raise RequestError(
                    f"edits: {name} is {list(sizes)}, and the edit gives {show_value(given)}"
                ) from None
            try:
                return jnp.broadcast_to(new, sizes)
            except ValueError:
                raise RequestError(
                    f"edits: {name} is {list(sizes)}, and the edit gives {list(new.shape)}"
                ) from None

        traced = jax.make_jaxpr(changed)(abstract)
        keys = self._keys(name) if shape.axes == _BY_HEADS else None
        # What is part of a program's key must not hold arrays: without its constants.
        code = traced.jaxpr.replace(constvars=traced.jaxpr.constvars)
        return TracedEdit(tuple(traced.consts), _Code(code), keys)

    def _row_edits(self, edits: object) -> Mapping[str, ValueEdit]:
        """Those of requests and traces, in their order."""
        listed: Any = (edits,) if isinstance(edits, Edit | Steer) else edits
        if not isinstance(listed, Sequence) or not all(isinstance(e, Edit | Steer) for e in listed):
            raise RequestError(
                f"edits are {show_value(edits)}; give names with a function or an array each, or "
                "a list of Edit and Steer"
            )
        plain = tuple(each.edit if isinstance(each, Steer) else each for each in listed)
        decoder = self.model.modules.spec.decoder is not None
        keys = -(-self.tokens // BLOCK) * BLOCK if decoder else self.tokens
        shapes = {
            name: shape
            for name, shape in self.model.activations.items()
            if not (self.read and name.startswith("encoder."))
        }
        sampling = SamplingParams(edits=plain)
        seen = {name: self._keys(name) for name in shapes}
        use = traced_edits(sampling, shapes, self.tokens, self.tokens, keys, seen)
        if use is None or (taps := taps_of([use])) is None:
            return {}
        positions = jnp.arange(self.tokens, dtype=jnp.int32)
        tables = jax.tree.map(jnp.asarray, edit_tables(taps, 1, [(0, use)]))
        return take_row_edits(tables, jnp.zeros_like(positions), positions)[1]

    def _tokens(self, name: str) -> int:
        """Tokens that the stack of a value computes."""
        return self.read if self.read and name.startswith("encoder.") else self.tokens

    def _keys(self, name: str) -> int:
        """Keys of an attention's scores."""
        cache = self.model.caches.get(name.rpartition(".")[0])
        crossed = cache is not None and cache.group == ENCODER
        return self.read if crossed else self._tokens(name)


@dataclass(frozen=True, eq=False)
class _Code:
    """A traced function without its constants; each is equal to itself alone."""

    jaxpr: Any


@partial(jax.tree_util.register_dataclass, data_fields=["constants"], meta_fields=["code", "keys"])
@dataclass(frozen=True)
class TracedEdit:
    """An edit of a value by a traced function: see `jinfer.nn.activation_taps.ValueEdit`.

    Traced before the layer is, so that arrays which it refers to are arguments of that trace.

    Attributes:
        constants: these arrays.
        code: the function of a float32 value as it is named.
        keys: of scores: how many keys there are; the others are of the cache's last block.
    """

    constants: tuple[Array, ...]
    code: _Code
    keys: int | None

    def applied(self, value: Float[Array, "1 tokens ..."]) -> Array:
        """The value after the edit."""
        whole, given = value[0], value[0].astype(jnp.float32)
        if self.keys is not None:
            given = given[..., : self.keys].swapaxes(0, 1)
        (new,) = jax.core.eval_jaxpr(self.code.jaxpr, self.constants, given)
        if self.keys is not None:
            new = whole.at[..., : self.keys].set(new.swapaxes(0, 1).astype(whole.dtype))
        return new.astype(value.dtype)[None]

    def select_rows(self, rows: Int[Array, " chosen"]) -> TracedEdit:
        """The edits of some of the rows: the function always computes all."""
        raise AssertionError("all tokens have results")


def _text(pattern: object) -> str:
    if not isinstance(pattern, str):
        raise RequestError(f"a name is {show_value(pattern)}; give a text such as 'decoder.*.x'")
    return pattern
