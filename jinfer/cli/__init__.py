"""The command `jinfer`, and `python -m jinfer`: a word for each program that comes with jinfer."""

from jinfer.cli.entry_point import enter, main

__all__ = ["enter", "main"]
