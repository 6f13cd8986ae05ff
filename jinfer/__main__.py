"""`python -m jinfer`: the same as the command `jinfer`."""

from jinfer.commands import enter

if __name__ == "__main__":
    enter()
