"""Drafts that tests choose, and answers with them and without."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from jinfer import LLM, Completion, SamplingParams
from jinfer.engine.engine_stats import DraftCounts
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.speculate.draft_length import DraftLength
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.speculative_decoding import SpeculativeDecoder
from jinfer.speculate.token_tree import ROOT, TokenTree


@dataclass(eq=False)
class RandomTrees(Drafter):
    """Trees of random shape, some of whose paths begin like the answer.

    Attributes:
        answers: prompt -> answer.
        least, most: nodes of a tree, where there is room for them.
    """

    answers: Mapping[tuple[int, ...], Sequence[int]]
    vocab: int
    most: int
    least: int = 1
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def draft(self, requested: Sequence[tuple[RunningSequence, int]]) -> list[TokenTree]:
        return [self.tree(sequence, levels) for sequence, levels in requested]

    def tree(self, sequence: RunningSequence, levels: int) -> TokenTree:
        prompt = sequence.request.prompt
        answer = self.answers[prompt][len(sequence.tokens) - len(prompt) :]
        tokens, parents, depths = list[int](), list[int](), list[int]()
        count = self.rng.randint(self.least, self.most)
        while len(tokens) < count:
            open_ = [ROOT, *(i for i, d in enumerate(depths) if d < levels)]
            # The newest node more often, so that there are deep trees too.
            parent = self.rng.choice([*open_, *open_[-1:] * 3])
            depth = 1 if parent == ROOT else depths[parent] + 1
            right = depth <= len(answer) and self.rng.random() < 0.7
            token = answer[depth - 1] if right else self.rng.randrange(self.vocab)
            siblings = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
            if token not in siblings:
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
        return TokenTree(tuple(tokens), tuple(parents), ("random",) * len(tokens))


@contextmanager
def speculating(llm: LLM, *drafters: Drafter, nodes: int | None = 8) -> Iterator[DraftCounts]:
    """The model with drafts; gives the counts of these alone."""
    engine = llm.session.engine
    engine.speculator = SpeculativeDecoder(engine, drafters, DraftLength(nodes))
    engine.drafted = DraftCounts()
    try:
        yield engine.drafted
    finally:
        engine.speculator = None


def ids(vocab: int, *lengths: int) -> list[list[int]]:
    """Prompts of random tokens."""
    rng = np.random.default_rng(5)
    return [rng.integers(3, vocab, length).tolist() for length in lengths]


def known(prompts: Sequence[list[int]], answers: Sequence[Completion]) -> dict:
    """What a drafter has to know of some answers."""
    pairs = zip(prompts, answers, strict=True)
    return {tuple(prompt): answer.token_ids for prompt, answer in pairs}


def same(got: Sequence[Completion], plain: Sequence[Completion]) -> None:
    """Tokens, and log-probabilities to the last bit."""
    for one, other in zip(got, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        assert one.text == other.text
        assert one.logprobs == other.logprobs


def alone(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[Completion]:
    """The answers to prompts one after the other, without drafts."""
    return [llm.generate([prompt], params)[0] for prompt in prompts]
