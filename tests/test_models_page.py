"""docs/models.md names every family, and says truly how it was checked."""

import re
from pathlib import Path

from jinfer.modelspec.spec_files import families

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| (golden: (.*)|NumPy) \|$", re.MULTILINE)


def rows() -> dict[str, list[str]]:
    """Family -> the goldens it is checked by; none where it is checked by NumPy."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    return {found[1]: re.findall(r"`(\w+)`", found[3] or "") for found in ROW.finditer(page)}


def test_every_family_has_a_row() -> None:
    assert set(rows()) == set(families())


def test_every_golden_is_there() -> None:
    missing = {
        golden
        for goldens in rows().values()
        for golden in goldens
        if not (ROOT / "tests" / "goldens" / golden).is_dir()
    }
    assert missing == set()


def test_families_without_a_golden_have_a_test() -> None:
    folder = ROOT / "tests"
    files = [*(folder / "families").glob("test_*.py"), folder / "speculate" / "heads.py"]
    tests = "".join(path.read_text() for path in files)
    for family, goldens in rows().items():
        architectures = re.findall(r'"(\w+)"', families()[family].read_text().split("[dims]")[0])
        assert goldens or any(f'"{name}"' in tests for name in (*architectures, family)), family
