"""The model specifications that come with jinfer: each resolves, and says what it needs to say."""

import re
from functools import cache
from pathlib import Path

import pytest

from jinfer.spec.files import families, format_table, read_toml, specs_folder, with_families
from jinfer.spec.resolve import Facts, resolve
from jinfer.template import PromptTemplate
from tests.spec.cases import cases

SPECS = sorted(specs_folder().glob("*.toml"))
# One repository's files of several models, or several specifications of one model.
HUB = re.compile(r"hf://[\w.-]+/[\w.-]+(/[\w./-]+\.(gguf|bin))?")


@cache
def checkpoints() -> dict[str, Facts]:
    """A small checkpoint, as published ones describe themselves, for every family."""
    return {case.family: case.facts for case in cases()}


def test_there_are_specifications() -> None:
    assert len(SPECS) > 100


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_it_resolves_for_a_checkpoint_of_its_family(path: Path) -> None:
    table = read_toml(path)
    known = checkpoints()[table["family"]]
    spec = resolve(with_families(table, path), str(path), known, format_table(known.format))
    assert spec.decoder is not None or len(spec.stacks) == 1
    assert spec.prompt.template == table.get("prompt", {}).get("template")


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_it_says_what_it_is(path: Path) -> None:
    table = read_toml(path)
    assert len(table["description"]) > 10
    assert not table["description"].endswith(".")
    assert table["family"] in families()
    assert re.fullmatch(r"[a-z0-9_.]+", path.stem)
    weights = table["weights"]
    assert weights.startswith("package://") or HUB.fullmatch(weights)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_its_template_asks_the_question(path: Path) -> None:
    template = read_toml(path).get("prompt", {}).get("template")
    if template is None:
        assert "base model" not in read_toml(path)["description"]  # it has none of its own
        return
    parts = PromptTemplate.parse(template).parts
    assert sum(getattr(part, "name", "") in ("query", "_query") for part in parts) == 1


def test_no_two_are_the_same() -> None:
    weights = [read_toml(path)["weights"] for path in SPECS]
    assert len(set(weights)) == len(weights)
    descriptions = [read_toml(path)["description"] for path in SPECS]
    assert len(set(descriptions)) == len(descriptions)
