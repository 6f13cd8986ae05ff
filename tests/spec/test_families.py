"""The families that come with jinfer, resolved for the checkpoints of the golden files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jinfer.spec.blocks import Attention, Head, Rope, Scaling
from jinfer.spec.files import families, find_family
from jinfer.spec.model import ModelSpec
from jinfer.spec.resolve import Facts

from .cases import (
    GOLDENS,
    LLAMA2C,
    MADE_UP,
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


def attention(spec: ModelSpec, layer: int = 0) -> Attention:
    assert spec.decoder is not None
    block = dict(spec.decoder.layers[layer].modules)["attn"]
    assert isinstance(block, Attention)
    return block


def rope(spec: ModelSpec) -> Rope:
    position = attention(spec).position
    assert isinstance(position, Rope)
    return position


def spec_head(spec: ModelSpec) -> Head:
    head = dict(spec.shared)["logits"]
    assert isinstance(head, Head)
    return head


def unplaced(spec: ModelSpec) -> list[str]:
    """Parameters that the specification has no tensor name for."""
    return [name for name in parameters(spec) if spec.tensors.place(name) is None]


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
    assert (spec.dims["hidden"], spec.dims["layers"]) == (64, 2)
    assert unplaced(spec) == []


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


def test_a_gguf_head_is_tied_where_it_has_no_tensor() -> None:
    known = gguf_like("llama")
    assert not spec_head(resolved_family("llama", known)).tied
    assert spec_head(resolved_family("llama", replace(known, has=lambda pattern: False))).tied


def test_llama2c() -> None:
    known = facts(LLAMA2C)
    known = Facts("llama2c", known.lookup, known.has, "the header")
    assert find_family(known, [], Path("model.bin")).stem == "llama"
    spec = resolved_family("llama", known)
    assert rope(spec).pairs == "adjacent"
    assert spec_head(spec).tied
    assert spec.dims["kv_heads"] == 2
    place = spec.tensors.place("decoder.1.ffn.gate.weight")
    assert place is not None
    assert place.names == ("layers.1.feed_forward.w1.weight",)


def test_rotary_scaling_is_read_from_either_config() -> None:
    assert rope(resolved_golden("llama2")).scaling is None
    linear = rope(resolved_golden("llama_rope_linear")).scaling
    assert (linear and linear.rope_type, linear and linear.factor) == ("linear", 4.0)
    yarn = rope(resolved_golden("qwen25_yarn", "config.v5.json")).scaling
    assert yarn == Scaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)


def test_rotary_scaling_is_read_from_gguf_metadata() -> None:
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    linear = rope(resolved_family("llama", gguf_like("llama", **scaled))).scaling
    assert linear == Scaling(rope_type="linear", factor=4.0, original_max_position_embeddings=256)
    assert rope(resolved_family("llama", gguf_like("llama"))).scaling is None


def test_qwen_windows_begin_at_a_layer() -> None:
    config = json.loads((GOLDENS / "qwen15/config.json").read_text())
    config |= {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}
    spec = resolved_family("qwen2", facts(config))
    assert [attention(spec, i).window for i in range(3)] == [None, 16, 16]


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
