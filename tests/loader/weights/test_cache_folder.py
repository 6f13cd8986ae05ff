"""Entries of weights that are kept: whole or made again, bounded, the user's alone."""

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer.loader.checkpoint import open_checkpoint
from jinfer.loader.checkpoint.native_checkpoint import native_metadata
from jinfer.loader.checkpoint.safetensors import Writer
from jinfer.loader.weights import quantized_cache
from jinfer.loader.weights.quantized_cache import (
    NotCached,
    _place,
    add_entry,
    cache_key,
    cache_root,
    find_entry,
)

SOURCE = Path(__file__).parents[2] / "goldens" / "llama2"


def write(target: Path) -> None:
    writer = Writer(target)
    writer.add({"a": np.arange(3 << 18, dtype=np.float32)})
    writer.finish(native_metadata(open_checkpoint(SOURCE), {}, {}, {}))


def entry(parent: Path, key: str = "one") -> Path:
    parent.mkdir(exist_ok=True)
    add_entry(parent, key, 1, write)
    return parent / key


def test_an_entry_is_found_again(tmp_path: Path) -> None:
    entry(tmp_path)
    found = find_entry(tmp_path, "one")
    assert found is not None
    np.testing.assert_array_equal(found.parts["a"].read(), np.arange(3 << 18, dtype=np.float32))
    assert find_entry(tmp_path, "two") is None
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _zeros(path: Path) -> None:
    """A megabyte that never reached the disk."""
    with path.open("r+b") as file:
        file.seek(1 << 20)
        file.write(bytes(1 << 20))


@pytest.mark.parametrize("damage", [_cut, _zeros, Path.unlink])
@pytest.mark.parametrize("file", ["model.safetensors", "sampled"])
def test_a_damaged_entry_is_removed(tmp_path: Path, damage: Any, file: str) -> None:
    path = entry(tmp_path)
    damage(path / file)
    assert find_entry(tmp_path, "one") is None
    assert list(tmp_path.iterdir()) == []
    add_entry(tmp_path, "one", 1, write)
    assert find_entry(tmp_path, "one") is not None


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        write(target)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_entry(tmp_path, "one", 1, fail)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    for name, age in (("making-old", 2 * 24 * 3600), ("making-new", 60)):
        (tmp_path / name).mkdir()
        then = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (then, then))
    entry(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["making-new", "one"]


def test_the_least_recently_used_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3 << 20
    for age, key in ((30, "a"), (20, "b"), (10, "c")):
        path = entry(tmp_path, key)
        then = path.stat().st_mtime - age
        os.utime(path, (then, then))
    assert find_entry(tmp_path, "a") is not None  # used just now
    monkeypatch.setattr(quantized_cache, "MOST_BYTES", 3 * size + size // 2)
    add_entry(tmp_path, "d", size, write)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "d"]
    with pytest.raises(NotCached, match=r"has no room for 1024\.0 GiB"):
        add_entry(tmp_path, "e", 1 << 40, write)


def test_the_key_is_that_of_the_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes((SOURCE.parent / "gguf_llama2" / "model.gguf").read_bytes())
    first = cache_key(open_checkpoint(path), "a")
    assert first == cache_key(open_checkpoint(path), "a") != cache_key(open_checkpoint(path), "b")
    (tmp_path / "other.gguf").write_bytes(b"nothing of it")
    assert cache_key(open_checkpoint(path), "a") == first
    os.utime(path, (0, 0))
    assert cache_key(open_checkpoint(path), "a") != first


def test_files_beside_an_index_count(tmp_path: Path) -> None:
    for path in SOURCE.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = cache_key(open_checkpoint(tmp_path))
    (weights,) = tmp_path.glob("*.safetensors")
    os.utime(weights, (0, 0))
    assert cache_key(open_checkpoint(tmp_path)) != first


def test_the_folder_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_cache, "_place", _place)
    monkeypatch.setenv("JINFER_CACHE", str(tmp_path / "cache"))
    path = cache_root()
    assert path == tmp_path / "cache" / "weights"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    entry(path)
    path.chmod(0o755)
    assert find_entry(cache_root(), "one") is not None, "others could only read"
    path.chmod(0o777)
    assert find_entry(cache_root(), "one") is None, "others may have written it"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_cache, "_place", _place)
    file = tmp_path / "file"
    file.touch()
    for chosen, words in (("off", "JINFER_CACHE is off"), (str(file), "cannot be used")):
        monkeypatch.setenv("JINFER_CACHE", chosen)
        with pytest.raises(NotCached, match=words):
            cache_root()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "weights").symlink_to(tmp_path)
    monkeypatch.setenv("JINFER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(NotCached, match="is not a folder of yours"):
        cache_root()
    monkeypatch.setenv("JINFER_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(NotCached, match="cannot be written to"):
        cache_root()
