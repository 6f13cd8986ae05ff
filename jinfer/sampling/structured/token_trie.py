"""Token trie: a tokenizer as llguidance reads it, by the bytes of each token.

A constraint allows a token if the token's bytes continue the answer. So the trie has the bytes
that the detokenizer joins. No text matches control tokens, only a grammar that names them
(`<|im_end|>`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import cast

from llguidance import LLTokenizer, TokenizerWrapper

from jinfer.tokenizer import Tokenizer

MAX_TOKEN_BYTES = 1000  # llguidance's trie is at most 1,024 deep
MAX_TOKENIZERS = 4  # tokenizers with cached tries

_SPECIAL_MARK = b"\xff"  # no byte of UTF-8: before the name of a token that is not text
_UTF8_BYTES = frozenset({*range(0xC0), *range(0xC2, 0xF5)})
_COMMON = frozenset({*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC3, 0xF0)})
_LOCK = Lock()
_KNOWN: OrderedDict[Tokenizer, Vocabulary] = OrderedDict()  # most recently used last


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer with its trie.

    Attributes:
        tokenizer: the tokenizer.
        tokens: bytes of each id; empty for ids that are not text.
        trie: llguidance's tokenizer.
        eos_ids: ids that end an answer; may be empty.
        missing: bytes of UTF-8 that are not a token by themselves; often control characters, or
            the first bytes of planes of Unicode that are not in use.
    """

    tokenizer: Tokenizer
    tokens: tuple[bytes, ...]
    trie: LLTokenizer
    eos_ids: tuple[int, ...]
    missing: frozenset[int]

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.tokens)

    def can_write(self, text: str) -> bool:
        """Whether the tokens can write any text of common characters and these, from any state."""
        return self.missing.isdisjoint(_COMMON) and self.missing.isdisjoint(text.encode())


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Returns the trie of a tokenizer, built at first use; thread-safe."""
    with _LOCK:
        if (found := _KNOWN.get(tokenizer)) is None:
            found = _KNOWN[tokenizer] = _build(tokenizer)
            while len(_KNOWN) > MAX_TOKENIZERS:
                _KNOWN.popitem(last=False)
        _KNOWN.move_to_end(tokenizer)
        return found


def forget_vocabulary(tokenizer: Tokenizer) -> None:
    """Frees the trie of a tokenizer."""
    with _LOCK:
        _KNOWN.pop(tokenizer, None)


def _build(tokenizer: Tokenizer) -> Vocabulary:
    special = _special_tokens(tokenizer)
    tokens = tuple(
        b"" if id in special else _text_bytes(tokenizer, id) for id in range(tokenizer.vocab_size)
    )
    eos_ids = tuple(id for id in tokenizer.eos_ids if 0 <= id < len(tokens))
    source = _Source(
        tokens=[
            _SPECIAL_MARK + special[id].encode() if special.get(id) else data
            for id, data in enumerate(tokens)
        ],
        special_token_ids=[id for id, name in special.items() if name],
        eos_token_id=eos_ids[0] if eos_ids else None,
        encode=_exact_encoder(tokenizer, tokens),
    )
    trie = LLTokenizer(cast(TokenizerWrapper, source), eos_token=list(eos_ids) or None)
    missing = _UTF8_BYTES - {data[0] for data in tokens if len(data) == 1}
    return Vocabulary(tokenizer, tokens, trie, eos_ids, missing)


@dataclass(frozen=True)
class _Source:
    """The attributes that `LLTokenizer` reads."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int | None
    encode: Callable[[str], list[int]]
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


def _special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Returns id -> name of tokens that are not text, "unknown" included."""
    named = {id: name for name, id in tokenizer.special.control.items()}
    others = (
        *tokenizer.eos_ids,
        tokenizer.bos_id,
        tokenizer.pad_id,
        tokenizer.unk_id,
        tokenizer.mask_id,
    )
    named |= {id: tokenizer.token(id) for id in others if id is not None and id not in named}
    return {id: name for id, name in named.items() if 0 <= id < tokenizer.vocab_size}


def _text_bytes(tokenizer: Tokenizer, id: int) -> bytes:
    data = tokenizer.token_bytes(id)
    return b"" if data.startswith(_SPECIAL_MARK) or len(data) > MAX_TOKEN_BYTES else data


def _exact_encoder(tokenizer: Tokenizer, tokens: tuple[bytes, ...]) -> Callable[[str], list[int]]:
    """Encodes a text in the middle of an answer to ids whose bytes are exactly the text's.

    Some tokenizers put a space before a text. They encode the text after a line break, whose ids
    are then removed. Text that normalization would change is spelled by longest tokens.
    """
    ids = {data: id for id, data in reversed(list(enumerate(tokens))) if data}
    longest = max(map(len, ids), default=0)

    def spelled(found: list[int]) -> bytes:
        return b"".join([tokens[id] if id < len(tokens) else b"" for id in found])

    def after_break(text: str) -> list[int] | None:
        found = tokenizer.encode_parts(["\n" + text])
        for start in (1, 2):
            if spelled(found[:start]).lstrip(b" ") == b"\n":
                return found[start:]
        return None

    def greedy(data: bytes) -> list[int]:
        found = []
        while data:
            ends = range(min(longest, len(data)), 0, -1)
            end = next((end for end in ends if data[:end] in ids), 0)
            if end:
                found.append(ids[data[:end]])
            data = data[end or 1 :]
        return found

    def encode(text: str) -> list[int]:
        data = text.encode()
        found = tokenizer.encode_parts([text])
        if spelled(found) == data:
            return found
        moved = after_break(text)
        return moved if moved is not None and spelled(moved) == data else greedy(data)

    return encode
