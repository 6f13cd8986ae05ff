"""SentencePiece tokenizer (Unigram, BPE), with ids that may differ from the library's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import sentencepiece

from jinfer.tokenizer.piece_bytes import SPACE_MARK, marked_spaces
from jinfer.tokenizer.sentencepiece_model import load, without_dummy_prefix
from jinfer.tokenizer.tokenizer_base import SpecialTokens, Tokenizer, pattern_of, valid_text

_UNKNOWN_TEXT = " \u2047 "  # how sentencepiece decodes the unknown piece


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model and a table from its pieces to the model's ids.

    Unlike other control tokens, the unknown one is decoded, as ` ⁇ `.
    """

    def __init__(
        self,
        path: Path,
        processor: sentencepiece.SentencePieceProcessor,
        special: SpecialTokens,
        names: Sequence[str] | None = None,
        to_token: Sequence[int] | None = None,
        spaced_parts: bool = True,
        always: Collection[str] = (),
    ) -> None:
        """Wraps a processor.

        Args:
            names: name of every id; None: the processor's pieces.
            to_token: id of every piece of the processor; None: its own numbers.
            spaced_parts: text after a special token gets the space that is added at a text's
                beginning (Llama's "legacy" behaviour, and llama.cpp's).
            always: names in `special.parsed` that are tokens in any text, even with parsing off.
        """
        if names is None:
            names = processor.id_to_piece(list(range(processor.vocab_size())))
        adds_space = processor.normalize("a").startswith((SPACE_MARK, " "))
        unk = special.unk
        if unk is not None:
            control = {name: id for name, id in special.control.items() if id != unk}
            special = replace(special, control=control)
        super().__init__(len(names), special, marked_spaces(strip_space=adds_space))
        if unk is not None:
            self._bytes[unk] = _UNKNOWN_TEXT.encode()
        self._processor = processor
        self._continues = processor
        if adds_space and not spaced_parts:
            self._continues = load(without_dummy_prefix(processor.serialized_model_proto()), path)
        self._names = names
        self._to_token = to_token
        self._always = pattern_of(name for name in always if name in self._found)

    def token(self, id: int) -> str:
        return self._names[id] if 0 <= id < len(self._names) else ""

    def id(self, token: str) -> int | None:
        return self._ids.get(token)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: id for id, name in reversed(list(enumerate(self._names))) if name}

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        return self.encode_parts(self.split_special(text) if parse_special else [text])

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        if self._always is not None:
            parts = [piece for part in parts for piece in self._cut(part)]
        ids: list[int] = []
        for place, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                processor = self._continues if place else self._processor
                ids += self._pieces(processor, valid_text(part))
        return ids

    def _cut(self, part: int | str) -> list[int | str]:
        return [part] if isinstance(part, int) else self._split(part, self._always)

    def _pieces(self, processor: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
        pieces: list[int] = processor.encode(text)
        return pieces if self._to_token is None else [self._to_token[piece] for piece in pieces]
