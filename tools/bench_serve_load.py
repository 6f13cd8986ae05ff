"""Server load: prompts, lengths and arrival times, all from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_WORDS = (
    "river", "stone", "paper", "window", "garden", "summer", "bridge", "letter", "market", "doctor",
    "silver", "engine", "yellow", "forest", "island", "museum", "pencil", "rocket", "tunnel",
)  # fmt: skip


@dataclass(frozen=True)
class LengthMix:
    """A distribution of lengths.

    Attributes:
        lengths: words of a prompt, or tokens of an answer.
        weights: of each.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> LengthMix:
        """`128`, or `32:3,512:1`: 32 three times as often as 512. Raises `ValueError`."""
        lengths, weights = [], []
        for part in text.split(","):
            length, _, weight = part.partition(":")
            lengths.append(int(length))
            weights.append(float(weight or 1))
        if min(lengths) < 1 or not all(0 < weight < 1e9 for weight in weights):
            raise ValueError("lengths are at least 1, weights above 0")
        return cls(tuple(lengths), tuple(weights))

    def draw(self, rng: random.Random) -> int:
        """A random length."""
        return rng.choices(self.lengths, self.weights)[0]


@dataclass(frozen=True)
class Workload:
    """The requests of users.

    Attributes:
        prompt: words of a question.
        answer: max tokens of an answer.
        shared: words of the prefix shared by all conversations.
        turns: questions per conversation, each with the history before it.
        seed: of the random generator.
    """

    prompt: LengthMix
    answer: LengthMix
    shared: int = 0
    turns: int = 1
    seed: int | str = 0


@dataclass(frozen=True)
class ChatTurn:
    """A question, and the max length of its answer."""

    question: str
    tokens: int


def conversation(work: Workload, number: int) -> list[ChatTurn]:
    """The turns of one user; the same for each run with the same seed."""
    rng = random.Random(f"{work.seed}/{number}")
    begin = words(random.Random(f"{work.seed}/shared"), work.shared)
    turns = []
    for turn in range(work.turns):
        own = words(rng, work.prompt.draw(rng))
        before = f"{begin}\n\n" if begin and turn == 0 else ""
        turns.append(ChatTurn(before + own, work.answer.draw(rng)))
    return turns


def words(rng: random.Random, count: int) -> str:
    """A text of so many words; a common word is about a token."""
    return " ".join(rng.choices(_WORDS, k=count))


def arrivals(rate: float, count: int, seed: int | str) -> Sequence[float]:
    """Arrival times of a Poisson process of this rate, in seconds."""
    rng, now, times = random.Random(f"{seed}/arrivals"), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times
