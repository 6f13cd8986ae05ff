"""Flags of `jinfer generate`; imports nothing slow."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jinfer.cli.terminal.argument_parser import CliParser
from jinfer.cli.terminal.foreign_flags import FLAG_ALIASES, FLAG_HINTS
from jinfer.distributed import job_config
from jinfer.sampling import param_ranges as ranges
from jinfer.sampling.param_field import Parameter
from jinfer.sampling.parameter_docs import described
from jinfer.sampling.request_errors import RequestError
from jinfer.sampling.sampling_params import ACTIVATIONS, PARAMETERS

_FILES = ("json_schema", "grammar")  # may be given as a file
_FILE_NAME = re.compile(r"[^\s{}()\[\]:|\"']+\.(json|lark|gbnf|ebnf|txt)")


# Flags that `--help` shows.
_SHORT = (
    *("--prompt", "--system", "--chat", "--max-tokens", "--temperature", "--ctx-size", "--set"),
    *("--json", "--threads", "--help"),
)


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The argument parser; flags that are not given are None."""
    chat = prog.endswith(" chat")
    parser = CliParser(
        prog=prog,
        usage="%(prog)s [SOURCE] [QUESTION] [flags]",
        description="A conversation with a model."
        if chat
        else "Answers a question, or continues a text. Without one, in a terminal: a chat.",
        allow_abbrev=False,
        short=_SHORT,
        words="question",
        instead=FLAG_HINTS,
    )
    add = partial(_add, parser.add_argument)
    add(
        "source",
        nargs="?",
        help="a name that 'jinfer list' shows, a checkpoint folder or file, a spec (.toml), "
        "package://..., owner/name of a hub",
    )
    parser.set_defaults(question=None)
    add(
        "--list",
        nargs="?",
        const="",
        metavar="TEXT",
        help="show the models that are known by name, or those with TEXT in their name or "
        "their family's; TEXT may be a pattern such as 'qwen*'",
    )
    add(
        "--prompt",
        metavar="TEXT",
        help="what to answer, as QUESTION; - reads it from standard input, and what comes through "
        "a pipe follows it",
    )
    add("--prompt-file", metavar="FILE", help="a file with what to answer")
    add("--ids", help='token ids to continue instead of a text, such as "1 15043"')
    _switch(add, "--raw", "continue the prompt as it is, without a chat template")
    add("--system", metavar="TEXT", help="the system message")
    _switch(add, "--chat", "a conversation; a --prompt is its first message")
    add("--model", "-m", metavar="SOURCE", help="the source, as llama.cpp names it")
    add(
        *("--ctx-size", "-c", "--max-model-len"),
        type=_positive,
        metavar="N",
        help="tokens that a sequence may have (engine.context)",
    )
    add(
        *("--kv-cache", "-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype"),
        metavar="KIND",
        help="what numbers of the cache are kept as (quantization.kv_cache)",
    )
    add("--dtype", metavar="TYPE", help="of weights and computation")
    add("--set", action="append", metavar="KEY=VALUE", help="set any key of the spec")
    _switch(
        add,
        "--explain-speculation",
        "colour tokens by who drafted them, and print how often drafts were right",
    )
    _switch(add, "--json", "print one JSON object with text, ids and timings")
    add("--threads", type=_positive, metavar="N", help="use at most N cores of the CPU")
    several = parser.add_argument_group("several hosts", "'jinfer docs partition' says more")
    for name, about in job_config.FLAGS.items():
        several.add_argument(f"--{name}", help=about, metavar=name.upper())
    add_sampling(parser)
    return parser


def _add(add: Callable[..., Any], *names: str, **how: Any) -> None:
    """Adds an argument, with aliases of other engines that the help omits.

    The first name is jinfer's and is shown.
    """
    add(names[0], **how)
    others = (*names[1:], *FLAG_ALIASES.get(names[0], ()))
    if others:
        dest = names[0].removeprefix("--").replace("-", "_")
        add(*others, **how | {"dest": dest, "help": argparse.SUPPRESS})


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    given = {name: getattr(options, name, None) for name in PARAMETERS}
    changes = {name: value for name, value in given.items() if value is not None}
    if options.greedy:
        changes["strategy"] = "greedy"
    return changes


def spelled(name: str) -> str:
    """The flag of a parameter."""
    return "-n" if name == "n" else f"--{name.replace('_', '-')}"


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each sampling parameter, and --greedy."""
    group = parser.add_argument_group("sampling", "'jinfer docs sampling' says more of each")
    add = partial(_add, group.add_argument)
    help = _described()
    _switch(add, "--greedy", "always the likeliest token")
    for name, parameter in PARAMETERS.items():
        if parameter.range is ranges.PROCESSORS:
            continue  # functions cannot be written in a shell
        if name in ACTIVATIONS:
            continue
        names = ["-n", "--n"] if name == "n" else list(map(spelled, (name, *parameter.aliases)))
        text = help.get(name, "").replace("%", "%%")
        if name == "n":
            text += " (llama.cpp's -n is --max-tokens)"
        if parameter.range is ranges.SWITCH:
            _switch(add, *names, text)
            continue
        add(*names, help=text, **_form(parameter))


def _form(parameter: Parameter) -> Mapping[str, Any]:
    """argparse's keyword arguments for a parameter."""
    if parameter.name in _FILES:
        return {"type": _text_or_file, "metavar": "FILE|TEXT"}
    match parameter.range:
        case ranges.Range(whole=whole):
            return {"type": int, "metavar": "N"} if whole else {"type": float, "metavar": "X"}
        case ranges.Items(item=ranges.is_id):
            return {"type": _ids, "metavar": "IDS"}
        case ranges.IdSequences():
            return {"type": _ids, "action": "append", "metavar": "IDS"}
        case ranges.Biases():
            return {"type": _bias, "action": "append", "metavar": "ID=X"}
        case ranges.Items() | ranges.Names():
            return {"action": "append", "metavar": "TEXT"}
        case ranges.EARLY:
            return {"type": _early, "metavar": "true|false|never"}
    return {"metavar": "NAME" if parameter.name == "strategy" else "TEXT"}


def _switch(add: Callable[..., Any], *names_and_help: str) -> None:
    *names, help = names_and_help
    add(*names, action="store_const", const=True, help=help)


def _described() -> dict[str, str]:
    """Help texts by parameter; of parameters documented together, for the first."""
    result: dict[str, str] = {}
    for (first, *others), text in described().items():
        result[first] = text if not others else f"(with {', '.join(others)}) {text}"
        result |= {name: f"see {spelled(first)}" for name in others}
    return result


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
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


def token_ids(text: str) -> list[int]:
    """The numbers of `--ids`. Raises `RequestError`."""
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise RequestError(f"--ids {text!r}: write token ids, such as --ids '1 15043'")
    return [int(word) for word in words]


def _early(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, text)


def _text_or_file(text: str) -> str:
    """A text, or the content of the file of that name."""
    try:
        if not Path(text).is_file():
            if _FILE_NAME.fullmatch(text):
                raise argparse.ArgumentTypeError(f"{text}: there is no such file")
            return text
        return Path(text).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise argparse.ArgumentTypeError(f"{text}: is no text in UTF-8") from None
        return text  # longer than a file name may be
