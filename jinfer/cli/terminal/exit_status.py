"""Exit status of commands: Ctrl-C, closed pipes (SIGPIPE) and process limits."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from jinfer.cli.terminal import INTERRUPTED
from jinfer.sandbox.process_limits import limit_reason

_stuck = False  # set where threads may wait for others that could not be started


def run_for_status(command: Callable[[], int]) -> int:
    """Run a command; return its exit status, also after Ctrl-C, a closed pipe or a limit."""
    global _stuck
    try:
        return command()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe; buffered output is discarded.
        _print_no_more()
        return 1
    except (MemoryError, ImportError, RuntimeError, OSError) as error:
        if (reason := limit_reason(error)) is not None:
            print(f"error: {reason}", file=sys.stderr)
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


def exit_process(status: int) -> NoReturn:
    """Exit the process; without waiting for compilation after Ctrl-C.

    Nor after a process limit was reached: threads may wait for others that never started.
    """
    # Before any other cleanup, which Ctrl-C could only interrupt.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    if status == INTERRUPTED or _stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
