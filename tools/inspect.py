"""What a checkpoint is: `python -m tools.inspect SOURCE [--set k=v] [--json|--svg|--html FILE]`.

It needs no family to fit: for a checkpoint that none does, or not quite, it lists what is left
over and missing, and proposes lines for a specification.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinfer.errors import USER_ERRORS
from jinfer.spec.drawing import draw
from jinfer.spec.errors import SpecError
from jinfer.spec.files import parse_override
from jinfer.spec.resolve import merge
from tools.matching import describe
from tools.report import to_html, to_json, to_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. Errors are one line, never a traceback."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (*USER_ERRORS, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.inspect",
        description="Prints what a checkpoint is and which tensor is which parameter.",
    )
    add = parser.add_argument
    add("source", help="a spec (.toml), a checkpoint folder or file, package://..., hf://...")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="set any key of the spec")
    add("--json", metavar="FILE", help="write the report as JSON; - prints it instead of the text")
    add("--svg", metavar="FILE", help="write a drawing of the wiring")
    add("--html", metavar="FILE", help="write the report with the drawing as a page")
    return parser


def _run(options: argparse.Namespace) -> int:
    overrides: dict[str, Any] = {}
    for text in options.set:
        overrides = merge(overrides, parse_override(text))
    found = describe(options.source, overrides)
    if options.svg and found.spec is None:
        raise SpecError(options.source, "--svg", f"nothing to draw: {found.problem}")
    if options.json == "-":
        print(json.dumps(to_json(found), ensure_ascii=False, indent=1))
    else:
        print(to_text(found))
    if options.json and options.json != "-":
        text = json.dumps(to_json(found), ensure_ascii=False, indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    if options.svg and found.spec is not None:
        Path(options.svg).write_text(draw(found.spec), encoding="utf-8")
    if options.html:
        Path(options.html).write_text(to_html(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
