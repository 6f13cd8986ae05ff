"""Command-line entry point of generation and chat: `python -m jinfer.generate SOURCE`."""

from __future__ import annotations

from collections.abc import Sequence

from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.terminal.exit_status import exit_process, run_for_status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. Errors are one line, never a traceback."""
    return run_for_status(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    # Slow imports are here, where Ctrl-C is handled.
    from jinfer.progress import take_warnings, task
    from jinfer.startup import importing, interrupts_raised

    with interrupts_raised():
        from jinfer.cli.terminal.generate_flags import make_parser
    options = make_parser(prog_of_module(__spec__.name)).parse_args(arguments)
    take_warnings()
    with task("starting"), importing():
        from jinfer.cli.terminal.run_generate import run
    return run(options)


if __name__ == "__main__":
    exit_process(main())
