"""Caches that are killed, damaged, shared and full: each start works, and answers the same."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.soak


def started(folder: Path) -> subprocess.Popen[str]:
    """A program that keeps weights, programs and prefixes in a folder."""
    # As for users: programs are stored ready to run, unless JAX has a cache of its own.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cached_program", str(folder)],
        env={**kept, "JINFER_CACHE": str(folder), "JINFER_NO_CUSTOM_CALLS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(program: subprocess.Popen[str]) -> tuple[str, str]:
    """What it prints, and its errors; it ends well."""
    printed, errors = program.communicate(timeout=600)
    assert program.returncode == 0, errors
    return printed, errors


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".lockfile"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with all caches, and what a start prints."""
    folder = tmp_path_factory.mktemp("whole")
    printed, _ = answers(started(folder))
    kinds = {path.relative_to(folder).parts[0] for path in files(folder)}
    assert kinds == {"weights", "programs", "prefixes"}
    return folder, printed


def test_starts_that_are_killed_while_they_write(tmp_path: Path, whole: tuple[Path, str]) -> None:
    rng = random.Random(1)
    begun = time.monotonic()
    assert answers(started(tmp_path / "timed"))[0] == whole[1]
    seconds = time.monotonic() - begun
    for _ in range(int(os.environ.get("JINFER_SOAK_KILLS", "6"))):
        program = started(tmp_path / "killed")
        time.sleep(seconds * rng.uniform(0.2, 1.0))
        program.kill()
        program.communicate()
    assert answers(started(tmp_path / "killed"))[0] == whole[1]


def _flipped(data: bytes) -> bytes:
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :] if data else data


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        _flipped,
        lambda data: b"",
        lambda data: b"something else" * (len(data) // 14 + 1),
    ],
    ids=["cut short", "a bit", "empty", "something else"],
)
def test_damaged_files(damage: Callable[[bytes], bytes], whole: tuple[Path, str]) -> None:
    folder, printed = whole
    for path in files(folder):
        mode = path.stat().st_mode
        path.chmod(0o600)
        path.write_bytes(damage(path.read_bytes()))
        path.chmod(mode)
    found, errors = answers(started(folder))
    assert found == printed
    assert "Traceback" not in errors
    assert answers(started(folder))[0] == printed


def test_two_starts_at_the_same_time(tmp_path: Path, whole: tuple[Path, str]) -> None:
    both = [started(tmp_path) for _ in range(2)]
    assert [answers(one)[0] for one in both] == [whole[1]] * 2


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system without room."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk(full: Path, whole: tuple[Path, str]) -> None:
    found, errors = answers(started(full))
    assert found == whole[1]
    assert "Traceback" not in errors
    # A line for each cache, and two for the one that JAX writes itself.
    assert 1 <= len(errors.splitlines()) <= 5, errors
