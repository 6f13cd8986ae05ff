"""When an engine looks for drafts: often while they are found, seldom while they do not pay."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_REST, _LONGER, _LONGEST_REST = 1, 4, 256  # calls; each rest is so many times the one before
_MISSES, _AFTER_MISSES = 3, 8  # so often without a draft, and so many calls without a look
_RAREST = 8  # calls from one look at what would have been right to the next


@dataclass
class Pace:
    """Whether to look for drafts now.

    Attributes:
        probing: the next draft is tried whatever it seems to be worth: nothing is known of it
            since drafts did not pay.
    """

    probing: bool = False
    _rest: int = 0
    _next: int = _FIRST_REST
    _missed: int = 0
    _gap: int = 1
    _unwatched: int = 0

    @property
    def resting(self) -> bool:
        """Whether calls are made without a look at drafts; they need not wait for each other."""
        return self._rest > 0

    def rest(self) -> bool:
        """Whether the call that is about to be made is one of those."""
        if not self._rest:
            return False
        self._rest -= 1
        self.probing = self._rest == 0
        return True

    def steps(self, most: int) -> int:
        """Steps of a call without drafts: few where one was found a moment ago."""
        return most if self._rest else min(most, 1 << self._missed)

    def watches(self, *, new: bool) -> bool:
        """During a rest: whether to see now what a draft would have been worth.

        Args:
            new: the rest is for what others were: of this sequence little is known.
        """
        self._unwatched += 1
        return new or self._unwatched >= self._gap

    def watched(self, *, right: bool) -> None:
        """It was seen: the next time is soon while drafts would be right, and rare while not."""
        self._unwatched, self._gap = 0, 1 if right else min(2 * self._gap, _RAREST)

    def missed(self, *, rests: bool) -> None:
        """Nobody knew a draft; after some such looks there may be a rest."""
        self._missed += 1
        if self._missed > _MISSES:
            self._missed = _MISSES
            if rests:
                self._begin(max(self._next, _AFTER_MISSES))
        self.probing = False

    def useless(self) -> None:
        """What there was did not pay."""
        self._begin(self._next)
        self.probing = False

    def drafted(self) -> None:
        """Drafts were found, and are worth it unless they were only tried."""
        self._next = self._next if self.probing else _FIRST_REST
        self._rest = self._missed = 0
        self.probing = False

    def _begin(self, calls: int) -> None:
        self._rest, self._next = calls, min(_LONGER * calls, _LONGEST_REST)
