"""Progress bars of quantizing end full, with every method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jinfer.cli.quantize import quantize_checkpoint as quantize
from jinfer.cli.quantize.quantize_checkpoint import convert
from jinfer.loader.weights import layer_forward, layerwise_gptq, read_weights
from jinfer.progress import Task

MODEL = Path(__file__).parents[2] / "goldens" / "llama2"


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """All tasks that were begun; none is shown, because standard error is no terminal."""
    begun: list[Task] = []

    @contextmanager
    def task(what: str, total: float | None = None, **keys: Any) -> Iterator[Task]:
        assert not keys["shown"]
        one = Task(what, total, keys["unit"])
        begun.append(one)
        yield one

    for module in (read_weights, layerwise_gptq, layer_forward, quantize):
        monkeypatch.setattr(module, "task", task)
    return begun


@pytest.mark.parametrize("method", ["rtn", "mse", "gptq"])
def test_bars_end_full(method: str, tmp_path: Path, tasks: list[Task]) -> None:
    tables = {"quantization": {"weights": "q4", "threshold": 0, "method": method}}
    convert(str(MODEL), tmp_path / "out", tables, tokens=512)
    whats = ["quantizing", "writing a text", "quantizing"] if method == "gptq" else ["quantizing"]
    assert [one.what for one in tasks] == whats
    for one in tasks:
        assert one.total
        assert one.done == pytest.approx(one.total)
