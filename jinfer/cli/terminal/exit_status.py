"""How a command ends: where it was interrupted, and where nobody reads what it prints."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from jinfer.cli.terminal import INTERRUPTED
from jinfer.guard.process_limits import reason

_stuck = False  # threads may wait for others that could not be started


def status_of(command: Callable[[], int]) -> int:
    """The exit status of a command, also of one that Ctrl-C, a closed pipe or a limit ends."""
    global _stuck
    try:
        return command()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; what is still buffered has nowhere to go.
        _print_no_more()
        return 1
    except (MemoryError, ImportError, RuntimeError, OSError) as error:
        if (said := reason(error)) is not None:
            print(f"error: {said}", file=sys.stderr)
            _stuck = True
            return 2
        if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
            raise
        _print_no_more()
        where = error.filename or "standard output"
        print(f"error: {where}: {error.strerror}", file=sys.stderr)
        return 2


def _print_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(status: int) -> NoReturn:
    """Ends the process; at once where it was interrupted, whatever is still being compiled.

    Where it came to a limit of the system's too: what could not be started may be waited for.
    """
    # Before all else that happens at the end: all is said, and Ctrl-C could only interrupt that.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    if status == INTERRUPTED or _stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
