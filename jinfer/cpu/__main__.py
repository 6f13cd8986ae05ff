"""Compiles the custom calls ahead of use and prints the library's path."""

import argparse
import sys
from pathlib import Path

from jinfer.cpu import prebuilt
from jinfer.cpu.build_library import library_path, write_prebuilt
from jinfer.cpu.compilers import BuildError

parser = argparse.ArgumentParser(prog="python -m jinfer.cpu", description=__doc__)
which = parser.add_mutually_exclusive_group()
which.add_argument(
    "--here", action="store_true", help="for this machine's instructions alone: half the work"
)
which.add_argument(
    "--into",
    metavar="FOLDER",
    type=Path,
    help="not for the cache, but as a package brings them along",
)
which.add_argument(
    "--into-package",
    dest="into",
    action="store_const",
    const=prebuilt.FOLDER,
    help="into this package: as if a wheel had brought them",
)
parser.add_argument(
    "--headers",
    metavar="FOLDER",
    help="with --into: XLA's, of the oldest jaxlib that is to take them; else the installed one's",
)
options = parser.parse_args()
if options.headers and options.into is None:
    parser.error("--headers is for --into and --into-package")
try:
    if options.into is not None:
        print(write_prebuilt(options.into, options.headers))
    else:
        print(library_path(every=not options.here))
except (BuildError, OSError) as error:
    sys.exit(f"error: {error}")
