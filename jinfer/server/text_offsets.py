"""Text offsets: where tokens begin in a text, for the log-probabilities of completions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from jinfer.engine.requests import Request
from jinfer.tokenizer import Tokenizer
from jinfer.tokenizer.detokenizer import Detokenizer
from jinfer.tokenizer.tokenizer_base import valid_text


def token_offsets(detokenizer: Detokenizer, ids: Sequence[int]) -> list[int]:
    """The offset of each token in the decoded text.

    A token that continues a character has that character's offset. Advances the detokenizer.
    """
    result = []
    for id in ids:
        result.append(detokenizer.offset_of(id))
        detokenizer.push(id)
    return result


class TextOffsets:
    """Text offsets of an answer's tokens, incrementally."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        """Begins the answer to a request; without a tokenizer all offsets are 0."""
        self._detokenizer = None
        self._shown = 0
        if tokenizer is not None:
            special = request.sampling.skip_special
            self._detokenizer = tokenizer.detokenizer(
                request.prompt, skip_special=special, shown=request.shown
            )

    def of(self, ids: Sequence[int], text: str = "", *, ended: bool = False) -> list[int]:
        """The offsets of more tokens.

        Args:
            text: the text shown with them; part may be held back for a stop text.
            ended: no more text follows, so tokens that were not shown are at the end.
        """
        self._shown += len(text)
        if self._detokenizer is None:
            return [0] * len(ids)
        found = token_offsets(self._detokenizer, ids)
        return [min(place, self._shown) for place in found] if ended else found


def token_offsets_in(
    tokenizer: Tokenizer, text: str, ids: Sequence[int], *, last: bool = False
) -> list[int]:
    """The offset of each token in a text that may name special tokens.

    Where the tokenizer normalizes the text, an offset is the length of the tokens before it, at
    most the text's length.

    Args:
        last: the tokens may be only the last ones of the text.
    """
    data = valid_text(text).encode()
    begins = [0, *accumulate(len(letter.encode()) for letter in valid_text(text))]
    own = b"".join(map(tokenizer.token_bytes, ids))
    result, at = [], max(0, len(data) - len(own)) if last else 0
    for id in ids:
        own = tokenizer.spelled(id)
        if tokenizer.is_control(id) and not data.startswith(own, at):
            own = b""  # bytes that the tokenizer adds around a text
        if at == 0 and tokenizer.strip_space and not data.startswith(own):
            own = own.removeprefix(b" ")
        result.append(bisect_right(begins, at) - 1)
        at = min(at + len(own), len(data))
    return result
