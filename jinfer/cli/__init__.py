"""Command line interface: the program `jinfer` (and `python -m jinfer`) with its subcommands."""

from jinfer.cli.entry_point import enter, main

__all__ = ["enter", "main"]
