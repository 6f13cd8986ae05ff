"""What is said of the machine: its memory, and others who use it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from jinfer.cli.bench.machine_info import CPUCounters, counters, machine, others, read_rate


def test_the_machine() -> None:
    found = machine()
    assert 1 <= found["cores"] <= found["of"]
    assert found["cpu"]


def test_a_rate_of_reading() -> None:
    """Between a floppy disk's and that of any memory there is."""
    assert 1e8 < read_rate(1, repeats=2) < 1e13


def test_neither_the_best_reading_nor_the_worst_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings take 1, 9 and 2 seconds: what memory gives is what it gave in 2."""
    readings = iter([0.0, 1.0, 1.0, 10.0, 10.0, 12.0])
    # In place of the module, not in it: other threads, of tests before this one, read that clock.
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    monkeypatch.setattr("jinfer.cli.bench.machine_info.build_library.available", lambda: False)
    monkeypatch.setattr("jinfer.cli.bench.machine_info._READ_BYTES", 1 << 20)
    monkeypatch.setattr("jinfer.cli.bench.machine_info.time", clock)
    assert read_rate(2, repeats=3) == (2 << 20) / 2.0


def test_others_are_what_is_left() -> None:
    before = CPUCounters(clock=100, busy=1000, stolen=50, own=10)
    after = CPUCounters(clock=110, busy=1025, stolen=50, own=30)
    found = others(before, after)
    assert found is not None
    assert found.cores == pytest.approx(0.5)
    assert found.stolen == 0
    assert not found.quiet
    assert "0.50 cores busy" in str(found)
    assert "trust no figure" in str(found)
    calm = others(before, CPUCounters(clock=110, busy=1020.5, stolen=50, own=30))
    assert calm is not None
    assert calm.quiet
    assert "trust" not in str(calm)
    stolen = others(before, CPUCounters(clock=110, busy=1020, stolen=60, own=30))
    assert stolen is not None
    assert not stolen.quiet


def test_counters_are_read(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 200 300 9999 7 400 500 600 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    found = counters(stat)
    assert found is not None
    assert found.busy / found.stolen == pytest.approx(1500 / 600)
    assert found.own > 0


@pytest.mark.parametrize("text", [None, "", "cpu 1 2 3\n", "cpu a b c d e f g h\n", "intr 1\n"])
def test_without_counters_nothing_is_known(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert counters(tmp_path / "stat") is None
    assert others(None, CPUCounters(1, 1, 1, 1)) is None
