"""Recurrences with state as custom calls: matrix, selective, diagonal and WKV scan, short conv.

Threads divide sequences, heads and blocks of a state's columns; each computes a sequence's tokens
one after the other. So a token's bits depend neither on the batch nor on prompt chunking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.cpu import build_library

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_CALLS = ("matrix_scan", "selective_scan", "diagonal_scan", "wkv_scan", "short_conv")
_ERASE = ("none", "delta", "low_rank")


class Runs(NamedTuple):
    """The sequences of a flat batch.

    Attributes:
        starts, lengths: first token and number of tokens of each sequence; 0: none.
        slots: each sequence's row of the state table; sequences with tokens have distinct rows.
        fresh: 1 for a sequence that begins here: its state is zero, and the table is ignored.
        copies: row of the table that the state after each token is copied to; -1: none.
        kept: whether states are written back and copied; else sequences may share a slot.
    """

    starts: Int[Array, " runs"]
    lengths: Int[Array, " runs"]
    slots: Int[Array, " runs"]
    fresh: Int[Array, " runs"]
    copies: Int[Array, " tokens"]
    kept: bool = True


def available() -> bool:
    """Whether the custom calls exist on this machine; compiles them the first time."""
    return build_library.register(*(f"jinfer_{name}" for name in _CALLS))


def matrix_scan(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    log_decay: Float[Array, "tokens heads *key_dim"],
    table: Float[Array, "slots heads key_dim value_dim"],
    runs: Runs,
    *,
    erase: Literal["none", "delta", "low_rank"] = "none",
    beta: Float[Array, "tokens heads"] | None = None,
    read: Float[Array, "tokens heads key_dim"] | None = None,
    write: Float[Array, "tokens heads key_dim"] | None = None,
) -> tuple[Float[Array, "tokens heads value_dim"], Array]:
    """Computes `jinfer.ops.recurrence.matrix_state.matrix_scan`; all arrays are float32.

    Args:
        table: changed in place if states are kept, and then not to be used again.
        beta: with `erase="delta"`; read, write: with `erase="low_rank"`.

    Returns:
        The output, zero for padding, and the table.
    """
    empty = jnp.zeros(0, jnp.float32)
    optional = (empty if part is None else part for part in (beta, read, write))
    inputs = (q, k, v, log_decay, *optional)
    return _call("matrix_scan", inputs, v.shape, table, runs, erase=np.int64(_ERASE.index(erase)))


def selective_scan(
    x: Float[Array, "tokens channels"],
    dt: Float[Array, "tokens channels"],
    a: Float[Array, "states channels"],
    b: Float[Array, "tokens states"],
    c: Float[Array, "tokens states"],
    table: Float[Array, "slots states channels"],
    runs: Runs,
) -> tuple[Float[Array, "tokens channels"], Array]:
    """Computes `jinfer.ops.recurrence.diagonal_state.selective_scan`, without the skip."""
    return _call("selective_scan", (x, dt, a, b, c), x.shape, table, runs)


def diagonal_scan(
    log_decay: Float[Array, "tokens channels"],
    x: Float[Array, "tokens channels"],
    table: Float[Array, "slots channels"],
    runs: Runs,
) -> tuple[Float[Array, "tokens channels"], Array]:
    """Computes h = exp(log_decay) h + x for each token; h is also the output."""
    return _call("diagonal_scan", (log_decay, x), x.shape, table, runs)


def wkv_scan(
    k: Float[Array, "tokens channels"],
    v: Float[Array, "tokens channels"],
    log_decay: Float[Array, " channels"],
    bonus: Float[Array, " channels"],
    table: Float[Array, "slots 3 channels"],
    runs: Runs,
) -> tuple[Float[Array, "tokens channels"], Array]:
    """Computes `jinfer.ops.recurrence.rwkv4.wkv`."""
    return _call("wkv_scan", (k, v, log_decay, bonus), k.shape, table, runs)


def short_conv(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "taps channels"],
    bias: Float[Array, " channels"] | None,
    table: Float[Array, "slots taps_1 channels"],
    runs: Runs,
) -> tuple[Float[Array, "tokens channels"], Array]:
    """Computes `jinfer.ops.recurrence.short_conv.short_conv`."""
    inputs = (x, weight, jnp.zeros(0, jnp.float32) if bias is None else bias)
    return _call("short_conv", inputs, x.shape, table, runs)


def _call(
    name: str,
    inputs: tuple[Array, ...],
    shape: tuple[int, ...],
    table: Array,
    runs: Runs,
    **attributes: np.int64,
) -> tuple[Array, Array]:
    *where, kept = runs
    arguments = (*inputs, *(part.astype(jnp.int32) for part in where))
    of_states = table.shape if kept else (0,)
    shapes = [jax.ShapeDtypeStruct(dims, np.float32) for dims in (shape, of_states)]
    aliases = {len(arguments): 1} if kept else {}
    call = jax.ffi.ffi_call(f"jinfer_{name}", shapes, input_output_aliases=aliases)
    out, after = call(*arguments, table, **attributes)
    return out, after if kept else table
