"""Rules of drafts, each with a golden checkpoint under other names, shapes or keys."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer.loader.open_model import open_files
from tools.draft_spec import draft
from tools.measure_drafts import measure

GOLDENS = Path(__file__).parents[1] / "goldens"

type Tensors = dict[str, np.ndarray]


def renamed(*lines: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    """Tensors with each of these patterns in their names replaced."""

    def change(tensors: Tensors) -> Tensors:
        found = {}
        for name, array in tensors.items():
            for pattern, text in lines:
                name = re.sub(pattern, text, name)
            found[name] = array
        return found

    return change


def fused_by_pytorch(tensors: Tensors) -> Tensors:
    found = {name: a for name, a in tensors.items() if ".attention.self." not in name}
    for leaf in ("weight", "bias"):
        for i in range(sum(name.endswith("attention.self.query.bias") for name in tensors)):
            at = f"bert.encoder.layer.{i}.attention"
            parts = [tensors[f"{at}.self.{word}.{leaf}"] for word in ("query", "key", "value")]
            found[f"{at}.in_proj_{leaf}"] = np.concatenate(parts)
    return found


def one_for_all_layers(tensors: Tensors) -> Tensors:
    found = {name: array for name, array in tensors.items() if not re.search(r"layer\.[1-9]", name)}
    return renamed((r"encoder\.layer\.0\.", "encoder.groups.0.inner.0."))(found)


def with_scalars(tensors: Tensors) -> Tensors:
    layers = {int(i) for name in tensors for i in re.findall(r"layers\.(\d+)\.", name)}
    one = np.ones(1, np.float32)
    return tensors | {f"model.layers.{i}.layer_scalar": one for i in layers}


def with_more_rows(tensors: Tensors) -> Tensors:
    name = "model.embed_tokens.weight"
    table = tensors[name]
    head = {"lm_head.weight": tensors.get("lm_head.weight", table)}
    return tensors | head | {name: np.concatenate([table, table[:1]])}


# What is changed -> the golden, its tensors, its config.json, and what the draft has to say.
CASES: dict[str, tuple[str, Callable[[Tensors], Tensors], Mapping[str, Any], tuple[str, ...]]] = {
    "a feed-forward by its shapes": (
        "qwen3",
        renamed(
            (r"mlp\.gate_proj", "block.a_gate"),
            (r"mlp\.up_proj", "block.b"),
            ("mlp.down_proj", "block.c"),
        ),
        {},
        ("layers.{i}.block.a_gate", "read as a feed-forward by their shapes"),
    ),
    "a table of embeddings by its shape": (
        "qwen3",
        renamed((r"model\.embed_tokens", "model.w")),
        {},
        ('"embed" = "model.w"',),
    ),
    "lists of one sort of module each": (
        "qwen3",
        renamed(
            (r"layers\.(\d+)\.self_attn", r"attentions.\1"),
            (r"layers\.(\d+)\.mlp", r"ffns.\1"),
            (r"layers\.(\d+)\.input_layernorm", r"layer_norm1.\1"),
            (r"layers\.(\d+)\.post_attention_layernorm", r"layer_norm2.\1"),
        ),
        {},
        ('"decoder.{i}.attn.q" = "model.attentions.{i}.q_proj"', "model.layer_norm2.{i}"),
    ),
    "a bare norm beside attention's own": (
        "qwen3",
        renamed(
            (r"\.input_layernorm", ".self_attn.self_attn_norm"),
            (r"\.post_attention_layernorm", ".LayerNorm"),
        ),
        {},
        ('"decoder.{i}.ffn_norm" = "model.layers.{i}.LayerNorm"',),
    ),
    "wrapped projections": (
        "qwen3",
        renamed((r"(self_attn\.[qkvo]_proj)", r"\1.linear")),
        {},
        ("layers.{i}.self_attn.o_proj.linear",),
    ),
    "a scalar of each layer": ("qwen3", with_scalars, {}, ("x = layer_scale(x)",)),
    "more rows than the head gives": ("qwen3", with_more_rows, {}, ("rows than the head",)),
    "layer norms without a bias": (
        "qwen3",
        dict,
        {"norm_type": "low_precision_layernorm"},
        ('attn_norm = { kind = "layer", bias = false, eps = "eps" }',),
    ),
    "projections fused as PyTorch does": (
        "bert",
        fused_by_pytorch,
        {},
        ('"encoder.{i}.attn.{q,k,v}.bias" = "bert.encoder.layer.{i}.attention.in_proj_bias"',),
    ),
    "one layer for all": (
        "bert",
        one_for_all_layers,
        {},
        ('"encoder.{i}.attn.q" = "bert.encoder.groups.0.inner.0.attention.self.query"',),
    ),
    "windows by a word for each layer": (
        "llama2",
        dict,
        {"attention_layers": ["global", "local"] * 4, "window_size": 16},
        ("($window_size if $attention_layers[i] == 'local' else none)",),
    ),
    "keys of attention where there is none": (
        "mamba",
        dict,
        {
            "attention_multiplier": 0.3,
            "partial_rotary_factor": 0.5,
            "layer_types": ["mamba"] * 3,
        },
        (),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rule_of_drafts(case: str, tmp_path: Path) -> None:
    golden, change, config, said = CASES[case]
    text = drafted(golden, change, config, tmp_path)
    assert [part for part in said if part not in text] == [], text
    result = measure(tmp_path)
    assert result.resolves, result.problem


def test_kinds_that_two_keys_tell_apart_together(tmp_path: Path) -> None:
    mixers = ["linear_attention"] * 3 + ["full_attention"]
    keys = {"layer_types": mixers, "mlp_layer_types": ["dense"] + ["sparse"] * 3}
    text = drafted("kimi_linear", dict, keys, tmp_path)
    both = "if $layer_types[i] == 'linear_attention' and $mlp_layer_types[i] == 'dense'"
    assert both in text, text
    result = measure(tmp_path)
    assert result.resolves, result.problem


def drafted(
    golden: str,
    change: Callable[[Tensors], Tensors],
    config: Mapping[str, Any],
    folder: Path,
) -> str:
    """The draft of a golden checkpoint with other tensors and further keys."""
    place = GOLDENS / golden
    tensors: Tensors = {}
    for file in place.glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(change(tensors), folder / "model.safetensors")
    own = json.loads((place / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, **config}))
    return draft(open_files(folder, {}))
