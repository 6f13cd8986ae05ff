"""Draft trees as SVG: the source of each drafted token, and the accepted tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Protocol

from jinfer.html.svg_drawing import svg
from jinfer.html.token_text import visible

_WIDTH, _HEIGHT, _ACROSS, _DOWN, _MARGIN = 104, 24, 34, 10, 16
_CHARACTERS = 12  # columns of a token's text
_COLOURS = ("#3d6ea5", "#4f8a4a", "#a0702a", "#8a4f8f", "#2f8f8f", "#a54a4a")
_ROOT, _CHOSEN = -1, -2  # nodes of the token before the drafts, and of the one sampled after
_STYLE = """
.jt .box{fill:#fff;stroke-width:1}.jt .right{stroke-width:3}.jt .right+text{font-weight:700}
.jt .own{stroke:#8a8f98;stroke-dasharray:4 3}
.jt .wire{fill:none;stroke:#b5bac2}.jt .way{fill:none;stroke:#22262b;stroke-width:3}
"""
_DARK = ".jt .box{fill:#2f3338}.jt .wire{stroke:#6b717a}.jt .way{stroke:#e4e6e9}"


class Drafted(Protocol):
    """The part of a `DraftedStep` that is drawn; its package imports this one."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def parents(self) -> Sequence[int]: ...
    @property
    def sources(self) -> Sequence[str]: ...
    @property
    def accepted(self) -> Sequence[int]: ...
    @property
    def chosen(self) -> Sequence[int]: ...


def draw(steps: Sequence[Drafted], text: Callable[[int], str], left_out: int = 0) -> str:
    """Draw trees, one below the other.

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
    words = f"bold: accepted; dashed: chosen by the model{more}"
    top += 22  # on a line of its own, for narrow screens
    legend += f'<text class="soft" x="{_MARGIN}" y="{top + 10}">{words}</text>'
    width = max(widest + 2 * _MARGIN, x, 8 * len(words) + _MARGIN)
    height = top + 12 + _MARGIN
    return svg("jt", width, height, "".join(parts) + legend, style=_STYLE, dark=_DARK)


def _tree(
    drafted: Drafted, text_of: Callable[[int], str], colours: dict[str, str]
) -> tuple[str, int, int]:
    """The SVG elements of a tree, its width and its height."""
    cells = _places(drafted)
    way = {_ROOT, *drafted.accepted, _CHOSEN}
    last = drafted.accepted[-1] if drafted.accepted else _ROOT
    above = dict(enumerate(drafted.parents)) | ({_CHOSEN: last} if _CHOSEN in cells else {})
    wires, boxes = [], []
    for node, parent in sorted(above.items(), key=lambda edge: edge[0] in way):
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


def _places(drafted: Drafted) -> dict[int, tuple[int, int]]:
    """Column and row of each node: a first child in its parent's row, others below."""
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
