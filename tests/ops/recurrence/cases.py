"""Every recurrence with inputs of one sequence, its operation and its definition in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.ops.recurrence.diagonal_state import rg_lru, selective_scan
from jinfer.ops.recurrence.matrix_state import (
    gated_delta,
    linear_attention,
    rwkv7,
    ssd,
)
from jinfer.ops.recurrence.rwkv4 import wkv
from jinfer.ops.recurrence.sequence_runs import SequenceRuns
from jinfer.ops.recurrence.short_conv import short_conv
from tests.reference import numpy_recurrences as definitions
from tests.reference.numpy_blocks import Floats

# (inputs by name, table, runs) -> (outputs, table).
type Operation = Callable[[dict[str, Any], Array, SequenceRuns], tuple[Array, Array]]
RNG = np.random.default_rng(7)


class Case(NamedTuple):
    """A recurrence.

    Attributes:
        state: shape of a sequence's state.
        inputs: shapes of a token's inputs.
        operation: what is tested, of inputs [tokens, ...].
        define: the definition, of one sequence's inputs in float64.
        map: from a standard normal number to an input.
    """

    state: tuple[int, ...]
    inputs: dict[str, tuple[int, ...]]
    operation: Operation
    define: Callable[[dict[str, Floats]], Floats]
    map: Mapping[str, Callable[[Floats], Floats]] = MappingProxyType({})

    def draw(self, tokens: int, seed: int) -> dict[str, np.ndarray]:
        """Inputs of a sequence."""
        rng = np.random.default_rng(seed)
        drawn = {name: rng.standard_normal((tokens, *shape)) for name, shape in self.inputs.items()}
        mapped = {name: self.map.get(name, lambda x: x)(x) for name, x in drawn.items()}
        return {name: x.astype(np.float32) for name, x in mapped.items()}


def _softplus(x: Floats) -> Floats:
    return np.log1p(np.exp(x - 1))


def _unit(x: Floats) -> Floats:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _share(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def _log_decay(x: Floats) -> Floats:
    return -np.exp(x - 1)


def _draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def _wide(x: np.ndarray) -> Floats:
    return x.astype(np.float64)


# Widths that fill no vector, beside such that fill several.
WEIGHT, BIAS = _draw(4, 37), _draw(37)
A1, D1 = -np.exp(_draw(6, 70)), _draw(70)
A2, D2 = -np.exp(_draw(6)), _draw(6)
# MiniMax-Text-01, 3 heads, layer 1 of 4.
SLOPES = np.array([2 ** (-8 * h / 3) * (2 / 3) for h in (1, 2, 3)], np.float32)
LAMBDA, DECAY, BONUS = _draw(37), _draw(37), _draw(37)

_DELTA = {"q": (2, 12), "k": (2, 12), "v": (4, 41), "beta": (4,)}
_OF_DELTA = {"k": _unit, "beta": _share, "decay": _log_decay}


def _delta(x: dict[str, Any], table: Array, runs: SequenceRuns) -> tuple[Array, Array]:
    return gated_delta(x["q"], x["k"], x["v"], x["decay"], x["beta"], table, runs)


def _defined_delta(x: dict[str, Floats]) -> Floats:
    return definitions.gated_delta_rule(x["q"], x["k"], x["v"], np.exp(x["decay"]), x["beta"])


CASES = {
    "short_conv": Case(
        (3, 37),
        {"x": (37,)},
        lambda x, table, runs: short_conv(
            x["x"], jnp.asarray(WEIGHT), jnp.asarray(BIAS), table, runs
        ),
        lambda x: definitions.causal_conv(x["x"], _wide(WEIGHT), _wide(BIAS)),
    ),
    "selective_scan": Case(
        (6, 70),
        {"x": (70,), "dt": (70,), "b": (6,), "c": (6,)},
        lambda x, table, runs: selective_scan(
            x["x"], x["dt"], jnp.asarray(A1), x["b"], x["c"], jnp.asarray(D1), table, runs
        ),
        lambda x: definitions.mamba1(x["x"], x["dt"], _wide(A1.T), x["b"], x["c"], _wide(D1)),
        {"dt": _softplus},
    ),
    "ssd": Case(
        (6, 20, 41),
        {"x": (6, 41), "dt": (6,), "b": (2, 20), "c": (2, 20)},
        lambda x, table, runs: ssd(
            x["x"], x["dt"], jnp.asarray(A2), x["b"], x["c"], jnp.asarray(D2), table, runs
        ),
        lambda x: definitions.mamba2(x["x"], x["dt"], _wide(A2), x["b"], x["c"], _wide(D2)),
        {"dt": _softplus},
    ),
    "linear_attention": Case(
        (3, 9, 16),
        {"q": (3, 9), "k": (3, 9), "v": (3, 16)},
        lambda x, table, runs: linear_attention(
            x["q"], x["k"], x["v"], jnp.asarray(SLOPES), table, runs
        ),
        lambda x: definitions.lightning(x["q"], x["k"], x["v"], _wide(SLOPES)),
    ),
    "gated_delta": Case((4, 12, 41), {**_DELTA, "decay": (4,)}, _delta, _defined_delta, _OF_DELTA),
    "kda": Case((4, 12, 41), {**_DELTA, "decay": (4, 12)}, _delta, _defined_delta, _OF_DELTA),
    "rg_lru": Case(
        (37,),
        {"x": (37,), "input_gate": (37,), "recurrence_gate": (37,)},
        lambda x, table, runs: rg_lru(
            x["x"], x["input_gate"], x["recurrence_gate"], jnp.asarray(LAMBDA), table, runs
        ),
        lambda x: definitions.griffin(x["x"], x["input_gate"], x["recurrence_gate"], _wide(LAMBDA)),
        {"input_gate": _share, "recurrence_gate": _share},
    ),
    "rwkv4": Case(
        (3, 37),
        {"k": (37,), "v": (37,)},
        lambda x, table, runs: wkv(
            x["k"], x["v"], jnp.asarray(DECAY), jnp.asarray(BONUS), table, runs
        ),
        lambda x: definitions.wkv4(x["k"], x["v"], _wide(DECAY), _wide(BONUS)),
        {"k": lambda x: 5 * x},
    ),
    "rwkv7": Case(
        (3, 10, 16),
        {
            **dict.fromkeys(("r", "decay", "k", "removal", "rate"), (3, 10)),
            "v": (3, 16),
        },
        lambda x, table, runs: rwkv7(
            x["r"], x["decay"], x["k"], x["v"], x["removal"], x["rate"], table, runs
        ),
        lambda x: definitions.wkv7(
            x["r"], np.exp(x["decay"]), x["k"], x["v"], x["removal"], x["rate"]
        ),
        {"decay": _log_decay, "removal": _unit, "rate": _share},
    ),
}


class Piece(NamedTuple):
    """Tokens first .. last - 1 of a sequence; sequence -1: padding."""

    sequence: int
    first: int
    last: int


def joined(
    sequences: Sequence[dict[str, np.ndarray]], pieces: Sequence[Piece], tokens: int
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The inputs, rows and positions of a flat batch; padding holds NaN."""
    names = sequences[0].keys()
    inputs = {
        name: np.full((tokens, *sequences[0][name].shape[1:]), np.nan, np.float32) for name in names
    }
    rows, positions = np.full(tokens, -1, np.int32), np.zeros(tokens, np.int32)
    at = 0
    for sequence, first, last in pieces:
        end = at + last - first
        if sequence >= 0:
            for name in names:
                inputs[name][at:end] = sequences[sequence][name][first:last]
            rows[at:end], positions[at:end] = sequence, np.arange(first, last)
        at = end
    return inputs, rows, positions
