"""Flags of `jinfer generate`; imports nothing slow."""

# ruff: noqa: RUF009 (`option` gives a `dataclasses.field`)

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.cli.terminal.argument_parser import (
    CliParser,
    Flag,
    add_flags,
    flags_of,
    help_texts,
    spelled,
)
from jinfer.modelspec.bounded_types import Size, from_text, option
from jinfer.modelspec.foreign_names import flag_aliases, flag_hint
from jinfer.parallel.distributed import job_config
from jinfer.sampling.param_field import Parameter
from jinfer.sampling.request_errors import RequestError
from jinfer.sampling.sampling_params import ACTIVATIONS, PARAMETERS, SamplingParams

_FILES = ("json_schema", "grammar")  # may be given as a file
_FILE_NAME = re.compile(r"[^\s{}()\[\]:|\"']+\.(json|lark|gbnf|ebnf|txt)")
# Functions cannot be written in a shell.
_WITHOUT_FLAG = (*ACTIVATIONS, "logits_processors")

# Flags that `--help` shows.
_SHORT = (
    *(
        "--prompt",
        "--image",
        "--system",
        "--chat",
        "--max-tokens",
        "--temperature",
        "--ctx-size",
        "--set",
    ),
    *("--json", "--threads", "--help"),
)


@dataclass(frozen=True)
class ModelFlags:
    """Flags about the model, of `generate` and `serve`.

    Attributes:
        model: the source, as llama.cpp names it.
        ctx_size: maximum tokens of a sequence (engine.context).
        kv_cache: number format of the KV cache (quantization.kv_cache).
        dtype: number format of weights and computation.
        set: any key of the specification.
    """

    model: str | None = option(metavar="SOURCE")
    ctx_size: Size | None = option(key="engine.context")
    kv_cache: str | None = option(key="quantization.kv_cache", metavar="TYPE")
    dtype: str | None = option(key="dtype", metavar="TYPE")
    set: tuple[str, ...] = option((), metavar="KEY=VALUE")


@dataclass(frozen=True)
class GenerateFlags(ModelFlags):
    """Flags of `generate` besides the sampling parameters.

    Attributes:
        prompt: what to answer, as QUESTION; - reads it from standard input, and the input of a
            pipe follows it.
        prompt_file: a file with the prompt.
        image: an image that the question is about; several in their order.
        ids: token ids to continue instead of a text, such as "1 15043".
        raw: continue the prompt as it is, without a chat template.
        system: the system message.
        chat: a conversation; a --prompt is its first message.
        explain_speculation: colour tokens by who drafted them, and print how often drafts were
            right.
        json: print one JSON object with text, ids and timings.
        threads: use at most N cores of the CPU.
    """

    prompt: str | None = option()
    prompt_file: str | None = option(metavar="FILE")
    image: tuple[str, ...] = option((), metavar="FILE")
    ids: str | None = option(metavar="IDS")
    raw: bool = option(False)
    system: str | None = option()
    chat: bool = option(False)
    explain_speculation: bool = option(False)
    json: bool = option(False)
    threads: Size | None = option()


JOB_FLAGS = tuple(
    Flag(name, f"--{name}", (), str, about, metavar=name.upper())
    for name, about in job_config.FLAGS.items()
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
        instead=flag_hint,
    )
    parser.add_argument(
        "source",
        nargs="?",
        help="a name that 'jinfer list' shows, a checkpoint folder or file, a spec (.toml), "
        "package://..., owner/name of a hub",
    )
    parser.set_defaults(question=None)
    parser.add_argument(
        "--list",
        nargs="?",
        const="",
        metavar="TEXT",
        help="show the models that are known by name, or those with TEXT in their name or "
        "their family's; TEXT may be a pattern such as 'qwen*'",
    )
    add_flags(parser, flags_of(GenerateFlags))
    add_flags(
        parser.add_argument_group("several hosts", "'jinfer docs partition' says more"), JOB_FLAGS
    )
    add_sampling(parser)
    return parser


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    given = {name: getattr(options, name, None) for name in PARAMETERS}
    changes = {name: value for name, value in given.items() if value is not None}
    if options.greedy:
        changes["strategy"] = "greedy"
    return changes


@dataclass(frozen=True)
class _SamplingFlag(Flag):
    """A flag of a sampling parameter; `SamplingParams` checks its bounds."""

    def read(self, text: str) -> Any:
        text = _text_or_file(text) if self.name in _FILES else text
        return from_text(self.type, text)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each sampling parameter, and --greedy."""
    group = parser.add_argument_group("sampling", "'jinfer docs sampling' says more of each")
    greedy = Flag("greedy", "--greedy", (), bool, "always the likeliest token")
    texts = help_texts(SamplingParams)
    texts["n"] += " (llama.cpp's -n is --max-tokens)"
    parameters = [row for row in PARAMETERS.values() if row.name not in _WITHOUT_FLAG]
    add_flags(group, [greedy, *(_sampling_flag(row, texts[row.name]) for row in parameters)])


def _sampling_flag(parameter: Parameter, help: str) -> Flag:
    name = parameter.name
    metavar = "FILE|TEXT" if name in _FILES else "NAME" if name == "strategy" else ""
    aliases = (*(["--n"] if name == "n" else ()), *flag_aliases(name))
    return _SamplingFlag(name, spelled(name), aliases, parameter.type, help, metavar=metavar)


def token_ids(text: str) -> list[int]:
    """The numbers of `--ids`. Raises `RequestError`."""
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise RequestError(f"--ids {text!r}: write token ids, such as --ids '1 15043'")
    return [int(word) for word in words]


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
