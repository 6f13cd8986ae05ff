"""`jinfer docs PAGE`: shows the bundled documentation."""

from __future__ import annotations

import pydoc
import sys
from collections.abc import Sequence
from pathlib import Path

from jinfer.cli.terminal.argument_parser import argument, parse
from jinfer.modelspec.spec_errors import nearest_hint


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a page, or the list of pages; return the exit status."""
    name = parse(
        __spec__.name,
        arguments,
        "Shows a page of the documentation, or lists the pages.",
        argument("page", nargs="?", help="name of the page, such as 'sampling'"),
    ).page
    folder = docs_folder()
    found = [*sorted(folder.glob("*.md")), *sorted(folder.glob("reference/*.md"))]
    pages = {path.stem: path for path in found}
    if name is None:
        width = max(map(len, pages), default=0)
        for stem, page in pages.items():
            print(f"  {stem:{width}}  {_title(page)}")
        return 0
    path = pages.get(Path(name).name.removesuffix(".md"))
    if path is None:
        print(f"error: there is no page {name!r}; {nearest_hint(name, pages)}", file=sys.stderr)
        return 2
    text = path.read_text(encoding="utf-8")
    if sys.stdout.isatty() and sys.stdin.isatty():
        pydoc.pager(text)
    else:
        print(text, end="")
    return 0


def docs_folder() -> Path:
    """The folder of the pages: installed with jinfer, or in the checkout."""
    package = Path(__file__).parents[1]
    installed = package / "docs_data"
    return installed if installed.is_dir() else package.parent / "docs"


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return next((line.strip("# \n") for line in file if line.startswith("# ")), "")
