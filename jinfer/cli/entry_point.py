"""Command line entry point: dispatches to the subcommand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NoReturn

from jinfer.cli.command_registry import COMMANDS, GROUPS, Subcommand
from jinfer.cli.prog_name import prog_of_jinfer, running_command
from jinfer.cli.terminal.exit_status import exit_process, run_for_status
from jinfer.runtime.startup import gc_paused, importing

_TOOLS = "jinfer.tools."
_NAMES = {command.name: command for command in COMMANDS}


def enter() -> NoReturn:
    """The console script `prog_of_jinfer`; exits the process."""
    exit_process(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    match words:
        case [] | ["-h" | "--help" | "help"]:
            print(_help())
            return 0
        case ["-V" | "--version" | "version"]:
            from jinfer.version import __version__

            print(f"jinfer {__version__}")
            return 0
        case ["help", *words]:
            words = [*words, "--help"]
    if words[0] in GROUPS:
        if len(words) == 1 or words[1] in ("-h", "--help"):
            print(_group_help(words[0]))
            return 0
        words[:2] = [" ".join(words[:2])]
    chosen = _NAMES.get(words[0])
    if chosen is None:
        print(f"error: {_unknown(words[0])}", file=sys.stderr)
        return 2
    return run_for_status(lambda: _run(chosen, words[1:]))


def _run(chosen: Subcommand, words: Sequence[str]) -> int:
    # Imported here, because logging would slow down help texts.
    from jinfer.progress import task

    provide_tools()
    with running_command(chosen.name):
        # Programs import the engine themselves, after they have parsed their arguments.
        with task("starting"), importing() if chosen.module.startswith(_TOOLS) else gc_paused():
            module = import_module(chosen.module)
        return int(module.main([*chosen.first, *words]))


def provide_tools() -> None:
    """Makes `jinfer.tools` importable in a checkout, where the folder is beside the package."""
    name = _TOOLS.removesuffix(".")
    if name in sys.modules or find_spec(name) is not None:
        return
    folder = Path(__file__).parents[2] / "tools"
    start = folder / "__init__.py"
    if not start.is_file():
        return
    spec = spec_from_file_location(name, start, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _help() -> str:
    lines = {name: about for name, about in _help_lines().items() if " " not in name}
    return "\n".join(
        [
            f"usage: {prog_of_jinfer()} COMMAND [ARGUMENTS]   "
            f"({prog_of_jinfer()} COMMAND --help says more)",
            "",
            *_columns(lines),
            "",
            f"{prog_of_jinfer()} --version says which jinfer this is.",
        ]
    )


def _group_help(group: str) -> str:
    inside = {name: about for name, about in _help_lines().items() if name.startswith(f"{group} ")}
    usage = f"usage: {prog_of_jinfer()} {group} WHAT [ARGUMENTS]"
    return "\n".join([usage, "", *_columns(inside)])


def _help_lines() -> dict[str, str]:
    """A line of help for each command; a group stands in place of its first command."""
    lines: dict[str, str] = {}
    for each in COMMANDS:
        group, _, rest = each.name.partition(" ")
        if rest and group not in lines:
            inside = (n.removeprefix(f"{group} ") for n in _NAMES if n.startswith(f"{group} "))
            lines[group] = f"{GROUPS[group]}: {', '.join(inside)}"
        lines[each.name] = each.about
    return lines


def _columns(lines: dict[str, str]) -> list[str]:
    width = max(map(len, lines))
    return [f"  {name:{width}}  {about}" for name, about in lines.items()]


def _unknown(word: str) -> str:
    """The error message for an unknown command."""
    if "://" in word or Path(word).suffix in (".toml", ".gguf") or Path(word).exists():
        return f"{word} is no command; did you mean '{prog_of_jinfer()} generate {word}'?"
    # Imported here, because only errors need it.
    from jinfer.modelspec.foreign_names import foreign_commands

    if (own := foreign_commands().get(word)) is not None:
        return f"there is no command {word!r}; there is: {prog_of_jinfer()} {own}"
    group, _, rest = word.partition(" ")
    names = [
        name
        for name in _help_lines()
        if (name.startswith(f"{group} ") if rest else " " not in name)
    ]
    near = get_close_matches(word, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"there is no command {word!r}; {hint}there are: {', '.join(names)}"
