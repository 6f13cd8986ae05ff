"""A checkpoint and a specification that do not fit each other: one line that says what to do."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer import LLM
from jinfer.api.user_errors import USER_ERRORS
from jinfer.generate import main

GOLDEN = Path(__file__).parents[2] / "goldens" / "llama2"
DOWN = "model.layers.1.mlp.down_proj.weight"
EXTRA = "model.layers.1.mlp.extra.weight"

type Config = dict[str, Any]
type Arrays = dict[str, np.ndarray]


def config(**changes: Any) -> Callable[[Config, Arrays], None]:
    return lambda config, tensors: config.update(changes)


def gone(config: Config, tensors: Arrays) -> None:
    del tensors[DOWN]


def renamed(config: Config, tensors: Arrays) -> None:
    tensors[DOWN.replace("down", "dwon")] = tensors.pop(DOWN)


def one_more(config: Config, tensors: Arrays) -> None:
    tensors[EXTRA] = np.zeros((2, 2), np.float32)


def turned(config: Config, tensors: Arrays) -> None:
    tensors[DOWN] = np.ascontiguousarray(tensors[DOWN].T)


NOT_ALIKE = "map it to another in [tensors], or see whether a file is missing"
SIZES = " but the specification says [64, 96]; correct [dims], or how [tensors] maps it"

# what is wrong -> the change, what the user sets, and what the error says
CASES: dict[str, tuple[Callable[[Config, Arrays], None], Config, list[str]]] = {
    "a tensor is missing": (
        gone,
        {},
        [f"no tensor {DOWN}, which decoder.1.ffn.down.weight is to be loaded from; ", NOT_ALIKE],
    ),
    "a tensor has another name": (
        renamed,
        {},
        [f"no tensor {DOWN}, which", f"did you mean '{DOWN.replace('down', 'dwon')}'? {NOT_ALIKE}"],
    ),
    "a tensor too many": (
        one_more,
        {},
        [f"no place for {EXTRA}; map them in [tensors], or list them under tensors.ignore"],
    ),
    "a tensor of another shape": (
        turned,
        {},
        [
            f"{DOWN} is [112, 64] for decoder.1.ffn.down.weight, but",
            "says [64, 112]; correct [dims]",
        ],
    ),
    "other sizes in config.json": (
        config(intermediate_size=96),
        {},
        ["mlp.down_proj.weight is [64, 112] for decoder.0.ffn.down.weight,", SIZES],
    ),
    "other sizes by the user": (
        config(),
        {"dims.intermediate": 96},
        ["mlp.down_proj.weight is [64, 112] for decoder.0.ffn.down.weight,", SIZES],
    ),
    "heads that do not divide": (
        config(num_attention_heads=5),
        {},
        ["dims.head_dim: 12.8 ($head_dim | hidden / heads) is not a whole number from 1"],
    ),
    "a layer too many": (
        config(num_hidden_layers=4),
        {},
        ["no tensor model.layers.3.", f" is to be loaded from; {NOT_ALIKE}"],
    ),
    "a layer too few": (
        config(num_hidden_layers=2),
        {},
        ["no place for model.layers.2.", "and 4 more; map them in [tensors]"],
    ),
    "a size that is missing": (
        config(hidden_size=None),
        {},
        ["dims.hidden: config.json has no 'hidden_size'; set dims.hidden or add a default"],
    ),
    "an unsupported activation": (
        config(hidden_act="sinlu"),
        {},
        ["decoder.modules.ffn.activation: 'sinlu' ($hidden_act", "did you mean 'silu'? allowed: "],
    ),
    "an unknown architecture": (
        config(architectures=["OddForCausalLM"]),
        {},
        ["no family is known for OddForCausalLM; write a specification (jinfer docs specs)"],
    ),
    "weights quantized in another way": (
        config(quantization_config={"quant_method": "vptq"}),
        {},
        ["config.json: quantization_config says", "by vptq", "use the original weights, or"],
    ),
}


def broken(folder: Path, change: Callable[[Config, Arrays], None]) -> None:
    """The golden with something changed in it."""
    described = json.loads((GOLDEN / "config.json").read_text())
    tensors = load_file(GOLDEN / "model.safetensors")
    change(described, tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(described))


@pytest.mark.parametrize("case", CASES)
def test_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """The same for a program and at the command line."""
    change, overrides, words = CASES[case]
    broken(tmp_path, change)
    with pytest.raises(USER_ERRORS) as caught:
        LLM(tmp_path, dtype="float32", **overrides)
    text = str(caught.value)
    assert text.startswith(str(tmp_path))
    assert "\n" not in text
    for word in words:
        assert word in text

    settings = [f"--set={key}={value}" for key, value in overrides.items()]
    assert main([str(tmp_path), "--ids", "1", *settings]) == 2
    assert capsys.readouterr() == ("", f"error: {text}\n")


def test_the_command_itself(tmp_path: Path) -> None:
    broken(tmp_path, one_more)
    command = [sys.executable, "-m", "jinfer.generate", str(tmp_path), "--ids", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=GOLDEN.parents[3])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {tmp_path}: the specification has no place for {EXTRA};")


def test_unchanged_it_is_served(tmp_path: Path) -> None:
    broken(tmp_path, config())
    assert LLM(tmp_path, dtype="float32").logits([[1, 2]])[0].shape == (2, 320)
