"""What the fuzzers of several packages share: damaged JSON, and what a user may see of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = [300, pytest.param(30_000, marks=pytest.mark.soak)]
SECONDS = 10.0  # of this thread
MEMORY = 500 << 20  # bytes of this process, beside 20 times the file

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**32, 2**63, 10**40, -(10**9), 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "\ud800", "a" * 5000, "\0", "/dev/zero", "../x", "{{"),
    *([], {}, [[]], [None], {"": None}, [2**40] * 3, {"content": 3}, "0", "é", "$hidden_size"),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key of a JSON value where something stands."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))[:50]
    for key, inner in pairs:
        yield value, key
        yield from places(inner)


def damaged(value: Any, data: st.DataObject) -> str:
    """JSON of a copy of a value, with one to four of its parts changed, or its text cut."""
    copy = json.loads(json.dumps(value))
    for _ in range(data.draw(st.integers(1, 4))):
        spots = list(places(copy))
        if not spots:
            break
        owner, key = spots[data.draw(st.integers(0, len(spots) - 1))]
        match data.draw(st.integers(0, 4)):
            case 0:
                del owner[key]
            case 1 if isinstance(owner, dict):
                owner[data.draw(st.sampled_from(["x", "", "\udc00", "type", "id"]))] = owner[key]
            case 2:
                other, place = spots[data.draw(st.integers(0, len(spots) - 1))]
                if isinstance(other, dict) and place in other:
                    owner[key] = json.loads(json.dumps(other[place]))
            case _:
                owner[key] = deepcopy(data.draw(st.sampled_from(ODD)))
    text = json.dumps(copy)
    if data.draw(st.integers(0, 9)) == 0:
        text = text[: data.draw(st.integers(0, len(text)))]
    return text


def endures(action: Callable[[], object], errors: tuple[type[Exception], ...], path: Path) -> None:
    """Runs something: it works or raises one of these errors, in a line, soon, in little memory."""
    before, begun = _fresh_peak(), time.thread_time()
    try:
        action()
    except errors as error:
        text = str(error)
        assert text
        assert "\n" not in text, text
        assert len(text) < 3000, text
    assert time.thread_time() - begun < SECONDS, path.read_bytes()[:2000]
    taken = _kilobytes("VmHWM") * 1024 - before if before else 0
    assert taken < MEMORY + 20 * path.stat().st_size, path.read_bytes()[:2000]


def _fresh_peak() -> int:
    """Bytes that this process has, from which on its peak is counted anew; 0: not known here."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _kilobytes("VmRSS") * 1024


def _kilobytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    return 0


def many(examples: int) -> settings:
    """Hypothesis' settings for so many examples."""
    return settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
