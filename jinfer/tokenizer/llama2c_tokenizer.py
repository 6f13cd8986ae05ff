"""llama2.c tokenizer (tokenizer.bin): BPE by score, encoded as run.c does.

Format, little-endian: uint32 length of the longest piece; then for each piece float32 score, uint32
length, bytes. The number of pieces is in the model file's header.
"""

from __future__ import annotations

import heapq
import struct
from pathlib import Path

from jinfer.tokenizer.piece_bytes import marked_spaces
from jinfer.tokenizer.tokenizer_base import SpecialTokens, Tokenizer, TokenizerError
from jinfer.tokenizer.tokenizer_config import read_file

_UNK, _BOS, _EOS, _FIRST_BYTE = 0, 1, 2, 3  # ids that run.c assumes


class Llama2cTokenizer(Tokenizer):
    """BPE by score over a whole text, as in run.c.

    A text begins with a space and ends at a NUL character. What no piece covers is encoded as
    bytes, whose ids begin at 3.
    """

    def __init__(self, pieces: list[bytes], scores: list[float]) -> None:
        special = SpecialTokens(
            bos=_BOS,
            eos=(_EOS,),
            unk=_UNK,
            control={"<s>": _BOS, "</s>": _EOS},
            prefix=(_BOS,),
        )
        super().__init__(len(pieces), special, marked_spaces(strip_space=True, mark=" "))
        self._pieces = pieces
        self._scores = scores
        self._ids = {piece: id for id, piece in reversed(list(enumerate(pieces)))}

    def token(self, id: int) -> str:
        if not 0 <= id < len(self._pieces):
            return ""
        name = self._pieces[id].decode("utf-8", "surrogateescape")
        return name.strip("\n") if id in (_BOS, _EOS) else name

    def id(self, token: str) -> int | None:
        return self.special.control.get(token, self._ids.get(token.encode("utf-8", "replace")))

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        if parse_special:
            return self.encode_parts(self.split_special(text))
        return self._merge(self._letters(text))

    def _letters(self, text: str) -> list[int]:
        text = text.split("\0")[0]
        ids: list[int] = []
        for letter in " " + text if text else "":
            data = letter.encode()
            id = self._ids.get(data)
            ids += [byte + _FIRST_BYTE for byte in data] if id is None else [id]
        return ids

    def _merge(self, ids: list[int]) -> list[int]:
        """Repeatedly merges the neighbours whose piece has the highest score, leftmost first."""
        after = list(range(1, len(ids) + 1))
        before = list(range(-1, len(ids) - 1))
        queue: list[tuple[float, int, int, int, int]] = []

        def offer(left: int) -> None:
            right = after[left] if left >= 0 else len(ids)
            if right < len(ids):
                joined = self._ids.get(self._pieces[ids[left]] + self._pieces[ids[right]])
                if joined is not None:
                    entry = (-self._scores[joined], left, ids[left], ids[right], joined)
                    heapq.heappush(queue, entry)

        for place in range(len(ids)):
            offer(place)
        while queue:
            _, left, first, second, joined = heapq.heappop(queue)
            right = after[left]
            if ids[left] != first or right >= len(ids) or ids[right] != second:
                continue  # one of the two has been merged meanwhile
            ids[left], ids[right] = joined, -1
            after[left] = after[right]
            if after[left] < len(ids):
                before[after[left]] = left
            offer(left)
            offer(before[left])
        return [id for id in ids if id >= 0]


def load_llama2c(path: Path, vocab_size: int | None) -> Llama2cTokenizer:
    """Load a tokenizer.bin.

    Args:
        vocab_size: number of pieces, from the model's header; None: all pieces of the file.

    Raises:
        TokenizerError: the file is truncated or has impossible lengths.
    """
    data = read_file(path)
    pieces: list[bytes] = []
    scores: list[float] = []
    at = 4
    while at < len(data) if vocab_size is None else len(pieces) < vocab_size:
        if at + 8 > len(data):
            limit = "" if vocab_size is None else f" of {vocab_size}, the model's vocabulary size"
            raise TokenizerError(f"{path}: ends in piece {len(pieces)}{limit}")
        score, length = struct.unpack_from("<fI", data, at)
        at += 8 + length
        if at > len(data) or score != score:
            raise TokenizerError(f"{path}: piece {len(pieces)} is not valid ({length} bytes long)")
        pieces.append(data[at - length : at])
        scores.append(score)
    if len(pieces) < _FIRST_BYTE + 256:
        raise TokenizerError(f"{path}: has {len(pieces)} pieces; bytes alone need 259")
    return Llama2cTokenizer(pieces, scores)
