"""Families whose logits are those of transformers 5.24, for weights drawn by name.

`transformers_logits.npz` has, under each name, config.json, the shapes of the tensors and the
logits that transformers' modelling code gave for them in float32; of some, greedy tokens.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM, SamplingParams
from tests.families.drawn_weights import drawn

FILE = Path(__file__).with_name("transformers_logits.npz")
FAMILIES = (
    *("bamba", "falcon_mamba", "glm4_moe_lite", "jamba", "lfm2_moe", "olmo_hybrid"),
    *("qwen3_5_moe", "zamba2", "zamba2_adapters", "beam", "flint", "hy_v4", "lara_mini", "lfm3"),
    *("aria", "mistral4", "mllama", "persimmon"),
)
TEXT = [5, 17, 3, 64, 90, 17, 8, 33, 2, 71, 44, 29]


def greedy_tokens(llm: LLM, count: int) -> list[int]:
    """The likeliest tokens after `TEXT`, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return list(llm.generate([TEXT], params)[0].token_ids)


# Other forms of a family's config.json: the keys of the stored one that they leave out, as
# transformers computes them from others, or has the same by default.
FORMS = {
    "zamba2": ("hybrid_layer_ids",),  # computed from `layers_block_type`
    "aria": ("hidden_act", "mlp_bias", "attention_bias", "rms_norm_eps", "rope_parameters"),
    "hy_v4": (
        *("mlp_layer_types", "indexer_types", "hc_eps", "hc_magnitude", "rms_norm_eps"),
        "routed_scaling_factor",
    ),
    "mistral4": ("hidden_act", "norm_topk_prob", "rms_norm_eps", "routed_scaling_factor"),
    "mllama": ("hidden_act", "rms_norm_eps", "rope_parameters"),
    "persimmon": ("hidden_act", "layer_norm_eps", "qk_layernorm", "rope_parameters"),
}


@pytest.mark.parametrize(
    ("family", "without"), [*((name, ()) for name in FAMILIES), *FORMS.items()]
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, family: str, without: tuple[str, ...]
) -> None:
    with np.load(FILE) as stored:
        made = json.loads(str(stored[f"{family}.made"]))
        wanted = stored[f"{family}.logits"]
        greedy = stored.get(f"{family}.greedy")
    config = {key: value for key, value in made["config"].items() if key not in without}
    assert len(config) == len(made["config"]) - len(without)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: drawn(name, tuple(shape)) for name, shape in made["shapes"].items()}
    save_file(tensors, tmp_path / "model.safetensors")
    llm = LLM(tmp_path, dtype="float32")
    assert np.max(np.abs(np.asarray(llm.logits(TEXT)) - wanted)) < 2e-4
    if greedy is not None and not without:
        assert greedy_tokens(llm, len(greedy)) == greedy.tolist()
