"""Engines beside ours that answer in another way, or no more: a line that says so."""

import sys
from pathlib import Path

import pytest

from jinfer.cli.bench.bench_cpu import BenchTask, EngineProcess, EngineUnderTest

STARTED = """print('{"kinds": ["decode"]}', flush=True)"""
RATE = """input(); print('{"rate": 2.5}', flush=True)"""
RSS = """sys.stdin.read(); print('{"rss": 9}')"""


def measured(folder: Path, *lines: str) -> tuple[float, dict[str, object]]:
    """What a side answers that runs these lines, which are those of another version."""
    program = "\n".join(("import sys", *lines))
    side = EngineUnderTest("jinfer in old", (sys.executable, "-c", program), folder=folder)
    process = EngineProcess(side, "model")
    try:
        return process.measure(BenchTask("decode", 1)), process.close()
    finally:
        process.stop()


def test_what_is_understood(tmp_path: Path) -> None:
    assert measured(tmp_path, STARTED, RATE, RSS) == (2.5, {"rss": 9})
    # What the first version said of its start.
    assert measured(tmp_path, """print('{"seconds": 3}', flush=True)""", RATE, RSS)[0] == 2.5


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['print("{half")'], "{half.* at its start"),
        (["""print('{"kinds": 3}')"""], "at its start"),
        ([STARTED, RATE.replace("rate", "tokens")], ".*tokens.* where rate is expected"),
        ([STARTED, RATE.replace("2.5", "[1]")], "where rate is expected"),
        ([STARTED, RATE.replace("2.5", "0")], "where rate is expected"),
        ([STARTED, RATE, RSS.replace("rss", "peak")], ".*peak.* where rss is expected"),
    ],
)
def test_another_way_to_answer(lines: list[str], words: str, tmp_path: Path) -> None:
    expected = rf"^jinfer in old answers in another way than this version, .*{words}: compare with"
    with pytest.raises(OSError, match=expected) as error:
        measured(tmp_path, *lines)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lines", [[], [STARTED], [STARTED, RATE]])
def test_no_answer(lines: list[str], tmp_path: Path) -> None:
    """Whether its pipe is closed already, or only when it has read what is asked."""
    with pytest.raises(OSError, match=r"^jinfer in old ended without an answer \(status 4\)"):
        measured(tmp_path, *lines, "sys.exit(4)")
