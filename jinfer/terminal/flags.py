"""The flags of the command line; nothing here takes time to import."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from jinfer.distributed.job import FLAGS as JOB
from jinfer.sampling.described import described
from jinfer.sampling.params import SamplingParams

_COUNTS = ("int", "int | None")
_NUMBERS = ("float", "float | None")
_IDS = ("banned_token_ids", "allowed_token_ids", "stop_token_ids")
_FILES = ("json_schema", "grammar")  # too long to be written in a line, at times


def parser(prog: str) -> argparse.ArgumentParser:
    """What reads the command line; flags that were not given are None."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [SOURCE] [flags]",
        description="Generates text. Without a prompt, in a terminal: a chat.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "source",
        nargs="?",
        help="a spec (.toml), a checkpoint folder or file, package://..., hf://...",
    )
    add(
        "--list",
        nargs="?",
        const="",
        metavar="TEXT",
        help="show the models whose specs come with jinfer, or those with TEXT in their name or "
        "their family's; TEXT may be a pattern such as 'qwen*'",
    )
    add("--prompt", metavar="TEXT", help="what to answer; - reads it from standard input")
    add("--prompt-file", metavar="FILE", help="a file with what to answer")
    add("--ids", help='token ids to continue instead of a text, such as "1 15043"')
    _switch(add, "--raw", "continue the prompt as it is, without a chat template")
    add("--system", metavar="TEXT", help="the system message")
    _switch(add, "--chat", "a conversation; a --prompt is its first message")
    add("--set", action="append", metavar="KEY=VALUE", help="set any key of the spec")
    _switch(
        add,
        "--explain-speculation",
        "colour tokens by who drafted them, and print how often drafts were right",
    )
    _switch(add, "--json", "print one JSON object with text, ids and timings")
    add("--threads", type=_positive, metavar="N", help="use at most N cores of the CPU")
    several = parser.add_argument_group("several hosts", "docs/partition.md says more")
    for name, about in JOB.items():
        several.add_argument(f"--{name}", help=about, metavar=name.upper())
    add_sampling(parser.add_argument_group("sampling", "docs/sampling.md says more of each"))
    return parser


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    given = {name: getattr(options, name) for name in _NAMES}
    changes = {name: value for name, value in given.items() if value is not None}
    if options.greedy:
        changes["strategy"] = "greedy"
    return changes


def spelled(name: str) -> str:
    """A flag as it is written."""
    return "-n" if name == "n" else f"--{name.replace('_', '-')}"


def add_sampling(group: argparse._ArgumentGroup) -> None:
    """A flag for each sampling parameter, and --greedy."""
    help = _described()
    _switch(group.add_argument, "--greedy", "always the likeliest token")
    for field in fields(SamplingParams):
        names = ["-n", "--n"] if field.name == "n" else [spelled(field.name)]
        text = help.get(field.name, "").replace("%", "%%")
        kind = str(field.type)
        if kind == "bool":
            _switch(group.add_argument, *names, text)
            continue
        group.add_argument(*names, help=text, **_form(field.name, kind))


def _form(name: str, kind: str) -> Mapping[str, Any]:
    """How a parameter is written."""
    if kind in _COUNTS:
        return {"type": int, "metavar": "N"}
    if kind in _NUMBERS:
        return {"type": float, "metavar": "X"}
    if name in _IDS:
        return {"type": _ids, "metavar": "IDS"}
    if name == "bad_words_ids":
        return {"type": _ids, "action": "append", "metavar": "IDS"}
    if name == "logit_bias":
        return {"type": _bias, "action": "append", "metavar": "ID=X"}
    if name == "early_stopping":
        return {"type": _early, "metavar": "true|false|never"}
    if name in _FILES:
        return {"type": _text_or_file, "metavar": "FILE|TEXT"}
    if "list" in kind:
        return {"action": "append", "metavar": "TEXT"}
    return {"metavar": "NAME" if name == "strategy" else "TEXT"}


def _switch(add: Callable[..., Any], *names_and_help: str) -> None:
    *names, help = names_and_help
    add(*names, action="store_const", const=True, help=help)


def _described() -> dict[str, str]:
    """What `SamplingParams` says of its fields; of several together, the first one has it."""
    found: dict[str, str] = {}
    for (first, *others), text in described().items():
        found[first] = text if not others else f"(with {', '.join(others)}) {text}"
        found |= {name: f"see {spelled(first)}" for name in others}
    return found


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _ids(text: str) -> list[int]:
    return [int(word) for word in text.replace(",", " ").split()]


def _bias(text: str) -> tuple[int, float]:
    id, equals, bias = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=X, such as 15043=-5")
    return int(id), float(bias)


def _early(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, text)


def _text_or_file(text: str) -> str:
    """A text, or what a file of that name holds."""
    try:
        if not Path(text).is_file():
            return text
        return Path(text).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise argparse.ArgumentTypeError(f"{text}: is no text in UTF-8") from None
        return text  # too long for a name


_NAMES = tuple(field.name for field in fields(SamplingParams))
