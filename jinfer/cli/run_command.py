"""Tool main wrapper: exit status, and errors as one line."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

from jinfer import progress
from jinfer.api.user_errors import USER_ERRORS
from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.terminal.argument_parser import argument, parse, several
from jinfer.loader.sources import SourceError
from jinfer.modelspec.spec_files import parse_override
from jinfer.modelspec.toml_tables import merge
from jinfer.ops.backend import start
from jinfer.ops.disable_kernels import SwitchError
from jinfer.progress import take_warnings, throughout

SOURCE = argument(
    "source", help="a model's name, a spec (.toml), a checkpoint folder or file, package://..."
)
SET = several("--set", metavar="KEY=VALUE", help="set any key of the spec")
JSON = argument("--json", metavar="FILE", help="also write all figures as JSON")
SVG = argument("--svg", metavar="FILE", help="plot the figures")
_FLAGS = ("json", "svg", "html", "propose_spec", "draft")  # that name a file to write
_STDOUT = "-"


class Command(Protocol):
    """A command: takes its arguments (None: those of the process), returns its exit status."""

    def __call__(self, words: Sequence[str] | None = None) -> int: ...


def command(
    description: str, *arguments: Callable[[Any], Any], **how: Any
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Makes a function of parsed options a command; see `run`."""

    def made(work: Callable[[argparse.Namespace], int]) -> Command:
        def main(words: Sequence[str] | None = None) -> int:
            spec = sys.modules[work.__module__].__spec__  # of `__main__` too
            assert spec is not None, "a command is in a module"
            return run(work, parse(spec.name, words, description, *arguments, **how))

        main.__doc__ = work.__doc__
        return main

    return made


def run(work: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """The result of `work`; 2 after an error that the user can fix, printed as one line.

    It begins if what it is to write can be written. On a terminal a line says that work is in
    progress, unless there is other output.
    """
    if getattr(options, "worker", None):  # the parent process shows progress
        progress.show(False)
    take_warnings()
    try:
        check_outputs(options)
        with throughout(prog_of_module(work.__module__)):
            return work(options)
    except BrokenPipeError:
        raise  # a closed pipe is not an error
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except (*USER_ERRORS, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, AssertionError):
        try:
            start()
        except SwitchError as error:  # JAX could not be started, which is a line
            print(f"error: {error}", file=sys.stderr)
            return 2
        raise


def overrides_of(texts: Sequence[str] | None) -> dict[str, Any]:
    """What `--set` says, as tables laid over a specification."""
    return reduce(merge, map(parse_override, texts or ()), {})


def write_json(file: str | Path | None, value: Any) -> None:
    """Write what `--json` asks for, if it is given."""
    if file:
        Path(file).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def width(text: str) -> str:
    """A weight format by its name in specifications: 3.5 is q3.5; "4.25 bits" is a budget."""
    return f"q{text}" if re.fullmatch(r"\d(\.\d)?", text) else text


def check_outputs(options: argparse.Namespace) -> None:
    """Raises `SourceError` if a file that a flag names cannot be written."""
    for file in (getattr(options, flag, None) for flag in _FLAGS):
        if file and file != _STDOUT:
            check_writable(file)


def check_writable(file: str | Path) -> None:
    """Raises `SourceError` if a file cannot be written."""
    path = Path(file)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise SourceError(f"{file}: there is no folder {folder}; make it first")
    if path.is_dir():
        raise SourceError(f"{file}: is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise SourceError(f"{file}: may not be written by this user; name another file")
