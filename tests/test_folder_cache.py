"""Cache entries that are folders: intact or made again, bounded, private to the user."""

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jinfer.disk_cache import FolderCache, NoCacheError, cache_folder, private_folder

FILE = "content.bin"
SAMPLES = (None, 1 << 12)
MIB = 1 << 20


def entry(cache: FolderCache, key: str = "one") -> Path:
    """A new entry of 3 MiB."""
    cache.folder.mkdir(exist_ok=True, mode=0o700)
    with cache.new(key) as folder:
        (folder / FILE).write_bytes(bytes(range(1, 256)) * (3 * MIB // 255) + b"x")
    return cache.folder / key


@pytest.fixture(params=SAMPLES, ids=["all hashed", "sampled"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> FolderCache:
    return FolderCache(tmp_path, 1 << 40, request.param)


def test_entry_is_found_again(cache: FolderCache) -> None:
    path = entry(cache)
    assert cache.find("one") == path
    assert cache.find("two") is None
    assert [path.name for path in cache.folder.iterdir()] == ["one"]


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _zeros(path: Path) -> None:
    """A megabyte that never reached the disk."""
    with path.open("r+b") as file:
        file.seek(MIB)
        file.write(bytes(MIB))


@pytest.mark.parametrize("damage", [_cut, _zeros, Path.unlink])
@pytest.mark.parametrize("file", [FILE, "digest"])
def test_damaged_entry_is_removed(
    cache: FolderCache, damage: Callable[[Path], None], file: str
) -> None:
    damage(entry(cache) / file)
    assert cache.find("one") is None
    assert list(cache.folder.iterdir()) == []
    entry(cache)
    assert cache.find("one") is not None


def test_flipped_bit_is_found_where_everything_is_hashed(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, 1 << 40)
    with (entry(cache) / FILE).open("r+b") as file:
        file.seek(MIB // 2)
        file.write(b"?")
    assert cache.find("one") is None


def test_entry_that_others_could_have_written_is_ignored(cache: FolderCache) -> None:
    path = entry(cache)
    for part in (path / FILE, path, path.parent):
        mode = stat.S_IMODE(part.stat().st_mode)
        part.chmod(0o777)
        assert cache.find("one") is None
        part.chmod(mode)
        assert cache.find("one") == path
    path.rename(path.parent / "real")
    path.symlink_to(path.parent / "real")
    assert cache.find("one") is None


def test_files_of_a_permissive_umask_are_closed(cache: FolderCache) -> None:
    before = os.umask(0)
    try:
        path = entry(cache)
    finally:
        os.umask(before)
    assert cache.find("one") == path


def test_failed_entry_leaves_nothing(cache: FolderCache) -> None:
    def fail() -> None:
        with cache.new("one") as folder:
            (folder / FILE).write_bytes(b"a part")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(cache.folder.iterdir()) == []


def test_leftovers_of_a_killed_process_are_removed(cache: FolderCache) -> None:
    for name, age in (("new-old", 2 * 24 * 3600), ("new-fresh", 60)):
        (cache.folder / name).mkdir()
        then = time.time() - age
        os.utime(cache.folder / name, (then, then))
    cache.make_room(1)
    assert sorted(path.name for path in cache.folder.iterdir()) == ["new-fresh"]


def test_least_recently_used_entries_make_room(cache: FolderCache) -> None:
    size = 3 * MIB
    for age, key in ((30, "a"), (20, "b"), (10, "c")):
        path = entry(cache, key)
        then = path.stat().st_mtime - age
        os.utime(path, (then, then))
    assert cache.find("a") is not None  # used just now
    small = FolderCache(cache.folder, 3 * size + size // 2, cache.sample)
    small.make_room(size)
    entry(small, "d")
    assert sorted(path.name for path in cache.folder.iterdir()) == ["a", "c", "d"]
    with pytest.raises(NoCacheError, match=r"has no room for 1024\.00 GiB"):
        small.make_room(1 << 40)
    with pytest.raises(NoCacheError, match="has no room for"):
        cache.make_room(1, 1 << 60)


def test_second_process_waits_for_the_lock(cache: FolderCache) -> None:
    waited = threading.Event()

    @contextmanager
    def waiting() -> Iterator[None]:
        waited.set()
        yield

    def second() -> None:
        with cache.lock("one", waiting):
            assert cache.find("one") is not None

    with cache.lock("one", waiting):
        assert not waited.is_set()
        thread = threading.Thread(target=second)
        thread.start()
        assert waited.wait(30)
        entry(cache)
    thread.join(30)
    assert not thread.is_alive()
    assert [path.name for path in cache.folder.iterdir()] == ["one"]


def test_folder_is_private_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JINFER_CACHE", str(tmp_path / "cache"))
    path = private_folder(cache_folder("weights"))
    assert path == tmp_path / "cache" / "weights"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    cache = FolderCache(path, 1 << 40)
    entry(cache)
    path.chmod(0o755)
    private_folder(path)
    assert cache.find("one") is not None, "others could only read"
    path.chmod(0o777)
    with pytest.raises(NoCacheError, match="can be written to by other users"):
        private_folder(path, repair=False)
    (path / "link").symlink_to(tmp_path / "nowhere")
    private_folder(path)
    assert list(path.iterdir()) == [], "others may have written it"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for chosen, words in (("off", "JINFER_CACHE=off"), (str(file), "cannot be used")):
        monkeypatch.setenv("JINFER_CACHE", chosen)
        with pytest.raises(NoCacheError, match=words):
            private_folder(cache_folder("weights"))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NoCacheError, match="is not a folder of yours"):
        private_folder(tmp_path / "link")
    with monkeypatch.context() as patch:
        own = os.geteuid()
        patch.setattr(os, "geteuid", lambda: own + 1)
        with pytest.raises(NoCacheError, match="is not a folder of yours"):
            private_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(NoCacheError, match="cannot be written to"):
            private_folder(tmp_path / "other")


def test_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    for name in ("JINFER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(NoCacheError, match="there is no home folder; set JINFER_CACHE"):
        cache_folder("weights")
