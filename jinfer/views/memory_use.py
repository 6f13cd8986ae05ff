"""Memory: what a model's weights and its cache take, by part and by layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from jinfer.loader.weights.model_size import bytes_text
from jinfer.views.cell_grid import Cell, cell_grid
from jinfer.views.view import Drawn, Table, View, beneath

if TYPE_CHECKING:
    from jinfer.api.llm import LLM

_COLOURS = ("217 95 2", "59 110 165", "79 138 74", "138 79 143", "47 143 143", "160 112 42")
_FAINT = "138 143 152"
_LAYER = re.compile(r"(?P<stack>\w+)\.(?P<layer>\d+)\.(?P<module>\w+)")
_BAR = 26  # pixels of a bar
_STYLE = f"""
.jv .bar{{display:flex;height:{_BAR}px;margin:2px 0 4px;border-radius:4px;overflow:hidden;
background:var(--sunken)}}
.jv .bar i{{display:block;min-width:1px;height:100%}}
.jv .legend{{display:flex;flex-wrap:wrap;gap:2px 16px;font:12px/1.6 var(--mono);margin-bottom:8px}}
.jv .legend b{{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}}
"""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes.

    Attributes:
        weights: of each parameter, by name; the same array once.
        formats: how each is stored.
        cache: of the whole KV cache, by group of layers.
        held: share of the cache that is in use.
        tokens: that the cache has room for.
    """

    weights: Mapping[str, int]
    cache: Mapping[str, int]
    tokens: int = 0
    held: float = 0.0
    formats: Mapping[str, str] = field(default_factory=dict)


def memory(llm: LLM) -> View:
    """What weights and cache take; nothing is computed or copied."""
    from jinfer.engine.scheduling.cache_size import block_bytes
    from jinfer.loader.weights.grouped_blocks import described
    from jinfer.nn.lora_rows import is_adapter
    from jinfer.ops.attention.kv_cache import BLOCK, nbytes
    from jinfer.quant import QuantizedTensor

    engine = llm.session.engine
    model, sizes = engine.runner.model, engine.runner.programs.sizes
    once = llm.weights.same
    weights, formats = dict[str, int](), dict[str, str]()
    for name, parameter in zip(model.names, model.parameters, strict=True):
        if once.get(name, name) != name:
            continue
        weights["adapters" if is_adapter(name) else name] = nbytes(parameter) + (
            weights.get("adapters", 0) if is_adapter(name) else 0
        )
        codes = getattr(parameter, "rounded", parameter)
        quantized = isinstance(codes, QuantizedTensor)
        formats[name] = described(codes.format) if quantized else str(codes.dtype)
    block_sizes = block_bytes(model.caches, sizes.kv_cache)
    cache = {group: block_sizes[group] * count for group, count in sizes.blocks.items()}
    stats = llm.stats()
    tokens = max(sizes.blocks.values(), default=0) * BLOCK
    held = stats.blocks_held / stats.blocks if stats.blocks else 0.0
    return draw_memory(MemoryUse(weights, cache, tokens, held, formats))


def draw_memory(use: MemoryUse) -> View:
    """The view of memory: bars of weights and of the cache, and a grid by layer and module."""
    parts: dict[str, int] = {}
    layers: dict[str, dict[str, int]] = {}
    stored: dict[str, set[str]] = {}
    for name, size in use.weights.items():
        match = _LAYER.match(name)
        module = match["module"] if match else name.rsplit(".", 1)[0].removeprefix("decoder.")
        parts[module] = parts.get(module, 0) + size
        stored.setdefault(module, set()).update({use.formats[name]} if name in use.formats else ())
        if match:
            stack = "" if match["stack"] == "decoder" else f"{match['stack']}."
            row = layers.setdefault(f"{stack}{match['layer']}", {})
            row[module] = row.get(module, 0) + size
    weights, cache = sum(use.weights.values()), sum(use.cache.values())
    whole = max(weights, cache, 1)
    drawn = [
        Drawn(f"<style>{_STYLE}</style>", 0, 0),
        _bar(f"weights {bytes_text(weights)}", _largest(parts), whole, stored),
    ]
    if cache:
        groups = {f"{name} blocks": size for name, size in use.cache.items()}
        title = f"cache {bytes_text(cache)}, room for {use.tokens:,} tokens, {use.held:.0%} held"
        drawn.append(_bar(title, groups, whole, {}))
    drawn.append(_grid(layers))
    about = f"weights {bytes_text(weights)}, cache {bytes_text(cache)}"
    return View("memory", about, beneath(*drawn), lambda: _table(use))


def _largest(parts: Mapping[str, int]) -> dict[str, int]:
    """The largest parts by name, and the sum of the others."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    shown, others = ordered[: len(_COLOURS)], ordered[len(_COLOURS) :]
    return dict([*shown, ("others", sum(size for _, size in others))] if others else shown)


def _bar(title: str, parts: Mapping[str, int], whole: int, stored: Mapping[str, set[str]]) -> Drawn:
    pieces, legend = list[str](), list[str]()
    for at, (name, size) in enumerate(parts.items()):
        colour = f"background:rgb({_COLOURS[at] if at < len(_COLOURS) else _FAINT})"
        words = f"{name} {bytes_text(size)}"
        words += f" ({', '.join(sorted(stored[name]))})" if stored.get(name) else ""
        pieces.append(f'<i style="width:{100 * size / whole:.3f}%;{colour}"></i>')
        legend.append(f'<span><b style="{colour}"></b>{escape(words)}</span>')
    markup = (
        f'<small>{escape(title)}</small><div class="bar" role="img" aria-label="{escape(title)}">'
        f'{"".join(pieces)}</div><div class="legend">{"".join(legend)}</div>'
    )
    return Drawn(markup, 0, _BAR + 42 + 20 * -(-len(parts) // 2))


def _grid(layers: Mapping[str, Mapping[str, int]]) -> Drawn:
    columns = list(dict.fromkeys(name for row in layers.values() for name in row))
    largest = max((size for row in layers.values() for size in row.values()), default=1)
    listed: list[tuple[str, Sequence[Cell | None]]] = []
    for layer, row in layers.items():
        cells = [
            Cell(bytes_text(row[n]), f"layer {layer}, {n}: {row[n]:,} bytes", row[n] / largest)
            if n in row else None
            for n in columns
        ]  # fmt: skip
        total = sum(row.values())
        listed.append((layer, [*cells, Cell(bytes_text(total), f"layer {layer}: {total:,} bytes")]))
    wide = max(12, *(len(name) + 1 for name in columns)) if columns else 12
    return cell_grid("layer", [*columns, "together"], listed, wide=wide, number=True)


def _table(use: MemoryUse) -> Table:
    names = [*use.weights, *(f"cache.{group}" for group in use.cache)]
    return {
        "name": names,
        "bytes": [*use.weights.values(), *use.cache.values()],
        "format": [use.formats.get(name) for name in names],
    }
