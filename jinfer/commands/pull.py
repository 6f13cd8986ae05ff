"""`jinfer pull NAME`: a model's weights are fetched, and where they lie is printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jinfer.commands.program import program
from jinfer.opening.names import in_full
from jinfer.opening.sources import SourceError, locate
from jinfer.spec.errors import SpecError
from jinfer.spec.files import read_toml
from jinfer.spec.tables import check_text
from jinfer.terminal.arguments import Parser

_PLACES = ("weights", "tokenizer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetches what is named; returns the exit status."""
    parser = Parser(
        prog=program(__spec__.name),
        description="Fetches the weights of models into the cache of the hub's own library, and "
        "prints where they lie. What lies there already is not fetched again.",
    )
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="a name that 'list' shows, owner/name or hf://owner/name of a hub, a spec (.toml)",
    )
    options = parser.parse_args(arguments)
    try:
        for name in options.names:
            for place in fetched(name):
                print(place, flush=True)
    except (SourceError, SpecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def fetched(name: str) -> Iterator[Path]:
    """Where a model's weights lie, and its tokenizer if it has a place of its own.

    Raises:
        SourceError, SpecError: there is no such model, or it cannot be fetched.
    """
    source = in_full(name, Path.cwd())
    if source.startswith("hf://") or not source.endswith(".toml"):
        yield _fetch(source, Path.cwd())
        return
    path = locate(source, Path.cwd())
    table = read_toml(path)
    if "weights" not in table:
        raise SpecError(path, "weights", "is missing: the specification fits any checkpoint")
    for key in _PLACES:
        if key in table:
            yield _fetch(check_text(table[key], path, key), path.parent)


def _fetch(source: str, beside: Path) -> Path:
    if source.startswith("hf://"):
        # The hub's library shows how far it is.
        print(f"fetching {source}", file=sys.stderr)
    return locate(source, beside)


if __name__ == "__main__":
    sys.exit(main())
