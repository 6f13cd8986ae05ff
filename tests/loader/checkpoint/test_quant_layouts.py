"""Quantized checkpoints of other writers, against weights packed as the layouts are described."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer.loader.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from jinfer.loader.checkpoint.layouts.module_tensors import QuantSettings
from jinfer.loader.checkpoint.layouts.quant_layouts import decode_quantized
from jinfer.loader.weights.grouped_blocks import grouped_format, grouped_tensor
from jinfer.quant_format import parse_format

from .quantized_cases import CASES, Case

MODULE = "model.layers.0.mlp.up_proj"
OUTPUTS, INPUTS = 32, 256


def opened(
    folder: Path,
    arrays: dict[str, np.ndarray],
    config: Any,
    metadata: dict[str, str] | None = None,
) -> Checkpoint:
    whole = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
    save_file(whole, folder / "m.safetensors", metadata)
    settings = None if config is None else QuantSettings(config, folder / "config.json")
    return decode_quantized(open_checkpoint(folder), settings)


def stored(case: Case, seed: int = 1) -> tuple[dict[str, np.ndarray], np.ndarray]:
    leaves, weights = case.write(np.random.default_rng(seed), OUTPUTS, INPUTS)
    return {f"{MODULE}.{leaf}": array for leaf, array in leaves.items()}, weights


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_the_layouts_definition(tmp_path: Path, name: str) -> None:
    """Decoded values are exact; kept codes are exact within the reported error."""
    case = CASES[name]
    arrays, weights = stored(case)
    others = {"model.norm.weight": np.ones(4), f"{MODULE}.bias": np.ones(2)}
    stated = case.metadata_of(MODULE)
    tensors = opened(tmp_path, arrays | others, case.config, stated).tensors
    assert set(tensors) == {*others, f"{MODULE}.weight"}
    tensor = tensors[f"{MODULE}.weight"]
    values = tensor.read()
    assert tensor.shape == values.shape == (OUTPUTS, INPUTS)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, weights, rtol=2e-6, atol=1e-7 * np.abs(weights).max())
    found = grouped_format([tensor], exact=False)
    if not case.kept:
        assert found is None
        return
    assert found is not None
    if case.kept == "table":
        assert found.format.codebook is not None
    else:
        assert found.format == parse_format(case.kept)
    assert found.lost <= case.lost
    order = np.random.default_rng(2).permutation(OUTPUTS)[:24]
    kept = grouped_tensor([tensor, tensor], True, found, order, None)
    assert kept.shape == (2, 24, INPUTS)
    assert tensor.codes is not None
    table = (0.0, 1.0) if tensor.codes.values is None else tensor.codes.values
    step = np.abs(tensor.codes.scales()).max() * np.diff(np.unique(table)).min()
    bound = found.lost * 1.01 * step + 1e-6 * np.abs(weights).max()
    for one in (0, 1):
        np.testing.assert_allclose(kept[one].dequantize(), weights[order], rtol=0, atol=bound)
    exactly = grouped_format([tensor], exact=True)
    if exactly is not None:  # at most a bit more
        assert exactly.format.code_bits - found.format.code_bits == bool(case.lost)
        kept = grouped_tensor([tensor], False, exactly, None, None)
        np.testing.assert_allclose(kept.dequantize(), weights, rtol=1e-6, atol=1e-9)
    else:
        assert case.lost > 0


def test_bits_are_those_of_an_own_format(tmp_path: Path) -> None:
    """GPTQ and AWQ take as much memory as jinfer's own four bits."""
    for name, format in (("gptq_128", "q4_b128_sym"), ("awq_128", "q4_b128")):
        folder = tmp_path / name
        folder.mkdir()
        tensor = opened(folder, stored(CASES[name])[0], CASES[name].config).tensors
        found = grouped_format([*tensor.values()], exact=False)
        assert found is not None
        kept = grouped_tensor([*tensor.values()], False, found, None, None)
        assert 8 * kept.nbytes == OUTPUTS * INPUTS * parse_format(format).bits_per_weight


def test_unsupported_torchao_and_quanto_tensors_are_refused(tmp_path: Path) -> None:
    torchao, quanto = {"quant_method": "torchao"}, None
    arrays, _ = stored(CASES["torchao_int4"])
    scaled = arrays | {f"{MODULE}._weight_act_pre_scale": np.ones(4)}
    packed = {f"{MODULE}.weight._data._data": np.zeros((4, 4), np.uint8)}
    tiled = {f"{MODULE}.weight": '{"_type": "Int4TilePackedTo4dTensor"}'}
    stated = CASES["torchao_int4"].metadata_of(MODULE)
    odd = {f"{MODULE}.weight": '{"_type": "IntxUnpackedToInt8Tensor", "_data": {}}'}
    for tensors, config, metadata, reason in (
        (arrays, torchao, None, "__metadata__ does not say of what class weight is"),
        (arrays, torchao, tiled, f"torchao, with {MODULE}.weight as Int4TilePackedTo4dTensor"),
        (arrays, torchao, odd, "its target_dtype is None: not read"),
        (scaled, torchao, stated, "scales of activations are not read"),
        (packed, quanto, None, "quanto's 4 and 2 bits do not say their matrix's shape, and are"),
    ):
        with pytest.raises(CheckpointError) as caught:
            opened(tmp_path, tensors, config, metadata)
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)
