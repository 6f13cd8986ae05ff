"""Pages about the source name existing files and lines; links of all pages have a target."""

import re
from pathlib import Path

import pytest

from tests import package_drawing
from tests.structure import source_files

ROOT = Path(__file__).parents[1]
NAMES = ("README.md", *(f"docs/{n}.md" for n in ("architecture", "contributing", "glossary")))
PAGES = [ROOT / name for name in (*NAMES, "docs/install.md")]
ALL_PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("docs", "jinfer", "kernels_pallas", "specs", "tests", "tools")
SUFFIXES = {".py", ".cc", ".h", ".toml", ".md", ".svg", ".json", ".txt"}
FILES = ["pyproject.toml"] + [
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in SUFFIXES or path.is_dir()
]
_FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(
    r"(?!NAME)[\w./-]*\w\.(?:py|cc|h|toml|md|svg)|(?:jinfer|tests|specs)(?:/[\w.]+)+"
)


def files_named(text: str) -> list[str]:
    """Between backticks outside of blocks; those with a NAME in them stand for any."""
    spans = re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))
    return [span for span in spans if _FILE.fullmatch(span) and "NAME" not in span]


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def squeezed(text: str) -> str:
    """Code without spaces, comments that stand apart, and commas before a bracket."""
    code = re.sub(r" {2,}(#|//) .*", "", text)
    return re.sub(r"\s+", "", code).replace(",)", ")")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_are_there(page: Path) -> None:
    """In full, or by the end of their path."""
    named = files_named(page.read_text(encoding="utf-8"))
    known = {f"/{name}" for name in FILES}
    assert [name for name in named if not any(k.endswith(f"/{name}") for k in known)] == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = _FENCE.sub("", page.read_text("utf-8"))
    for name, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if ":" in name:
            continue
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_lines_of_tables_are_in_the_source() -> None:
    """Each block of contributing.md, as a whole or line by line."""
    text = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
    paths = [*source_files(ROOT), *(ROOT / "jinfer/cpu/src").rglob("*.*")]
    paths += [*(ROOT / "specs").rglob("*.toml"), *(ROOT / "jinfer").rglob("*.toml")]
    source = "\0".join(squeezed(path.read_text(encoding="utf-8")) for path in paths)
    for block in _FENCE.findall(text):
        if squeezed(block) not in source:
            assert [line for line in block.splitlines() if squeezed(line) not in source] == []


def test_the_drawing_shows_the_levels() -> None:
    """`python -m tests.package_drawing` draws it."""
    assert package_drawing.PAGE.read_text(encoding="utf-8") == package_drawing.drawing()
