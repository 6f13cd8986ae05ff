"""PEFT's patterns of module names, as its `get_pattern_key` matches them."""

import pytest

from jinfer.loader.adapters.peft_patterns import first_matches
from jinfer.sandbox.sandboxed_process import SandboxError

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.12.mlp.up_proj", "lm_head"]


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["q_proj"], [0, None, None]),
        (["proj", "up_proj", "lm_head"], [None, 1, 2]),  # names are whole between dots
        (["self_attn.q_proj", "q_proj"], [0, None, None]),
        ([r"layers\.\d\..*", "layers.*"], [0, 1, None]),
        ([r"^model\.layers\.0\.self_attn\.q_proj$", ".*"], [0, 1, 1]),
        (["^layers.*"], [None, None, None]),
        ([r"model\.layers\.(0|1)\..*_proj"], [0, None, None]),
    ],
)
def test_the_first_match_counts(patterns: list[str], found: list[int | None]) -> None:
    assert first_matches(patterns, NAMES) == found


@pytest.mark.parametrize("pattern", ["(q", r"(\w+\.?)+;", "*"])
def test_invalid_or_slow_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(SandboxError):
        first_matches([pattern], [name * 3 for name in NAMES])
