"""Conflicting flags: those that contradict each other or have no effect are rejected."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jinfer.cli.terminal.argument_parser import flags_of, spelled
from jinfer.cli.terminal.generate_flags import GenerateFlags, sampling
from jinfer.sampling.samplers import SELECTABLE
from jinfer.sampling.sampling_params import CONSTRAINTS, PARAMETERS, SamplingParams


class FlagError(ValueError):
    """Flags that cannot be combined; the message is one line."""


@dataclass(frozen=True)
class _Conflict:
    """A flag, others that it excludes, and the reason."""

    flag: str
    others: tuple[str, ...]
    why: str


# Parameters that do nothing where nothing is drawn.
_DRAWING = tuple(p.name for p in PARAMETERS.values() if p.draws)
_CONFLICTS = (
    _Conflict("question", ("prompt", "prompt_file", "ids"), "both are the prompt"),
    _Conflict("ids", ("prompt", "prompt_file"), "both are the prompt"),
    _Conflict("prompt", ("prompt_file",), "both are the prompt"),
    _Conflict("ids", ("raw",), "token ids are continued as they are"),
    _Conflict("ids", ("system",), "token ids are continued as they are"),
    _Conflict("image", ("ids", "raw"), "images belong to the message of a chat template"),
    _Conflict("raw", ("system",), "the system message is a part of the chat template"),
    _Conflict("json", ("explain_speculation",), "JSON has no colours"),
    _Conflict("explain_speculation", ("n", "best_of"), "one answer is explained"),
    _Conflict("greedy", ("strategy",), "both say how tokens are chosen"),
    _Conflict("greedy", ("temperature", "seed", *_DRAWING), "nothing is left to chance"),
    *(
        _Conflict(item, CONSTRAINTS[number:], "an answer keeps to one of them")
        for number, item in enumerate(CONSTRAINTS[:-1], start=1)
    ),
)
_CHAT = ("ids", "json", "raw", "logprobs", "n", "best_of", "explain_speculation")

# Keys of a specification -> flags that set them.
FLAG_OF_KEY = {flag.key: flag.name for flag in flags_of(GenerateFlags) if flag.key}


def merge_alternatives(options: argparse.Namespace) -> argparse.Namespace:
    """Merges alternatives (positional and flag) for the source and the prompt.

    Raises:
        FlagError: both are given.
    """
    words = list(options.question or ())
    if options.model is not None and options.source is not None:
        words.insert(0, options.source)
    result = argparse.Namespace(**vars(options))
    result.source = options.source if options.model is None else options.model
    result.model, result.question = None, None
    if words:
        given = {name for name, value in vars(options).items() if value is not None}
        check_pairs(given | {"question"})
        result.prompt = " ".join(words)
    return result


def check(options: argparse.Namespace, chat: bool) -> None:
    """Check that flags do not conflict, before anything is opened.

    Args:
        chat: whether it is a chat, with or without the flag.

    Raises:
        FlagError: two flags conflict.
    """
    given = {name for name, value in vars(options).items() if value is not None}
    if options.list is not None and (others := sorted(given - {"list"})):
        raise FlagError(f"--list shows a table and ends; leave out {_named(others[0])}")
    if options.list is None and options.source is None:
        raise FlagError(
            "a source is missing: a name that 'jinfer list' shows, a checkpoint folder or file "
            "(--help)"
        )
    check_pairs(given)
    if chat and (other := _first(_CHAT, given)):
        why = "cannot go with --chat" if options.chat else "needs a prompt: --prompt or --ids"
        raise FlagError(f"{_named(other)} {why}")
    if options.chat and options.prompt == "-":
        raise FlagError("--chat with --prompt -: the chat reads standard input itself")
    if chat and options.ignore_eos and options.max_tokens is None:
        raise FlagError("--ignore-eos in a chat needs --max-tokens: no answer would end")
    if options.logprobs is not None and not options.json:
        raise FlagError("--logprobs needs --json, which shows them")
    _check_settings(options)


def check_pairs(given: Collection[str]) -> None:
    """Check given sampling flags for conflicts. Raises `FlagError`."""
    for never in _CONFLICTS:
        if never.flag in given and (other := _first(never.others, given)):
            raise FlagError(f"{_named(never.flag)} with {_named(other)}: {never.why}")


def _check_settings(options: argparse.Namespace) -> None:
    """Reject --set of a key that a flag sets as well."""
    keys = {f"generation.{name}": name for name in sampling(options)}
    keys |= {key: name for key, name in FLAG_OF_KEY.items() if getattr(options, name) is not None}
    if options.system is not None:
        keys["prompt.system"] = "system"
    for text in options.set or ():
        if (flag := keys.get(text.partition("=")[0].strip())) is not None:
            raise FlagError(f"--set {text} with {_named(flag)}: both set the same")


def check_effects(given: Collection[str], params: SamplingParams) -> None:
    """Check that sampling parameters from flags have an effect, given all parameters of a request.

    Raises:
        FlagError: one has no effect.
    """
    for flag, why in _without_effect(given, params):
        raise FlagError(f"{_named(flag)} does nothing here: {why}")
    if "n" in given and params.n > 1 and not params.draws:
        raise FlagError(
            f"-n {params.n} is how many answers there are, which would be equal: set a temperature "
            "above 0; how many tokens: --max-tokens"
        )


def _without_effect(given: Collection[str], params: SamplingParams) -> Iterator[tuple[str, str]]:
    rows = [row for row in PARAMETERS.values() if row.name in given]
    for row in rows:
        if row.strategies and params.strategy not in row.strategies:
            yield row.name, f"give --strategy {' or '.join(row.strategies)}"
    for row in rows:
        if row.needs and not getattr(params, row.needs):
            yield row.name, f"give {_named(row.needs)}"
    if not params.draws:
        why = f"nothing is drawn at {_why_greedy(params)}"
        for flag in ("seed", *_DRAWING):
            if flag in given and not (flag == "top_k" and params.strategy == "contrastive"):
                yield flag, why
        if "temperature" in given and params.temperature and params.strategy != "fsd":
            yield "temperature", why
    for flag in SELECTABLE:
        if flag in given and params.samplers is not None and flag not in params.samplers:
            yield flag, "--samplers leaves it out"


def _why_greedy(params: SamplingParams) -> str:
    if params.temperature == 0 and params.strategy not in ("greedy", "beam", "fsd", "contrastive"):
        return "a temperature of 0"
    strategy = "greedy" if params.strategy == "auto" else params.strategy
    return f"strategy {strategy}; set a temperature"


def _first(names: Collection[str], given: Collection[str]) -> str | None:
    return next((name for name in names if name in given), None)


def _named(name: str) -> str:
    return {"source": "the source", "question": "QUESTION"}.get(name) or spelled(name)
