"""Compiles the custom calls ahead of use and prints where they are."""

import sys

from jinfer.cpu.build import BuildError, library_path

try:
    print(library_path(every=True))
except BuildError as error:
    sys.exit(f"error: {error}")
