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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinfer.cli.inspect.inspect_report import to_html, to_json, to_text
from jinfer.cli.inspect.match_checkpoint import describe
from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.propose.propose_spec import propose_spec
from jinfer.cli.run_command import overrides_of, run
from jinfer.cli.terminal.argument_parser import CliParser
from jinfer.loader.model_files import ModelFiles
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.view.model_svg import draw_model
from jinfer.parallel.cost_model import HARDWARE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status. Errors are one line, never a traceback."""
    return run(_run, _parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = CliParser(
        prog=prog_of_module(__spec__.name),
        description="Prints a checkpoint's format, family, sizes, and each tensor's parameter.",
    )
    add = parser.add_argument
    add("source", help="a spec (.toml), a checkpoint folder or file, package://..., hf://...")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="set any key of the spec")
    add("--partition", metavar="DEVICES", help='show the shard of each device: "0&1;2&3", "auto"')
    add("--on", choices=sorted(HARDWARE), default="a100", help="hardware of the estimate (a100)")
    add("--propose-spec", metavar="FILE", help="write a first specification (.toml)")
    add("--draft", metavar="FILE", help=argparse.SUPPRESS)  # its former name
    add("--json", metavar="FILE", help="write the report as JSON; - prints it instead of the text")
    add("--svg", metavar="FILE", help="write a drawing of the wiring")
    add("--html", metavar="FILE", help="write the report with the drawing as a page")
    return parser


def _run(options: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
