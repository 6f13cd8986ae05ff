"""Vocabulary coverage: whether a vocabulary that lacks single bytes can write any answer."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from jinfer.sampling.request_errors import ConstraintError
from jinfer.sampling.structured.matcher import Matcher
from jinfer.sampling.structured.token_trie import Vocabulary

if TYPE_CHECKING:
    from jaxtyping import Int

MAX_STEPS = 500
_CLOSING = b'}]")>,:.0123456789'  # what tends to end something, the likeliest first
_ALIKE = 64  # candidates that are ordered by how often they were tried
_RANKED: WeakKeyDictionary[Vocabulary, np.ndarray] = WeakKeyDictionary()


def find_answer(matcher: Matcher, vocabulary: Vocabulary) -> bool:
    """Looks for one answer that the vocabulary can write.

    Depth first: short closing tokens before others, tokens that were often tried last. It may miss
    an answer that exists; where it finds none, hardly anything can be written.
    """
    rank = _ranked(vocabulary)
    words = np.zeros(-(-vocabulary.size // 32), np.uint32)
    taken: dict[int, int] = {}
    waiting: list[list[int]] = []  # per depth: tokens still to be tried
    for _ in range(MAX_STEPS):
        if matcher.may_end:
            return True
        try:
            matcher.mask(words)
        except ConstraintError:
            words[:] = 0
            matcher = matcher.fork()
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        first = rank[bits[rank] > 0][:_ALIKE].tolist()
        waiting.append(sorted(first, key=lambda id: taken.get(id, 0) // 4))
        while waiting and not waiting[-1]:
            waiting.pop()
            if waiting:
                matcher.rollback(1)
        if not waiting:
            return False
        token = waiting[-1].pop(0)
        taken[token] = taken.get(token, 0) + 1
        matcher.advance(token)
    return False


def _ranked(vocabulary: Vocabulary) -> Int[np.ndarray, " ids"]:
    """Ids of the tokens that are text, those to try first at the beginning."""
    if (known := _RANKED.get(vocabulary)) is not None:
        return known

    def key(id: int) -> tuple[int, int]:
        data = vocabulary.tokens[id]
        place = _CLOSING.find(data)
        return len(data), place if place >= 0 else len(_CLOSING)

    ids = (i for i, data in enumerate(vocabulary.tokens) if data)
    found = _RANKED[vocabulary] = np.array(sorted(ids, key=key))
    return found
