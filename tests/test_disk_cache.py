"""What is kept for the next start is believed only as it was written, by this user."""

import os
from pathlib import Path

import pytest

from jinfer.disk_cache import DiskCache

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def shelf(tmp_path: Path) -> DiskCache:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    return DiskCache(folder, "version 1")


def entry(shelf: DiskCache) -> Path:
    (path,) = shelf.folder.iterdir()
    return path


def test_entries_are_found(shelf: DiskCache) -> None:
    assert shelf.get("a") is None
    shelf.put("a", CONTENT)
    shelf.put("b", b"")
    assert shelf.get("a") == CONTENT
    assert shelf.get("b") == b""
    assert shelf.get("ab") is None
    shelf.put("a", b"other")
    assert shelf.get("a") == b"other"
    assert len(list(shelf.folder.iterdir())) == 2


def test_entries_of_another_version_are_missing(shelf: DiskCache) -> None:
    shelf.put("a", CONTENT)
    assert DiskCache(shelf.folder, "version 2").get("a") is None
    assert shelf.get("a") == CONTENT


def test_renamed_entry_is_invalid(shelf: DiskCache) -> None:
    shelf.put("a", CONTENT)
    first = entry(shelf)
    shelf.put("b", b"other")
    (second,) = set(shelf.folder.iterdir()) - {first}
    first.replace(second)
    assert shelf.get("b") is None


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "hash", "longer"])
def test_damaged_entry_is_removed(shelf: DiskCache, damage: str) -> None:
    shelf.put("a", CONTENT)
    path = entry(shelf)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[0 if damage == "hash" else -10] ^= 1
    path.write_bytes(
        {"cut": whole[:-1], "empty": b"", "longer": whole + b"x"}.get(damage, bytes(flipped))
    )
    assert shelf.get("a") is None
    assert not path.exists()
    shelf.put("a", CONTENT)
    assert shelf.get("a") == CONTENT


@pytest.mark.parametrize("how", ["writable", "link", "folder", "pipe"])
def test_entry_that_others_could_have_written_is_invalid(shelf: DiskCache, how: str) -> None:
    shelf.put("a", CONTENT)
    path = entry(shelf)
    if how == "writable":
        path.chmod(0o666)
    else:
        path.rename(shelf.folder / "real")
        if how == "link":
            path.symlink_to(shelf.folder / "real")
        elif how == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
    assert shelf.get("a") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_entry_of_another_user_is_invalid(shelf: DiskCache) -> None:
    shelf.put("a", CONTENT)
    os.chown(entry(shelf), 1234, 1234)
    assert shelf.get("a") is None


def test_missing_folder_is_no_error(tmp_path: Path) -> None:
    shelf = DiskCache(tmp_path / "missing", "version 1")
    shelf.put("a", CONTENT)
    assert shelf.get("a") is None
    assert list(tmp_path.iterdir()) == []


def test_least_recently_used_entry_is_evicted(shelf: DiskCache) -> None:
    small = DiskCache(shelf.folder, shelf.versions, limit=3 * (len(CONTENT) + 32))
    for age, key in enumerate("abc"):
        small.put(key, CONTENT)
        for path in shelf.folder.iterdir():
            past = path.stat().st_mtime - 100 + age
            os.utime(path, (past, past))
    assert small.get("a") == CONTENT
    small.put("d", CONTENT)
    assert [key for key in "abcd" if small.get(key) is not None] == ["a", "c", "d"]


def test_leftovers_of_a_killed_process_are_removed(shelf: DiskCache) -> None:
    left, fresh = shelf.folder / "new-left", shelf.folder / "new-fresh"
    for path in (left, fresh):
        path.write_bytes(b"x")
    os.utime(left, (1, 1))
    shelf.put("a", CONTENT)
    assert not left.exists()
    assert fresh.exists()
