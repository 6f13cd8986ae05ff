"""Converted checkpoints in Orbax's folders: damage is an error of one line."""

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer.api.user_errors import USER_ERRORS
from jinfer.cli.quantize.quantize_checkpoint import convert
from jinfer.loader.checkpoint import CheckpointError, open_checkpoint
from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.checkpoint.orbax import DESCRIPTION, FOLDER, open_orbax, orbax_api
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.loader.weights.tensor_mapping import LoadError
from jinfer.nn.abstract_model import build_abstract_model
from tests.loader.checkpoint.converting import MODEL, SMALL, check_equal, in_metadata, leaves


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint, to be copied."""
    out = tmp_path_factory.mktemp("converted") / "out"
    convert(str(MODEL), out, {"quantization": {"weights": "q4", **SMALL}}, orbax=True)
    return out


def changed(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = out / DESCRIPTION
    described = json.loads(path.read_text())
    change(described)
    path.write_text(json.dumps(described))


Q = "decoder.0.attn.q.weight"
MANIFEST = "state/manifest.ocdbt"
DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "no metadata": (
        lambda d: d.pop("__metadata__"), CheckpointError, "__metadata__ is not a table of strings",
    ),
    "metadata of numbers": (
        lambda d: d["__metadata__"].update(same=1), CheckpointError, "not a table of strings",
    ),
    "another's": (
        lambda d: d["__metadata__"].update(format="pt"), CheckpointError, "does not describe what",
    ),
    "version": (
        lambda d: d["__metadata__"].update(version="2"), CheckpointError, "of version '2', and 1",
    ),
    "no source": (
        lambda d: d["__metadata__"].pop("source"), CheckpointError, "__metadata__.source is not",
    ),
    "arrays": (lambda d: d.update(arrays=[]), CheckpointError, "arrays is not a table"),
    "files": (lambda d: d.pop("files"), CheckpointError, "files is not a table"),
    "size": (
        lambda d: d["files"].update({MANIFEST: 7}), CheckpointError, f"'{MANIFEST}' is not a file",
    ),
    "elsewhere": (
        lambda d: d["files"].update({"../spec.toml": [1, 2]}), CheckpointError,
        "is not a file of model",
    ),
    "anywhere": (
        lambda d: d["files"].update({"/dev/null": [0, 0]}), CheckpointError,
        "is not a file of model",
    ),
    "no mark": (
        lambda d: d["files"].pop("orbax.checkpoint"), CheckpointError,
        "files: orbax.checkpoint is missing",
    ),
    "a file too many": (
        lambda d: d["files"].update({"state/d/x": [1, 2]}), CheckpointError,
        "state/d/x: is missing",
    ),
    "a name too long": (
        lambda d: d["files"].update({"a" * 300: [1, 2]}), CheckpointError,
        "is missing, or not readable",
    ),
    "a file's size": (
        lambda d: d["files"].update({MANIFEST: [7, 8]}), CheckpointError, "but 7 were written",
    ),
    "type": (
        lambda d: d["arrays"][f"{Q}.words"].__setitem__(0, "Q4"), CheckpointError,
        f"'{Q}.words' is not a type and a shape",
    ),
    "shape": (
        lambda d: d["arrays"].update({f"{Q}.words": ["U32", [1, -1]]}), CheckpointError,
        f"'{Q}.words' is not a type and a shape",
    ),
    "too many axes": (
        lambda d: d["arrays"].update({f"{Q}.words": ["U32", [1] * 99]}), CheckpointError,
        f"'{Q}.words' has too large a shape",
    ),
    "other type": (
        lambda d: d["arrays"]["decoder.norm.weight"].__setitem__(0, "F16"), CheckpointError,
        r"norm.weight is float32 \[64\], but model.orbax.json says float16 \[64\]",
    ),
    "other shape": (
        in_metadata("parameters", lambda t: t[Q]["format"].update(width="5")), CheckpointError,
        f"{Q}.words is U32 .*, but has to be uint32",
    ),
    "array that is not there": (
        lambda d: (
            d["arrays"].update({"decoder.n": d["arrays"]["decoder.norm.weight"]}),
            in_metadata("same", lambda t: t.update({"decoder.norm.weight": "decoder.n"}))(d),
            d["arrays"].pop("decoder.norm.weight"),
        ),
        CheckpointError, "has no array decoder.n: it is damaged",
    ),
    "array that is too many": (
        lambda d: d["arrays"].update({"more": ["F32", [1]]}), LoadError, "has no place for more",
    ),
    "array that is too few": (
        lambda d: d["arrays"].pop(f"{Q}.scales"), CheckpointError, f"has no tensor {Q}.scales",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line(kind: str, converted: Path, tmp_path: Path) -> None:
    change, error, words = DAMAGE[kind]
    out = tmp_path / "out"
    shutil.copytree(converted, out)
    changed(out, change)
    with pytest.raises(error, match=words) as caught:
        leaves(out)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(out / FOLDER))


def test_every_file_is_missed_and_measured(converted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(converted, out)
    files = [path for path in (out / FOLDER).rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in (*files, out / DESCRIPTION):
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path.name}: is missing"):
            open_checkpoint(out)
        if data:
            path.write_bytes(data[: len(data) // 2])
            with pytest.raises(
                CheckpointError, match=f"{path.name}.*(cut off|not valid)"
            ) as caught:
                open_checkpoint(out)
            assert "\n" not in str(caught.value)
        path.write_bytes(data)
    check_equal(leaves(out), leaves(converted))


@pytest.mark.parametrize("name", [MANIFEST, "state/_METADATA", "_CHECKPOINT_METADATA"])
def test_files_that_are_changed(name: str, converted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(converted, out)
    path = out / FOLDER / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is not what was written") as caught:
        open_checkpoint(out)
    assert str(caught.value).startswith(f"{path}: ")


def test_damage_that_only_orbax_finds(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors become one line; of some, it only says that it has found nothing."""
    api = orbax_api(converted)

    def fail(*_: object) -> None:
        try:
            raise ValueError("DATA_LOSS: bad block\n[a specification]")
        except ValueError as error:
            raise RuntimeError("while reading") from error

    with monkeypatch.context() as patched:
        patched.setattr(api, "load", fail)
        with pytest.raises(CheckpointError) as caught:
            leaves(converted)
    assert str(caught.value) == (
        f"{converted / FOLDER}: cannot be restored: DATA_LOSS: bad block; "
        "convert the source again with jinfer quantize"
    )
    monkeypatch.setattr(api, "metadata", lambda path: Nothing())
    with pytest.raises(CheckpointError, match=r"has no array embed\.weight"):
        leaves(converted)


class Nothing:
    """What Orbax says of a folder that it cannot read."""

    metadata = None


def test_no_byte_of_the_description_breaks_the_reader(converted: Path, tmp_path: Path) -> None:
    """Whatever one byte becomes, there is a model, or one of our errors."""
    out = tmp_path / "out"
    shutil.copytree(converted, out)
    path = out / DESCRIPTION
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(good)
        data[int(rng.integers(len(data)))] = int(rng.integers(32, 127))
        path.write_bytes(data)
        with suppress(*USER_ERRORS):
            opened = open_model(out, {})
            plan_weights(
                build_abstract_model(opened.spec, "float32"),
                opened.spec,
                opened.checkpoint,
                opened.activations,
            )


@pytest.mark.parametrize("place", [FOLDER, f"{FOLDER}/state"])
def test_a_folder_of_somebody_elses(place: str, converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted / place, tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_checkpoint(tmp_path / "out")


def test_without_orbax(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    assert open_checkpoint(converted).format == "safetensors"  # to look at it, it is not needed
    with pytest.raises(CheckpointError, match=r"-m pip install 'jinfer\[orbax\]'$") as caught:
        leaves(converted)
    assert "\n" not in str(caught.value)


def test_the_description_names_every_array(converted: Path) -> None:
    described = json.loads((converted / DESCRIPTION).read_text())
    api = orbax_api(converted)
    found = api.metadata(converted / FOLDER).metadata
    arrays = {
        name: (DTYPES[kind], tuple(shape)) for name, (kind, shape) in described["arrays"].items()
    }
    assert arrays == {name: (each.dtype, tuple(each.shape)) for name, each in found.items()}
    with pytest.raises(CheckpointError, match="is not read alone"):
        open_orbax(converted / DESCRIPTION).parts[f"{Q}.words"].read()
