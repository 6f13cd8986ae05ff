"""Command line entry point: the table of subcommands, and their dispatch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from jinfer.cli.prog_name import prog_of_jinfer, running_command
from jinfer.cli.terminal.exit_status import exit_process, run_for_status
from jinfer.startup import gc_paused, importing


@dataclass(frozen=True)
class Subcommand:
    """A subcommand.

    Attributes:
        name: one word, or two words of which the first names a group.
        module: the module whose function `main` runs the command.
        about: one line of help.
        first: arguments inserted before the user's.
        engine: whether importing the module imports the engine; the others import it themselves
            after parsing their arguments.
    """

    name: str
    module: str
    about: str
    first: tuple[str, ...] = ()
    engine: bool = False


def _tool(name: str, module: str, about: str) -> Subcommand:
    return Subcommand(name, f"jinfer.cli.{module}", about, engine=True)


COMMANDS = (
    Subcommand("generate", "jinfer.generate", "generate text for a prompt"),
    Subcommand("chat", "jinfer.generate", "chat in the terminal", ("--chat",)),
    Subcommand("serve", "jinfer.serve", "serve models over HTTP"),
    Subcommand("client", "jinfer.client", "send a prompt to a server, or chat with it"),
    Subcommand("list", "jinfer.cli.list_models", "list the models that have a name"),
    Subcommand("pull", "jinfer.cli.pull_model", "download a model's weights"),
    Subcommand("docs", "jinfer.cli.show_docs", "show a page of the documentation"),
    _tool("inspect", "inspect.inspect_checkpoint", "list a checkpoint's tensors and parameters"),
    Subcommand("look", "jinfer.look", "draw what a model computes for a prompt", engine=True),
    _tool("quantize", "quantize.quantize_checkpoint", "write a quantized checkpoint"),
    _tool("rotate", "quantize.rotate_weights", "write an equivalent model with rotated weights"),
    _tool("perplexity", "perplexity", "measure the perplexity of a text"),
    _tool("quality", "quality", "measure quality against bits per weight"),
    _tool("bench cpu", "bench.bench_cpu", "speed on a CPU, alone or against llama.cpp"),
    _tool(
        "bench engine",
        "bench.bench_engine",
        "latency interference between concurrent streams",
    ),
    _tool("bench serve", "bench.bench_serve", "load test an HTTP server"),
    _tool("bench speculate", "bench.bench_speculate", "speedup by speculative decoding"),
)
GROUPS = {"bench": "run a benchmark"}
# Benchmarks that need the source tree.
_SCRIPTS = tuple(
    f"bench {name}"
    for name in ("kernels", "linear", "lora", "models", "offload", "partition", "programs")
)
_NAMES = {command.name: command for command in COMMANDS}


def enter() -> NoReturn:
    """Run the console script `jinfer`; exit the process."""
    exit_process(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit status."""
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

    with running_command(chosen.name):
        with task("starting"), importing() if chosen.engine else gc_paused():
            module = import_module(chosen.module)
        return int(module.main([*chosen.first, *words]))


def _help() -> str:
    lines = {name: about for name, about in _help_lines().items() if " " not in name}
    return "\n".join(
        [
            f"usage: {prog_of_jinfer()} COMMAND [ARGUMENTS]   "
            f"({prog_of_jinfer()} COMMAND --help shows its flags)",
            "",
            *_columns(lines),
            "",
            f"{prog_of_jinfer()} --version prints the version.",
        ]
    )


def _group_help(group: str) -> str:
    inside = {name: about for name, about in _help_lines().items() if name.startswith(f"{group} ")}
    usage = f"usage: {prog_of_jinfer()} {group} NAME [ARGUMENTS]"
    return "\n".join([usage, "", *_columns(inside)])


def _help_lines() -> dict[str, str]:
    """Return a line of help for each command, and for each group before its first command."""
    lines: dict[str, str] = {}
    for item in COMMANDS:
        group, _, rest = item.name.partition(" ")
        if rest and group not in lines:
            inside = (n.removeprefix(f"{group} ") for n in _NAMES if n.startswith(f"{group} "))
            lines[group] = f"{GROUPS[group]}: {', '.join(inside)}"
        lines[item.name] = item.about
    return lines


def _columns(lines: dict[str, str]) -> list[str]:
    width = max(map(len, lines))
    return [f"  {name:{width}}  {about}" for name, about in lines.items()]


def _unknown(word: str) -> str:
    """The error message for an unknown command."""
    if "://" in word or Path(word).suffix in (".toml", ".gguf") or Path(word).exists():
        return f"{word} is no command; did you mean '{prog_of_jinfer()} generate {word}'?"
    if word in _SCRIPTS:
        script = f"python -m tools.{word.replace(' ', '_')}"
        return f"{word!r} is a script of jinfer's source tree; run there: {script}"
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
