"""Forbidden tokens: next tokens that a request's rules exclude, computed on the host.

`penalties.rules` excludes them on the device. The host needs them with a grammar: a forced token is
not sampled, and rules may exclude all tokens that a grammar allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jinfer.sampling.param_types import MAX_BAD_LENGTH
from jinfer.sampling.sampling_metadata import SamplingMetadata
from jinfer.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxtyping import UInt


@dataclass(frozen=True, eq=False)
class ForbiddenTokens:
    """The rules of one request.

    Attributes:
        never: a bit for each token that is always forbidden.
        ends: tokens that are forbidden until the answer has `least` tokens.
        words: sequences of tokens whose last may not follow the others.
        params: the request's parameters.
    """

    never: UInt[np.ndarray, " words"]
    ends: tuple[int, ...]
    least: int
    words: tuple[tuple[int, ...], ...]
    params: SamplingParams

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        metadata: SamplingMetadata,
        allowed: UInt[np.ndarray, " words"] | None,
        never: Iterable[int] = (),
    ) -> ForbiddenTokens:
        """Reads the rules from a request's row of sampling metadata, in NumPy.

        Args:
            allowed: bits of `allowed_token_ids`; None: all.
            never: tokens that the model never outputs.
        """
        row: Any = metadata
        words = len(allowed) if allowed is not None else 0
        biased = row.bias_ids[0][np.isneginf(row.biases[0])].tolist()
        banned = [*never, *(id for id in biased if id >= 0)]
        words = max([words, *(id // 32 + 1 for id in banned)])
        bits = np.zeros(words * 32, np.uint8)
        bits[banned] = 1
        packed = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
        if allowed is not None:
            packed[: len(allowed)] |= ~allowed
        bad = [tuple(id for id in ids if id >= 0) for ids in row.bad_words[0].tolist()]
        ends = tuple(id for id in row.end_ids[0].tolist() if id >= 0)
        return cls(packed, ends, params.min_tokens, tuple(filter(None, bad)), params)

    def now(self, tokens: Sequence[int], drawn: int) -> list[int]:
        """Returns tokens that are forbidden next, in addition to those that always are.

        Args:
            tokens: the prompt and the answer so far.
            drawn: number of tokens of the answer.
        """
        recent = tuple(tokens[-MAX_BAD_LENGTH:])
        completed = [word[-1] for word in self.words if _follows(recent, word[:-1])]
        return [*completed, *(self.ends if drawn < self.least else ())]

    def forbids(self, id: int, tokens: Sequence[int], drawn: int) -> bool:
        """Whether a token is forbidden next."""
        word = self.never[id // 32] if id // 32 < len(self.never) else 0
        return bool(int(word) >> id % 32 & 1) or id in self.now(tokens, drawn)

    def clear(self, mask: UInt[np.ndarray, " words"], tokens: Sequence[int], drawn: int) -> None:
        """Clears the bits of forbidden tokens in a mask."""
        mask[: len(self.never)] &= ~self.never[: len(mask)]
        for id in self.now(tokens, drawn):
            if id // 32 < len(mask):
                mask[id // 32] &= ~np.uint32(1 << id % 32)

    def names(self, answer: Sequence[int], tokens: Sequence[int], drawn: int) -> list[str]:
        """Names the parameters that forbid these ids; none: the model never outputs them."""
        ids = set(answer)
        allowed = self.params.allowed_token_ids
        pairs = cast("tuple[tuple[int, float], ...]", self.params.logit_bias)
        biased = {id for id, bias in pairs if np.isneginf(bias)}
        now = set(self.now(tokens, self.least))
        forbidden_by = {
            "banned_token_ids": ids & set(self.params.banned_token_ids),
            "logit_bias": ids & biased,
            "allowed_token_ids": ids - set(ids if allowed is None else allowed),
            "bad_words": ids & now,
            "min_tokens": ids & set(self.ends) if drawn < self.least else set(),
        }
        return [name for name, matching in forbidden_by.items() if matching]


def _follows(tokens: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return not end or tokens[-len(end) :] == end


def token_ids(mask: UInt[np.ndarray, " words"]) -> list[int]:
    """Returns the ids whose bits are set."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")
    return [int(id) for id in np.flatnonzero(bits)]
