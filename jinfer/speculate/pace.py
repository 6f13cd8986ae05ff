"""When an engine looks for drafts: often while they are found, seldom while they do not pay."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_REST = 64  # calls
_MISSES, _AFTER_MISSES = 3, 8  # so often without a draft, and so many calls without a look


@dataclass
class Pace:
    """Whether to look for drafts now.

    Attributes:
        probing: the next draft is tried whatever it seems to be worth: nothing is known of it
            since drafts did not pay.
    """

    probing: bool = False
    _rest: int = 0
    _longer: int = 1
    _missed: int = 0

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

    def missed(self, *, rests: bool) -> None:
        """Nobody knew a draft; after some such looks there may be a rest."""
        self._missed += 1
        if self._missed > _MISSES:
            self._missed, self._rest = _MISSES, _AFTER_MISSES if rests else 0
        self.probing = False

    def useless(self) -> None:
        """What there was did not pay."""
        self._rest, self._longer = self._longer, min(2 * self._longer, _LONGEST_REST)
        self.probing = False

    def drafted(self) -> None:
        """Drafts were found, and are worth it unless they were only tried."""
        self._longer = self._longer if self.probing else 1
        self._rest = self._missed = 0
        self.probing = False
