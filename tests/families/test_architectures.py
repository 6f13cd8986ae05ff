"""Architectures of transformers 5.24 with tiny checkpoints, whose weights are drawn by name.

`architectures.npz` has, under each name, a JSON text (config.json as transformers writes it, the
shapes of the tensors, the kind of the values, the keys that the class gives the same value by
default) and every third row of the values that transformers gave in float32: logits, hidden states,
or scores of classes; of decoders, greedy tokens as well. Architectures that transformers does not
have were computed by an equal one, with renamed tensors. `python -m
tests.families.test_architectures NAME FOLDER` writes a checkpoint.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM
from jinfer.modelspec.spec_files import families, read_toml
from tests.families.drawn_weights import drawn
from tests.families.test_transformers_logits import TEXT, greedy_tokens

FILE = Path(__file__).with_name("architectures.npz")
ANSWER = [2, 7, 11, 20]  # what the decoder of an encoder-decoder is given
FAMILIES = (
    *("axk1", "bailing_hybrid", "bailing_moe", "bailing_moe_v2", "bart_decoder", "bert_generation"),
    *(
        "big_bird",
        "bigbird_pegasus",
        "biogpt",
        "blenderbot",
        "blenderbot_small",
        "ctrl",
        "cwm",
        "deberta",
    ),
    *(
        "codeshell",
        "data2vec_text",
        "deci",
        "diffllama",
        "emu3",
        "ernie",
        "esm",
        "esmc",
        "flex_olmo",
        "fsmt",
    ),
    *("gemma4_unified", "gpt_neox_japanese", "granite_moe_shared", "granite_moe_swa", "hrm_text"),
    *("hunyuan_moe", "hy_v3", "ibert", "jais2", "laguna", "layoutlm", "led", "longcat_flash"),
    *("longformer", "longt5", "luke", "megatron_bert", "mellum", "ministral", "mvp"),
    *(
        "openai_gpt",
        "openelm",
        "pangu_embedded",
        "plbart",
        "qwen",
        "rembert",
        "roberta_prelayernorm",
        "sarvam_mla",
        "telechat2",
        "ultrabert",
    ),
    *("xlm", "xlm_roberta_xl"),
)
ROTARY = ("rope_theta", "partial_rotary_factor")
NEWER = {"full_attention", "sliding_attention", "llama_4_scaling_beta"}  # not in older files


@cache
def stored() -> dict[str, np.ndarray]:
    with np.load(FILE) as arrays:
        return dict(arrays)


def made(name: str) -> dict[str, Any]:
    """A checkpoint's config, shapes of tensors, kind of values and default keys."""
    text: dict[str, Any] = json.loads(bytes(stored()[f"{name}.made"]))
    return text


NAMES = [key.removesuffix(".made") for key in stored() if key.endswith(".made")]


def published(model: dict[str, Any]) -> dict[str, Any]:
    """The config.json as files of the hub have it: without defaults, with older rotary keys."""
    config = {k: v for k, v in model["config"].items() if k not in model["defaults"]}
    rotary = config.get("rope_parameters")
    if isinstance(rotary, dict) and not NEWER & rotary.keys():
        del config["rope_parameters"]
        config |= {key: rotary[key] for key in ROTARY if key in rotary}
        if rotary.get("rope_type", "default") != "default":
            config["rope_scaling"] = {k: v for k, v in rotary.items() if k not in ROTARY}
    return config


def write(name: str, folder: Path, form: str = "whole") -> None:
    """Writes a checkpoint."""
    model = made(name)
    config = model["config"] if form == "whole" else published(model)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = model["shapes"].items()
    save_file(
        {key: drawn(key, tuple(shape)) for key, shape in shapes}, folder / "model.safetensors"
    )


def test_families_with_a_checkpoint_here() -> None:
    """The families that no other test has values for."""
    named = {made(name)["config"]["architectures"][0] for name in NAMES}
    for family in FAMILIES:
        architectures = read_toml(families()[family])["match"]["architectures"]
        assert named & set(architectures), family


@pytest.mark.parametrize("form", ["whole", "published"])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_transformers(name: str, form: str, tmp_path: Path) -> None:
    write(name, tmp_path, form)
    llm, kind = LLM(tmp_path, dtype="float32"), made(name)["kind"]
    if kind == "seq2seq":
        (got,) = llm.logits([ANSWER], encoder_ids=[TEXT])
    elif kind == "scores":
        got = llm.classify([TEXT]).scores
    else:
        (got,) = llm.hidden([TEXT]) if kind == "hidden" else llm.logits([TEXT])
    wanted = stored()[f"{name}.values"]
    np.testing.assert_allclose(np.asarray(got)[::3], wanted, rtol=0, atol=2e-4)
    greedy = stored().get(f"{name}.greedy")
    if greedy is not None and form == "whole" and kind == "causal":
        assert greedy_tokens(llm, len(greedy)) == greedy.tolist()


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
