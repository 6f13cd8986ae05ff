"""The drawing: well-formed, nothing over the edge of its box, every call there, no lines lost."""

from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from jinfer import LLM
from jinfer.html.html_page import table_html
from jinfer.html.svg_drawing import CHARACTER
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.view.formula_graph import formula_graph
from jinfer.modelspec.view.model_svg import draw_model
from tests.loader.resolving import resolved as of_files
from tests.modelspec.helpers import model, resolved

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = ["llama2", "bloom", "phi2", "bert", "t5", "m2m100", "mixtral", "deepseek_moe", "minicpm"]
SVG = "{http://www.w3.org/2000/svg}"


def spec_of(name: str) -> ModelSpec:
    return of_files(GOLDENS / name, {}).spec


def drawn(spec: ModelSpec) -> ElementTree.Element:
    return ElementTree.fromstring(draw_model(spec))


@pytest.mark.parametrize("name", NAMES)
def test_text_stays_in_its_box_and_boxes_in_the_picture(name: str) -> None:
    root = drawn(spec_of(name))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    boxes = root.findall(f"{SVG}g[{SVG}rect]")
    assert boxes
    for box in boxes:
        rect = box.find(f"{SVG}rect")
        assert rect is not None
        x, y, w, h = (float(rect.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        for text in box.findall(f"{SVG}text"):
            middle, base = float(text.get("x", 0)), float(text.get("y", 0))
            half = len(text.text or "") * CHARACTER / 2
            assert x <= middle - half <= middle + half <= x + w
            assert y + 9 <= base <= y + h - 3


@pytest.mark.parametrize("name", NAMES)
def test_boxes_do_not_meet_and_lines_pass_beside_them(name: str) -> None:
    root = drawn(spec_of(name))
    places = []
    for rect in root.findall(f"{SVG}g/{SVG}rect"):
        x, y, w, h = (float(rect.get(key, 0)) for key in ("x", "y", "width", "height"))
        places.append((x, y, x + w, y + h))
    for n, (x0, y0, x1, y1) in enumerate(places):
        for a0, b0, a1, b1 in places[n + 1 :]:
            assert x1 <= a0 or a1 <= x0 or y1 <= b0 or b1 <= y0
    for path in root.findall(f"{SVG}path"):
        if path.get("class") in ("main", "wire"):
            points = [tuple(map(float, p.split())) for p in path.get("d", "")[1:].split("L")]
            for (ax, ay), (bx, by) in pairwise(points):
                for x0, y0, x1, y1 in places:
                    beside = max(ax, bx) <= x0 + 1 or min(ax, bx) >= x1 - 1
                    assert beside or max(ay, by) <= y0 + 1 or min(ay, by) >= y1 - 1


@pytest.mark.parametrize("name", NAMES)
def test_every_module_call_appears(name: str) -> None:
    spec = spec_of(name)
    shown = [g.get("data-module") for g in drawn(spec).iter(f"{SVG}g") if g.get("data-module")]
    wanted = []
    for stack in spec.stacks:
        sorts = dict.fromkeys(layer.wiring.text for layer in stack.layers)
        formulas = [stack.stem, stack.head]
        formulas += [
            next(x.wiring for x in stack.layers if x.wiring.text == text) for text in sorts
        ]
        wanted += [f"{stack.name}.{module}" for formula in formulas for module in formula.calls]
    assert set(shown) == set(wanted)
    assert len(shown) >= len(wanted)


def test_variants_are_drawn_once_each() -> None:
    text = draw_model(spec_of("deepseek_moe"))
    assert ">layer 0<" in text
    assert ">layers 1..2  × 2<" in text
    assert text.count('data-module="decoder.shared_expert"') == 1


@pytest.mark.parametrize(
    ("layer", "main", "lanes"),
    [
        ("x = x + attn(norm(x))", ["x", "+"], 2),
        ("x = norm(x + attn(x))", ["x", "+", "norm"], 2),
        ("n = norm(x)\nx + attn(n) + mlp(n)", ["x", "+", "+"], 3),
        ("x + 0.5 * attn(norm(x))", ["x", "+"], 2),
        ("x = 2 * x - mlp(attn(norm(x)))", ["x", "× 2", "+"], 2),
        ("n = norm(x)\nx = n * mlp(n) + attn(norm(n))", ["x", "norm", "×", "+"], 3),
    ],
)
def test_the_residual_stream_is_the_main_line(layer: str, main: list[str], lanes: int) -> None:
    changes: dict[str, Any] = {"decoder__layer": layer}
    if "mlp" in layer:
        changes["decoder__modules__mlp"] = {"kind": "linear"}
    spec = resolved(model(**changes))
    assert spec.decoder is not None
    graph = formula_graph(spec.decoder.layers[0].wiring, "x")
    assert [graph.nodes[number].label for number in graph.main] == main
    assert {graph.nodes[number].lane for number in graph.main} == {0}
    assert graph.lanes == lanes
    places = [(node.row, node.lane) for node in graph.nodes]
    assert len(places) == len(set(places))


def test_notebooks_show_the_drawing_and_the_sizes() -> None:
    llm = LLM(GOLDENS / "llama2")
    shown = llm._repr_html_()
    title = f"{llm.session.cache_report()}; wiring and sizes"
    assert shown.startswith(f"<div><p><b>{llm!r}</b></p><details><summary>{title}</summary>")
    assert llm.spec._repr_html_() in shown
    assert draw_model(llm.spec) in shown
    assert "decoder-only" in shown
    assert ">intermediate</td>" in shown
    assert ">112</td>" in shown


def test_numbers_of_32_bits_are_shown_as_they_were_meant() -> None:
    assert ">1e-05</td>" in table_html(("eps",), [(9.999999747378752e-06,)])
