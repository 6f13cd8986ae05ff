"""The command `jinfer`, and `python -m jinfer`: a word for each program that comes with jinfer."""

from jinfer.commands.dispatch import main

__all__ = ["main"]
