"""What a stranger's names do to an error: nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer.api.llm import LLM
from jinfer.api.user_errors import USER_ERRORS
from jinfer.sandbox.sanitize import sanitized

GOLDENS = Path(__file__).parents[1] / "goldens"
STRANGE = "one\ntwo\x1b[2J\u202e" + "x" * 100_000


def test_text_becomes_one_short_line() -> None:
    assert sanitized("usual: 東京 é") == "usual: 東京 é"
    assert sanitized("a\nb\x1b[2J\ud800\u202e") == r"a\nb\x1b[2J\ud800\u202e"
    long = sanitized("begin" + "x" * 10**6 + "end")
    assert len(long) == 2000
    assert long.startswith("beginxxx")
    assert long.endswith("xxxend")


@pytest.mark.parametrize("what", ["architecture", "key", "tensor", "value"])
def test_names_in_files_stay_in_one_line(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / "llama2", folder)
    config = json.loads((folder / "config.json").read_text())
    if what == "architecture":
        config["architectures"] = [STRANGE]
    elif what == "value":
        config["hidden_act"] = STRANGE
    elif what == "key":
        (folder / "spec.toml").write_text(
            f"family = 'llama'\nweights = '.'\n{json.dumps(STRANGE)} = 1"
        )
    else:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {STRANGE: np.zeros(3)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(USER_ERRORS) as caught:
        LLM(folder)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) <= 2000
