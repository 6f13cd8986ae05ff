"""docs/models.md names every family, and how it was checked."""

import json
import re
from pathlib import Path

from jinfer.modelspec.spec_files import families, format_table, read_toml

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| ([^|]*)\| (golden|NumPy|transformers) \|$", re.MULTILINE)


def found() -> list[re.Match[str]]:
    return [*ROW.finditer((ROOT / "docs" / "models.md").read_text(encoding="utf-8"))]


def goldens() -> dict[str, list[str]]:
    """Families -> the goldens that check them."""
    table: dict[str, list[str]] = json.loads((ROOT / "tests/families/goldens.json").read_text())
    return table


def test_every_family_has_a_row() -> None:
    assert {row[1] for row in found()} == set(families())
    assert {row[1] for row in found() if row[3] == "golden"} == set(goldens())


def test_the_names_in_ggufs_are_those_of_the_families() -> None:
    said = {row[1]: re.findall(r"`([\w-]+)`", row[2]) for row in found()}
    match = {name: read_toml(path).get("match", {}) for name, path in families().items()}
    assert said == {name: table.get("gguf", []) for name, table in match.items()}


def test_every_multimodal_class_is_named() -> None:
    names = re.findall(r"`(\w+)`", (ROOT / "docs" / "models.md").read_text("utf-8"))
    for architecture in format_table("multimodal")["architectures"]:
        assert architecture.removesuffix("ForConditionalGeneration") in names


def test_every_golden_is_there() -> None:
    missing = {
        golden
        for names in goldens().values()
        for golden in names
        if not (ROOT / "tests" / "goldens" / golden).is_dir()
    }
    assert missing == set()


def test_families_without_a_golden_have_a_test() -> None:
    folder = ROOT / "tests"
    files = [*(folder / "families").glob("test_*.py"), folder / "speculate" / "heads.py"]
    tests = "".join(path.read_text() for path in files)
    for family in families().keys() - goldens().keys():
        architectures = re.findall(r'"(\w+)"', families()[family].read_text().split("[dims]")[0])
        assert any(f'"{name}"' in tests for name in (*architectures, family)), family
