"""The command `jinfer`, and `python -m jinfer`: a word for each program that comes with jinfer."""

from jinfer.commands.dispatch import enter, main

__all__ = ["enter", "main"]
