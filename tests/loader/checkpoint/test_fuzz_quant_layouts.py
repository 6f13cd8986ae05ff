"""Damaged quantized checkpoints: user errors only, for any missing, cut or mistyped part."""

from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jinfer.loader.checkpoint import CheckpointError, open_checkpoint
from jinfer.loader.checkpoint.layouts.module_tensors import QuantSettings
from jinfer.loader.checkpoint.layouts.quant_layouts import LAYOUTS, decode_quantized
from jinfer.loader.weights.grouped_blocks import grouped_format, grouped_tensor, kept_blocks
from jinfer.quant.scaled_tensor import scaled_tensor

from .fuzzing import EXAMPLES, SHAPE_EDITS, fuzz_settings, reshaped
from .quantized_cases import CASES
from .quantized_writers import Arrays

DTYPES = [np.uint8, np.int8, np.int32, np.uint32, np.int64, np.float16, np.float32, np.bool_]
DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu]
ODD: list[Any] = [None, 0, -1, 1, 2, 3, 5, 8, 64, 10**12, True, False, "", "x", [], [1, 2], {}, 1.5]
ODD += [[0, 0], {"a": 1}, {"weights": {}}, {"g": {"weights": {"num_bits": 40}}}, "int", *LAYOUTS]


@cache
def seed(name: str) -> Arrays:
    leaves, _ = CASES[name].write(np.random.default_rng(4), 32, 256)
    return {f"m.0.{leaf}": array for leaf, array in leaves.items()}


def damaged(arrays: Arrays, kind: int, which: int, value: int) -> None:
    name = sorted(arrays)[which % len(arrays)]
    array = arrays[name]
    match kind - SHAPE_EDITS:
        case 0:
            noise = np.random.default_rng(value).integers(0, 256, max(1, array.nbytes), np.uint8)
            arrays[name] = noise[: array.nbytes].view(array.dtype).reshape(array.shape)
        case 1:
            arrays[f"m.0.{'weight' if value % 2 else 'scales'}"] = array
        case 2:
            arrays[name] = np.concatenate([array, array]) if array.ndim else array[None]
        case 3:
            flat = array.reshape(-1).view(np.uint8).copy()
            flat[value % max(1, flat.size) :][:1] ^= 1 << value % 8
            arrays[name] = flat.view(array.dtype).reshape(array.shape)
        case _:
            reshaped(arrays, kind, which, value, DTYPES)


EDITS = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 9), st.integers(0, 2**16)), min_size=1, max_size=3
)
KEYS = ["bits", "group_size", "sym", "quant_method", "format", "config_groups", "version", "mode"]
KEYS += ["weight_block_size", "quant_algo", "checkpoint_format", "packing_format", "quant_config"]
SAID = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(ODD), max_size=2)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damage_gives_user_errors(tmp_path: Path, examples: int) -> None:
    @fuzz_settings(examples)
    @given(st.sampled_from(sorted(CASES)), EDITS, SAID | st.just({}))
    def run(name: str, edits: list[tuple[int, int, int]], stated: dict[str, Any]) -> None:
        arrays = dict(seed(name))
        for edit in edits:
            if arrays:
                damaged(arrays, *edit)
        stored = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        text = CASES[name].metadata
        if stated and text:  # that is damaged, too
            text = text.replace("_type", "_data") if len(edits) > 1 else text[: len(edits) * 20]
        metadata = {"m.0.weight": text} if text else None
        save_file(stored, tmp_path / "model.safetensors", metadata)
        settings = QuantSettings({**CASES[name].config, **stated}, tmp_path / "config.json")
        try:
            checkpoint = decode_quantized(open_checkpoint(tmp_path), settings)
            for tensor in checkpoint.tensors.values():
                assert tensor.read().shape == tensor.shape
                assert tensor.raw().nbytes == tensor.nbytes
                for exact in (False, True) if tensor.codes is not None else ():
                    if (found := grouped_format([tensor], exact)) is not None:
                        kept = grouped_tensor([tensor], False, found, None, None)
                        assert kept.shape == tensor.shape
                scaled = tensor.scaled
                if scaled is not None and kept_blocks(scaled, tensor.shape[-1]) is not None:
                    with np.errstate(all="ignore"):
                        whole = scaled_tensor(scaled.numbers(), scaled.scales()).dequantize()
                    assert ((whole == tensor.read()) | np.isnan(whole)).all()
        except CheckpointError:
            pass

    run()
