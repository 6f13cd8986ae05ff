"""What is on disk is whole or not there: within its size, after kill -9, beside others' files."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jinfer.disk_cache import NoCacheError
from jinfer.engine.offload.disk_store import FOLDER, DiskStore
from jinfer.engine.offload.offload_stores import HostStore

SIZE = 10_000


def content(key: str) -> bytes:
    return random.Random(key).randbytes(SIZE)


def store(folder: Path, identity: str = "one", limit: int = 1 << 30) -> DiskStore:
    made = DiskStore(folder, identity, limit)
    made.scan()
    return made


def files_in(folder: Path) -> list[Path]:
    return list((folder / FOLDER).iterdir())


def test_contents_are_found_again(tmp_path: Path) -> None:
    first = store(tmp_path / "kept")
    assert first.put("a", content("a"))
    assert "a" in first
    assert "b" not in first
    again, files = store(tmp_path / "kept"), files_in(tmp_path / "kept")
    assert again.get("a", SIZE) == content("a")
    assert again.nbytes == first.nbytes == sum(path.stat().st_size for path in files)
    assert "a" not in store(tmp_path / "kept", "two")
    assert again.get("a", SIZE - 1) is None
    assert "a" not in again


def test_least_recently_used_contents_are_evicted(tmp_path: Path) -> None:
    kept = store(tmp_path, limit=10 * SIZE)
    for number in range(9):
        kept.put(str(number), content(str(number)))
        time.sleep(0.002)
    kept.touch(["1", "0"])
    kept.put("9", content("9"))
    kept.put("10", content("10"))
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 10 * SIZE
    assert "0" in kept
    assert "1" in kept
    assert "2" not in kept
    assert "10" in kept
    assert kept.nbytes <= 10 * SIZE


def test_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(NoCacheError, match="can be written to by other users"):
        store(tmp_path)
    with pytest.raises(NoCacheError, match="cannot be used"):
        store(Path("/proc/kept"))


def test_host_memory_has_a_limit() -> None:
    host = HostStore(3 * SIZE)
    for key in "abc":
        host.put(key, content(key))
    host.touch(["a"])
    host.put("d", content("d"))
    assert [key in host for key in "abcd"] == [True, False, True, True]
    host.put("large", bytes(4 * SIZE))
    assert "large" not in host
    host.forget("a")
    assert host.nbytes == 2 * SIZE
    assert host.get("c") == content("c")


WRITER = """
import sys
from pathlib import Path
from tests.engine.test_disk_store import content, store
kept = store(Path(sys.argv[1]), limit=40 * 10_000)
for number in range(int(sys.argv[2]), 10**9):
    print("writes", flush=True)
    kept.put(str(number % 60), content(str(number % 60)))
"""


def kill_while_it_writes(folder: Path, times: int) -> None:
    """Each time no content is found that is not as it was written."""
    root, rng = Path(__file__).parents[2], random.Random(times)
    found = 0
    for number in range(times):
        asked = [sys.executable, "-c", WRITER, str(folder), str(number)]
        with subprocess.Popen(asked, cwd=root, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(rng.randrange(1, 100)):  # contents, the last of which is interrupted
                assert writer.stdout.readline() == b"writes\n"
            time.sleep(rng.random() * 0.001)
            writer.send_signal(signal.SIGKILL)
        kept = store(folder, limit=40 * SIZE)
        for key in map(str, range(60)):
            assert kept.get(key, SIZE) in (None, content(key))
            found += key in kept
        left = sum(path.stat().st_size for path in files_in(folder))
        assert left <= 40 * SIZE + times * (SIZE + 32)
    assert found


def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    kill_while_it_writes(tmp_path, 3)


@pytest.mark.soak
def test_a_writer_that_is_killed_often(tmp_path: Path) -> None:
    kill_while_it_writes(tmp_path, 100)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(NoCacheError, match="cannot be written to"):
        store(tmp_path)
    tmp_path.chmod(0o700)
