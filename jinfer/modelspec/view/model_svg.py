"""Drawing of a model: its stacks, from the stem through each kind of layer to the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from html import escape
from typing import Any, Protocol

from jinfer.html.html_page import table_html
from jinfer.html.svg_drawing import CHARACTER, svg
from jinfer.modelspec import (
    attention_blocks,
    blocks,
    feed_forward_blocks,
    position_blocks,
)
from jinfer.modelspec.attention_blocks import AttentionSpec, CrossAttentionSpec, LatentAttentionSpec
from jinfer.modelspec.block import Block
from jinfer.modelspec.blocks import HeadSpec
from jinfer.modelspec.layer_spec import LayerSpec, StackSpec
from jinfer.modelspec.view.formula_graph import FormulaGraph, GraphNode, formula_graph

_LINE, _PADDING, _GAP, _LANE_GAP, _RADIUS = 16.0, 12.0, 28.0, 30.0, 11.0
_MARGIN, _TITLE = 18.0, 30.0
_STYLE = """
.jf .frame{fill:#f3f4f5;stroke:#d5d8dc}
.jf .box{fill:#fff;stroke:#8a8f98}.jf .attention{fill:#e6eef7;stroke:#6b8fb5}
.jf .feed{fill:#eaf3e8;stroke:#7fa677}.jf .norm{fill:#f7f1e1;stroke:#b8a468}
.jf .chip{fill:#ececee;stroke:#a9adb4}.jf .op{fill:#fff;stroke:#3d5a80;stroke-width:1.5}
.jf .wire{fill:none;stroke:#8a8f98;stroke-width:1.3}.jf .tip{fill:#8a8f98}
.jf .main{fill:none;stroke:#3d5a80;stroke-width:3}.jf .maintip{fill:#3d5a80}
"""
_DARK = """
.jf .frame{fill:#26292d;stroke:#43484f}
.jf .box{fill:#2f3338;stroke:#7d848e}.jf .attention{fill:#27384a;stroke:#6b8fb5}
.jf .feed{fill:#2a3a2a;stroke:#7fa677}.jf .norm{fill:#3d3826;stroke:#b8a468}
.jf .chip{fill:#33373c;stroke:#6b717a}.jf .op{fill:#1d1f22;stroke:#8fb0d6}
.jf .main{stroke:#8fb0d6}.jf .maintip{fill:#8fb0d6}
"""


@dataclass(frozen=True)
class _Section:
    """A frame of the drawing: a formula's graph and its modules."""

    title: str
    formula: str
    graph: FormulaGraph
    modules: Mapping[str, Block]


@dataclass(frozen=True)
class _NodeBox:
    """A node's box: its centre, and half its width and height."""

    x: float
    y: float
    w: float
    h: float


class Drawable(Protocol):
    """The part of a `ModelSpec` that is drawn; the class itself imports this module."""

    @property
    def shared(self) -> Sequence[tuple[str, Block]]: ...
    @property
    def stacks(self) -> Sequence[StackSpec]: ...


class HtmlViewable(Drawable, Protocol):
    """The part of a `ModelSpec` that `spec_html` shows."""

    @property
    def path(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def dims(self) -> Mapping[str, Any]: ...


def spec_html(spec: HtmlViewable) -> str:
    """HTML of the model's type, sizes and wiring, for notebooks."""
    sizes = [(name, value) for name, value in spec.dims.items() if value is not None]
    heading = f"<p><b>{escape(spec.path)}</b>: {spec.type}</p>"
    return f"<div>{heading}{table_html(('size', 'value'), sizes)}{draw_model(spec)}</div>"


def draw_model(spec: Drawable) -> str:
    """The model as an SVG document, with its stacks side by side."""
    parts, x, height = [], _MARGIN, 0.0
    for stack in spec.stacks:
        drawing, w, h = _draw_stack(spec, stack, x)
        parts += drawing
        x, height = x + w + _MARGIN, max(height, h)
    title = f"Wiring of the {' and '.join(stack.name for stack in spec.stacks)}"
    return svg("jf", x, height, "".join(parts), style=_STYLE, dark=_DARK, title=title)


def distinct_layers(stack: StackSpec) -> list[tuple[LayerSpec, list[int]]]:
    """The distinct layers of a stack, each with the numbers of the layers equal to it."""
    sorts: list[tuple[LayerSpec, list[int]]] = []
    for i, layer in enumerate(stack.layers):
        for known, numbers in sorts:
            if known == layer:
                numbers.append(i)
                break
        else:
            sorts.append((layer, [i]))
    return sorts


def numbers_text(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0..2,5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _sections(spec: Drawable, stack: StackSpec) -> list[_Section]:
    shared, own = dict(spec.shared), dict(stack.modules)
    known = {**shared, **own}
    whole = len(spec.stacks) > 1 and stack.name == "encoder"
    result = "logits" if any(isinstance(known[n], HeadSpec) for n in stack.head.calls) else "hidden"
    sections = [_Section("stem", stack.stem.text, formula_graph(stack.stem, "tokens"), known)]
    for layer, numbers in distinct_layers(stack):
        title = f"layers {shortened(numbers_text(numbers), 24)}  × {len(numbers)}"
        title = title if len(numbers) > 1 else f"layer {numbers[0]}"
        graph = formula_graph(layer.wiring, "x")
        sections.append(
            _Section(title, layer.wiring.text, graph, {**shared, **dict(layer.modules)})
        )
    graph = formula_graph(stack.head, "x", not whole, "encoded" if whole else result)
    return [*sections, _Section("head", stack.head.text, graph, known)]


def _lines(section: _Section, node: GraphNode) -> list[str]:
    """The lines of text in a node's box."""
    if node.kind == "module":
        return [node.label, *block_label(section.modules[node.label])]
    if node.kind == "number":
        return [node.label, *([shortened(node.detail)] if node.detail else [])]
    return [node.label]


def _size(section: _Section, node: GraphNode) -> tuple[float, float]:
    """Half the width and height of a node; zero for the stream from above."""
    if node.kind == "join":
        return _RADIUS, _RADIUS
    if node.kind == "input" and node.label == "x":
        return 0.0, 0.0
    lines = _lines(section, node)
    width = max(map(len, lines)) * CHARACTER + 2 * _PADDING
    return width / 2, (len(lines) * _LINE + _PADDING) / 2


def _draw_stack(spec: Drawable, stack: StackSpec, left: float) -> tuple[list[str], float, float]:
    """A stack's drawing, its width and height."""
    sections = _sections(spec, stack)
    sizes = [[_size(section, node) for node in section.graph.nodes] for section in sections]
    widths: dict[int, float] = {}
    for section, of in zip(sections, sizes, strict=True):
        for node, (w, _) in zip(section.graph.nodes, of, strict=True):
            widths[node.lane] = max(widths.get(node.lane, 40.0), 2 * w)
    middles, edge = [], left + _MARGIN
    for lane in range(max(widths) + 1):
        middles.append(edge + widths.get(lane, 40.0) / 2)
        edge += widths.get(lane, 40.0) + _LANE_GAP
    titled = max(len(section.title) for section in sections) * CHARACTER + 2 * _PADDING
    width = max(edge - left - _LANE_GAP + _MARGIN, middles[0] - left + titled)
    frames, lines, boxes = [_text(left, _MARGIN + 8, stack.name, "name", "start")], [], []
    y = _MARGIN + _TITLE / 1.5
    for number, (section, of) in enumerate(zip(sections, sizes, strict=True)):
        top, y = y, y + _TITLE
        places = {}
        for row in range(section.graph.rows):
            inside = [n for n, node in enumerate(section.graph.nodes) if node.row == row]
            tall = max(of[n][1] for n in inside)
            for n in inside:
                places[n] = _NodeBox(middles[section.graph.nodes[n].lane], y + tall, *of[n])
            y += 2 * tall + _GAP
        bottom = y - _GAP + _PADDING + 4
        frames.append(_rect("frame", 8, left, top, width, bottom - top))
        frames.append(_text(left + width - _PADDING, top + 19, section.title, "soft", "end"))
        lines += _draw_lines(section.graph, places)
        boxes += [
            _node(section, node, places[n], stack.name)
            for n, node in enumerate(section.graph.nodes)
        ]
        y = bottom + 14
        value = places[section.graph.value]
        if number < len(sections) - 1:  # the stream continues in the next frame
            lines.append(_line("main", [(value.x, value.y + value.h), (value.x, y + _TITLE + 1)]))
    return [*frames, *lines, *boxes], width, y + _MARGIN - 14


def _draw_lines(graph: FormulaGraph, places: Mapping[int, _NodeBox]) -> list[str]:
    out = []
    steps = {(a, b) for a, b in zip(graph.main, graph.main[1:], strict=False)}
    forks: dict[int, list[int]] = {}  # row -> the nodes to which a line branches from above it
    for node in graph.nodes:
        for arg in node.args[:1]:
            if graph.nodes[arg].lane != node.lane:
                sources = forks.setdefault(node.row, [])
                if arg not in sources:
                    sources.append(arg)
    tops = {
        row: min(place.y - place.h for n, place in places.items() if graph.nodes[n].row == row)
        for row in forks
    }
    for n, node in enumerate(graph.nodes):
        to = places[n]
        for position, arg in enumerate(node.args):
            start = places[arg]
            style = "main" if (arg, n) in steps else "wire"
            below = (start.x, start.y + start.h)
            if graph.nodes[arg].row == node.row:  # from the side
                side = 1 if start.x > to.x else -1
                points = [(start.x - side * start.w, to.y), (to.x + side * to.w, to.y)]
            elif start.x == to.x:
                points = [below, (to.x, to.y - to.h)]
            elif position == 0:
                turn = forks[node.row].index(arg) - (len(forks[node.row]) - 1) / 2
                y = tops[node.row] - _GAP / 2 + 6 * turn
                points = [below, (start.x, y), (to.x, y), (to.x, to.y - to.h)]
            else:
                side = 1 if start.x > to.x else -1
                points = [below, (start.x, to.y), (to.x + side * to.w, to.y)]
            out.append(_line(style, points, tip=True))
    return out


def _node(section: _Section, node: GraphNode, at: _NodeBox, stack: str) -> str:
    if not at.w:
        return ""
    if node.kind == "join":
        circle = f'<circle class="op" cx="{at.x:.1f}" cy="{at.y:.1f}" r="{at.w:.1f}"/>'
        return f"<g>{circle}{_text(at.x, at.y + 4, node.label, 'name')}</g>"
    style = _style(section.modules[node.label]) if node.kind == "module" else "chip"
    round_ = 5 if node.kind == "module" else min(at.h, 12)
    texts = _lines(section, node)
    y = at.y - len(texts) * _LINE / 2 + 12
    written = [
        _text(at.x, y + n * _LINE, text, "soft" if n else "name") for n, text in enumerate(texts)
    ]
    module = f' data-module="{stack}.{node.label}"' if node.kind == "module" else ""
    box = _rect(style, round_, at.x - at.w, at.y - at.h, 2 * at.w, 2 * at.h)
    return f"<g{module}>{box}{''.join(written)}</g>"


def _style(block: Block) -> str:
    """The CSS class of a block's box."""
    if isinstance(block, AttentionSpec | CrossAttentionSpec | LatentAttentionSpec):
        return "attention"
    return {"rms": "norm", "layer": "norm", "mlp": "feed", "gated": "feed", "moe": "feed"}.get(
        block.kind, "box"
    )


def _rect(style: str, radius: float, x: float, y: float, w: float, h: float) -> str:
    return (
        f'<rect class="{style}" rx="{radius:g}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{w:.1f}" height="{h:.1f}"/>'
    )


def _text(x: float, y: float, text: str, style: str, anchor: str = "middle") -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{style}" {at}>{escape(text)}</text>'


def _line(style: str, points: list[tuple[float, float]], tip: bool = False) -> str:
    """A line, optionally with an arrow tip."""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    drawn = f'<path class="{style}" d="{path}"/>'
    if not tip:
        return drawn
    (x0, y0), (x, y) = points[-2:]
    length = max(abs(x - x0), abs(y - y0)) or 1.0
    dx, dy, size = (x - x0) / length, (y - y0) / length, 7.0 if style == "main" else 5.5
    bx, by, half = x - dx * size, y - dy * size, size * 0.6
    corners = [(x, y), (bx - dy * half, by + dx * half), (bx + dy * half, by - dx * half)]
    shape = "M" + "L".join(f"{cx:.1f} {cy:.1f}" for cx, cy in corners) + "Z"
    return drawn + f'<path class="{"maintip" if style == "main" else "tip"}" d="{shape}"/>'


_MAX_LINE = 34
_NAMES = {
    "rms": "RMS norm",
    "layer": "layer norm",
    "moe": "mixture of experts",
    "mlp": "feed-forward",
    "gated": "gated feed-forward",
    "head": "vocabulary head",
}


def block_label(block: Block) -> list[str]:
    """A few short lines: the kind, the sizes, and fields that differ from the defaults."""
    name = _NAMES.get(block.kind, block.kind.replace("_", " "))
    sizes, shown = _sizes(block)
    extras = [text for field in fields(block) if (text := _extra(block, field, shown))]
    return [shortened(line) for line in (name, *sizes, *_packed(extras))]


def shortened(line: str, limit: int = _MAX_LINE) -> str:
    """A line cut to the width of a box."""
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _sizes(block: Any) -> tuple[list[str], set[str]]:
    """Lines with the block's sizes, and the names of the fields they show."""
    match block:
        case blocks.EmbeddingSpec() | position_blocks.LearnedPositionsSpec():
            return [f"{block.size} × {block.width}"], {"size", "width"}
        case position_blocks.SinusoidalPositionsSpec():
            return [f"of width {block.width}"], {"width"}
        case blocks.RMSNormSpec() | blocks.LayerNormSpec():
            return [f"{block.size}, eps {block.eps:g}"], {"size", "eps", "bias", "weight"}
        case blocks.LinearSpec():
            return [f"{block.inputs} → {block.outputs}"], {"inputs", "outputs"}
        case blocks.HeadSpec():
            tied = ["weight of embed"] if block.tied else []
            return [f"{block.inputs} → {block.outputs}", *tied], {"inputs", "outputs", "tied"}
        case attention_blocks.AttentionSpec():
            heads = f"{block.heads} heads of {block.head_dim}"
            shared = [f"{block.kv_heads} of keys and values"]
            lines = [heads, *(shared if block.kv_heads != block.heads else [])]
            return lines, {"inputs", "heads", "kv_heads", "head_dim"}
        case attention_blocks.CrossAttentionSpec():
            shown = {"inputs", "heads", "head_dim", "encoded"}
            return [f"{block.heads} heads of {block.head_dim}"], shown
        case attention_blocks.LatentAttentionSpec():
            lines = [f"{block.heads} heads, latent {block.latent_rank}"]
            lines.append(f"dims {block.nope_dim} + {block.rope_dim}, values {block.value_dim}")
            return lines, {"inputs", "heads", "latent_rank", "nope_dim", "rope_dim", "value_dim"}
        case feed_forward_blocks.MLPSpec() | feed_forward_blocks.GatedMLPSpec():
            shown = {"inputs", "width", "activation"}
            return [f"{block.inputs} → {block.width} → {block.inputs}", block.activation], shown
        case feed_forward_blocks.MoESpec():
            lines = [f"{block.top_k} of {block.experts} experts"]
            lines.append(f"{block.inputs} → {block.width} → {block.inputs}, {block.activation}")
            return lines, {"inputs", "width", "experts", "top_k", "activation", "scoring"}
        case feed_forward_blocks.ActivationSpec():
            return [block.function], {"function"}
        case blocks.PoolSpec():
            return [f"{block.take} token" if block.take != "mean" else "mean of tokens"], {"take"}
        case blocks.SelectSpec():
            return [", ".join(map(str, block.indices))], {"indices"}
        case blocks.ClassifierSpec():
            return [f"{block.inputs} → {block.outputs} classes"], {"inputs", "outputs"}
    return [], set()


def _extra(block: Any, field: Any, shown: set[str]) -> str:
    """A field that no line shows and that is not its default; "" otherwise."""
    value = getattr(block, field.name)
    default = None if field.default is MISSING else field.default
    if field.name in (*shown, "kind") or value is None or value == default or value is False:
        return ""
    if value is True:
        return field.name.replace("_", " ")
    return _words(field.name, value)


def _words(name: str, value: Any) -> str:
    """A field's value in a few words."""
    match value:
        case position_blocks.RopeSpec():
            turned = f"rope theta {_number(value.theta)}, {value.pairs}"
            return turned + (f", {value.scaling.rope_type}" if value.scaling else "")
        case position_blocks.AlibiSpec():
            return "alibi"
        case position_blocks.RelativeBiasSpec():
            return "relative positions"
        case position_blocks.DisentangledSpec():
            return "disentangled positions"
        case attention_blocks.QKNormSpec():
            return f"{value.kind} norm of q, k per {value.over}"
        case float() | int():
            return f"{name.replace('_', ' ')} {_number(value)}"
        case str():
            return f"{name.replace('_', ' ')} {value}"
    return str(getattr(value, "kind", name)).replace("_", " ")


def _number(value: float) -> str:
    whole = float(value).is_integer() and abs(value) < 1e9
    return str(int(value)) if whole else f"{value:g}"


def _packed(words: list[str]) -> list[str]:
    """Words joined into as few lines as possible."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 2 + len(word) <= 28:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines
