"""The families that come with jinfer, resolved for the checkpoints of the golden files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jinfer.modelspec.attention_blocks import AttentionSpec
from jinfer.modelspec.blocks import HeadSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.position_blocks import RopeScalingSpec, RopeSpec
from jinfer.modelspec.resolve_spec import CheckpointFacts
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import families, find_family

from .cases import (
    GOLDENS,
    LLAMA,
    LLAMA2C,
    MADE_UP,
    MOE,
    Case,
    architectures,
    gguf_cases,
    gguf_like,
    golden,
    golden_folders,
    made_up,
    parameters,
)
from .helpers import facts, resolved_family

TESTED_ELSEWHERE = Path(__file__).parents[1] / "families"


def resolved_case(case: Case) -> ModelSpec:
    return resolved_family(case.family, case.facts)


def resolved_golden(folder: str, file: str = "config.json") -> ModelSpec:
    return resolved_case(golden(folder, file))


def attention(spec: ModelSpec, layer: int = 0) -> AttentionSpec:
    assert spec.decoder is not None
    block = dict(spec.decoder.layers[layer].modules)["attn"]
    assert isinstance(block, AttentionSpec)
    return block


def rope(spec: ModelSpec) -> RopeSpec:
    position = attention(spec).position
    assert isinstance(position, RopeSpec)
    return position


def without_layer_types(folder: str, **changes: Any) -> ModelSpec:
    config = json.loads((GOLDENS / folder / "config.json").read_text())
    del config["layer_types"]
    config.pop("sliding_window_pattern", None)
    return resolved_family(golden(folder).family, facts(config | changes))


def test_layer_types_of_exaone4_have_defaults() -> None:
    spec = without_layer_types("exaone4", num_hidden_layers=5, sliding_window=16)
    assert [attention(spec, i).window for i in range(5)] == [16, 16, 16, None, 16]
    assert [attention(spec, i).position is not None for i in range(5)] == [True] * 3 + [False, True]
    spec = without_layer_types("exaone4", sliding_window=16, sliding_window_pattern=2)
    assert [attention(spec, i).window for i in range(2)] == [16, None]


def test_layer_types_of_lfm2_have_defaults() -> None:
    def kinds(spec: ModelSpec) -> list[bool]:
        assert spec.decoder is not None
        return ["attn" in dict(layer.modules) for layer in spec.decoder.layers]

    assert kinds(without_layer_types("lfm2", full_attn_idxs=[2])) == [False, False, True, False]
    assert kinds(without_layer_types("lfm2")) == [True] * 4


@pytest.mark.parametrize("layers", [7, 8, 14])
def test_layer_types_of_gemma4_have_defaults(layers: int) -> None:
    """Every sixth layer and the last one see the whole text; the last two take earlier keys."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    types = [kinds[i % 6] for i in range(layers - 1)] + ["full_attention"]
    sizes = {"num_hidden_layers": layers, "num_kv_shared_layers": 1 + (layers == 8)}
    config = json.loads((GOLDENS / "gemma4" / "config.json").read_text()) | sizes
    given = resolved_family("gemma4", facts(config | {"layer_types": types}))
    assert without_layer_types("gemma4", **sizes) == given


def spec_head(spec: ModelSpec) -> HeadSpec:
    head = dict(spec.shared)["logits"]
    assert isinstance(head, HeadSpec)
    return head


def unplaced(spec: ModelSpec) -> list[str]:
    """Parameters that the specification has no tensor name for."""
    return [name for name in parameters(spec) if spec.tensors.source_of(name) is None]


@pytest.mark.parametrize("folder", golden_folders())
def test_every_parameter_of_a_golden_has_a_tensor(folder: str) -> None:
    assert unplaced(resolved_golden(folder)) == []


@pytest.mark.parametrize("family", MADE_UP)
def test_every_parameter_of_a_made_up_checkpoint_has_a_tensor(family: str) -> None:
    case = made_up(family)
    assert find_family(case.facts, case.architectures, Path(family)).stem == family
    assert unplaced(resolved_case(case)) == []


@pytest.mark.parametrize("case", list(gguf_cases()), ids=lambda case: case.name)
def test_every_family_with_a_gguf_name_resolves(case: Case) -> None:
    assert find_family(case.facts, case.architectures, Path("file.gguf")).stem == case.family
    spec = resolved_case(case)
    assert spec.dims["hidden"] == case.facts.lookup("embedding_length")
    assert spec.dims.get("layers") in (None, case.facts.lookup("block_count"))
    assert unplaced(spec) == []


@pytest.mark.parametrize("case", list(gguf_cases()), ids=lambda case: case.name)
def test_metadata_precede_defaults(case: Case) -> None:
    """Also where a family has a default of its own for config.json."""

    def lookup(key: str) -> Any:
        return {
            "attention.layer_norm_rms_epsilon": 3e-4,
            "attention.layer_norm_epsilon": 3e-4,
            "rope.freq_base": 77777.0,
        }.get(key) or case.facts.lookup(key)

    dims = resolved_case(replace(case, facts=replace(case.facts, lookup=lookup))).dims
    assert dims.get("eps", 3e-4) == 3e-4
    assert dims.get("rope_theta", 77777.0) == 77777.0


def test_every_family_is_tested() -> None:
    """Its values are compared: with a golden's, or in the tests of families, which name it."""
    files = [*TESTED_ELSEWHERE.glob("test_*.py"), *TESTED_ELSEWHERE.glob("../speculate/heads.py")]
    elsewhere = "".join(path.read_text() for path in files)
    here = {golden(folder).family for folder in golden_folders()}
    assert [
        family
        for family in sorted(families().keys() - here)
        if not any(f'"{name}"' in elsewhere for name in (*architectures(family), family))
    ] == []


@pytest.mark.parametrize("folder", golden_folders("config.v5.json"))
def test_newer_config_files_say_the_same(folder: str) -> None:
    assert resolved_golden(folder) == resolved_golden(folder, "config.v5.json")


@pytest.mark.parametrize("family", [n for n, keys in MADE_UP.items() if "rope_theta" in keys])
def test_rotary_keys_may_stand_in_a_table(family: str) -> None:
    """As transformers 5 writes them."""
    keys = ("rope_theta", "partial_rotary_factor")
    config = MADE_UP[family] | {"rope_theta": 5000.0}
    table = {"rope_type": "default", **{key: config[key] for key in keys if key in config}}
    newer = {key: value for key, value in config.items() if key not in keys}
    wanted = resolved_family(family, facts(config))
    assert resolved_family(family, facts(newer | {"rope_parameters": table})) == wanted


def test_a_gguf_head_is_tied_where_it_has_no_tensor() -> None:
    known = gguf_like("llama")
    assert not spec_head(resolved_family("llama", known)).tied
    assert spec_head(resolved_family("llama", replace(known, has=lambda pattern: False))).tied


def test_llama2c() -> None:
    known = facts(LLAMA2C)
    known = CheckpointFacts("llama2c", known.lookup, known.has, "the header")
    assert find_family(known, [], Path("model.bin")).stem == "llama"
    spec = resolved_family("llama", known)
    assert rope(spec).pairs == "adjacent"
    assert spec_head(spec).tied
    assert spec.dims["kv_heads"] == 2
    place = spec.tensors.source_of("decoder.1.ffn.gate.weight")
    assert place is not None
    assert place.names == ("layers.1.feed_forward.w1.weight",)


def test_rotary_scaling_is_read_from_either_config() -> None:
    assert rope(resolved_golden("llama2")).scaling is None
    linear = rope(resolved_golden("llama_rope_linear")).scaling
    assert (linear and linear.rope_type, linear and linear.factor) == ("linear", 4.0)
    yarn = rope(resolved_golden("qwen25_yarn", "config.v5.json")).scaling
    assert yarn == RopeScalingSpec(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=32
    )


def test_rotary_scaling_is_read_from_gguf_metadata() -> None:
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    linear = rope(resolved_family("llama", gguf_like("llama", **scaled))).scaling
    assert linear == RopeScalingSpec(
        rope_type="linear", factor=4.0, original_max_position_embeddings=256
    )
    assert rope(resolved_family("llama", gguf_like("llama"))).scaling is None


def test_qwen_windows_begin_at_a_layer() -> None:
    config = json.loads((GOLDENS / "qwen15/config.json").read_text())
    config |= {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}
    spec = resolved_family("qwen2", facts(config))
    assert [attention(spec, i).window for i in range(3)] == [None, 16, 16]


TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SWITCH = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    ("family", "keys", "windows"),
    [
        ("qwen2", SWITCH | {"layer_types": TYPES}, [16, None, 16, None]),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 0},
         [None] * 4),
        ("qwen3", SWITCH | {"max_window_layers": 3}, [None, None, None, 16]),
        ("qwen3", SWITCH | {"max_window_layers": 3, "layer_types": TYPES}, [16, None, 16, None]),
        ("qwen3_moe", SWITCH, [16] * 4),
        ("qwen3_moe", {"sliding_window": 16, "use_sliding_window": False}, [None] * 4),
        ("qwen2_moe", SWITCH | {"max_window_layers": 2}, [16, None, None, None]),
        ("qwen2_moe", SWITCH | {"layer_types": TYPES}, [16, None, 16, None]),
        ("smollm3", SWITCH | {"layer_types": TYPES}, [16, None, 16, None]),
        ("smollm3", {"sliding_window": 16, "layer_types": TYPES, "use_sliding_window": False},
         [None] * 4),
        ("smollm3", SWITCH | {"no_rope_layers": [1, 1, 1, 0]}, [None, None, None, 16]),
        ("gemma2", {"sliding_window": 16, "layer_types": TYPES[::-1]}, [None, 16, None, 16]),
        ("gemma3", {"sliding_window": 16, "layer_types": TYPES}, [16, None, 16, None]),
        ("gpt_oss", {"sliding_window": 16, "layer_types": TYPES[::-1]}, [None, 16, None, 16]),
        ("cohere2", {"sliding_window": 16, "layer_types": TYPES}, [16, None, 16, None]),
    ],
)  # fmt: skip
def test_layer_types_say_which_layers_have_a_window(
    family: str, keys: dict[str, Any], windows: list[int | None]
) -> None:
    config = LLAMA | MOE | {"query_pre_attn_scalar": 16} | keys
    spec = resolved_family(family, facts(config))
    assert [attention(spec, i).window for i in range(4)] == windows


def test_a_kind_of_layer_that_is_not_known_is_refused() -> None:
    config = LLAMA | {"layer_types": ["chunked_attention"] * 4}
    with pytest.raises(SpecError, match="layer 0 would be 'chunked_attention'"):
        resolved_family("qwen3", facts(config))


def test_soft_caps_of_gemma() -> None:
    capped = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    for family in ("gemma2", "gemma3"):
        config = LLAMA | {"sliding_window": 16, "query_pre_attn_scalar": 16}
        plain = resolved_family(family, facts(config | dict.fromkeys(capped, None)))
        spec = resolved_family(family, facts(config | capped))
        assert (attention(plain).softcap, attention(spec).softcap) == (None, 50.0)
        assert plain.decoder is not None
        assert spec.decoder is not None
        assert "tanh" not in plain.decoder.head.calls
        assert dict(spec.decoder.head.constants) == {"logits_cap": 30.0}


@pytest.mark.parametrize(
    ("keys", "activation"),
    [
        ({"hidden_act": "gelu"}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),
        ({"hidden_act": "relu"}, "relu"),
        ({"hidden_act": "gelu", "hidden_activation": "silu"}, "silu"),
    ],
)
def test_the_activation_of_gemma(keys: dict[str, Any], activation: str) -> None:
    config = {key: value for key, value in (LLAMA | keys).items() if value is not None}
    spec = resolved_family("gemma", facts(config))
    assert spec.decoder is not None
    assert dict(spec.decoder.layers[0].modules)["ffn"].activation == activation  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keys", "scale", "activation"),
    [
        ({}, 64**-0.5, "relu"),
        ({"tie_word_embeddings": False}, 1, "relu"),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, 1, "relu"),
        ({"feed_forward_proj": "gated-gelu"}, 64**-0.5, "gelu_tanh"),
        ({"feed_forward_proj": "gated-silu"}, 64**-0.5, "silu"),
        ({"feed_forward_proj": "silu"}, 64**-0.5, "silu"),
    ],
)
def test_what_t5_says_of_its_outputs_and_activation(
    keys: dict[str, Any], scale: float, activation: str
) -> None:
    sizes = {"vocab_size": 320, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2}
    spec = resolved_family("t5", facts(sizes | {"num_heads": 4} | keys))
    assert spec.decoder is not None
    assert dict(spec.decoder.head.constants)["head_scale"] == scale
    assert dict(spec.decoder.layers[0].modules)["ffn"].activation == activation  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["gemma_embedding", "gemma3", "modernbert"])
def test_kinds_of_layers_rotate_in_their_own_ways(family: str) -> None:
    table = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9e5},
        "sliding_attention": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 7e4},
    }
    types = ["full_attention", "sliding_attention"]
    config = MADE_UP[family] | {"layer_types": types * 2, "rope_parameters": table}
    spec = resolved_family(family, facts({k: v for k, v in config.items() if k != "rope_theta"}))
    for layer, (theta, kind, factor) in zip(
        spec.stacks[0].layers, [(9e5, "linear", 8), (7e4, "yarn", 2)], strict=False
    ):
        block = dict(layer.modules)["attn"]
        assert isinstance(block, AttentionSpec)
        position = block.position
        assert isinstance(position, RopeSpec)
        assert position.scaling is not None
        assert (position.theta, position.scaling.rope_type) == (theta, kind)
        assert position.scaling.factor == factor


@pytest.mark.parametrize("family", ["gpt2", "gpt_bigcode"])
def test_scores_of_gpt2_may_be_unscaled(family: str) -> None:
    sizes = {"vocab_size": 320, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}
    scales = [(True, False, [None, None]), (False, False, [1, 1]), (True, True, [0.25, 0.125]),
              (False, True, [1, 0.5])]  # fmt: skip
    for scaled, by_layer, wanted in scales:
        keys = {"scale_attn_weights": scaled, "scale_attn_by_inverse_layer_idx": by_layer}
        spec = resolved_family(family, facts(sizes | keys))
        assert [attention(spec, i).scale for i in range(2)] == wanted


def test_positions_of_falcon() -> None:
    config = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "multi_query": False,
              "num_attention_heads": 4, "parallel_attn": False,
              "new_decoder_architecture": False}  # fmt: skip
    for alibi, kind in ((True, "alibi"), (False, "rope")):
        position = attention(resolved_family("falcon", facts(config | {"alibi": alibi}))).position
        assert position is not None
        assert position.kind == kind


def test_mistral_window_may_be_null() -> None:
    assert attention(resolved_golden("mistral")).window == 16
    config = json.loads((GOLDENS / "mistral/config.json").read_text())
    spec = resolved_family("mistral", facts(config | {"sliding_window": None}))
    assert attention(spec).window is None


def test_a_spec_lies_over_its_family() -> None:
    known = golden("llama2").facts
    over = {"dims": {"context": 32}, "decoder": {"modules": {"attn": {"window": 4}}}}
    spec = resolved_family("llama", known, over | {"engine": {"slots": 1}})
    assert (spec.dims["context"], attention(spec).window, spec.engine.slots) == (32, 4, 1)
