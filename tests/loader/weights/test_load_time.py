"""What bars of quantizing count by: they end full, whatever is quantized how."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jinfer.loader.weights import layer_forward, layerwise_gptq, read_weights
from jinfer.progress import Task
from tools import quantize
from tools.quantize import convert

MODEL = Path(__file__).parents[2] / "goldens" / "llama2"


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """All that were begun."""
    begun: list[Task] = []

    @contextmanager
    def task(what: str, total: float | None = None, **keys: Any) -> Iterator[Task]:
        one = Task(what, total, keys["unit"], keys["shown"], 20)
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
        assert one.is_shown is False  # nobody watches here; where somebody does it is
        assert one.total
        assert one.done == pytest.approx(one.total)


def test_the_share_that_is_done() -> None:
    one = Task("quantizing", 250.0, "%", None, 20)
    one.update(100)
    assert one.line(79).startswith("quantizing 40% |########------------| ")
