"""The model as a pure function of its parameters and a text, for `jax.jit`, `vmap` and `grad`.

It is computed in XLA's own operations, all of which have derivatives, without the engine: no
batches of requests, no cache that stays, no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jinfer.api.activation_names import matching
from jinfer.api.activation_tracing import traced_edits
from jinfer.api.session import Session
from jinfer.engine.requests import RequestError
from jinfer.engine.runner.edit_tables import edit_tables, taps_of
from jinfer.modelspec.spec_errors import nearest_hint, show_value
from jinfer.nn.abstract_model import AbstractModel, Want, build_abstract_model
from jinfer.nn.activation_shapes import ActivationShape
from jinfer.nn.activation_taps import ActivationTaps, TapError, ValueEdit
from jinfer.nn.lora_rows import LORA_A, LORA_B, is_adapter
from jinfer.nn.row_edits import take_row_edits
from jinfer.nn.whole_text import Text, decode_text, encode_text, token_embedding
from jinfer.ops.attention.kv_cache import BLOCK, ENCODER
from jinfer.ops.backend import DIFFERENTIABLE, target_platform
from jinfer.quant import OutlierTensor, QuantizedTensor, ReorderedTensor
from jinfer.quant.lora_weight import LowRankSum
from jinfer.quant.scaled_tensor import ScaledTensor
from jinfer.sampling.activation_edits import Edit, Steer
from jinfer.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from jinfer.nn.transformer import Model

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
        captured_names = {name for pattern in patterns for name in matching(_text(pattern), known)}
        changed: Mapping[str, ValueEdit]
        if isinstance(edits, Mapping):
            changed = {
                name: self._edit(name, known[name], edit)
                for pattern, edit in edits.items()
                for name in matching(_text(pattern), known)
            }
        else:
            changed = self._row_edits(edits)
        names = tuple(name for name in known if name in captured_names)
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
        plain = tuple(item.edit if isinstance(item, Steer) else item for item in listed)
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


type Params = Mapping[str, Any]
type Ids = ArrayLike | Sequence[int]


@dataclass(frozen=True, eq=False, repr=False)
class PureFunction:
    """A model's forward pass over one text: what `LLM.function` gives.

    It keeps nothing and changes nothing. Attributes are what it is traced with.

    Attributes:
        model: the modules, without parameters.
        context: how many tokens a text may have.
        types: how many token types there are; None: unknown.
        wants: the results that there are.
        remat: whether a backward pass computes each layer again.
    """

    model: AbstractModel
    context: int
    types: int | None
    wants: tuple[str, ...]
    remat: bool = False

    def __call__(
        self,
        params: Params,
        tokens: Ids,
        *,
        embeddings: Float[ArrayLike, "tokens width"] | None = None,
        length: Int[ArrayLike, ""] | None = None,
        token_type_ids: Ids | None = None,
        encoder_ids: Ids | None = None,
        encoder_embeddings: Float[ArrayLike, "source width"] | None = None,
        encoder_length: Int[ArrayLike, ""] | None = None,
        want: Want = "logits",
        capture: str | Sequence[str] = (),
        edits: Edits | None = None,
    ) -> Any:
        """Logits of every token of a text, or another result, float32.

        Args:
            params: parameters by name, as of `LLM.function`, or others of their shapes. Besides
                "decoder.3.attn.q.weight" there may be "decoder.3.attn.q.lora_a", [rank, inputs],
                and "decoder.3.attn.q.lora_b", [outputs, rank]: b a is added to the weight (LoRA).
            tokens: ids of one text; of an encoder-decoder, the decoder's. Several texts of one
                length are computed by `jax.vmap(apply, in_axes=(None, 0))`.
            embeddings: vectors in place of the token embedding's rows; see `embed`.
            length: tokens that are not padding, which is at the end; None: all. What is computed
                of padding means nothing.
            token_type_ids: of an encoder that has them.
            encoder_ids, encoder_embeddings, encoder_length: the same for what the encoder of an
                encoder-decoder reads.
            want: "logits", "hidden" (the last hidden states), "classes", or "pooled", as there
                are; of an encoder "pooled" and "classes" are of the whole text.
            capture: names of values, as of `LLM.names`, maybe with `*`. They are returned with the
                result: (logits, {name: value}), each float32 with its axes as they are named.
            edits: by such names, a function of a value, or an array, whose result takes its
                place. What a function refers to has derivatives, too: of a value by itself, they
                are those of zeros that are added to it. Or `Edit` and `Steer`, as in requests.

        Raises:
            RequestError: an argument that the model has no use for, or of a wrong shape, or an
                unknown name.
        """
        if want not in self.wants:
            raise RequestError(
                f"the model gives no {want!r:.40}; want is one of {', '.join(self.wants)}"
            )
        if token_type_ids is not None and self._stack == "decoder":
            raise RequestError("token_type_ids are for an encoder; leave them out")
        text = self._text("tokens", tokens, length, embeddings)
        if token_type_ids is not None:
            text = text._replace(types=_ids("token_type_ids", token_type_ids, self.types))
            _check_shape("token_type_ids", text.types, text.tokens.shape)
        source = None
        if self.model.has_cross_attention != (encoder_ids is not None):
            raise RequestError(
                "the model has an encoder and a decoder: give encoder_ids, which the encoder reads"
                if encoder_ids is None
                else "encoder_ids are for a model with an encoder and a decoder; leave them out"
            )
        if encoder_ids is not None:
            given = encoder_ids, encoder_length, encoder_embeddings
            source = self._text("encoder_ids", *given)
        read = 0 if source is None else source.tokens.shape[0]
        named = FunctionTaps(self.model, text.tokens.shape[0], read)
        taps = named.taps(capture, {} if edits is None else edits)
        text = text._replace(taps=taps)
        source = None if source is None else source._replace(taps=taps)
        with target_platform(DIFFERENTIABLE):
            module = self._module(params)
            _check_vectors(module, self._stack, text)
            if source is not None:
                _check_vectors(module, "encoder", source)
            try:
                if self._stack == "encoder":
                    results = encode_text(module, text)
                else:
                    results = decode_text(module, self.model.caches, text, source)
            except TapError as error:
                raise RequestError(str(error)) from error
        result = results[want].astype(jnp.float32)
        if not capture:
            return result
        assert taps is not None, "values are captured"
        return result, named.named(results["captured"], taps.capture)

    def embed(
        self, params: Params, tokens: Ids, *, encoder: bool = False
    ) -> Float[Array, "tokens width"]:
        """The rows of the token embedding: `embeddings` that give what the tokens give.

        Args:
            encoder: of an encoder-decoder: those of its encoder.
        """
        with target_platform(DIFFERENTIABLE):
            table = token_embedding(self._module(params), "encoder" if encoder else self._stack)
            return table(self._text("tokens", tokens).tokens)

    def __repr__(self) -> str:
        return f"apply(params, tokens) -> {' | '.join(self.wants)}"

    @property
    def _stack(self) -> str:
        return "decoder" if self.model.modules.spec.decoder is not None else "encoder"

    def _text(self, name: str, tokens: Any, length: Any = None, vectors: Any = None) -> Text:
        ids = _ids(name, tokens, self.model.vocab)
        if ids.ndim != 1:
            raise RequestError(
                f"{name} have {ids.ndim} axes; give those of one text, and map over several: "
                "jax.vmap(apply, in_axes=(None, 0))"
            )
        count = ids.shape[0]
        if not 1 <= count <= self.context:
            raise RequestError(f"{name} has {count} tokens; from 1 to {self.context}")
        vectors = None if vectors is None else _floats("embeddings", vectors)
        return Text(ids, _length(name, length, count), vectors=vectors)

    def _module(self, params: Params) -> Model:
        """The model with these parameters."""
        if not isinstance(params, Mapping):
            raise RequestError("params are no dictionary; give those of llm.function()")
        model, extra = self.model, dict(params)
        leaves = list[Any]()
        for name, like, role in zip(model.names, model.parameters, model.roles, strict=True):
            if name not in params:
                raise RequestError(f"params has no {name}; give all that llm.function() gave")
            value = extra.pop(name)
            value = value if hasattr(value, "shape") else _floats(name, value)
            _check_shape(name, value, like.shape)
            owner = name.removesuffix("weight")
            a, b = extra.pop(owner + LORA_A, None), extra.pop(owner + LORA_B, None)
            if a is not None or b is not None:
                *stack, outputs, inputs = like.shape
                value = _with_lora(owner, value, a, b, (*stack, outputs, inputs), role)
            leaves.append(value)
        for name in extra:
            hint = nearest_hint(str(name), list(model.names))
            raise RequestError(f"there is no parameter {str(name)!r:.200}; {hint}")
        module = model.module(tuple(leaves))
        for stack in module.stacks.values():
            stack.remat = self.remat
        return module


def pure_function(
    session: Session, *, dequantize: bool = False, remat: bool = False
) -> tuple[PureFunction, dict[str, Any]]:
    """As `LLM.function`."""
    engine = session.engine
    if engine.runner.programs.pipeline is not None:
        raise RequestError(
            "the model is divided among devices or processes; open it without [partition]"
        )
    whole: tuple[Any, ...] = session.thread.run(lambda engine: engine.runner.parameters)
    spec = session.opened.spec
    params = {
        name: value
        for name, value in zip(engine.runner.model.names, whole, strict=True)
        if not is_adapter(name)
    }
    if dequantize:
        params = dict(_dequantized(params))
    # Without room for the engine's adapters, and no more in it than the text needs.
    model = build_abstract_model(spec, engine.runner.model.modules.dtype)
    model.modules.make()
    stack = spec.decoder or spec.stacks[0]
    heads = ("logits", "pooled", "classes")
    found = tuple(name for name in heads if name in stack.head.results)
    if spec.decoder is not None and not spec.generates:
        found = tuple(name for name in found if name != "logits")
    wants = (*found, "hidden")
    return PureFunction(model, session.opened.context, spec.dims.get("types"), wants, remat), params


def _dequantized(params: Params) -> Iterator[tuple[str, Array]]:
    """Quantized ones in float32; parameters that are one array stay one."""
    known = dict[int, Array]()
    for name, value in params.items():
        packed = QuantizedTensor | OutlierTensor | ReorderedTensor | ScaledTensor
        if not isinstance(value, packed):
            yield name, value
            continue
        key = id(jax.tree.leaves(value)[0])
        if key not in known:
            known[key] = jnp.asarray(jax.tree.map(np.asarray, value).dequantize(np.float32))
        yield name, known[key]


def _with_lora(owner: str, weight: Any, a: Any, b: Any, shape: tuple[int, ...], role: str) -> Any:
    """weight + b a."""
    if a is None or b is None:
        missing = LORA_A if a is None else LORA_B
        raise RequestError(f"params has no {owner}{missing}, and {owner}weight has the other one")
    a, b = jnp.asarray(a), jnp.asarray(b)
    *stack, outputs, inputs = shape
    rank = a.shape[-2] if a.ndim == len(shape) else 0
    _check_shape(owner + LORA_A, a, (*stack, rank, inputs))
    _check_shape(owner + LORA_B, b, (*stack, outputs, rank))
    if role in ("matrix", "head"):
        return LowRankSum(weight, a, b)
    whole = weight if isinstance(weight, Array) else weight.dequantize()
    term = jnp.matmul(b.astype(jnp.float32), a.astype(jnp.float32), precision="highest")
    return (whole.astype(jnp.float32) + term).astype(whole.dtype)


def _check_vectors(module: Model, stack: str, text: Text) -> None:
    if text.vectors is not None:
        width = token_embedding(module, stack).weight[...].shape[1]
        _check_shape("embeddings", text.vectors, (text.tokens.shape[0], width))


def _check_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != tuple(shape):
        raise RequestError(f"{name} is {list(value.shape)}; give {list(shape)}")


def _ids(name: str, given: Any, known: int | None) -> Int[Array, ...]:
    """Whole numbers below a bound, as far as they are known while the function is traced."""
    try:
        ids = given if isinstance(given, Array) else np.asarray(given)
    except ValueError:  # lists of several lengths
        raise RequestError(f"{name} are {show_value(given)}; give those of one text") from None
    if ids.size and ids.dtype.kind not in "iu":
        what = ids.dtype.name if ids.ndim else show_value(given)
        raise RequestError(f"{name} are {what}; give whole numbers")
    if known and not isinstance(ids, jax.core.Tracer) and ids.size:
        numbers = np.asarray(ids)
        if numbers.min() < 0 or numbers.max() >= known:
            raise RequestError(f"{name} are from 0 to {known - 1}, as many as the model has")
    return jnp.asarray(ids, jnp.int32)


def _length(name: str, length: Any, count: int) -> Int[Array, ""]:
    """How many tokens are not padding, checked as far as it is known."""
    size = count if length is None else length
    if not isinstance(size, jax.core.Tracer):
        number = np.asarray(size)
        if number.ndim or number.dtype.kind not in "iu" or not 1 <= number <= count:
            raise RequestError(
                f"the length of {name} is {show_value(length)}; give a number from 1 to {count}"
            )
    return jnp.asarray(size, jnp.int32)


def _floats(name: str, given: Any) -> Array:
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError):
        raise RequestError(f"{name} is {show_value(given)}; give an array of numbers") from None
