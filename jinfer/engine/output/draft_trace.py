"""Speculative decoding, trace: the draft trees of an answer, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import overload

from jinfer.engine.scheduling.sequence import ROOT, DraftedStep
from jinfer.markup.token_text import visible


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
        return draw(self.drafted[:MOST_DRAWN], self.text, len(self) - MOST_DRAWN)


MOST_DRAWN = 12


_WIDTH, _HEIGHT, _ACROSS, _DOWN, _MARGIN = 104, 24, 34, 10, 16
_CHARACTERS = 12  # columns of a token's text
_COLOURS = ("#3d6ea5", "#4f8a4a", "#a0702a", "#8a4f8f", "#2f8f8f", "#a54a4a")
_ROOT, _CHOSEN = -1, -2  # nodes left of the drafted ones, and of the token sampled after them
_STYLE = """
.jt text{font:12px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#22262b}
.jt .soft{fill:#5c636d}.jt .page{fill:#fcfcfb}.jt .box{fill:#fff;stroke-width:1}
.jt .right{stroke-width:3}.jt .right+text{font-weight:700}
.jt .own{stroke:#8a8f98;stroke-dasharray:4 3}
.jt .wire{fill:none;stroke:#b5bac2}.jt .way{fill:none;stroke:#22262b;stroke-width:3}
@media (prefers-color-scheme:dark){
.jt text{fill:#e4e6e9}.jt .soft{fill:#a9b0ba}.jt .page{fill:#1d1f22}.jt .box{fill:#2f3338}
.jt .wire{stroke:#6b717a}.jt .way{stroke:#e4e6e9}}
"""


def draw(steps: Sequence[DraftedStep], text: Callable[[int], str], left_out: int = 0) -> str:
    """An SVG of trees, one below the other.

    Args:
        text: text of a token id.
        left_out: number of further trees that are not drawn.
    """
    sources = list(dict.fromkeys(name for step in steps for name in step.sources))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(sources)}
    parts, widest, top = list[str](), 0, _MARGIN
    for number, step in enumerate(steps):
        body, wide, high = _tree(step, text, colours)
        parts.append(f'<g transform="translate({_MARGIN},{top})" data-step="{number}">{body}</g>')
        widest, top = max(widest, wide), top + high + 2 * _DOWN
    legend, x = "", _MARGIN
    for name, colour in colours.items():
        legend += f'<rect x="{x}" y="{top}" width="12" height="12" fill="{colour}"/>'
        legend += f'<text class="soft" x="{x + 18}" y="{top + 10}">{escape(name)}</text>'
        x += 36 + 8 * len(name)
    more = f"; {left_out} more calls" if left_out > 0 else ""
    words = f"bold: right; dashed: chosen by the model{more}"
    top += 22  # a line of its own: phones have room for it
    legend += f'<text class="soft" x="{_MARGIN}" y="{top + 10}">{words}</text>'
    width = max(widest + 2 * _MARGIN, x, 8 * len(words) + _MARGIN)
    height = top + 12 + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="jt" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><style>{_STYLE}</style>'
        f'<rect class="page" width="{width}" height="{height}"/>{"".join(parts)}{legend}</svg>'
    )


def _tree(
    drafted: DraftedStep, text_of: Callable[[int], str], colours: dict[str, str]
) -> tuple[str, int, int]:
    """The SVG elements of a tree, its width and its height."""
    cells = _places(drafted)
    way = {_ROOT, *drafted.accepted, _CHOSEN}
    last = drafted.accepted[-1] if drafted.accepted else _ROOT
    above = dict(enumerate(drafted.parents)) | ({_CHOSEN: last} if _CHOSEN in cells else {})
    wires, boxes = [], []
    for node, parent in sorted(above.items(), key=lambda one: one[0] in way):
        (column, row), (before, level) = cells[node], cells[parent]
        x, y = column * (_WIDTH + _ACROSS), row * (_HEIGHT + _DOWN) + _HEIGHT // 2
        from_x, from_y = before * (_WIDTH + _ACROSS) + _WIDTH, level * (_HEIGHT + _DOWN)
        middle = from_x + _ACROSS // 2
        path = f"M{from_x},{from_y + _HEIGHT // 2} H{middle} V{y} H{x}"
        wires.append(f'<path class="{"way" if node in way else "wire"}" d="{path}"/>')
    for node, (column, row) in cells.items():
        x, y = column * (_WIDTH + _ACROSS), row * (_HEIGHT + _DOWN)
        if node == _ROOT:
            kind, stroke, text = "box own", "", "…"
        elif node == _CHOSEN:
            kind, stroke, token = "box own right", "", drafted.chosen[-1]
            text = visible(text_of(token), _CHARACTERS) or str(token)
        else:
            kind = "box right" if node in way else "box"
            stroke = f' stroke="{colours[drafted.sources[node]]}"'
            drafts = text_of(drafted.tokens[node])
            text = visible(drafts, _CHARACTERS) or str(drafted.tokens[node])
        boxes.append(
            f'<rect class="{kind}"{stroke} x="{x}" y="{y}" rx="4" width="{_WIDTH}" '
            f'height="{_HEIGHT}"/><text x="{x + _WIDTH // 2}" y="{y + 16}" '
            f'text-anchor="middle">{escape(text)}</text>'
        )
    columns = 1 + max(column for column, _ in cells.values())
    rows = 1 + max(row for _, row in cells.values())
    width, height = columns * (_WIDTH + _ACROSS), rows * (_HEIGHT + _DOWN)
    return "".join([*wires, *boxes]), width, height


def _places(drafted: DraftedStep) -> dict[int, tuple[int, int]]:
    """Column and row of each node; a first child is in its parent's row, others are below."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(drafted.parents):
        children.setdefault(parent, []).append(node)
    if len(drafted.chosen) > len(drafted.accepted):
        children.setdefault(drafted.accepted[-1] if drafted.accepted else _ROOT, []).append(_CHOSEN)
    cells, rows = dict[int, tuple[int, int]](), 0
    stack = [(_ROOT, 0, True)]
    while stack:
        node, column, first = stack.pop()
        rows += not first
        cells[node] = (column, rows)
        below = children.get(node, [])
        stack += [(child, column + 1, i == 0) for i, child in enumerate(below)][::-1]
    return cells
