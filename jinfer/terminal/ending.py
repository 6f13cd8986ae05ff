"""How a command ends: where it was interrupted, and where nobody reads what it prints."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from jinfer.terminal import INTERRUPTED


def status_of(command: Callable[[], int]) -> int:
    """The exit status of a command, also of one that Ctrl-C or a closed pipe ends."""
    try:
        return command()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; what is still buffered has nowhere to go.
        _print_no_more()
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _print_no_more()
        where = error.filename or "standard output"
        print(f"error: {where}: {error.strerror}", file=sys.stderr)
        return 2


def _print_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(status: int) -> NoReturn:
    """Ends the process; at once where it was interrupted, whatever is still being compiled."""
    # Before all else that happens at the end: all is said, and Ctrl-C could only interrupt that.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    if status == INTERRUPTED:
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
