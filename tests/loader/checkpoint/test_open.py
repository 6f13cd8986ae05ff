"""Which reader opens what: files by content, folders by the rule, and clear words otherwise."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jinfer.loader.checkpoint import Checkpoint, CheckpointError, open_checkpoint

from .pickles import dict_of, storage, tensor, zip_file
from .test_llama2c import build

DATA = Path(__file__).parent / "data"
GOLDENS = Path(__file__).parents[2] / "goldens"


def put(path: Path, *names: str, value: float = 1.0) -> Path:
    """A small safetensors file with these tensors."""
    safetensors.numpy.save_file({name: np.full(2, value, np.float32) for name in names}, path)
    return path


def put_pickle(path: Path, name: str = "p") -> Path:
    body = dict_of(**{name: tensor(storage())})
    path.write_bytes(zip_file(body, {"0": bytes(24)}))
    return path


def put_index(folder: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def names(checkpoint: Checkpoint) -> list[str]:
    return sorted(checkpoint.tensors)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".safetensors", ".gguf", ""])
def test_content_decides(tmp_path: Path, suffix: str) -> None:
    """Whatever the file is called."""
    made = {
        "safetensors": put(tmp_path / "a", "x").read_bytes(),
        "pickle": (DATA / "zip.pt").read_bytes(),
        "gguf": (GOLDENS / "gguf_llama2" / "model.gguf").read_bytes(),
        "llama2c": build((8, 12, 2, 4, 2, 6, 5), 0, True)[0],
    }
    path = tmp_path / f"model{suffix}"
    for kind, data in made.items():
        path.write_bytes(data)
        checkpoint = open_checkpoint(str(path))
        assert checkpoint.format == kind
        assert checkpoint.path == path


def test_old_pickle_and_llama2c_that_begin_alike(tmp_path: Path) -> None:
    """A dim of 640 has the two bytes that start a pickle of protocol 2."""
    data, _ = build((640, 2, 1, 640, 1, 1, 1), 0, True)
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    assert data.startswith(b"\x80\x02")
    assert open_checkpoint(path).format == "llama2c"
    assert open_checkpoint(DATA / "legacy.pt").format == "pickle"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "none of their marks"),
        (b"hello, world", "none of their marks; it is a text that begins 'hello, world'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"tjgg" + bytes(60), "older than GGUF"),
    ],
)
def test_unknown_file(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "model"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf", ".bin", ".pt"])
def test_empty_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.touch()
    with pytest.raises(CheckpointError, match="model"):
        open_checkpoint(path)


def test_path_that_is_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, reason in (
        (pipe, "not a regular file"),
        (tmp_path / "absent", "cannot be read"),
        (tmp_path / "nul\0", "cannot be read"),
        (tmp_path / ("x" * 5000), "cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            open_checkpoint(path)


def test_single_files_in_folders(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", "x")
    assert open_checkpoint(tmp_path).format == "safetensors"
    put_pickle(tmp_path / "pytorch_model.bin")
    assert names(open_checkpoint(tmp_path)) == ["x"]  # safetensors first
    (tmp_path / "model.safetensors").unlink()
    assert open_checkpoint(tmp_path).format == "pickle"


def test_other_files_in_the_folder_are_ignored(tmp_path: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt"):
        (tmp_path / name).write_bytes(b"not weights")
    (tmp_path / "rng_state_0.pth").write_bytes(b"not weights")
    put(tmp_path / "consolidated.safetensors", "other")
    put_pickle(tmp_path / "consolidated.00.pth")
    put_pickle(tmp_path / "model.pth")
    put(tmp_path / "model.safetensors", "x")
    assert names(open_checkpoint(tmp_path)) == ["x"]
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "consolidated.safetensors").unlink()
    assert names(open_checkpoint(tmp_path)) == ["p"]


def test_consolidated_alone_is_read(tmp_path: Path) -> None:
    put_pickle(tmp_path / "consolidated.00.pth")
    assert names(open_checkpoint(tmp_path)) == ["p"]


def test_gguf_and_llama2c_folders(tmp_path: Path) -> None:
    shutil.copy(GOLDENS / "gguf_llama2" / "model.gguf", tmp_path)
    assert open_checkpoint(tmp_path).format == "gguf"
    shutil.copy(tmp_path / "model.gguf", tmp_path / "another.gguf")
    (tmp_path / "model.gguf").rename(tmp_path / "this.gguf")
    with pytest.raises(CheckpointError, match=r"several checkpoints \(another.gguf, this.gguf\)"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(GOLDENS / "llama2c_v0").format == "llama2c"


def test_sharded_with_index(tmp_path: Path) -> None:
    put(tmp_path / "b.safetensors", "y", value=2.0)
    put(tmp_path / "a.safetensors", "x", "z")
    put_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"})
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["x", "z", "y"]
    assert checkpoint.path == tmp_path
    np.testing.assert_array_equal(checkpoint.tensors["y"].read(), [2, 2])


def test_sharded_pickle_with_index(tmp_path: Path) -> None:
    put_pickle(tmp_path / "one.bin", "x")
    put_pickle(tmp_path / "two.bin", "y")
    put_index(tmp_path, {"x": "one.bin", "y": "two.bin"}, "pytorch_model.bin.index.json")
    assert names(open_checkpoint(tmp_path)) == ["x", "y"]


def test_shards_without_index(tmp_path: Path) -> None:
    put(tmp_path / "model-00001-of-00002.safetensors", "x")
    with pytest.raises(CheckpointError, match=r"shards \[2\] of 2 are missing"):
        open_checkpoint(tmp_path)
    put(tmp_path / "model-00002-of-00002.safetensors", "y")
    assert names(open_checkpoint(tmp_path)) == ["x", "y"]
    put(tmp_path / "model-00002-of-00002.safetensors", "x")
    with pytest.raises(CheckpointError, match=r"'x' is also in model-00001-of-00002"):
        open_checkpoint(tmp_path)
    put(tmp_path / "model-00003-of-00003.safetensors", "z")
    with pytest.raises(CheckpointError, match="do not make one set"):
        open_checkpoint(tmp_path)


def test_two_sets_are_ambiguous(tmp_path: Path) -> None:
    put(tmp_path / "one.safetensors", "x")
    put(tmp_path / "two.safetensors", "y")
    with pytest.raises(CheckpointError, match="several checkpoints"):
        open_checkpoint(tmp_path)


def test_error_of_an_empty_folder_lists_searched_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json.*pytorch_model"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"x": "a.safetensors", "y": "b.safetensors"}, "'b.safetensors', which is not"),
        ({"x": "a.safetensors", "y": "a.safetensors"}, "holds 'y', which it does not"),
        ({"x": "../a.safetensors"}, "plain file name"),
        ({"x": "sub/a.safetensors"}, "plain file name"),
        ({"x": "/etc/passwd"}, "plain file name"),
        ({"x": "..\\a.safetensors"}, "plain file name"),
        ({"x": "C:a.safetensors"}, "plain file name"),
        ({"x": ".."}, "plain file name"),
        ({"x": ""}, "plain file name"),
        ({"x": "a\0"}, "plain file name"),
        ({"x": 3}, "plain file name"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_bad_index(tmp_path: Path, weight_map: Any, reason: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    put(folder / "a.safetensors", "x")
    put(tmp_path / "a.safetensors", "x")
    put_index(folder, weight_map)
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {"a": "b", "a": "c"}}'])
def test_index_that_is_not_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="JSON"):
        open_checkpoint(tmp_path)


def test_the_index_decides(tmp_path: Path) -> None:
    """Older copies in other shards, and tensors that it does not list, are left out."""
    put(tmp_path / "a.safetensors", "x", "junk", value=1.0)
    put(tmp_path / "b.safetensors", "x", "y", value=2.0)
    put_index(tmp_path, {"x": "b.safetensors", "y": "b.safetensors"})
    assert names(open_checkpoint(tmp_path)) == ["x", "y"]
    put_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    checkpoint = open_checkpoint(tmp_path)
    assert names(checkpoint) == ["x", "y"]
    np.testing.assert_array_equal(checkpoint.tensors["x"].read(), [1, 1])
    np.testing.assert_array_equal(checkpoint.tensors["y"].read(), [2, 2])


@pytest.mark.parametrize(
    ("stored", "plain"),
    [
        (["module.x", "module.y.z"], ["x", "y.z"]),
        (["_orig_mod.x", "_orig_mod.y.z"], ["x", "y.z"]),
        (["module._orig_mod.x", "_orig_mod.module.y.z"], ["x", "y.z"]),
        (["x", "layers.0._orig_mod._checkpoint_wrapped_module.y"], ["layers.0.y", "x"]),
        (["module.x", "y"], ["module.x", "y"]),  # a name of its own
        (["_orig_mod.x", "x"], ["_orig_mod.x", "x"]),  # two of one name
        (["my_orig_mod.x"], ["my_orig_mod.x"]),
    ],
)
def test_names_of_wrapped_models(tmp_path: Path, stored: list[str], plain: list[str]) -> None:
    put(tmp_path / "model.safetensors", *stored)
    checkpoint = open_checkpoint(tmp_path)
    assert names(checkpoint) == plain
    assert [tensor.name for tensor in checkpoint.tensors.values()] == list(checkpoint.tensors)


FAILED = [
    (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer.*git lfs pull"),
    (b"<!DOCTYPE html>\n<html class=''>" + b"x" * 9000, "an HTML page, not the file itself"),
    (b"Entry not found", "a server's answer, 'Entry not found'"),
    (b'{"error":"Repository not found"}', "a server's answer, 'Repository not found'"),
]


@pytest.mark.parametrize(("data", "reason"), FAILED)
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "pytorch_model.bin",
        "model.pth",
        "model.gguf",
        "model.safetensors.index.json",
        "model-00002-of-00002.safetensors",
    ],
)
def test_failed_downloads_in_a_folder(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(data)
    if "-of-" in name:
        put(tmp_path / "model-00001-of-00002.safetensors", "x")
    with pytest.raises(CheckpointError, match=f"{name}.*: is {reason}"):
        open_checkpoint(tmp_path)


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    link = tmp_path / "model-00002-of-00002.safetensors"
    link.symlink_to("../blobs/gone")
    for names_ in ([], ["model-00001-of-00002.safetensors"]):
        for name in names_:
            put(tmp_path / name, "x")
        with pytest.raises(CheckpointError, match=f"{link.name}: is a link to ../blobs/gone"):
            open_checkpoint(tmp_path)
    put_index(tmp_path, {"x": "model-00001-of-00002.safetensors", "y": link.name})
    with pytest.raises(CheckpointError, match=r"'model-00002-.*, which is a link to ../blobs/gone"):
        open_checkpoint(tmp_path)


def test_broken_llama2c_says_the_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    data = build((8, 12, 2, 4, 2, 6, 5), 0, True)[0]
    path.write_bytes(data[:-4])
    with pytest.raises(CheckpointError, match=f"implies {len(data)} bytes"):
        open_checkpoint(path)
    path.write_bytes(struct.pack("<7i", *[-1] * 7))
    with pytest.raises(CheckpointError, match=str(path)):
        open_checkpoint(path)
