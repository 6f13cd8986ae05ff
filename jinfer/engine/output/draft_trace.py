"""Speculative decoding, trace: the draft trees of an answer, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import overload

from jinfer.engine.scheduling.sequence import ROOT, DraftedStep


@dataclass(frozen=True)
class Step:
    """A draft tree with the texts of its tokens; notebooks draw it."""

    drafted: DraftedStep
    text: Callable[[int], str]

    def __repr__(self) -> str:
        accepted = "".join(map(self.text, self.drafted.chosen))
        return f"Step({len(self.drafted.tokens)} drafted, gave {accepted!r})"

    def _repr_svg_(self) -> str:
        """The tree: a colour for each draft source, accepted tokens bold."""
        from jinfer.html.draft_tree_svg import draw

        return draw([self.drafted], self.text)


@dataclass(frozen=True, repr=False)
class Steps:
    """The draft trees of an answer, one for each call that verified any; notebooks draw them.

    Attributes:
        drafted: the trees, in the order of the calls.
        text: text of a token id.
    """

    drafted: tuple[DraftedStep, ...]
    text: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.drafted)

    def __iter__(self) -> Iterator[Step]:
        return (Step(step, self.text) for step in self.drafted)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Steps: ...
    def __getitem__(self, index: int | slice) -> Step | Steps:
        if isinstance(index, slice):
            return Steps(self.drafted[index], self.text)
        return Step(self.drafted[index], self.text)

    def __repr__(self) -> str:
        right = sum(len(step.accepted) for step in self.drafted)
        return f"Steps({len(self)} calls, {right} drafted tokens right)"

    def tried(self) -> Mapping[str, Mapping[int, tuple[int, int]]]:
        """(accepted, total) nodes whose parents were accepted, by draft source and depth."""
        tried: dict[str, dict[int, tuple[int, int]]] = {}
        for step in self.drafted:
            reached = {ROOT, *step.accepted}
            each = zip(step.parents, step.sources, step.depths(), strict=True)
            for node, (parent, source, depth) in enumerate(each):
                if parent in reached:
                    right, count = tried.setdefault(source, {}).get(depth, (0, 0))
                    tried[source][depth] = (right + (node in reached), count + 1)
        return tried

    def _repr_svg_(self) -> str:
        """The trees of the first `MOST_DRAWN` calls, one below the other."""
        from jinfer.html.draft_tree_svg import draw

        return draw(self.drafted[:MOST_DRAWN], self.text, len(self) - MOST_DRAWN)


MOST_DRAWN = 12
