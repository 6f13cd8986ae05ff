"""`python -m jinfer`: the same as the command `jinfer`."""

from jinfer.cli import enter

if __name__ == "__main__":
    enter()
