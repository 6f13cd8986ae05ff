"""Token ids to text one at a time, never showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_UTF8_LONGEST = 4  # bytes


class Detokenizer:
    """Incremental decoding.

    For any ids, the joined results of `push` and the last `flush` equal
    `tokenizer.decode(prompt_ids + ids)` less the characters that were complete after the prompt:
    with no prompt, `tokenizer.decode(ids)`. So the space before the first word after a prompt is
    kept, and a character whose bytes began in the prompt is shown whole.

    U+FFFD is shown only for bytes that no later token can make a character of.

    Attributes:
        shown: characters so far.
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
        """The text that is certain once this token is known; may be empty."""
        data = self._token_bytes(id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._count(self._utf8.decode(data))

    def place(self, id: int) -> int:
        """Where in the text this token begins, if it is the next one.

        Tokens inside a character are where it begins.
        """
        begun, _ = self._utf8.getstate()
        data = self._token_bytes(id)
        if not begun or not data or _continues(begun, data):
            return self.shown
        return self.shown + len(begun.decode("utf-8", "replace"))

    def flush(self) -> str:
        """The rest at the end of a text: U+FFFD if a character is not complete, else nothing."""
        return self._count(self._utf8.decode(b"", final=True))

    def _count(self, text: str) -> str:
        self.shown += len(text)
        return text


def _continues(begun: bytes, data: bytes) -> bool:
    """Whether the first byte goes on with a character that is not complete."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(begun + data[:1])
    except UnicodeDecodeError:
        return False
    return True


def _last_bytes(token_bytes: Callable[[int], bytes], ids: Sequence[int]) -> bytes:
    """Enough of the end of a text to hold the beginning of a character that is not complete."""
    tail = b""
    for id in reversed(ids):
        tail = token_bytes(id) + tail
        if len(tail) >= _UTF8_LONGEST:
            break
    return tail
