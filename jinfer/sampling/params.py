"""What a request asks of the choice of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

MAX_STOP_IDS = 16  # ids that a request may name
MAX_END_IDS = 64  # ids that end a request, the model's own included, for `min_tokens` to forbid
MAX_LOGPROBS = 20
MAX_BEAMS = 64
MAX_TEMPERATURE = 1_000_000  # every token is as likely as the next long before
MAX_SEED = 2**64 - 1
MAX_INDEX = 2**31 - 1  # counts and token ids are 32-bit on the device

Strategy = Literal["auto", "greedy", "sample", "top_k", "top_p", "min_p", "beam"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request asks of the choice of tokens.

    Filters apply in this order, each to what the one before left: temperature, top_k, top_p, min_p.

    Attributes:
        strategy: "greedy" takes the likeliest token; "sample" draws, with every filter given;
            "top_k", "top_p", "min_p" draw and insist on that filter; "auto" draws if a
            temperature above 0 or a filter is given, and is greedy otherwise.
        beams, length_penalty: of the strategy "beam", which keeps the `beams` likeliest sequences
            and takes the one with the greatest log-probability / length ** length_penalty.
        temperature: logits are divided by it; 0 is greedy; None: 1 when drawing.
        top_k: only the k likeliest tokens; 0: all.
        top_p: only the likeliest tokens that together have this probability (arXiv 1904.09751).
        min_p: only tokens at least this share of the likeliest's probability (arXiv 2407.01082).
        seed: the same seed, prompt and parameters give the same tokens; None: a new one.
        max_tokens: at most so many new tokens; None: up to the context's end.
        min_tokens: no end of sequence and no stop token before so many.
        stop: texts that end the answer; they are not part of it.
        stop_token_ids: ids that end the answer; they are not part of its text.
        ignore_eos: go on after the model's own end of sequence.
        logprobs: also give the log-probability of each token, and of so many likeliest ones.

    Raises:
        ValueError: for a value outside its range.
    """

    strategy: Strategy = "auto"
    beams: int = 4
    length_penalty: float = 1.0
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, right, expected in self._rules():
            if not right:
                raise ValueError(f"{name} must be {expected}, not {getattr(self, name)!r}")

    def _rules(self) -> Iterable[tuple[str, bool, str]]:
        yield "strategy", self.strategy in get_args(Strategy), f"one of {get_args(Strategy)}"
        temperature = 0.0 if self.temperature is None else self.temperature
        cool = _number(temperature, 0, MAX_TEMPERATURE)
        yield "temperature", cool, f"from 0 to {MAX_TEMPERATURE}"
        yield "beams", _whole(self.beams, 1, MAX_BEAMS), f"a whole number from 1 to {MAX_BEAMS}"
        yield "length_penalty", _number(self.length_penalty, -100, 100), "from -100 to 100"
        yield "top_k", _whole(self.top_k, 0), f"a whole number from 0 (all) to {MAX_INDEX}"
        yield "top_p", _number(self.top_p, 0, 1) and self.top_p > 0, "above 0, and at most 1"
        yield "min_p", _number(self.min_p, 0, 1), "from 0 to 1"
        seed = 0 if self.seed is None else self.seed
        most = 1 if self.max_tokens is None else self.max_tokens
        yield "seed", _whole(seed, 0, MAX_SEED), f"a whole number from 0 to {MAX_SEED}"
        yield "max_tokens", _whole(most, 1), f"a whole number from 1 to {MAX_INDEX}"
        yield "min_tokens", _whole(self.min_tokens, 0), f"a whole number from 0 to {MAX_INDEX}"
        yield "stop", all(isinstance(s, str) and s for s in self.stop), "texts, none empty"
        yield (
            "stop_token_ids",
            len(self.stop_token_ids) <= MAX_STOP_IDS
            and all(_whole(i, 0) for i in self.stop_token_ids),
            f"at most {MAX_STOP_IDS} token ids",
        )
        wanted = self.logprobs
        yield (
            "logprobs",
            wanted is None or _whole(wanted, 0, MAX_LOGPROBS),
            f"from 0 to {MAX_LOGPROBS}",
        )
        missing = {"top_k": not self.top_k, "top_p": self.top_p == 1.0, "min_p": not self.min_p}
        yield self.strategy, not missing.get(self.strategy, False), "set for that strategy"

    @property
    def drawing_temperature(self) -> float:
        """The temperature to draw with; 0 for greedy."""
        filtered = bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0
        if self.strategy == "greedy" or self.temperature == 0:
            return 0.0
        if self.strategy == "auto" and self.temperature is None and not filtered:
            return 0.0
        return 1.0 if self.temperature is None else self.temperature


def _whole(value: Any, least: int, most: int = MAX_INDEX) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(value: Any, least: float, most: float) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    )
