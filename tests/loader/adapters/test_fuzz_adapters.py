"""Damaged LoRA adapters: user errors only, for any missing, cut or mistyped part."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jinfer.loader.adapters.adapter_terms import adapter_terms, stacked, with_norms
from jinfer.loader.adapters.lora_adapter import open_adapter
from jinfer.loader.adapters.merged_adapter import merged
from jinfer.loader.checkpoint import CheckpointError
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.tensor_mapping import LoadError
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.nn.lora_rows import AdapterSlots
from tests.engine.adapters import write_adapter, write_gguf_adapter
from tests.loader.checkpoint.fuzzing import SHAPE_EDITS, fuzz_settings, mutations, reshaped

TESTS = Path(__file__).parents[2]
BASE = TESTS / "goldens" / "mixtral"
EXAMPLES = [60, pytest.param(20_000, marks=pytest.mark.soak)]
DTYPES: list[Any] = [np.uint8, np.int64, np.float16, np.bool_, ml_dtypes.bfloat16]
ODD: list[Any] = [None, 0, -1, 1, 2, 3, 1e300, True, "", "x", [], ["experts.down_proj"], {}, 1.5]
ODD += [["gate_up_proj"], {"down_proj": 3}, {".*\\.x": 1}, {"q_proj": None}, [[]], "0.18.0", "9"]
KEYS = ["r", "lora_alpha", "target_parameters", "rank_pattern", "alpha_pattern", "use_rslora"]
KEYS += ["use_dora", "peft_type", "bias", "peft_version", "init_lora_weights", "modules_to_save"]
EDITS = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 99), st.integers(0, 2**16)), max_size=3
)
SAID = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(ODD), max_size=2)


def damaged(arrays: dict[str, np.ndarray], kind: int, which: int, value: int) -> None:
    name = sorted(arrays)[which % len(arrays)]
    array = arrays[name]
    match kind - SHAPE_EDITS:
        case 0:
            arrays[name.replace("lora_", "base_layer.lora_")] = array
        case 1:
            arrays[name.replace("experts", "experts.0.w1")] = array
        case 2:
            arrays[name] = np.full_like(array, np.nan if value % 2 else 0)
        case 3:
            arrays[name.replace(".weight", "")] = array
        case _:
            reshaped(arrays, kind, which, value, DTYPES)


def reader() -> Callable[[Path], int]:
    """Reads an adapter for a model in slots and merged: how many of these it was accepted in."""
    opened = open_model(BASE, {})
    plain = build_abstract_model(opened.spec, np.float32)
    slots = AdapterSlots(2, 8, "float16", experts=True, magnitudes=True)
    model = build_abstract_model(opened.spec, np.float32, adapters=slots)
    coded = build_abstract_model(opened.spec, np.float32, adapters=replace(slots, dtype="int8"))
    shapes = dict(zip(plain.names, (each.shape for each in plain.parameters), strict=True))
    empty, codes = (
        {
            name: np.zeros(p.shape, p.dtype)
            for name, p in zip(one.names, one.parameters, strict=True)
            if name not in shapes
        }
        for one in (model, coded)
    )

    def weight_of(projection: str) -> np.ndarray:
        return np.ones(shapes[f"{projection}.weight"], np.float32)

    def read(path: Path) -> int:
        accepted = 0
        try:
            adapter = open_adapter(path)
        except CheckpointError:
            return accepted
        try:
            terms = adapter_terms(adapter, model, opened.spec.tensors, "safetensors")
            terms = with_norms(terms, weight_of, path)
            for before in (codes, empty):
                stacks = stacked(terms, 1, before, path)
                assert all(np.isfinite(each.astype(np.float32)).all() for each in stacks.values())
            accepted += 1
        except (CheckpointError, LoadError):
            pass
        try:
            whole = merged(opened.checkpoint, adapter, plain, opened.spec.tensors)
            for name, tensor in whole.tensors.items():
                if tensor is not opened.checkpoint.tensors[name]:
                    assert tensor.read().shape == tensor.shape
            accepted += 1
        except (CheckpointError, LoadError):
            pass
        return accepted

    return read


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damage_gives_user_errors(tmp_path: Path, examples: int) -> None:
    read, folder, targets = reader(), tmp_path / "a", ("q_proj", "w1", "experts.1.w2")
    peft = [TESTS / "engine" / "peft" / name for name in ("mixtral", "old_mixtral")]
    dora = write_adapter(tmp_path / "dora", 2, 1, base=BASE, targets=("v_proj",), dora=True)
    each = write_adapter(tmp_path / "each", 2, 1, base=BASE, targets=targets)
    seeds = [(load_file(one / "adapter_model.safetensors"), one) for one in (*peft, dora, each)]
    assert [read(source) for _, source in seeds] == [2] * len(seeds)
    folder.mkdir()

    @fuzz_settings(examples)
    @given(st.sampled_from(range(len(seeds))), EDITS, SAID)
    def run(which: int, edits: list[tuple[int, int, int]], stated: dict[str, Any]) -> None:
        arrays, source = dict(seeds[which][0]), seeds[which][1]
        for edit in edits:
            if arrays:
                damaged(arrays, *edit)
        stored = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        save_file(stored, folder / "adapter_model.safetensors")
        config = json.loads((source / "adapter_config.json").read_text()) | stated
        (folder / "adapter_config.json").write_text(json.dumps(config))
        with np.errstate(all="ignore"):
            read(folder)

    run()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_bytes(tmp_path: Path, examples: int) -> None:
    """Of the configuration, and of a GGUF file."""
    read, folder = reader(), tmp_path / "a"
    shutil.copytree(TESTS / "engine" / "peft" / "mixtral", folder)
    config = (folder / "adapter_config.json").read_bytes()
    gguf = write_gguf_adapter(tmp_path / "a.gguf", {"blk.0.attn_q.weight": (64, 64)}, 2)

    @fuzz_settings(examples)
    @given(mutations(config), mutations(gguf.read_bytes()))
    def run(stated: bytes, whole: bytes) -> None:
        (folder / "adapter_config.json").write_bytes(stated)
        (tmp_path / "b.gguf").write_bytes(whole)
        with np.errstate(all="ignore"):
            read(folder)
            read(tmp_path / "b.gguf")

    run()
