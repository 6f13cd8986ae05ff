"""Compiles the custom calls ahead of use and prints where they are.

With `--here`, kernels for this machine's instructions alone: half the work.
"""

import sys

from jinfer.cpu.build import BuildError, library_path

try:
    print(library_path(every="--here" not in sys.argv[1:]))
except BuildError as error:
    sys.exit(f"error: {error}")
