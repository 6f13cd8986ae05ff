"""`jinfer inspect SOURCE`: what a checkpoint is, and which tensor is which parameter.

With `--partition DEVICES` it shows each device's shard.

No family has to match: for a checkpoint that none fits, or not quite, it lists extra and missing
tensors, and proposes lines for a specification.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from jinfer.cli.inspect.inspect_report import to_html, to_json, to_text
from jinfer.cli.inspect.match_checkpoint import describe
from jinfer.cli.propose.propose_spec import propose_spec
from jinfer.cli.run_command import SET, SOURCE, command, overrides_of
from jinfer.cli.terminal.argument_parser import argument
from jinfer.loader.model_files import ModelFiles
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.view.model_svg import draw_model
from jinfer.parallel.cost_model import HARDWARE


@command(
    "Prints a checkpoint's format, family, sizes, and each tensor's parameter.",
    SOURCE,
    SET,
    argument(
        "--partition", metavar="DEVICES", help='show the shard of each device: "0&1;2&3", "auto"'
    ),
    argument(
        "--on", choices=sorted(HARDWARE), default="a100", help="hardware of the estimate (a100)"
    ),
    argument("--propose-spec", metavar="FILE", help="write a first specification (.toml)"),
    argument("--draft", metavar="FILE", help=argparse.SUPPRESS),
    argument(
        "--json", metavar="FILE", help="write the report as JSON; - prints it instead of the text"
    ),
    argument("--svg", metavar="FILE", help="write a drawing of the wiring"),
    argument("--html", metavar="FILE", help="write the report with the drawing as a page"),
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    overrides = overrides_of(options.set)
    if options.partition:
        return _show_plan(options, overrides)
    found = describe(options.source, overrides)
    if options.svg and found.spec is None:
        raise SpecError(options.source, "--svg", f"nothing to draw: {found.problem}")
    if options.draft:
        print("note: --draft is now called --propose-spec", file=sys.stderr)
    file = options.propose_spec or options.draft
    if file:
        _write_spec(found.opened, options.source, Path(file))
    if options.json == "-":
        print(json.dumps(to_json(found), ensure_ascii=False, indent=1))
    else:
        print(to_text(found, file or ""))
    if options.json and options.json != "-":
        text = json.dumps(to_json(found), ensure_ascii=False, indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    if options.svg and found.spec is not None:
        Path(options.svg).write_text(draw_model(found.spec), encoding="utf-8")
    if options.html:
        Path(options.html).write_text(to_html(found), encoding="utf-8")
    return 0


def _show_plan(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    # Here: it compiles, and imports what compiling needs; a report needs none of it.
    from jinfer.cli.inspect.inspect_partition import to_svg, to_text, view

    plan = view(options.source, overrides, options.partition, options.on)
    print(to_text(plan))
    if options.svg:
        Path(options.svg).write_text(to_svg(plan), encoding="utf-8")
    if plan.memory.problem:
        raise SpecError(options.source, "partition", plan.memory.problem)
    return 0


def _write_spec(opened: ModelFiles, source: str, file: Path) -> None:
    """Write a proposed spec with a path to its weights; never overwrites a file."""
    weights = os.path.relpath(opened.weights.resolve(), file.resolve().parent)
    text = propose_spec(opened, source if "://" in source else weights)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        reason = "is there already, and may have been changed"
        raise SpecError(file, "--propose-spec", reason) from error
