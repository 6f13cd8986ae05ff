"""How the custom calls are compiled and found."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jinfer.cpu import build


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, as the library is loaded once in each."""
    everything = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=everything, capture_output=True, text=True, check=True)


_ASK = "from jinfer.cpu import build; print(build.available(), build.available())"


def test_without_a_compiler_one_line_says_what_is_lost(tmp_path: Path) -> None:
    done = run(_ASK, CXX="no-such-compiler", JINFER_CACHE=str(tmp_path))
    assert done.stdout.split() == ["False", "False"]
    (line,) = done.stderr.splitlines()
    assert "no C++ compiler no-such-compiler; install g++ or clang++" in line
    assert "slower" in line


def test_switched_off() -> None:
    done = run(_ASK, **{build.OFF: "1"})
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr == ""


def test_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("JINFER_CACHE", str(tmp_path))
    with pytest.raises(build.BuildError, match="false fails"):
        build.library_path()
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.skipif(not build.available(), reason="no C++ compiler")
def test_is_found_again() -> None:
    path = build.library_path()
    written = path.stat().st_mtime_ns
    assert build.library_path() == path
    assert path.stat().st_mtime_ns == written


@pytest.mark.skipif(not build.available(), reason="no C++ compiler")
def test_instructions_can_be_lowered(caplog: pytest.LogCaptureFixture) -> None:
    best = build.isa()
    with build.lowered_isa("portable"):
        assert build.isa() == "portable"
    assert build.isa() == best
    with caplog.at_level(logging.WARNING):
        done = run("from jinfer.cpu import build; print(build.isa())", **{build.LOWER: "portable"})
    assert done.stdout.strip() == "portable"
