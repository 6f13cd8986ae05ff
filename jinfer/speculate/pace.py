"""When an engine looks for drafts: often while they are found, seldom while they do not pay."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_REST = 8  # calls
_MISSES = 3  # from here on a call without drafts takes as many steps as it may


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
        return most if self._rest or self._missed >= _MISSES else min(most, 1 << self._missed)

    def missed(self) -> None:
        """Nobody knew a draft."""
        self._missed = min(self._missed + 1, _MISSES)

    def useless(self) -> None:
        """What there was did not pay."""
        self._rest, self._longer = self._longer, min(2 * self._longer, _LONGEST_REST)
        self.probing = False

    def drafted(self) -> None:
        """Drafts were found, and are worth it unless they were only tried."""
        self._longer = self._longer if self.probing else 1
        self._rest = self._missed = 0
        self.probing = False
