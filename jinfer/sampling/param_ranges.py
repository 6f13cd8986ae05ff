"""The ranges of sampling parameters: a row per number, which is checked and described by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_STOP_IDS = 16  # ids that a request may name
MAX_END_IDS = 64  # ids that end a request, the model's own included, for `min_tokens` to forbid
MAX_LOGPROBS = 20
MAX_BEAMS = 64
MAX_ANSWERS = 128  # of one request
MAX_TEMPERATURE = 1_000_000  # every token is as likely as the next long before
MAX_SEED = 2**64 - 1
MAX_INDEX = 2**31 - 1  # counts and token ids are 32-bit on the device
MAX_BIASED = 512  # ids with a bias of their own, banned ones included
MAX_BAD_WORDS = 128  # sequences, of which a text may make two
MAX_BAD_LENGTH = 16  # tokens of each
MAX_BREAKERS = 64  # ids that DRY's matches do not cross
MAX_CANDIDATES = 64  # of FSD and contrastive search
MAX_NGRAM = 8


@dataclass(frozen=True)
class Range:
    """Numbers that a parameter may be.

    Attributes:
        least, most: both may be taken, `least` not where `above`.
        whole: only whole numbers.
        note: what the least one means.
    """

    least: float
    most: float
    whole: bool = False
    above: bool = False
    note: str = ""

    def holds(self, value: Any) -> bool:
        """Whether the value is a number in the range; neither a truth value nor NaN is one."""
        kinds = (int,) if self.whole else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        if self.above:
            return f"above {self.least}, and at most {self.most}"
        least = f"{self.least} ({self.note})" if self.note else f"{self.least}"
        return f"{'a whole number ' if self.whole else ''}from {least} to {self.most}"


def _count(least: int, most: int = MAX_INDEX, note: str = "") -> Range:
    return Range(least, most, whole=True, note=note)


_SHARE = Range(0, 1)
_ANY = Range(-100, 100)
_WINDOW = _count(-1, note="all")

RANGES: Mapping[str, Range] = {
    "temperature": Range(0, MAX_TEMPERATURE),
    "beams": _count(1, MAX_BEAMS),
    "length_penalty": _ANY,
    "top_k": _count(0, note="all"),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "typical_p": _SHARE,
    "tfs_z": _SHARE,
    "top_a": _SHARE,
    "top_n_sigma": Range(-1, 1_000_000),
    "xtc_probability": _SHARE,
    "xtc_threshold": _SHARE,
    "dynatemp_range": Range(0, MAX_TEMPERATURE),
    "dynatemp_exponent": Range(0, 100),
    "mirostat": _count(0, 2, note="off"),
    "mirostat_tau": Range(0, 100),
    "mirostat_eta": _SHARE,
    "repetition_penalty": Range(0, 100, above=True),
    "presence_penalty": _ANY,
    "frequency_penalty": _ANY,
    "penalty_last_n": _WINDOW,
    "dry_multiplier": Range(0, 100),
    "dry_base": Range(1, 100),
    "dry_allowed_length": _count(1),
    "dry_penalty_last_n": _WINDOW,
    "fsd_alpha": _SHARE,
    "fsd_k": _count(1, MAX_CANDIDATES),
    "fsd_n": _count(1, MAX_NGRAM),
    "fsd_beta": _SHARE,
    "fsd_pool": _count(0, MAX_CANDIDATES, "the whole vocabulary"),
    "random_fsd_tokens": _count(0),
    "random_fsd_probability": _SHARE,
    "penalty_alpha": _SHARE,
    "n": _count(1, MAX_ANSWERS),
    "best_of": _count(1, MAX_ANSWERS),
    "seed": _count(0, MAX_SEED),
    "max_tokens": _count(1),
    "min_tokens": _count(0),
    "logprobs": Range(0, MAX_LOGPROBS, whole=True),
}
# None: decided elsewhere, or not asked for.
OPTIONAL = frozenset({"temperature", "best_of", "seed", "max_tokens", "logprobs"})


def is_id(value: Any) -> bool:
    """Whether a value can be a token's id."""
    return _count(0).holds(value)
