"""How a program of this package ends: its status, and errors as one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from jinfer.errors import USER_ERRORS


def run(work: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """What `work` returns; 2 after an error that the user can mend, which is one line."""
    try:
        return work(options)
    except (*USER_ERRORS, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
