"""`jinfer list`: the table of models whose specifications are bundled."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jinfer.cli.terminal.argument_parser import argument, parse
from jinfer.loader import model_catalogue
from jinfer.modelspec.spec_errors import SpecError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    options = parse(
        __spec__.name,
        arguments,
        "Lists the models whose specifications come with jinfer. Their names are sources: "
        "jinfer generate NAME.",
        argument(
            "text",
            nargs="?",
            default="",
            help="only models whose name or family has this text; may be a pattern: 'qwen*'",
        ),
        argument(
            "--memory",
            action="store_true",
            help="also show memory for each width of weights, families, sources",
        ),
    )
    try:
        print(model_catalogue.table(text=options.text, memory=options.memory))
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
