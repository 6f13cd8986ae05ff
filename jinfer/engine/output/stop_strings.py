"""Stop strings: where an answer ends, found while it streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StopStrings:
    """Passes a text on up to the first stop string in it.

    The first is the one that is complete first, and the longest of those that are complete at the
    same character, so that the result does not depend on how the text is split into pieces. What
    may be the beginning of a stop string is held back until it is known not to be one.

    Attributes:
        stops: the stop strings.
        included: whether the answer includes the stop string that ends it.
        found: the one that was found; "": none yet.
    """

    stops: tuple[str, ...]
    included: bool = False
    found: str = ""
    _held: str = ""

    def push(self, text: str, early: bool = False) -> str:
        """New text of the answer, after another piece.

        Args:
            text: the piece.
            early: a stop string that this piece completes does not end the answer.
        """
        if self.found or not self.stops:
            return "" if self.found else text
        old, text = len(self._held), self._held + text
        matches = ((text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self.stops)
        ends = [(at + len(stop), at) for at, stop in matches if at >= 0]
        if ends and not early:
            end, at = min(ends)
            self.found, self._held = text[at:end], ""
            return text[: end if self.included else at]
        keep = max(_overlap(text, stop) for stop in self.stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
