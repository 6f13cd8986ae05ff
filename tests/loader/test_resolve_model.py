"""What a user can point at: a spec, a folder, a file; with a family found, named, or unknown."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import gguf
import pytest

from jinfer.loader.checkpoint import CheckpointError
from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.model_files import tokenizer_path
from jinfer.loader.open_model import open_files
from jinfer.modelspec.spec_errors import SpecError

from .resolving import resolved

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.mark.parametrize("name", ["llama2", "gguf_llama2", "llama2c_v0/model.bin"])
def test_a_family_is_found(name: str) -> None:
    found = resolved(GOLDENS / name, {})
    assert found.spec.dims["hidden"] == 64
    assert found.spec.tensors.source_of("decoder.2.ffn.up.weight") is not None


@pytest.mark.parametrize("source", ["", " ", None, 5])
def test_what_is_no_source(source: Any) -> None:
    """Nothing is not the folder where the user is."""
    with pytest.raises(SourceError, match="is no model; give a path, a name of jinfer list"):
        resolved(source, {})


def test_a_big_endian_gguf_file(tmp_path: Path) -> None:
    """With the family of its architecture, and the metadata that the same file has elsewhere."""
    path = tmp_path / "model.gguf"
    source = gguf.GGUFReader(GOLDENS / "gguf_llama2" / "model.gguf")
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    for key, field in source.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], kind)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, little = resolved(path, {}), resolved(GOLDENS / "gguf_llama2" / "model.gguf", {})
    assert dict(found.config) == dict(little.config)
    assert found.spec.dims == little.spec.dims


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("<html><body>Sign in</body></html>", "is an HTML page"),
        ('{"error":"Invalid credentials in Authorization header"}', "'Invalid credentials in Au"),
    ],
)
def test_a_config_that_is_a_failed_download(tmp_path: Path, text: str, reason: str) -> None:
    shutil.copytree(GOLDENS / "llama2", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(text)
    with pytest.raises(SourceError, match=f"config.json: is .*{reason.removeprefix('is ')}"):
        resolved(tmp_path / "model", {})


def test_single_file_of_a_folder() -> None:
    found = resolved(GOLDENS / "llama2" / "model.safetensors", {})
    assert found.config["architectures"] == ["LlamaForCausalLM"]


def test_a_spec_with_weights_beside_it(tmp_path: Path) -> None:
    shutil.copytree(GOLDENS / "llama2", tmp_path / "weights")
    spec = tmp_path / "model.toml"
    spec.write_text('weights = "weights"\n[engine]\nslots = 3\n')
    found = resolved(spec, {"engine": {"context": 100}})
    assert (found.spec.engine.slots, found.spec.engine.context) == (3, 100)
    assert found.spec.path == str(spec)


def test_weights_given_by_the_user_are_relative_to_where_he_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(GOLDENS)
    spec = tmp_path / "model.toml"
    spec.write_text('weights = "nowhere"\n')
    assert resolved(spec, {"weights": "mistral"}).spec.dims["kv_heads"] == 2
    with pytest.raises(SourceError, match=r"nowhere: there is no such file"):
        resolved(spec, {})


def test_a_family_named_by_the_user(tmp_path: Path) -> None:
    shutil.copytree(GOLDENS / "llama2", tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    config["architectures"] = ["OddForCausalLM"]
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match="no family is known for OddForCausalLM"):
        resolved(tmp_path / "odd", {})
    assert resolved(tmp_path / "odd", {"family": "llama"}).spec.dims["hidden"] == 64
    with pytest.raises(SpecError, match="did you mean 'llama'"):
        resolved(tmp_path / "odd", {"family": "lama"})


def test_a_spec_without_weights(tmp_path: Path) -> None:
    spec = tmp_path / "model.toml"
    spec.write_text('family = "llama"\n')
    with pytest.raises(SpecError, match=r"model.toml: weights: is missing"):
        resolved(spec, {})


@pytest.mark.parametrize("text", ["[", "[1]", '"a"', "{" * 100_000, "\xff"])
def test_broken_config(tmp_path: Path, text: str) -> None:
    shutil.copytree(GOLDENS / "llama2", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=r"config.json: (cannot be read as JSON|is not a JSON)"):
        resolved(tmp_path / "model", {})


def test_a_folder_that_holds_a_gguf_file_has_its_tokenizer() -> None:
    found = open_files(GOLDENS / "gguf_llama2", {})
    assert tokenizer_path(found, {}) == GOLDENS / "gguf_llama2" / "model.gguf"
    assert tokenizer_path(open_files(GOLDENS / "llama2", {}), {}) == GOLDENS / "llama2"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weights", "../outside"),
        ("weights", "/etc/passwd"),
        ("weights", "hf://owner/name"),
        ("weights", "package://os/path"),
        ("weights", "~/model"),
        ("tokenizer", "sub/../../outside"),
        ("family", "../family.toml"),
        ("engine.cache_disk", "/outside"),
    ],
)
def test_a_specification_that_nobody_named_stays_in_its_folder(
    tmp_path: Path, key: str, value: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / "llama2", folder)
    (tmp_path / "outside").mkdir()
    keys = {"family": "llama", "weights": ".", key: value}
    (folder / "spec.toml").write_text("\n".join(f'{k} = "{v}"' for k, v in keys.items()))
    with pytest.raises(SpecError, match=rf"{key}: .* leads out of the folder; give spec\.toml"):
        resolved(folder, {})
    if value == "../outside":  # named by the user, it may
        with pytest.raises(CheckpointError, match="outside"):
            resolved(folder / "spec.toml", {})


def test_layers_that_the_file_does_not_have(tmp_path: Path) -> None:
    """Ten thousand layers were built before the first was looked for."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / "llama2", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10_000}))
    begun = time.thread_time()
    with pytest.raises(SpecError, match=r"dims\.layers: is 10000 in all, but model has only"):
        resolved(folder, {})
    assert time.thread_time() - begun < 5


@pytest.mark.parametrize("what", ["pipe", "/dev/zero"])
def test_a_config_that_is_no_file(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / "llama2", folder)
    (folder / "config.json").unlink()
    if what == "pipe":
        os.mkfifo(folder / "config.json")
    else:
        (folder / "config.json").symlink_to(what)
    with pytest.raises(SourceError, match=r"config\.json: is not a regular file"):
        resolved(folder, {})


def test_who_is_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / "llama2", folder)
    assert resolved(folder, {}).trust is None
    assert resolved(folder, {"trust": False}).trust is False
    (folder / "spec.toml").write_text('family = "llama"\nweights = "."\ntrust = true')
    assert resolved(folder, {}).trust is None  # it came with the weights
    assert resolved(folder / "spec.toml", {}).trust is True
    assert resolved(folder / "spec.toml", {"trust": False}).trust is False
    with pytest.raises(SpecError, match="trust: 3 is not true or false"):
        resolved(folder, {"trust": 3})


@pytest.mark.parametrize("name", ["llama2", "qwen25_yarn", "pegasus"])
@pytest.mark.parametrize("value", ["x", True, 0, -1, 0.5, 10**12, [1], {"a": 1}, 1e308])
def test_a_context_that_is_none(tmp_path: Path, value: object, name: str) -> None:
    """No block of llama2 has it, a scaling of qwen25_yarn, and a table of pegasus is as long."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": value}))
    with pytest.raises(SpecError, match=r"dims\.context: "):
        resolved(folder, {})


def test_a_context_written_with_a_point(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / "llama2", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64.0}))
    assert repr(resolved(folder, {}).spec.dims["context"]) == "64"
