"""Detokenizer: incremental decoding of token ids, never showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_UTF8_LONGEST = 4  # bytes


class Detokenizer:
    """Decodes tokens incrementally.

    For any ids, the joined results of `push` and the last `flush` equal
    `tokenizer.decode(prompt_ids + ids)` without the characters that were complete after the prompt;
    with no prompt, `tokenizer.decode(ids)`. So the space before the first word after a prompt is
    shown, and so is a whole character whose bytes began in the prompt.

    U+FFFD is shown only for bytes that no later token can complete.

    Attributes:
        shown: number of characters so far.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], strip_space: bool, prompt_ids: Sequence[int]
    ) -> None:
        self.shown = 0
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = _last_bytes(token_bytes, prompt_ids)
        self._at_start = strip_space and not tail
        self._utf8.decode(tail)

    def push(self, id: int) -> str:
        """The text that is certain after this token; may be empty."""
        data = self._token_bytes(id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._count(self._utf8.decode(data))

    def offset_of(self, id: int) -> int:
        """The offset in the text at which this token begins, if it comes next.

        Tokens inside a character have its offset.
        """
        begun, _ = self._utf8.getstate()
        data = self._token_bytes(id)
        if not begun or not data or _continues(begun, data):
            return self.shown
        return self.shown + len(begun.decode("utf-8", "replace"))

    def flush(self) -> str:
        """The rest at the end of a text: U+FFFD for an incomplete character, else nothing."""
        return self._count(self._utf8.decode(b"", final=True))

    def _count(self, text: str) -> str:
        self.shown += len(text)
        return text


def _continues(begun: bytes, data: bytes) -> bool:
    """Whether the first byte continues an incomplete character."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(begun + data[:1])
    except UnicodeDecodeError:
        return False
    return True


def _last_bytes(token_bytes: Callable[[int], bytes], ids: Sequence[int]) -> bytes:
    """Enough bytes of the end of a text to contain an incomplete character's beginning."""
    tail = b""
    for id in reversed(ids):
        tail = token_bytes(id) + tail
        if len(tail) >= _UTF8_LONGEST:
            break
    return tail
