"""Block bytes: the content of a KV cache block in one piece, from and to the rows of a transfer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jinfer.ops.attention.kv_blocks import BlockRows

# Rows of each part of a model: one on a device, or each of its pipeline stages. An array has
# [devices * rows, numbers], as each device of a stage has a part of every block.
type PartRows = tuple[BlockRows, ...]


def _arrays(parts: PartRows, group: str) -> Iterator[Any]:
    """The arrays of a group, in the order in which a block's bytes have them."""
    for rows in parts:
        of_group = rows.get(group, {})
        yield from (of_group[name] for name in sorted(of_group))


def block_nbytes(parts: PartRows, group: str, count: int) -> int:
    """Bytes of a block of a group.

    Args:
        count: number of rows.
    """
    arrays = _arrays(parts, group)
    return sum(one.shape[0] // count * one.shape[1] * one.dtype.itemsize for one in arrays)


def rows_nbytes(parts: PartRows) -> int:
    """Bytes of all rows."""
    arrays = (one for rows in parts for of_group in rows.values() for one in of_group.values())
    return sum(int(np.prod(one.shape)) * one.dtype.itemsize for one in arrays)


def on_host(parts: PartRows) -> PartRows:
    """The rows as arrays of the host; waits until they are computed."""
    return tuple(
        {group: {n: np.asarray(one) for n, one in of.items()} for group, of in rows.items()}
        for rows in parts
    )


def block_bytes_of(parts: PartRows, group: str, row: int, count: int) -> bytes:
    """The content of the block in a row of host arrays.

    Args:
        count: number of rows.
    """
    arrays = _arrays(parts, group)
    pieces = (one.reshape(-1, count, one.shape[-1])[:, row].tobytes() for one in arrays)
    return b"".join(pieces)


def rows_of(abstract: PartRows, contents: Mapping[str, Sequence[bytes]], count: int) -> PartRows:
    """Rows whose first ones have some contents, as arrays of the host.

    Args:
        abstract: their shapes and types.
        contents: of each group, at most `count`, each as long as `block_nbytes` says.
    """
    made: PartRows = tuple(
        {
            group: {n: np.zeros(one.shape, one.dtype) for n, one in of.items()}
            for group, of in r.items()
        }
        for r in abstract
    )
    for group, listed in contents.items():
        for row, content in enumerate(listed):
            begin = 0
            for array in _arrays(made, group):
                place = array.reshape(-1, count, array.shape[-1])[:, row]
                end = begin + place.nbytes
                place[...] = np.frombuffer(content[begin:end], array.dtype).reshape(place.shape)
                begin = end
    return made
