"""Logits processors: a user's functions of the logits, compiled into the steps that need them.

A function takes the logits of some rows, float32 [rows, vocab]; the tokens of each row's sequence,
int32 [rows, length], the prompt first, and -1 where the sequence has ended; and how many tokens
each has, int32 [rows]. It returns the new logits. It is traced once for each batch size, so it must
be pure: equal arguments give equal results, and a row's result depends only on that row. Functions
are extras of a step, like log-probabilities that few requests need: other programs lack them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.modelspec.spec_errors import nearest_hint, show_value
from jinfer.sampling.request_errors import RequestError
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.sampling.token_history import History

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MAX_PROCESSORS = 31  # maximum functions of a model; each has a bit of an int32
_ROWS = 2  # sizes of the arguments in a trial call

type ProcessorFunction = Callable[[Array, Array, Array], Array]


@dataclass(frozen=True)
class LogitsProcessor:
    """A function registered with a model.

    Attributes:
        index: its bit in `State.processors`.
        function: of logits, tokens and lengths.
    """

    index: int
    function: ProcessorFunction


@dataclass
class LogitsProcessors:
    """A model's registered functions, in order of registration.

    Attributes:
        vocab, context: sizes of a row of logits, and of a sequence.
        by_name: functions that requests may name.
    """

    vocab: int
    context: int
    by_name: Mapping[str, ProcessorFunction] = field(default_factory=dict)
    _known: dict[ProcessorFunction, LogitsProcessor] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def resolve(self, requested: Iterable[ProcessorFunction | str]) -> tuple[LogitsProcessor, ...]:
        """Returns the processors of a request.

        Raises:
            RequestError: an unknown name, a function that cannot be compiled, or too many
                functions.
        """
        functions = [self._named(item) if isinstance(item, str) else item for item in requested]
        return tuple(dict.fromkeys(map(self._processor, functions)))

    def _named(self, name: str) -> ProcessorFunction:
        if name not in self.by_name:
            hint = nearest_hint(name, self.by_name) if self.by_name else "no function has a name"
            raise RequestError(f"logits_processors: there is no {show_value(name)}; {hint}")
        return self.by_name[name]

    def _processor(self, function: ProcessorFunction) -> LogitsProcessor:
        with self._lock:
            if (known := self._known.get(function)) is not None:
                return known
            if len(self._known) == MAX_PROCESSORS:
                raise RequestError(
                    f"logits_processors: a model takes {MAX_PROCESSORS} functions, and each new "
                    "one is compiled; give the same function again, not a copy of it"
                )
            self._check(function)
            made = LogitsProcessor(len(self._known), function)
            self._known[function] = made
            return made

    def _check(self, function: ProcessorFunction) -> None:
        name = function_name(function)
        of = jax.ShapeDtypeStruct
        logits = of((_ROWS, self.vocab), jnp.float32)
        tokens, lengths = of((_ROWS, self.context), jnp.int32), of((_ROWS,), jnp.int32)
        try:
            result = jax.eval_shape(function, logits, tokens, lengths)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise RequestError(
                f"logits_processors: {name} is no JAX function of (logits, tokens, lengths): "
                f"{reason}"
            ) from error
        shape = getattr(result, "shape", None)
        if shape != logits.shape or not jnp.issubdtype(result.dtype, jnp.floating):
            what = type(result).__name__ if shape is None else f"{result.dtype}{list(shape)}"
            raise RequestError(
                f"logits_processors: {name} gives {what} for float32{list(logits.shape)}; it has "
                "to give logits of the same shape"
            )


def function_name(function: Callable[..., Any]) -> str:
    """Returns a name of a function for errors."""
    return getattr(function, "__qualname__", None) or type(function).__name__


def bits(processors: Iterable[LogitsProcessor]) -> int:
    """Returns a row's `State.processors`."""
    return sum(1 << processor.index for processor in processors)


def process(
    logits: Float[Array, "rows vocab"],
    processors: Sequence[LogitsProcessor],
    requested: Int[Array, " rows"],
    history: History,
) -> Float[Array, "rows vocab"]:
    """Applies each row's processors to its logits, in order of registration.

    Forbidden tokens stay forbidden; NaN becomes -inf, except where the model's logit is NaN.

    Args:
        processors: processors of the program.
        requested: a bit for each processor of a row.
    """
    rows, length = logits.shape[0], history.tokens.shape[1]
    every = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    tokens = history.at(every)
    forbidden, wrong = jnp.isneginf(logits), jnp.isnan(logits)
    for processor in processors:
        new = processor.function(logits, tokens, history.lengths).astype(jnp.float32)
        new = jnp.where(forbidden | jnp.isnan(new), -jnp.inf, new)
        new = jnp.where(wrong, jnp.nan, new)
        logits = jnp.where(((requested >> processor.index) & 1)[:, None] > 0, new, logits)
    return logits


type Extra = LogitsProcessor | Literal["logprob_token_ids", "post_sampling_probs"]


def extras_of(params: SamplingParams, processors: Sequence[LogitsProcessor]) -> tuple[Extra, ...]:
    """Returns the extras of a request."""
    named: list[Extra] = []
    if params.logprobs is not None and params.logprob_token_ids:
        named.append("logprob_token_ids")
    if params.logprobs is not None and params.post_sampling_probs:
        named.append("post_sampling_probs")
    return (*named, *processors)


def union(rows: Iterable[Sequence[Extra]]) -> tuple[Extra, ...]:
    """Returns the distinct extras of some requests, in a fixed order."""
    return tuple(sorted({extra for row in rows for extra in row}, key=_place))


def processors_of(extras: Iterable[object]) -> list[LogitsProcessor]:
    """Selects the logits processors."""
    return [extra for extra in extras if isinstance(extra, LogitsProcessor)]


def has_function(extras: Iterable[Extra]) -> bool:
    """Whether the extras include a user's function."""
    return bool(processors_of(extras))


def _place(extra: Extra) -> tuple[int, str]:
    return (extra.index, "") if isinstance(extra, LogitsProcessor) else (-1, extra)
