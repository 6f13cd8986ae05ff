"""Images of a prompt: where their features enter, and what they change for each of its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from jinfer.sampling.request_errors import RequestError

if TYPE_CHECKING:
    from jaxtyping import Int

Positions = Literal["plain", "grid"]
Mask = Literal["causal", "image", "window", "prompt"]


class ImageContent(Protocol):
    """What the engine reads of a prepared image, besides what its encoder does."""

    @property
    def digest(self) -> bytes:
        """A hash of all that its features depend on."""
        ...

    @property
    def tokens(self) -> int:
        """Number of its placeholders, which is that of its features."""
        ...


@dataclass(frozen=True, eq=False)
class ImageSpan:
    """An image of a prompt.

    Attributes:
        runs: (first token, count) of its placeholders; the k-th one gets the k-th feature.
        grid: rows and columns of its features, for positions on a grid.
        image: its content.
    """

    runs: tuple[tuple[int, int], ...]
    grid: tuple[int, int]
    image: ImageContent

    def places(self) -> Int[np.ndarray, " tokens"]:
        """The token indices of its placeholders."""
        return np.concatenate([np.arange(begin, begin + count) for begin, count in self.runs])


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a prompt, by token.

    Attributes:
        spans: the images, in order.
        cache_ids: the prompt as the prefix cache knows it: a placeholder's id is negative and
            depends on the image and on the index in it, so equal ids mean equal features.
        owner: index of the image that a token is a placeholder of; -1: none.
        feature: index of its feature in the image.
        shifts: rotary positions by time, row and column, minus the token's index.
        shift: the same after the prompt, where the three are equal.
        ranges: the first and the last token of the range within which a token attends both ways;
            -1: it only attends to earlier tokens. None: all do.
        seed: bytes that all keys and values depend on, in addition to the tokens before.
        lookup: the token that a model is given in place of placeholders; None: these.
    """

    spans: tuple[ImageSpan, ...]
    cache_ids: tuple[int, ...]
    owner: Int[np.ndarray, " prompt"]
    feature: Int[np.ndarray, " prompt"]
    shifts: Int[np.ndarray, "3 prompt"]
    shift: int
    ranges: Int[np.ndarray, "2 prompt"] | None
    seed: bytes = b""
    lookup: int | None = None

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        spans: Sequence[ImageSpan],
        positions: Positions = "plain",
        mask: Mask = "causal",
        lookup: int | None = None,
    ) -> PromptImages:
        """Lays images over a prompt.

        Args:
            positions: "grid": a feature's rotary position is its place in the image (M-RoPE).
            mask: where tokens attend both ways: nowhere, within each run of placeholders ("window":
                in attentions with a window alone), or within the prompt.
            lookup: as the attribute.

        Raises:
            RequestError: the placeholders do not fit the prompt or the image.
        """
        owner, feature = np.full(len(prompt), -1, np.int32), np.zeros(len(prompt), np.int32)
        cache_ids, ranges = np.array(prompt, np.int64), np.full((2, len(prompt)), -1, np.int32)
        spans = sorted(spans, key=lambda span: span.runs[:1])
        for index, span in enumerate(spans):
            _check(span, len(prompt), owner)
            places, count = span.places(), span.image.tokens
            owner[places], feature[places] = index, np.arange(count)
            numbers = np.frombuffer(hashlib.shake_128(span.image.digest).digest(8 * count), "<i8")
            cache_ids[places] = numbers | np.int64(-1 << 63)
            for begin, length in span.runs:
                ranges[:, begin : begin + length] = [[begin], [begin + length - 1]]
        seed = b""
        if mask == "prompt":
            ranges[:] = [[0], [len(prompt) - 1]]
            # A block of the prompt depends on all of it.
            seed = b"prompt" + hashlib.blake2b(cache_ids.tobytes(), digest_size=16).digest()
        shifts, shift = _shifts(len(prompt), spans) if positions == "grid" else (None, 0)
        return cls(
            tuple(spans),
            tuple(cache_ids.tolist()),
            owner,
            feature,
            np.zeros((3, len(prompt)), np.int32) if shifts is None else shifts,
            shift,
            None if mask == "causal" else ranges,
            seed,
            lookup,
        )

    def changes(self, begin: int, end: int) -> bool:
        """Whether images change anything for a range of tokens but equal rotary positions."""
        inside = bool((self.owner[begin:end] >= 0).any())
        return inside or (self.ranges is not None and bool((self.ranges[1, begin:end] >= 0).any()))

    def shift_at(self, token: int) -> int:
        """The rotary position of a token of text, minus its index."""
        return int(self.shifts[0, token]) if token < len(self.owner) else self.shift

    def whole_end(self, begin: int, end: int) -> int:
        """The end of a chunk from `begin` that cuts no range within which tokens attend both ways.

        It is `end` or before it, unless the range at `begin` is longer.
        """
        if self.ranges is None or end >= len(self.owner) or self.ranges[1, end - 1] < end:
            return end
        first, last = self.ranges[:, end - 1].tolist()
        return first if first > begin else last + 1

    def whole_begin(self, token: int) -> int:
        """The first token of the range that a chunk from `token` would cut; `token` if none."""
        if self.ranges is None or token >= len(self.owner) or self.ranges[1, token] < 0:
            return token
        return int(self.ranges[0, token])

    @property
    def longest(self) -> int:
        """Tokens of the longest range within which tokens attend both ways."""
        if self.ranges is None:
            return 0
        first, last = self.ranges
        return int(np.max(np.where(last >= 0, last - first + 1, 0), initial=0))


def _check(span: ImageSpan, prompt: int, owner: Int[np.ndarray, " prompt"]) -> None:
    """Raises `RequestError` for an image whose placeholders are not free tokens of the prompt."""
    before = 0 if span.runs else prompt
    for begin, count in span.runs or ((0, 0),):
        if begin < before or count < 1 or begin + count > prompt:
            raise RequestError(f"an image has placeholders at {begin}, outside its prompt")
        if (owner[begin : begin + count] >= 0).any():
            raise RequestError(f"two images have a placeholder at {begin}")
        before = begin + count
    count = sum(count for _, count in span.runs)
    if count != span.image.tokens:
        raise RequestError(f"an image of {span.image.tokens} tokens has {count} placeholders")


def _shifts(prompt: int, spans: Sequence[ImageSpan]) -> tuple[Int[np.ndarray, "3 prompt"], int]:
    """Positions of M-RoPE minus indices, and their difference after the prompt.

    An image begins at the position after the text before it. Its features' positions are that one
    plus their row and column; the text after it goes on after the longer side (arXiv 2409.12191).
    """
    shifts, shift = np.zeros((3, prompt), np.int32), 0
    for span in spans:
        places, (rows, columns) = span.places(), span.grid
        if rows * columns != len(places):
            raise RequestError(
                f"an image of {rows} x {columns} features has {len(places)} placeholders"
            )
        begin = int(places[0])
        index = np.arange(len(places))
        base = np.full_like(index, begin + shift)
        at = np.stack([base, base + index // columns, base + index % columns])
        shift += max(rows, columns) - len(places)
        shifts[:, begin:] = shift
        shifts[:, places] = at - places
    return shifts, shift
