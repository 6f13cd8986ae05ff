"""Merged adapters whose finite numbers make weights that float32 cannot hold: an error."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer import LLM
from jinfer.loader.adapters.lora_adapter import CONFIG, open_adapter
from jinfer.loader.adapters.merged_adapter import merged
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.tensor_mapping import LoadError
from jinfer.nn.abstract_model import build_abstract_model
from tests.engine.adapters import write_adapter
from tests.engine.tiny import GOLDEN

TESTS = Path(__file__).parents[2]
MIXTRAL = TESTS / "engine" / "peft" / "mixtral"
PROJECTION = "model.layers.0.self_attn.q_proj"
EXPERT = r"model.layers.0.block_sparse_moe.experts.0.w[123]"
TOO_LARGE = r"lora_B times lora_A times its scale \(lora_alpha\) is too large for float32; lower"


def filled(folder: Path, number: float, alpha: float) -> Path:
    """An adapter's copy, all of whose matrices have this number everywhere."""
    file, config = folder / "adapter_model.safetensors", folder / CONFIG
    arrays = {n: np.full_like(a, number) for n, a in load_file(file).items() if "lora_mag" not in n}
    save_file({**load_file(file), **arrays}, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": alpha}))
    return folder


def all_finite(base: Path, adapter: Path) -> bool:
    opened = open_model(base, {})
    model, tensors = build_abstract_model(opened.spec, np.float32), opened.spec.tensors
    whole = merged(opened.checkpoint, open_adapter(adapter), model, tensors)
    return all(np.isfinite(each.read().astype(np.float32)).all() for each in whole.tensors.values())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("number", "alpha", "reason"),
    [(1e19, 2, None), (1e19, 64, TOO_LARGE), (3e38, 2, TOO_LARGE), (3e38, 0, TOO_LARGE)],
)
def test_of_a_matrix(number: float, alpha: float, reason: str | None, tmp_path: Path) -> None:
    """The product, with a scale or alone; a lower scale helps with the first."""
    path = write_adapter(tmp_path / "poet", 2, 1, targets=("layers.0.self_attn.q_proj",))
    filled(path, number, alpha)
    if reason is None:
        assert all_finite(GOLDEN, path)
        return
    with pytest.raises(LoadError, match=f"poet.*: {PROJECTION}: {reason}") as error:
        LLM(GOLDEN, adapters={"poet": {"source": str(path), "merge": True}})
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("error")
def test_of_experts(tmp_path: Path) -> None:
    path = shutil.copytree(MIXTRAL, tmp_path / "poet")
    with pytest.raises(LoadError, match=f"poet.*: {EXPERT}: {TOO_LARGE}"):
        all_finite(TESTS / "goldens" / "mixtral", filled(path, 1e19, 3))
    assert all_finite(TESTS / "goldens" / "mixtral", filled(path, 1e19, 1))


@pytest.mark.filterwarnings("error")
def test_of_rows_with_magnitudes(tmp_path: Path) -> None:
    """Rows whose squares are too large have no length in float32: all 0 without an error."""
    path = write_adapter(tmp_path / "poet", 2, 1, targets=("layers.0.self_attn.q_proj",), dora=True)
    assert all_finite(GOLDEN, filled(path, 1e5, 2))
    with pytest.raises(LoadError, match=f"poet.*: {PROJECTION}: .* too long .*lower its scale"):
        all_finite(GOLDEN, filled(path, 1e13, 2))
