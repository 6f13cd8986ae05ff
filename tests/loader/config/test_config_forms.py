"""Keys of config.json that change the computation are followed, or the model is refused.

The checkpoints `probe_*` have keys that nothing read once, and a reference that heeds them.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM
from jinfer.loader.config.unused_config import consequences, unread
from jinfer.loader.open_model import open_model
from jinfer.modelspec.config_lookup import lookup_in
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import families, format_table, read_toml
from tests.loader.resolving import resolved
from tests.modelspec.cases import MADE_UP
from tests.modelspec.helpers import facts, resolved_family

GOLDENS = Path(__file__).parents[2] / "goldens"
PROBES = sorted(path.name for path in GOLDENS.glob("probe_*"))
SLIDING = ["sliding_attention"] * 3


def copy(folder: Path, golden: str, **keys: Any) -> Path:
    """A golden with other keys in its config.json; None takes a key out."""
    folder.mkdir()
    for file in (GOLDENS / golden).iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((GOLDENS / golden / "config.json").read_text()) | keys
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PROBES)
def test_logits(name: str) -> None:
    with np.load(GOLDENS / name / "expected.npz") as values:
        mask = values["attention_mask"].astype(bool)
        rows = [values["input_ids"][i][mask[i]].tolist() for i in range(2)]
        wanted = [*(values["logits"][i][: len(row)] for i, row in enumerate(rows))]
        long, long_logits = values["long_input_ids"][0].tolist(), values["long_logits"][0]
        types = None
        if "token_type_ids" in values:
            types = [values["token_type_ids"][i][mask[i]].tolist() for i in range(2)]
            types.append(values["long_token_type_ids"][0].tolist())
    with LLM(GOLDENS / name, dtype="float32") as llm:
        *got, last = llm.logits([*rows, long], token_type_ids=types)
    some = slice(3, None, 4) if len(long_logits) < len(long) else slice(None)
    for ours, reference in [*zip(got, wanted, strict=True), (last[some], long_logits)]:
        np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", PROBES)
def test_nothing_is_said_of_what_is_followed(name: str, tmp_path: Path) -> None:
    newer = json.loads((GOLDENS / name / "config.v5.json").read_text())
    for source in (GOLDENS / name, copy(tmp_path / "v5", name, **newer)):
        found = resolved(source, {})
        assert consequences(found.unread, found.config, found.spec) == {}


NESTED = {"sliding_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("eurobert", {"is_decoder": True}, "is_decoder: True is not followed"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ("falcon7b", {"alibi": True}, "alibi"),
    ("llama2", {"rope_parameters": NESTED, "rope_theta": None},
     "rope_parameters.sliding_attention.rope_type"),
    ("llama2", {"layer_types": SLIDING, "sliding_window": 8}, "layer_types"),
    ("llama2", {"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types"),
    ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama2", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "rope_parameters.partial_rotary_factor"),
    ("llama2", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ("phi3_mini_4k", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling.type"),
    ("phi2", {"qk_layernorm": True}, "qk_layernorm"),
    ("gpt2", {"add_cross_attention": True, "normalize_before": False}, "normalize_before"),
    ("bart", {"normalize_before": True}, "normalize_before"),
    ("m2m100", {"normalize_before": False}, "normalize_before"),
    ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("mixtral", {"scoring_func": "sigmoid"}, "scoring_func"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gpt_neox", {"rope_scaling": {"type": "dynamic"}}, "scaling.factor: is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("golden", "keys", "named"), REFUSED)
def test_what_is_not_followed_is_refused(
    golden: str, keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = copy(tmp_path / "model", golden, **keys)
    with pytest.raises(SpecError) as caught:
        open_model(folder, {})
    text = str(caught.value)
    assert text.startswith(f"{folder}: ")
    assert named in text
    assert "\n" not in text


# Keys of published files that change nothing, or that the family follows without reading them.
PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    ("cohere2", {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "layer_switch": 4}),
    ("deberta_v2", {"relative_attention": True, "pos_att_type": "p2c|c2p",
                    "norm_rel_ebd": "layer_norm", "max_relative_positions": -1}),
    ("deberta_v2", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
    ("eagle3", {"layer_types": ["full_attention"] * 32}),
    ("gemma_embedding", {"layer_types": ["sliding_attention", "full_attention"] * 2,
                         "hidden_act": None}),
    ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}),
    ("gptj", {"scale_attn_weights": True, "rotary": True}),
    ("marian", {"normalize_before": False, "share_encoder_decoder_embeddings": True}),
    ("mbart", {"normalize_before": True, "is_decoder": False}),
    ("modernbert", {"position_embedding_type": "absolute", "layer_norm_eps": 1e-5}),
    ("mpt", {"norm_type": "low_precision_layernorm", "learned_pos_emb": True}),
    ("nomic_bert", {"activation_function": "swiglu", "prenorm": False, "causal": False,
                    "use_rms_norm": False, "parallel_block": False, "hidden_act": None}),
    ("pegasus", {"normalize_before": True}),
    ("phi3_5_moe", {"rope_scaling": {
        "type": "longrope", "short_mscale": 1.24, "long_mscale": 1.24, "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8, "original_max_position_embeddings": 128}}),
    ("stablelm", {"rotary_scaling_factor": 1.0, "qk_layernorm": False}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "keys"), PUBLISHED)
def test_what_published_files_say_is_not_refused(family: str, keys: dict[str, Any]) -> None:
    assert not_followed(family, keys) == set()


def not_followed(family: str, keys: dict[str, Any]) -> set[str]:
    """The keys that a made-up checkpoint of a family would be refused for."""
    config = {k: value for k, value in (MADE_UP[family] | keys).items() if value is not None}
    asked = set[str]()
    spec = resolved_family(family, replace(facts(), lookup=lookup_in(config, asked)))
    return set(consequences(unread(config, asked), config, spec))


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("albert", {"num_hidden_groups": 2, "inner_group_num": 3}),
        ("deberta_v2", {"pos_att_type": ["p2c"], "norm_rel_ebd": "none"}),
        ("exaone", {"layer_types": ["sliding_attention"], "sliding_window": "x"}),
        ("gptj", {"scale_attn_weights": False}),
        ("gpt_neo", {"attention_types": [[["local"], 2]]}),
        ("marian", {"normalize_before": True, "share_encoder_decoder_embeddings": False}),
        ("nomic_bert", {"prenorm": True, "use_rms_norm": True, "rotary_scaling_factor": 2.0}),
        ("olmoe", {"n_group": 2, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5}),
        ("qwen2_moe", {"first_k_dense_replace": 2, "moe_layer_freq": ["x"]}),
        ("smollm3", {"rope_interleaved": True}),
    ],
)
def test_what_a_family_cannot_follow_is_named(family: str, keys: dict[str, Any]) -> None:
    assert not_followed(family, keys) == keys.keys()


@pytest.mark.parametrize("keys", [{"alibi": False}, {"rope": True}, {"prefix_lm": True}])
def test_attention_of_mpt(keys: dict[str, Any]) -> None:
    inner = MADE_UP["mpt"]["attn_config"] | keys
    assert not_followed("mpt", {"attn_config": inner}) == {f"attn_config.{key}" for key in keys}


def test_warning_is_enough_where_the_user_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy(tmp_path / "model", "llama2", sliding_window=32, logit_scale=0.25)
    with pytest.raises(
        SpecError, match=r"sliding_window: 32 is not followed: .*; nor are logit_scale"
    ):
        open_model(folder, {})
    with caplog.at_level(logging.WARNING, "jinfer"):
        open_model(folder, {"trust_config": "warn"})
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(" ")[1] for line in said] == ["sliding_window", "logit_scale"]
    with pytest.raises(SpecError, match=r"trust_config: 'yes' is not one of the allowed words"):
        open_model(folder, {"trust_config": "yes"})


@pytest.mark.parametrize(
    ("golden", "overrides"),
    [
        ("mistral", {"decoder.modules.attn.window": "none"}),
        ("llama2", {"dims.eps": 0.5, "dims.rope_theta": 3e6}),
        ("llama31", {"decoder.modules.attn.position.scaling": "none"}),
    ],
)
def test_what_the_user_replaces_is_followed(golden: str, overrides: dict[str, Any]) -> None:
    open_model(GOLDENS / golden, overrides)


def test_what_a_specification_of_ones_own_does_is_followed(tmp_path: Path) -> None:
    """By numbers in place of keys: it need not read them."""
    keys = {"logit_scale": 0.25, "embedding_multiplier": 12.0, "final_logit_softcapping": 30.0,
            "use_qk_norm": True, "scoring_func": "softmax"}  # fmt: skip
    copy(tmp_path / "weights", "llama2", **keys)
    (tmp_path / "spec.toml").write_text("""
family = "llama"
weights = "weights"
[decoder]
stem = "embed(tokens) * 12"
head = "30 * tanh(logits(norm(x)) / 4 / 30)"
[decoder.modules]
tanh = { kind = "activation", function = "tanh" }
attn = { qk_norm = { kind = "rms" } }
""")
    found = resolved(tmp_path / "spec.toml", {})
    assert keys.keys() <= found.unread.keys()
    assert consequences(found.unread, found.config, found.spec) == {}


def test_what_a_specification_replaces_in_its_family_is_followed(tmp_path: Path) -> None:
    weights = copy(tmp_path / "weights", "mistral")
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'family = "mistral"\nweights = "weights"\n[decoder.modules.attn]\nwindow = "none"\n'
    )
    open_model(spec, {})
    spec.write_text('family = "llama"\nweights = "weights"\n')
    with pytest.raises(SpecError, match=f"{weights.parent}/spec.toml: sliding_window: 16 is not"):
        open_model(spec, {})


@pytest.mark.parametrize("golden", ["bert", "gpt2", "llama2", "m2m100", "qwen3_moe", "gemma2"])
def test_a_model_type_stands_for_its_architecture(golden: str, tmp_path: Path) -> None:
    folder = copy(tmp_path / "model", golden, architectures=None)
    assert resolved(folder, {}).spec.stacks == resolved(GOLDENS / golden, {}).spec.stacks


def test_a_model_type_that_is_not_known_is_named(tmp_path: Path) -> None:
    folder = copy(tmp_path / "model", "llama2", architectures=None, model_type="flurb")
    with pytest.raises(SpecError, match="no family is known for flurb"):
        resolved(folder, {})


def test_every_model_type_has_a_family() -> None:
    served = {
        name
        for path in families().values()
        for name in read_toml(path).get("match", {}).get("architectures", [])
    }
    served |= format_table("multimodal")["architectures"].keys()
    assert set(format_table("architectures").values()) <= served
