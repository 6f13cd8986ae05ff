"""Package drawing: `python -m tests.package_drawing` draws docs/architecture.svg from LEVELS."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from tests.structure import LEVELS, ROOT

PAGE = ROOT / "docs" / "architecture.svg"
_LEFT, _WIDTH, _STEP, _TOP = 56, 804, 52, 66


@dataclass(frozen=True)
class Box:
    """A package, or several in one box.

    Attributes:
        names: the packages.
        kind: the colour.
        about: a few words.
        stations: numbers of a request's path and letters of a load's, as in architecture.md.
    """

    names: str
    kind: str
    about: str = ""
    stations: str = ""


# In the order of a row; a row's packages are those of LEVELS.
BOXES = (
    Box("server", "front", "HTTP routes", "1 9"),
    Box("generate serve client look", "front", "entry points"),
    Box("tools", "front", "development scripts"),
    Box("cli", "front", "commands, terminal, remote chat"),
    Box("jinfer", "api", "LLM, AsyncLLM, SamplingParams"),
    Box("views", "api", "pictures of what a model does"),
    Box("api", "api", "session, build_engine, results", "3 A G"),
    Box("speculate", "engine", "draft sources, token trees"),
    Box("parallel", "engine", "shards, stages, offload, hosts"),
    Box("engine", "engine", "scheduler, runner, search, output", "4 5 8 H"),
    Box("loader", "file", "source to opened model and arrays", "B C F I"),
    Box("sampling", "engine", "parameters, samplers, grammars", "7"),
    Box("nn", "model", "Flax modules, abstract model", "6 E"),
    Box("ops", "model", "attention, matmul, MoE, fusion", "6"),
    Box("quant", "model", "formats, packing, GPTQ", "I"),
    Box("template", "file", "chat templates", "2"),
    Box("images", "file", "patches, placeholders", "2"),
    Box("modelspec", "file", "TOML to ModelSpec", "D"),
    Box("tokenizer", "file", "text and ids", "2 8 B"),
    Box("sandbox disk_cache", "base", "untrusted input, caches"),
    Box("matmul_precision", "base", "no TF32"),
    Box("quant_format", "base", "names of formats"),
    Box("version", "base"),
    Box("cpu", "kernel", "C++ custom calls", "6"),
    Box("kernels_pallas", "kernel", "GPU kernels", "6"),
    Box("html", "base", "HTML and SVG"),
    Box("progress", "base", "progress bars"),
    Box("startup", "base", "start-up"),
)
KINDS = {
    "front": "entry points",
    "api": "API",
    "engine": "engine",
    "model": "computation",
    "file": "files and text",
    "kernel": "kernels",
    "base": "base",
}
_COLOURS = {  # kind -> fill and stroke, light and dark
    "front": ("#ececee", "#a9adb4", "#33373c", "#6b717a"),
    "api": ("#f7f1e1", "#b8a468", "#3d3826", "#b8a468"),
    "engine": ("#e6eef7", "#6b8fb5", "#27384a", "#6b8fb5"),
    "model": ("#eaf3e8", "#7fa677", "#2a3a2a", "#7fa677"),
    "file": ("#f3e9f5", "#a283ab", "#392b3d", "#a283ab"),
    "kernel": ("#fbe9e2", "#c08a72", "#432f27", "#c08a72"),
    "base": ("#ffffff", "#8a8f98", "#2f3338", "#7d848e"),
    "row": ("#f3f4f5", "#d5d8dc", "#26292d", "#43484f"),
}


def drawing() -> str:
    """The drawing; a package without a box, or a box without a package, is an error."""
    levels = [level - {"__main__"} for level in reversed(LEVELS)]
    boxed = {name for box in BOXES for name in box.names.split()}
    assert boxed == set().union(*levels), boxed ^ set().union(*levels)
    height = _TOP + _STEP * len(levels) + 72
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ar" role="img" width="880" '
        f'height="{height}" viewBox="0 0 880 {height}"><title>Packages of jinfer by floor, with '
        f"the stations of a request and of a load</title><style>{_style()}</style>",
        f'<rect class="page" width="880" height="{height}"/>',
        _text(16, 26, "Packages of jinfer: each may import the packages below it", "title"),
        _badge(24, 46, "1") + _text(38, 50, "stations of a request", "soft"),
        _badge(240, 46, "A") + _text(254, 50, "stations of a model being loaded", "soft"),
    ]
    for row, level in enumerate(levels):
        y = _TOP + _STEP * row
        parts.append(f'<rect class="row" x="12" y="{y}" width="856" height="46" rx="4"/>')
        parts.append(_text(34, y + 27, str(len(levels) - row), "soft", "middle"))
        boxes = [box for box in BOXES if level & set(box.names.split())]
        width = (_WIDTH - 10 * (len(boxes) - 1)) / len(boxes)
        for column, box in enumerate(boxes):
            parts += _box(box, _LEFT + column * (width + 10), y + 5, width)
    x = 16
    for kind, text in KINDS.items():
        parts.append(
            _rect(kind, x, height - 30, 14, 14, 3) + _text(x + 20, height - 19, text, "soft")
        )
        x += 50 + 8 * len(text)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(box: Box, x: float, y: int, width: float) -> list[str]:
    parts = [_rect(box.kind, x, y, width, 36, 5), _text(x + 10, y + 15, box.names, "name")]
    if box.about:
        parts.append(_text(x + 10, y + 30, box.about, "soft"))
    for index, station in enumerate(reversed(box.stations.split())):
        parts.append(_badge(x + width - 14 - 19 * index, y + 11, station))
    return parts


def _rect(kind: str, x: float, y: int, width: float, height: int, radius: int) -> str:
    place = f'x="{x:g}" y="{y}" width="{width:g}" height="{height}"'
    return f'<rect class="{kind}" {place} rx="{radius}"/>'


def _text(x: float, y: int, text: str, kind: str, anchor: str = "") -> str:
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{kind}" x="{x:g}" y="{y}"{anchored}>{escape(text)}</text>'


def _badge(x: float, y: int, station: str) -> str:
    kind = "req" if station.isdigit() else "load"
    circle = f'<circle class="{kind}" cx="{x:g}" cy="{y}" r="8"/>'
    return circle + _text(x, y + 4, station, "badge", "middle")


def _style() -> str:
    light = "".join(f".ar .{k}{{fill:{c[0]};stroke:{c[1]}}}" for k, c in _COLOURS.items())
    dark = "".join(f".ar .{k}{{fill:{c[2]};stroke:{c[3]}}}" for k, c in _COLOURS.items())
    return (
        ".ar text{font:12px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#22262b}"
        ".ar .name{font-weight:600}.ar .soft{fill:#5c636d}"
        ".ar .title{font-size:14px;font-weight:600}"
        f".ar .page{{fill:#fcfcfb}}{light}.ar .req{{fill:#3d5a80}}.ar .load{{fill:#9a5b13}}"
        ".ar .badge{fill:#fff;font-weight:600;font-size:11px}"
        "@media (prefers-color-scheme:dark){.ar text{fill:#e4e6e9}.ar .soft{fill:#a9b0ba}"
        f".ar .page{{fill:#1d1f22}}{dark}.ar .badge{{fill:#fff}}}}"
    )


if __name__ == "__main__":
    PAGE.write_text(drawing(), encoding="utf-8")
