"""The command line: `python -m jinfer.generate SOURCE --prompt "..."`, or a chat."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from jinfer.commands.program import program
from jinfer.terminal import INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. Errors are one line, never a traceback."""
    # All that takes time is imported here, where Ctrl-C is heard.
    try:
        from jinfer.terminal.flags import parser

        options = parser(program(__spec__.name)).parse_args(arguments)
        from jinfer.engine.collector import paused

        with paused():
            from jinfer.terminal.run import run
        return run(options)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def leave(status: int) -> NoReturn:
    """Ends the process; at once where it was interrupted, whatever is still being compiled."""
    if status == INTERRUPTED:
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    leave(main())
