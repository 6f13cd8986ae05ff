"""tokenizer.json checks: bounds on normalizers, patterns and merges, for untrusted files.

The library follows any instruction of the file: a normalizer that doubles a text forty times, a
regular expression with catastrophic backtracking. These cheap checks apply to every file; `load.py`
finds the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jinfer.tokenizer.pretokenizers import PRE_TOKENIZERS
from jinfer.tokenizer.tokenizer_base import TokenizerError

MAX_GROWTH = 64  # factor by which a text may grow
MAX_STEPS = 64  # of a normalizer or a pre-tokenizer
MAX_WORD = 1000  # characters of a word that WordPiece splits, in quadratic time
_PATTERN = re.compile(rb'"Regex"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ESCAPED_LETTER = re.compile(rb"\\u00[2-7]")  # used only to hide a word
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
_SECTIONS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
_KINDS = {
    "normalizer": dir(tokenizers.normalizers),
    "pre_tokenizer": dir(tokenizers.pre_tokenizers),
    "post_processor": dir(tokenizers.processors),
    "decoder": dir(tokenizers.decoders),
    "model": dir(tokenizers.models),
}
_EMPTY = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
_KNOWN = {
    *(pattern for rule in PRE_TOKENIZERS.values() for pattern in rule.patterns),
    *(r"\s+", r"\s", r"\n", r"\r", r" {2,}", r"[\n]", r"[\r\n]", r"[0-9]", r"\d", r"\d+"),
    *(r"\p{N}{1,3}", r"[0-9][0-9][0-9]", r"\p{P}", r"[^\S\r\n]+", r".", r"\S+"),
}


def is_usual(data: bytes) -> bool:
    """Whether all regular expressions of a tokenizer.json are known ones."""
    if _ESCAPED_LETTER.search(data):
        return False
    for found in _PATTERN.finditer(data):
        try:
            pattern = json.loads(b'"' + found[1] + b'"')
        except ValueError:
            return False
        if pattern not in _KNOWN:
            return False
    return True


def check_merges(path: Path, data: bytes) -> None:
    """Raises `TokenizerError` for merges that the library would cut inside a character.

    It strips the continuation prefix from a merge's second piece without checking; if the rest is
    not valid UTF-8, the process aborts.
    """
    if not _PREFIX.search(data) and not _ESCAPED_LETTER.search(data):
        return
    try:
        model = json.loads(data)["model"]
        prefix, merges = model.get("continuing_subword_prefix"), model.get("merges", ())
        seconds = [m.split(" ")[-1] if isinstance(m, str) else m[-1] for m in merges]
        fitting = all(second.startswith(prefix or "") for second in seconds)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise TokenizerError(f"{path}: not a tokenizer.json: {error}"[:300]) from None
    if not fitting:
        raise TokenizerError(
            f"{path}: model.merges: some second pieces do not start with {prefix!r}, which is "
            f"its continuing_subword_prefix"
        )


def misfit(data: bytes) -> str:
    """The section of a tokenizer.json that the library does not take, and its kind: a clause.

    Each step is tried alone, in an otherwise empty tokenizer; empty if none is at fault.
    """
    try:
        whole = json.loads(data)
        steps = {name: [*_leaves(whole.get(name), inner)] for name, inner in _SECTIONS.items()}
        steps["model"] = [whole["model"]]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return ""
    for section, known in steps.items():
        for step in known:
            try:
                tokenizers.Tokenizer.from_str(json.dumps({**_EMPTY, section: step}))
            except Exception as error:
                kind = step.get("type")
                if "untagged enum" not in str(error):
                    return f"{section}: {kind}: {error}"
                state = "has keys that do not fit" if kind in _KINDS[section] else "is not known"
                return f"{section}: the kind {kind!r:.100} {state}"
    return ""


def check_pipeline(path: Path, backend: tokenizers.Tokenizer) -> None:
    """Raises `TokenizerError` for steps that could take too much time or memory."""
    try:
        growth, steps = _normalizing(_state(backend.normalizer))
        cuts = sum(1 for _ in _leaves(_state(backend.pre_tokenizer), "pretokenizers"))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: its steps are not readable: {error}"[:300]) from None
    if growth > MAX_GROWTH:
        raise TokenizerError(f"{path}: its normalizer makes a text {growth:.3g} times as long")
    if max(steps, cuts) > MAX_STEPS:
        raise TokenizerError(f"{path}: has {max(steps, cuts)} steps before its model")
    word = getattr(backend.model, "max_input_chars_per_word", 0)
    if word > MAX_WORD:
        raise TokenizerError(
            f"{path}: max_input_chars_per_word is {word}; at most {MAX_WORD} are used"
        )


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _leaves(step: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """The steps of nested sequences."""
    if step is None:
        return
    if step.get("type") == "Sequence":
        for inner_step in step[inner]:
            yield from _leaves(inner_step, inner)
    else:
        yield step


def _normalizing(state: Any) -> tuple[float, int]:
    """The factor by which a text may grow, and the number of steps."""
    growth, steps = 1.0, 0
    for step in _leaves(state, "normalizers"):
        steps += 1
        if step["type"] == "Replace":
            growth *= _replacing(step["pattern"], step["content"])
    return growth, steps


def _replacing(pattern: Mapping[str, str], content: str) -> float:
    if "String" not in pattern:
        return max(1.0, len(content))  # it may match single letters, or the empty string
    if not pattern["String"]:
        raise ValueError("a Replace of nothing")
    return max(1.0, len(content) / len(pattern["String"]))
