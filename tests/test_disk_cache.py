"""What is kept for the next start is believed only as it was written, by this user."""

import os
from pathlib import Path

import pytest

from jinfer.disk_cache import DiskCache

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def stored(tmp_path: Path) -> DiskCache:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    return DiskCache(folder, "version 1")


def entry(stored: DiskCache) -> Path:
    (path,) = stored.folder.iterdir()
    return path


def test_entries_are_found(stored: DiskCache) -> None:
    assert stored.get("a") is None
    stored.put("a", CONTENT)
    stored.put("b", b"")
    assert stored.get("a") == CONTENT
    assert stored.get("b") == b""
    assert stored.get("ab") is None
    stored.put("a", b"other")
    assert stored.get("a") == b"other"
    assert len(list(stored.folder.iterdir())) == 2


def test_entries_of_another_version_are_missing(stored: DiskCache) -> None:
    stored.put("a", CONTENT)
    assert DiskCache(stored.folder, "version 2").get("a") is None
    assert stored.get("a") == CONTENT


def test_renamed_entry_is_invalid(stored: DiskCache) -> None:
    stored.put("a", CONTENT)
    first = entry(stored)
    stored.put("b", b"other")
    (second,) = set(stored.folder.iterdir()) - {first}
    first.replace(second)
    assert stored.get("b") is None


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "hash", "longer"])
def test_damaged_entry_is_removed(stored: DiskCache, damage: str) -> None:
    stored.put("a", CONTENT)
    path = entry(stored)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[0 if damage == "hash" else -10] ^= 1
    path.write_bytes(
        {"cut": whole[:-1], "empty": b"", "longer": whole + b"x"}.get(damage, bytes(flipped))
    )
    assert stored.get("a") is None
    assert not path.exists()
    stored.put("a", CONTENT)
    assert stored.get("a") == CONTENT


@pytest.mark.parametrize("how", ["writable", "link", "folder", "pipe"])
def test_entry_that_others_could_have_written_is_invalid(stored: DiskCache, how: str) -> None:
    stored.put("a", CONTENT)
    path = entry(stored)
    if how == "writable":
        path.chmod(0o666)
    else:
        path.rename(stored.folder / "real")
        if how == "link":
            path.symlink_to(stored.folder / "real")
        elif how == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
    assert stored.get("a") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_entry_of_another_user_is_invalid(stored: DiskCache) -> None:
    stored.put("a", CONTENT)
    os.chown(entry(stored), 1234, 1234)
    assert stored.get("a") is None


def test_missing_folder_is_no_error(tmp_path: Path) -> None:
    stored = DiskCache(tmp_path / "missing", "version 1")
    stored.put("a", CONTENT)
    assert stored.get("a") is None
    assert list(tmp_path.iterdir()) == []


def test_least_recently_used_entry_is_evicted(stored: DiskCache) -> None:
    small = DiskCache(stored.folder, stored.versions, limit=3 * (len(CONTENT) + 32))
    for age, key in enumerate("abc"):
        small.put(key, CONTENT)
        for path in stored.folder.iterdir():
            past = path.stat().st_mtime - 100 + age
            os.utime(path, (past, past))
    assert small.get("a") == CONTENT
    small.put("d", CONTENT)
    assert [key for key in "abcd" if small.get(key) is not None] == ["a", "c", "d"]


def test_leftovers_of_a_killed_process_are_removed(stored: DiskCache) -> None:
    left, fresh = stored.folder / "new-left", stored.folder / "new-fresh"
    for path in (left, fresh):
        path.write_bytes(b"x")
    os.utime(left, (1, 1))
    stored.put("a", CONTENT)
    assert not left.exists()
    assert fresh.exists()
