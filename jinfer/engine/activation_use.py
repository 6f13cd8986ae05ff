"""Activations of a request: which it wants to see, and how it edits some, as tables of vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from jinfer.sampling.activation_edits import OPEN, Edit, token_range
from jinfer.sampling.request_errors import RequestError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# What is done to a row, each with all that the one before does; see `jinfer.nn.row_edits`.
Form = Literal["add", "scale", "project"]
FORMS: tuple[Form, ...] = ("add", "scale", "project")

MAX_EDIT_BYTES = 256 << 20  # of a request's vectors


@dataclass(frozen=True, eq=False)
class PlaceEdit:
    """What a request does at one place.

    Attributes:
        form: how much of it is needed.
        ranges: (first position, the one after the last, index of a vector, step), as
            `jinfer.nn.row_edits.EditTable` has them.
        shift, factor, along, back: the vectors.
        shape: of one token's value.
    """

    form: Form
    ranges: Int[np.ndarray, "ranges 4"]
    shift: Float[np.ndarray, "vectors width"]
    factor: Float[np.ndarray, "vectors width"]
    along: Float[np.ndarray, "vectors width"]
    back: Float[np.ndarray, "vectors width"]
    shape: tuple[int, ...]

    def content(self) -> bytes:
        """All that the edited values depend on."""
        parts = [self.ranges, self.shift]
        parts += [] if self.form == "add" else [self.factor, self.along, self.back]
        return b"".join(part.tobytes() for part in parts)


@dataclass(frozen=True, eq=False)
class ActivationUse:
    """The activations that a request wants to see and those that it edits.

    Attributes:
        capture: names of those that come back with its result.
        edits: by the name of the place.
        digest: hash of the edits; b"": there are none.
        bytes_of_token: of the captured values of one token, in float32.
    """

    capture: tuple[str, ...] = ()
    edits: Mapping[str, PlaceEdit] = field(default_factory=dict)
    digest: bytes = b""
    bytes_of_token: int = 0

    @classmethod
    def of(
        cls, capture: Sequence[str], edits: Mapping[str, PlaceEdit], bytes_of_token: int = 0
    ) -> ActivationUse:
        """A use with the digest of its edits."""
        hashed = hashlib.blake2b(digest_size=16)
        for name in sorted(edits):
            hashed.update(f"{name}\n".encode() + edits[name].content())
        digest = hashed.digest() if edits else b""
        return cls(tuple(capture), dict(edits), digest, bytes_of_token)

    @property
    def seed(self) -> bytes:
        """Bytes that keys and values depend on, in addition to the tokens."""
        return b"edits" + self.digest if self.edits else b""


def place_edits(
    edits: Sequence[Edit], shapes: Mapping[str, tuple[int, ...]], prompt: int
) -> dict[str, PlaceEdit]:
    """The edits of a request by place; where several concern a token, they follow in their order.

    Args:
        shapes: name of each place -> the shape of one token's value there.
        prompt: tokens of the prompt.

    Raises:
        RequestError: a value has not the place's width, or not as many tokens as its range; a
            place has no such head; two directions of one token would be projected out.
    """
    by_place: dict[str, list[Edit]] = {}
    for edit in edits:
        by_place.setdefault(edit.name, []).append(edit)
    found, count = dict[str, PlaceEdit](), 0
    for name, listed in by_place.items():
        changes = [_change(edit, shapes[name], prompt) for edit in listed]
        found[name] = _place_edit(name, [c for c in changes if c.begin < c.end], shapes[name])
        count += found[name].shift.nbytes * 4
        if count > MAX_EDIT_BYTES:
            raise RequestError(
                f"{listed[0].field}: {name}: the vectors take more than "
                f"{MAX_EDIT_BYTES >> 20} MiB; edit fewer tokens or fewer places"
            )
    return {name: each for name, each in found.items() if len(each.ranges)}


class _Change(NamedTuple):
    """One edit: its tokens, its part of a vector, and its values [tokens or 1, width]."""

    edit: Edit
    begin: int
    end: int
    columns: slice
    values: Float[np.ndarray, "tokens width"]

    def at(self, begin: int, end: int) -> Float[np.ndarray, "tokens width"]:
        """The values of some of its tokens."""
        return self.values[begin - self.begin : end - self.begin] if self.by_token else self.values

    @property
    def by_token(self) -> bool:
        """Whether each token has values of its own."""
        return len(self.values) > 1


def _change(edit: Edit, each: tuple[int, ...], prompt: int) -> _Change:
    begin, end = token_range(edit.tokens, prompt)
    columns = slice(0, prod(each))
    if edit.head is not None:
        if len(each) != 2:
            raise RequestError(f"{edit.field}: {edit.name} has no heads; leave out head")
        if edit.head >= each[0]:
            raise RequestError(
                f"{edit.field}: {edit.name} has {each[0]} heads; there is no {edit.head}"
            )
        columns = slice(edit.head * each[1], (edit.head + 1) * each[1])
        each = each[1:]
    width, values = columns.stop - columns.start, edit.value
    if values.ndim == 0 and edit.operation != "project_out":
        values = np.full((1, width), values, np.float32)
    elif values.shape in ((width,), each):
        values = values.reshape(1, width)
    elif values.shape[1:] in ((width,), each) and end < OPEN and len(values) == end - begin:
        values = values.reshape(-1, width)
    else:
        raise RequestError(f"{edit.field}: {edit.name}: {_wrong_shape(edit, each, begin, end)}")
    return _Change(edit, begin, end, columns, values)


def _wrong_shape(edit: Edit, each: tuple[int, ...], begin: int, end: int) -> str:
    shapes = f"{list(each)}" + (" or one number" if edit.operation != "project_out" else "")
    if end < OPEN:
        shapes += f", or {[end - begin, *each]} for the {end - begin} tokens of the range"
    elif edit.value.shape[1:] == each:
        count = len(edit.value)
        given = "1 token" if count == 1 else f"{count} tokens"
        return (
            f"it has vectors of {given}, and its range has no end; give {list(each)} for every "
            f"token, or tokens=slice({begin}, {begin + count})"
        )
    return f"the value has shape {list(edit.value.shape)}; a token's is {shapes}"


def _place_edit(name: str, changes: Sequence[_Change], each: tuple[int, ...]) -> PlaceEdit:
    """The edits of one place, by ranges that have the same ones."""
    ends = sorted({at for change in changes for at in (change.begin, change.end)})
    ranges, rows = list[tuple[int, int, int, int]](), list[_Row]()
    count = 0
    for begin, end in pairwise(ends):
        here = [c for c in changes if c.begin <= begin and end <= c.end]
        if not here:
            continue
        several = any(c.by_token for c in here)
        size = end - begin if several else 1
        if size * prod(each) * 16 > MAX_EDIT_BYTES:
            raise RequestError(
                f"edits: {name}: {size} tokens have vectors of their own; edit fewer"
            )
        row = _Row(name, size, prod(each))
        for change in here:
            row.apply(change, begin, end)
        ranges.append((begin, end, count, int(several)))
        rows.append(row)
        count += size
    projects = any(row.projects for row in rows)
    scales = projects or any((row.factor != 1).any() for row in rows)
    form: Form = "project" if projects else "scale" if scales else "add"
    shift, factor, along, back = (
        np.concatenate([getattr(row, part) for row in rows] or [np.zeros((0, prod(each)))]).astype(
            np.float32
        )
        for part in ("shift", "factor", "along", "back")
    )
    table = np.array(ranges, np.int32).reshape(-1, 4)
    return PlaceEdit(form, table, shift, factor, along, back, each)


class _Row:
    """Edits one after another, as y = factor * x + shift + (x . along) * back of some tokens."""

    def __init__(self, name: str, size: int, width: int) -> None:
        self.name, self.projects = name, False
        self.factor = np.ones((size, width), np.float32)
        self.shift, self.along, self.back = (np.zeros((size, width), np.float32) for _ in range(3))

    def apply(self, change: _Change, begin: int, end: int) -> None:
        """Adds an edit after the others."""
        at, values = change.columns, change.at(begin, end)
        match change.edit.operation:
            case "add":
                self.shift[:, at] += values
            case "set":
                self.factor[:, at], self.back[:, at], self.shift[:, at] = 0, 0, values
            case "scale":
                for part in (self.factor, self.back, self.shift):
                    part[:, at] *= values
            case "project_out":
                self._project_out(at, values)

    def _project_out(self, at: slice, values: Float[np.ndarray, "tokens width"]) -> None:
        if self.back.any():
            raise RequestError(
                f"edits: {self.name}: two directions are projected out of one token; give one, or "
                "one after the other at different places"
            )
        unit = np.zeros_like(self.shift)
        unit[:, at] = values / np.linalg.norm(values, axis=1, keepdims=True)
        self.projects, self.along, self.back = True, self.factor * unit, -unit
        self.shift -= (self.shift * unit).sum(1, keepdims=True) * unit
