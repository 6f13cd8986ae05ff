"""Final norm and LM head by themselves: the model's own modules, applied to any residual stream."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.modelspec.block import Block
from jinfer.modelspec.blocks import HeadSpec, LayerNormSpec, RMSNormSpec
from jinfer.progress import task
from jinfer.sampling.request_errors import RequestError
from jinfer.views.traced_values import layer_count

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from jinfer.api.llm import LLM
    from jinfer.engine.engine import Engine

    type Likeliest = tuple[
        Int[np.ndarray, "rows top"], Float[np.ndarray, "rows top"], Float[np.ndarray, " rows"]
    ]

_ROWS = 64  # computed at a time: their logits are all in memory


def likeliest_tokens(
    llm: LLM, x: Float[np.ndarray, "rows hidden"], following: Sequence[int], top: int
) -> Likeliest:
    """The model's head applied to residual streams.

    Args:
        following: a token of each row whose log-probability is returned too.

    Returns:
        Ids of the likeliest tokens, their log-probabilities, and those of `following`.

    Raises:
        RequestError: the model has no vocabulary head, or its head reads other values.
    """
    from jinfer.api.prompt_inputs import no_head_error

    layer_count(llm)
    assert llm.spec.decoder is not None
    if not llm.spec.generates:
        raise RequestError(no_head_error(llm.spec))
    if llm.spec.decoder.head.takes:
        taken = ", ".join(llm.spec.decoder.head.takes)
        raise RequestError(f"the model's head reads {taken} besides x, so x alone has no logits")
    with task("applying the head", len(x), unit="row") as shown:

        def job(engine: Engine) -> Generator[Any, None, Any]:
            # As a generator, so that other requests' steps run in between.
            head = _compiled(engine.runner.model.modules, engine.runner.model.rounded, top)
            parts = list[list[np.ndarray]]()
            for begin in range(0, len(x), _ROWS):
                if parts:
                    yield "computed"
                rows = np.zeros((_ROWS, x.shape[1]), np.float32)
                targets = np.zeros(_ROWS, np.int32)
                count = min(_ROWS, len(x) - begin)
                rows[:count] = x[begin : begin + count]
                targets[:count] = following[begin : begin + count]
                out = head(engine.runner.parameters, rows, targets)
                parts.append([np.asarray(part)[:count] for part in out])
                shown.update(count)
            return tuple(map(np.concatenate, zip(*parts, strict=True)))

        found: Likeliest = llm.session.thread.run(job)
    return found


@lru_cache(maxsize=4)
def _compiled(modules: Any, rounded: bool, top: int) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    from jinfer.nn.forward_context import ForwardBatch
    from jinfer.nn.transformer_layer import HiddenState

    @jax.jit
    def run(parameters: Any, x: Any, targets: Any) -> Any:
        whole = modules.merged(parameters, rounded)
        batch = ForwardBatch(targets[None], targets[None])  # no head reads positions
        state = HiddenState(x[None].astype(jnp.dtype(modules.dtype)), {}, {})
        logits = whole.stacks["decoder"].results(state, batch, whole.shared)["logits"][0]
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        values, ids = jax.lax.top_k(logprobs, min(top, logprobs.shape[-1]))
        return ids, values, jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]

    return run


@dataclass(frozen=True)
class FrozenHead:
    """A token's logit as a linear function of the residual stream, final norm's scale held fixed.

    Attributes:
        direction: logit = direction . x + constant, at the position that the scale is of.
        constant: what norm and head add by their biases.
        stage: what is explained: "logit", or what it is before a cap.
    """

    direction: Float[np.ndarray, " hidden"]
    constant: float
    stage: str


def frozen_head(llm: LLM, x: Float[np.ndarray, " hidden"], token: int) -> FrozenHead:
    """The head at a position, linearized for direct logit attribution.

    Args:
        x: the residual stream behind the last layer.
        token: its id.

    Raises:
        RequestError: the model's head is not one norm, then a projection.
    """
    norm, name, factor, stage = _head_parts(llm)
    row, bias = _head_row(llm, name, token)
    direction, constant = row.astype(np.float64), bias
    if norm is not None:
        block = _blocks(llm)[norm]
        assert isinstance(block, RMSNormSpec | LayerNormSpec)
        weight = _parameter(llm, norm, "weight") if block.weight else np.ones_like(x)
        weight = weight.astype(np.float64) + (1.0 if block.plus_one else 0.0)
        centered = isinstance(block, LayerNormSpec)
        inside = x.astype(np.float64) - (x.mean() if centered else 0.0)
        scale = 1 / np.sqrt((inside**2).mean() + block.eps)
        if isinstance(block, LayerNormSpec) and block.bias:
            constant += float(direction @ _parameter(llm, norm, "bias"))
        direction = direction * weight * scale
        if centered:
            direction = direction - direction.mean()
    return FrozenHead((direction * factor).astype(np.float32), constant * factor, stage)


def _head_parts(llm: LLM) -> tuple[str | None, str, float, str]:
    """The head's norm, its projection, the factor of its logits, and what these are then."""
    assert llm.spec.decoder is not None
    blocks, formula = _blocks(llm), llm.spec.decoder.head
    stream, normed = object(), object()  # arithmetic with them is a TypeError
    found: dict[str, str] = {}

    def call(name: str, given: list[Any]) -> Any:
        block = blocks[name]
        if "head" in found:
            found["behind"] = name
            return given[0]
        if isinstance(block, HeadSpec) and given[0] in (stream, normed):
            found["head"] = name
            return 1.0
        grouped = isinstance(block, RMSNormSpec | LayerNormSpec) and block.groups == 1
        if grouped and given[0] is stream and "norm" not in found:
            found["norm"] = name
            return normed
        raise RequestError(f"the model's head applies {name} too, so no part of a logit is linear")

    try:
        value, _ = formula.run({"x": stream}, call)
    except (TypeError, KeyError):
        value = None
    if "head" not in found or not isinstance(value, float):
        raise RequestError("the model's head is not a norm and a projection, so logits do not add")
    if "behind" in found:  # a cap, which is not linear
        return found.get("norm"), found["head"], 1.0, f"logit before {found['behind']}"
    return found.get("norm"), found["head"], value, "logit"


def _blocks(llm: LLM) -> dict[str, Block]:
    assert llm.spec.decoder is not None
    return {**dict(llm.spec.shared), **dict(llm.spec.decoder.modules)}


def _parameter(llm: LLM, module: str, part: str) -> np.ndarray:
    return np.asarray(llm.weights[_full(llm, f"{module}.{part}")].values, np.float32)


def _full(llm: LLM, name: str) -> str:
    return name if name in llm.weights else f"decoder.{name}"


def _head_row(llm: LLM, name: str, token: int) -> tuple[Float[np.ndarray, " hidden"], float]:
    """A token's row of the projection, and its bias."""
    block = _blocks(llm)[name]
    assert isinstance(block, HeadSpec)
    row = llm.weights.rows(_full(llm, "embed" if block.tied else name), [token])[0]
    return row, float(_parameter(llm, name, "bias")[token]) if block.bias else 0.0
