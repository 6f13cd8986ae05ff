"""House figures: `python -m tests.house_figures` prints the sizes that the tests limit.

A reduction lowers a bound; raising one needs a reason in the commit message.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

from tests.structure import ROOT, floors, source_files

AVOIDED = re.compile(r"\b(told|beside|whatever|stands)\b", re.IGNORECASE)

# Upper bounds.
BOUNDS = {
    "modules": 600,
    "lines": 108_500,
    "public classes": 940,
    "floors": 10,
    "modules of the largest folder": 70,
    "words of documentation by hand": 45_000,
    "avoided words in documentation": 20,
    "dependencies": 13,
}


def figures(root: Path = ROOT) -> dict[str, int]:
    """The figures, by name."""
    texts = {path: path.read_text(encoding="utf-8") for path in source_files(root)}
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "modules": len(texts),
        "lines": sum(text.count("\n") for text in texts.values()),
        "public classes": sum(map(_public_classes, texts.values())),
        "floors": max(floors(root).values()),
        "modules of the largest folder": max(folder_sizes(root).values()),
        "words of documentation by hand": words_by_hand(root),
        "avoided words in documentation": avoided_words(root),
        "dependencies": len(project["dependencies"]),
    }


def folder_sizes(root: Path = ROOT) -> Counter[str]:
    """Modules per folder."""
    return Counter(str(path.parent.relative_to(root)) for path in source_files(root))


def words_by_hand(root: Path = ROOT) -> int:
    """Words of the pages of docs/ that are not generated, blocks of code included."""
    return sum(
        len(page.read_text(encoding="utf-8").split()) for page in (root / "docs").glob("*.md")
    )


def avoided_words(root: Path = ROOT) -> int:
    """Occurrences of words to avoid by docs/style.md, generated pages included."""
    pages = [*(root / "docs").rglob("*.md"), *(root / "docs").rglob("*.ipynb")]
    pages += [root / name for name in ("README.md", "CHANGELOG.md") if (root / name).is_file()]
    return sum(len(AVOIDED.findall(page.read_text(encoding="utf-8"))) for page in pages)


def _public_classes(text: str) -> int:
    nodes = ast.parse(text).body
    return sum(isinstance(node, ast.ClassDef) and not node.name.startswith("_") for node in nodes)


def main() -> None:
    """Prints all figures with their bounds, and the folders with most modules."""
    for name, value in figures().items():
        print(f"{name:32}{value:>8,}  at most {BOUNDS[name]:,}")
    print("\nmodules per folder:")
    for folder, count in folder_sizes().most_common(12):
        print(f"  {folder:30}{count:>8}")


if __name__ == "__main__":
    main()
