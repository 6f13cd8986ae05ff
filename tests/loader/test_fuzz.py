"""Damaged configurations and indices: a model that opens, or one of the users' errors, soon."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfer.api.user_errors import USER_ERRORS
from jinfer.loader.checkpoint import CheckpointError, open_checkpoint
from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.open_model import open_model

from ..hostile import EXAMPLES, damaged, endures, many

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILIES = ("llama2", "gemma2", "mixtral", "t5", "bert", "deepseek_v2", "qwen25_yarn", "minilm")


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_config(tmp_path: Path, examples: int) -> None:
    known: dict[str, Any] = {
        name: json.loads((GOLDENS / name / "config.json").read_text("utf-8")) for name in FAMILIES
    }

    @many(examples)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(FAMILIES))
        folder = tmp_path / name
        if not folder.exists():
            shutil.copytree(GOLDENS / name, folder)
        (folder / "config.json").write_text(damaged(known[name], data))
        endures(lambda: open_model(folder, {}), USER_ERRORS, folder / "config.json")

    run()


WRONG: list[Any] = [
    *(None, True, [], {}, "", "x", "1", -1, 0, 0.5, 10**12, 1e308, float("inf"), float("nan")),
    *("\ud800", "a" * 5000, [1], [None], {"type": "x"}, {"rope_type": "yarn", "factor": 1e308}),
]
ALL = [path.parent.name for path in sorted(GOLDENS.glob("*/config.json"))]
EVERY = [name if name in ("llama2", "t5") else pytest.param(name, marks=pytest.mark.soak)
         for name in ALL if not name.startswith("tok_")]  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_every_key_with_wrong_values(tmp_path: Path, name: str) -> None:
    """Chance takes long to find the one key that nobody checks."""
    folder = tmp_path / name
    shutil.copytree(GOLDENS / name, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    for key in config:
        for value in WRONG:
            file.write_text(json.dumps({**config, key: value}))
            endures(lambda: open_model(folder, {}), USER_ERRORS, file)


POOLING = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.Normalize"},
]


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_modules(tmp_path: Path, examples: int) -> None:
    folder = tmp_path / "minilm"
    shutil.copytree(GOLDENS / "minilm", folder)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    files: dict[str, Any] = {
        "modules.json": POOLING,
        "1_Pooling/config.json": {
            "pooling_mode_mean_tokens": True,
            "pooling_mode_cls_token": False,
        },
        "sentence_bert_config.json": {"max_seq_length": 128, "do_lower_case": False},
    }

    @many(examples)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(files)))
        for name, value in files.items():
            text = damaged(value, data) if name == chosen else json.dumps(value)
            (folder / name).write_text(text)
        endures(lambda: open_model(folder, {}), USER_ERRORS, folder / chosen)

    run()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_indices(tmp_path: Path, examples: int) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    shutil.copy(GOLDENS / "llama2" / "model.safetensors", folder / "one.safetensors")
    tensors = list(open_checkpoint(folder / "one.safetensors").tensors)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "one.safetensors")}
    file = folder / "model.safetensors.index.json"

    @many(examples)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        file.write_text(damaged(index, data))
        endures(lambda: open_checkpoint(folder), (CheckpointError,), file)

    run()


@pytest.mark.parametrize("key", ["decoder_start_token_id", "forced_bos_token_id"])
@pytest.mark.parametrize("id", [10**12, -5, True, "x", [0, 10**6], 0.5])
def test_ids_that_no_vocabulary_has(tmp_path: Path, key: str, id: Any) -> None:
    folder = tmp_path / "t5"
    shutil.copytree(GOLDENS / "t5", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: id}))
    with pytest.raises(SourceError, match=rf"{key} has .*, which is no id of a vocabulary of"):
        open_model(folder, {})
