"""Custom calls of recurrences refuse buffers and runs that do not fit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jinfer.cpu import build_library, recurrence_call
from jinfer.cpu.recurrence_call import Runs
from tests.arrays import on_device

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

TOKENS, SLOTS = 4, 3


def ones(*shape: int) -> Any:
    return on_device(np.ones(shape, np.float32))


def runs(
    starts: list[int],
    lengths: list[int],
    slots: list[int],
    fresh: list[int] | None = None,
    copies: list[int] | None = None,
) -> Runs:
    fresh = [0] * len(starts) if fresh is None else fresh
    at = [on_device(each, np.int32) for each in (starts, lengths, slots, fresh)]
    return Runs(at[0], at[1], at[2], at[3], on_device(copies or [-1] * TOKENS, np.int32))


ONE = runs([0], [TOKENS], [1])


@pytest.mark.parametrize(
    "wrong",
    [
        runs([0], [TOKENS + 1], [1]),
        runs([-1], [2], [1]),
        runs([0], [-1], [1]),
        runs([0], [2], [SLOTS]),
        runs([0], [2], [-1]),
        runs([0, 2], [2, 2], [1, 1]),
        runs([0, 1], [2, 2], [0, 1]),
        runs([0], [2], [1], [0, 0]),
        runs([0], [2], [1], copies=[-1, SLOTS, -1, -1]),  # outside the table
        runs([0], [2], [1], copies=[-1, 1, -1, -1]),  # the run's own slot
        runs([0], [3], [1], copies=[2, -1, 2, -1]),  # two copies
        runs([0], [2], [1], copies=[-1, -1, 2, -1]),  # after padding
        runs([0], [2], [1], copies=[-1, 2]),
    ],
)
def test_invalid_runs_are_errors(wrong: Runs) -> None:
    def run(at: Runs) -> None:
        jax.block_until_ready(
            recurrence_call.diagonal_scan(ones(TOKENS, 5), ones(TOKENS, 5), ones(SLOTS, 5), at)
        )

    recurrence_call.available()
    run(ONE)
    run(runs([0], [3], [1], copies=[0, -1, 2, -1]))
    run(runs([9, 0], [0, 2], [7, 1]))  # a run without tokens may say anything
    run(runs([0, 2], [2, 2], [1, 1])._replace(kept=False))  # what is only read may be shared
    with pytest.raises(Exception, match="run"):
        run(wrong)


MATRIX = {
    "q": (TOKENS, 1, 6),
    "k": (TOKENS, 1, 6),
    "v": (TOKENS, 2, 5),
    "log_decay": (TOKENS, 2),
    "table": (SLOTS, 2, 6, 5),
}


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"q": (TOKENS, 1, 7)}, {}),
        ({"q": (TOKENS + 1, 1, 6)}, {}),
        ({"k": (TOKENS, 3, 6), "q": (TOKENS, 3, 6)}, {}),
        ({"log_decay": (TOKENS, 1)}, {}),
        ({"log_decay": (TOKENS, 2, 5)}, {}),
        ({"table": (SLOTS, 2, 5, 6)}, {}),
        ({"table": (SLOTS, 2, 30)}, {}),
        ({}, {"erase": "delta"}),
        ({}, {"erase": "delta", "beta": (TOKENS, 1)}),
        ({}, {"erase": "low_rank", "read": (TOKENS, 2, 6)}),
    ],
)
def test_invalid_matrix_states_are_errors(
    changes: dict[str, tuple[int, ...]], options: dict[str, Any]
) -> None:
    def run(shapes: dict[str, tuple[int, ...]], options: dict[str, Any]) -> None:
        options = {k: ones(*v) if isinstance(v, tuple) else v for k, v in options.items()}
        q, k, v, log_decay, table = (ones(*shapes[name]) for name in MATRIX)
        jax.block_until_ready(
            recurrence_call.matrix_scan(q, k, v, log_decay, table, ONE, **options)
        )

    recurrence_call.available()
    run(MATRIX, {})
    run(MATRIX, {"erase": "delta", "beta": (TOKENS, 2)})
    with pytest.raises(Exception, match=r"do not fit|other axes"):
        run({**MATRIX, **changes}, options)


@pytest.mark.parametrize(
    ("call", "shapes", "at", "wrong"),
    [
        ("selective_scan", [(4, 5), (4, 5), (3, 5), (4, 3), (4, 3), (3, 3, 5)], 2, (2, 5)),
        ("selective_scan", [(4, 5), (4, 5), (3, 5), (4, 3), (4, 3), (3, 3, 5)], 5, (3, 2, 5)),
        ("wkv_scan", [(4, 5), (4, 5), (5,), (5,), (3, 3, 5)], 4, (3, 2, 5)),
        ("wkv_scan", [(4, 5), (4, 5), (5,), (5,), (3, 3, 5)], 2, (4,)),
        ("short_conv", [(4, 5), (3, 5), (5,), (3, 2, 5)], 3, (3, 3, 5)),
        ("short_conv", [(4, 5), (3, 5), (5,), (3, 2, 5)], 2, (6,)),
        ("diagonal_scan", [(4, 5), (4, 5), (3, 5)], 0, (3, 5)),
    ],
)
def test_invalid_channel_states_are_errors(
    call: str, shapes: list[tuple[int, ...]], at: int, wrong: tuple[int, ...]
) -> None:
    def run(shapes: list[tuple[int, ...]]) -> None:
        jax.block_until_ready(getattr(recurrence_call, call)(*(ones(*s) for s in shapes), ONE))

    recurrence_call.available()
    run(shapes)
    with pytest.raises(Exception, match="do not fit"):
        run([*shapes[:at], wrong, *shapes[at + 1 :]])
