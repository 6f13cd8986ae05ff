"""Which of an axis's units each of several devices has: heads, columns of feed-forwards, tokens."""

from __future__ import annotations

from dataclasses import dataclass


class ShareError(ValueError):
    """Something cannot be divided among so many devices: says what."""


@dataclass(frozen=True)
class Share:
    """Parts of equal size, some of which end in padding, which is zeros.

    Attributes:
        total: units that there are.
        size: of a part.
        starts: the first unit of each part...
        counts: ...and how many of its units are no padding.
    """

    total: int
    size: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def padding(self) -> int:
        """Units of all parts together that are padding."""
        return self.size * len(self.counts) - sum(self.counts)


def even(total: int, devices: int, unit: int = 1) -> Share:
    """Parts one after the other, of whole multiples of `unit`."""
    size = -(-total // (unit * devices)) * unit
    starts = tuple(min(part * size, total) for part in range(devices))
    return Share(total, size, starts, tuple(min(size, total - start) for start in starts))


def heads(query: int, key: int, devices: int) -> tuple[Share, Share]:
    """Query heads, and the key and value heads that they read.

    Key and value heads fewer than devices are on several of them.

    Raises:
        ShareError: there are more devices than heads, or a device's query heads would read
            different key and value heads than another one's of equal number.
    """
    if devices > query:
        raise ShareError(f"{query} heads cannot be divided among {devices} devices")
    group = query // key
    if key >= devices:
        of_key = even(key, devices)
        return _times(of_key, group), of_key
    if devices % key:
        raise ShareError(
            f"{key} key and value heads do not divide among {devices} devices; "
            f"take {key} or a multiple of it"
        )
    among = devices // key
    within = even(group, among)
    starts = tuple(
        head * group + within.starts[part] for head in range(key) for part in range(among)
    )
    of_query = Share(query, within.size, starts, within.counts * key)
    owners = tuple(device // among for device in range(devices))
    return of_query, Share(key, 1, owners, (1,) * devices)


def _times(share: Share, each: int) -> Share:
    """The same of units that each are several smaller ones."""
    starts, counts = (tuple(n * each for n in part) for part in (share.starts, share.counts))
    return Share(share.total * each, share.size * each, starts, counts)


def of_elements(share: Share, elements: int) -> Share:
    """The share of an axis with so many elements, of which each unit has equally many."""
    return _times(share, elements // share.total)
