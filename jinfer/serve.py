"""The command line: `python -m jinfer.serve SOURCE...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from jinfer.engine.collector import imported
from jinfer.opening.sources import SourceError
from jinfer.spec.errors import SpecError


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until it is told to stop; returns the exit status. Errors are one line."""
    try:
        with imported():
            from jinfer.server.flags import options
            from jinfer.server.process import serve
    except ModuleNotFoundError as error:
        needed = f"run: {sys.executable} -m pip install 'jinfer[serve]'"
        print(f"error: the service needs the package {error.name}; {needed}", file=sys.stderr)
        return 2
    try:
        return serve(options(arguments, os.environ))
    except (SourceError, SpecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _exit() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    _exit()
