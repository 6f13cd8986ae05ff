"""Sharding of one axis: which heads, feed-forward columns or vocabulary tokens each device has."""

from __future__ import annotations

from dataclasses import dataclass


class ShardingError(ValueError):
    """Something cannot be divided among so many devices; the message says what."""


@dataclass(frozen=True)
class AxisSharding:
    """An axis divided into shards of equal size, some of which end in padding with zeros.

    Attributes:
        total: units on the axis.
        size: units in a shard, with padding.
        starts: the first unit of each shard.
        counts: units of each shard without padding.
    """

    total: int
    size: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def padding(self) -> int:
        """Units of padding in all shards together."""
        return self.size * len(self.counts) - sum(self.counts)


def shard_evenly(total: int, devices: int, unit: int = 1) -> AxisSharding:
    """Consecutive shards whose size is a multiple of `unit`."""
    size = -(-total // (unit * devices)) * unit
    starts = tuple(min(shard * size, total) for shard in range(devices))
    return AxisSharding(total, size, starts, tuple(min(size, total - start) for start in starts))


def shard_heads(query: int, key: int, devices: int) -> tuple[AxisSharding, AxisSharding]:
    """The shards of the query heads, and of the key and value heads that they read (GQA).

    Where there are fewer key and value heads than devices, each is replicated on several.

    Raises:
        ShardingError: there are more devices than heads, or neither of the number of key and value
            heads and the number of devices divides the other.
    """
    if devices > query:
        raise ShardingError(f"{query} heads cannot be divided among {devices} devices")
    group = query // key
    if key >= devices:
        kv_heads = shard_evenly(key, devices)
        return _in_smaller_units(kv_heads, group), kv_heads
    if devices % key:
        raise ShardingError(
            f"{key} key and value heads do not divide among {devices} devices; "
            f"take {key} or a multiple of it"
        )
    among = devices // key
    within = shard_evenly(group, among)
    starts = tuple(
        head * group + within.starts[part] for head in range(key) for part in range(among)
    )
    query_heads = AxisSharding(query, within.size, starts, within.counts * key)
    owners = tuple(device // among for device in range(devices))
    return query_heads, AxisSharding(key, 1, owners, (1,) * devices)


def _in_smaller_units(sharding: AxisSharding, each: int) -> AxisSharding:
    """The same sharding counted in smaller units, `each` of which make one."""
    starts, counts = (
        tuple(n * each for n in units) for units in (sharding.starts, sharding.counts)
    )
    return AxisSharding(sharding.total * each, sharding.size * each, starts, counts)


def in_elements(sharding: AxisSharding, elements: int) -> AxisSharding:
    """The same sharding counted in elements of an axis, equally many per unit."""
    return _in_smaller_units(sharding, elements // sharding.total)
