"""How a program of this package ends: its status, and errors as one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from jinfer.errors import USER_ERRORS
from jinfer.opening.sources import SourceError
from jinfer.ops.platforms import start
from jinfer.ops.switches import SwitchError


def check_places(*files: str | None) -> None:
    """Raises `SourceError` where a file cannot be written, before what takes long."""
    for file in filter(None, files):
        folder = Path(file).absolute().parent
        if not folder.is_dir():
            raise SourceError(f"{file}: there is no folder {folder}; make it first")
        if Path(file).is_dir():
            raise SourceError(f"{file}: is a folder; name a file in it")


def run(work: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """What `work` returns; 2 after an error that the user can mend, which is one line."""
    try:
        return work(options)
    except BrokenPipeError:
        raise  # nobody reads any more, which is no error
    except (*USER_ERRORS, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, AssertionError):
        try:
            start()
        except SwitchError as error:  # JAX could not be started, which is a line
            print(f"error: {error}", file=sys.stderr)
            return 2
        raise
