"""`python -m jinfer`: the same as the command `jinfer`."""

import sys

from jinfer.commands import main

if __name__ == "__main__":
    sys.exit(main())
