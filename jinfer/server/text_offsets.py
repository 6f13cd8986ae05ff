"""Where tokens begin in a text, as completions' log-probabilities say it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from jinfer.engine.requests import Request
from jinfer.tokenizer import Tokenizer
from jinfer.tokenizer.detokenizer import Detokenizer
from jinfer.tokenizer.tokenizer_base import valid_text


def places(detokenizer: Detokenizer, ids: Sequence[int]) -> list[int]:
    """Where each token begins in the text that they become.

    Those inside a character begin where it does. The detokenizer takes them in.
    """
    found = []
    for id in ids:
        found.append(detokenizer.place(id))
        detokenizer.push(id)
    return found


class Offsets:
    """Where the tokens of an answer begin in its text, while it comes."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        """Of the answer to a request; without a tokenizer it has no text."""
        self._detokenizer = None
        self._shown = 0
        if tokenizer is not None:
            special = request.sampling.skip_special
            self._detokenizer = tokenizer.detokenizer(
                request.prompt, skip_special=special, shown=request.shown
            )

    def of(self, ids: Sequence[int], text: str = "", *, ended: bool = False) -> list[int]:
        """The places of further tokens.

        Args:
            text: what was shown with them; a stop text may still be in doubt.
            ended: no more will be shown: what was not is at the end.
        """
        self._shown += len(text)
        if self._detokenizer is None:
            return [0] * len(ids)
        found = places(self._detokenizer, ids)
        return [min(place, self._shown) for place in found] if ended else found


def places_in(
    tokenizer: Tokenizer, text: str, ids: Sequence[int], *, last: bool = False
) -> list[int]:
    """Where the tokens of a text begin in it, which may name special tokens.

    Where a tokenizer changes what it reads, a place is as far from the beginning as the tokens
    before it are long; never beyond the end.

    Args:
        last: they may be only its last ones.
    """
    data = valid_text(text).encode()
    begins = [0, *accumulate(len(letter.encode()) for letter in valid_text(text))]
    own = b"".join(map(tokenizer.token_bytes, ids))
    found, at = [], max(0, len(data) - len(own)) if last else 0
    for id in ids:
        own = tokenizer.spelled(id)
        if tokenizer.is_control(id) and not data.startswith(own, at):
            own = b""  # what the tokenizer puts around a text
        if at == 0 and tokenizer.strip_space and not data.startswith(own):
            own = own.removeprefix(b" ")
        found.append(bisect_right(begins, at) - 1)
        at = min(at + len(own), len(data))
    return found
