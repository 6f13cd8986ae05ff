"""Back-off of speculative decoding: when to draft; seldom while drafts do not pay."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_REST, _LONGER, _LONGEST_REST = 1, 4, 256  # calls; each rest is `_LONGER` times the last
_MISSES, _AFTER_MISSES = 3, 8  # calls without a proposal, and the rest in calls after them
_RAREST = 8  # calls between two observations during a rest, at most


@dataclass
class Backoff:
    """Decides whether the next call drafts.

    Attributes:
        probing: the next draft is verified whatever its estimated value: drafts have rested, and
            the estimate is old.
    """

    probing: bool = False
    _rest: int = 0
    _next: int = _FIRST_REST
    _missed: int = 0
    _gap: int = 1
    _unwatched: int = 0

    @property
    def resting(self) -> bool:
        """Whether calls do not draft, and so need not wait for each other's tokens."""
        return self._rest > 0

    def rest(self) -> bool:
        """Whether the next call rests; counts it."""
        if not self._rest:
            return False
        self._rest -= 1
        self.probing = self._rest == 0
        return True

    def steps(self, most: int) -> int:
        """Steps of a call without drafts: few if the last calls had drafts."""
        return most if self._rest else min(most, 1 << self._missed)

    def watches(self, *, new: bool) -> bool:
        """During a rest: whether to observe now which drafts would have been accepted.

        Args:
            new: the sequence is new; the rest is due to others.
        """
        self._unwatched += 1
        return new or self._unwatched >= self._gap

    def watched(self, *, right: bool) -> None:
        """Records an observation; the next is soon if a draft was right, else later."""
        self._unwatched, self._gap = 0, 1 if right else min(2 * self._gap, _RAREST)

    def missed(self, *, rests: bool) -> None:
        """Records that no source had a proposal; after some misses there may be a rest."""
        self._missed += 1
        if self._missed > _MISSES:
            self._missed = _MISSES
            if rests:
                self._begin(max(self._next, _AFTER_MISSES))
        self.probing = False

    def useless(self) -> None:
        """Records proposals that did not pay; a rest begins."""
        self._begin(self._next)
        self.probing = False

    def drafted(self) -> None:
        """Records a draft that is verified; unless probing, it was worth it."""
        self._next = self._next if self.probing else _FIRST_REST
        self._rest = self._missed = 0
        self.probing = False

    def _begin(self, calls: int) -> None:
        self._rest, self._next = calls, min(_LONGER * calls, _LONGEST_REST)
