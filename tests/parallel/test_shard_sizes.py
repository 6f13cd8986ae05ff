"""Which heads and columns each device has."""

import pytest

from jinfer.parallel.shard_sizes import (
    AxisSharding,
    ShardingError,
    in_elements,
    shard_evenly,
    shard_heads,
)


def units(share: AxisSharding) -> list[list[int]]:
    """The units of each part, without padding."""
    pairs = zip(share.starts, share.counts, strict=True)
    return [list(range(start, start + count)) for start, count in pairs]


@pytest.mark.parametrize(
    ("query", "key", "devices", "of_query", "of_key"),
    [
        (4, 4, 2, [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        (4, 2, 2, [[0, 1], [2, 3]], [[0], [1]]),
        # Fewer key and value heads than devices: some have the same one.
        (4, 2, 4, [[0], [1], [2], [3]], [[0], [0], [1], [1]]),
        (6, 1, 4, [[0, 1], [2, 3], [4, 5], []], [[0], [0], [0], [0]]),
        (10, 2, 4, [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]], [[0], [0], [1], [1]]),
        # A number that does not divide ends in padding.
        (6, 6, 4, [[0, 1], [2, 3], [4, 5], []], [[0, 1], [2, 3], [4, 5], []]),
        (6, 3, 2, [[0, 1, 2, 3], [4, 5]], [[0, 1], [2]]),
    ],
)
def test_every_query_head_finds_its_key_head(
    query: int, key: int, devices: int, of_query: list[list[int]], of_key: list[list[int]]
) -> None:
    queries, keys = shard_heads(query, key, devices)
    assert units(queries) == of_query
    assert units(keys) == of_key
    group = queries.size // keys.size
    for own, held in zip(units(queries), units(keys), strict=True):
        for place, head in enumerate(own):
            assert held[place // group] == head // (query // key)


def test_heads_that_cannot_be_divided() -> None:
    with pytest.raises(ShardingError, match="4 heads cannot be divided among 8 devices"):
        shard_heads(4, 4, 8)
    with pytest.raises(ShardingError, match="2 key and value heads do not divide among 3 devices"):
        shard_heads(6, 2, 3)


def test_columns_stay_in_whole_blocks() -> None:
    share = shard_evenly(112, 4, 32)
    assert (share.size, units(share)) == (
        32,
        [[*range(32)], [*range(32, 64)], [*range(64, 96)], [*range(96, 112)]],
    )
    assert share.padding == 16
    assert shard_evenly(112, 4).size == 28


def test_elements_of_units() -> None:
    share = in_elements(shard_evenly(6, 4), 60)
    assert (share.total, share.size, share.starts) == (60, 20, (0, 20, 40, 60))
    assert share.counts == (20, 20, 20, 0)
