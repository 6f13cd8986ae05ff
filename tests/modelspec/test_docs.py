"""docs/specs.md: every TOML block resolves, and every error is the printed one."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.resolve_spec import resolve
from jinfer.modelspec.spec_files import format_table, parse_override, with_families
from jinfer.modelspec.toml_tables import merge

from .cases import gguf_like
from .helpers import PATH, error_of, facts
from .test_families import attention, unplaced

PAGE = Path(__file__).parents[2] / "docs" / "specs.md"
TEXT = PAGE.read_text(encoding="utf-8")
CONFIG = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 112, "sliding_window": 32, "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


TOML = [tomllib.loads(block) for block in blocks("toml")]
EXAMPLE, *OTHERS, _ = TOML  # the last one: tests/test_worked_example.py


def tables_of(block: dict[str, Any]) -> list[dict[str, Any]]:
    """A block with its family, alone, or laid over the example, as the page says."""
    if "family" in block:
        return with_families(block, Path(PATH))
    return [block] if "match" in block and "dims" in block else [EXAMPLE, block]


def resolved_block(block: dict[str, Any], config: dict[str, Any]) -> ModelSpec:
    return resolve(tables_of(block), PATH, facts(config), {})


def test_the_page_has_its_examples() -> None:
    assert len(TOML) >= 12


@pytest.mark.parametrize("number", range(len(TOML) - 1))
def test_every_block_resolves(number: int) -> None:
    spec = resolved_block(TOML[number], CONFIG)
    assert {len(stack.layers) for stack in spec.stacks} == {3}
    if TOML[number].keys() & {"tensors", "family"}:
        assert unplaced(spec) == []


@pytest.mark.parametrize("number", range(len(TOML) - 1))
def test_every_block_resolves_for_gguf(number: int) -> None:
    known = gguf_like("small", block_count=3, sliding_window=32)
    spec = resolve(tables_of(TOML[number]), PATH, known, format_table("gguf"))
    assert {len(stack.layers) for stack in spec.stacks} == {3}


def test_what_the_page_says_of_its_examples() -> None:
    by_pattern = {str(t["decoder"].get("pattern")): t for t in OTHERS if "decoder" in t}
    windowed = resolved_block(by_pattern["['windowed', 'windowed', 'full']"], CONFIG)
    assert [attention(windowed, i).window for i in range(3)] == [32, 32, None]
    typed = resolved_block(by_pattern["$layer_types | [full_attention]"], CONFIG)
    assert [attention(typed, i).window for i in range(3)] == [32, None, None]
    untyped = resolved_block(
        by_pattern["$layer_types | [full_attention]"], CONFIG | {"layer_types": None}
    )
    assert [attention(untyped, i).window for i in range(3)] == [None] * 3
    scaled = resolved_block(by_pattern["scaled if i % 2 else plain"], CONFIG)
    assert scaled.decoder is not None
    calls = [layer.wiring.calls for layer in scaled.decoder.layers]
    assert "post_norm" in calls[1]
    assert "post_norm" not in calls[0] + calls[2]


def test_what_the_page_says_of_its_encoder() -> None:
    (block,) = (block for block in OTHERS if "encoder" in block and "dims" in block)
    known = (("cls.bias", "pooler.weight"), ("pooler.weight",), ())
    results = []
    for tensors in known:
        spec = resolve([block], PATH, facts(CONFIG, tensors), {})
        assert unplaced(spec) == []
        results.append(spec.stacks[0].head.results)
    assert results == [{"hidden", "pooled", "logits"}, {"hidden", "pooled"}, {"hidden"}]


def test_what_the_page_says_of_when() -> None:
    (block,) = (
        b for b in OTHERS if "when" in b.get("decoder", {}).get("modules", {}).get("norm", {})
    )
    every = facts(CONFIG | {"word_embed_proj_dim": 32}, ("model.embed_positions.weight",))
    none = facts(CONFIG | {"no_final_norm": True})
    for known, calls in (
        (every, ("embed", "project_in", "position", "norm", "logits")),
        (none, ("embed", "logits")),
    ):
        decoder = resolve([EXAMPLE, block], PATH, known, {}).decoder
        assert decoder is not None
        assert (*decoder.stem.calls, *decoder.head.calls) == calls


def error_rows() -> list[tuple[str, str]]:
    rows = re.findall(r"^\| `([^`]+=[^`]*)` \| `(.+)` \|$", TEXT, flags=re.MULTILINE)
    return [(override, error.replace("\\|", "|")) for override, error in rows]


def test_the_page_has_its_errors() -> None:
    assert len(error_rows()) >= 5


@pytest.mark.parametrize(("override", "error"), error_rows())
def test_every_error_is_as_the_page_says(override: str, error: str) -> None:
    found = error_of(merge(EXAMPLE, parse_override(override)), CONFIG)
    assert found == error or (error[-3:] == "..." and found.startswith(error[:-3]))


def test_gguf_words_are_those_of_the_format() -> None:
    (paragraph,) = re.findall(r"^Every GGUF file(?:.+\n)+", TEXT, flags=re.MULTILINE)
    table = format_table("gguf")
    modules = {
        part
        for name in table["tensors"]["gguf"]
        for part in re.findall(r"\w+", re.sub(r"^decoder\.(\{i\}\.)?", "", name).split(".")[0])
    }
    for name in (*table["dims"], *table["modules"], *modules):
        assert f"`{name}`" in paragraph
