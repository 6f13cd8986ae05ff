"""Goldens on several devices give what they give on one. Run by tests/parallel/test_eight.py."""

from typing import Any

import pytest

from tests.parallel.eight.models import check_answers

GOLDENS = (
    "llama2",
    "mixtral",
    "deepseek_v2",
    "deepseek_v32",
    "falcon7b",
    "bloom",
    "bert",
    "m2m100",
)
# The goldens have two or three layers, so some stages of four have none.
LAYERS = {
    "llama2": {2: [2, 1], 3: [1, 2, 0], 4: [1, 1, 1, 0]},
    "mixtral": {2: [1, 1], 3: [0, 2, 0], 4: [1, 0, 1, 0]},
    "m2m100": {2: [1, 1], 3: [2, 0, 0], 4: [0, 1, 0, 1]},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1x1": {"devices": "0"},
    "4x1": {"devices": "0;1;2;3"},
    "1x4": {"devices": "0&1&2&3"},
    "2x2": {"devices": "0&1;2&3"},
    "4x2": {"devices": "0&1;2&3;4&5;6&7"},
    "3x1": {"devices": "3;1;0"},
    "cpu+1x2": {"devices": "0&1", "cpu_layers": 1},
    "2x2 mesh": {"mesh": {"pipe": 2, "tensor": 2}},
}
# Stages of several devices, a stage on the CPU, plain and quantized weights. Stages of one device,
# of which one has no layers, are in check_engine.py.
USUAL = {("mixtral", "2x2", "auto"), ("m2m100", "cpu+1x2", "q8")}
CASES = [(g, name, w) for w in ("auto", "q8", "q3.5") for g in GOLDENS for name in LAYOUTS]


@pytest.mark.parametrize(
    ("golden", "layout", "weights"),
    [
        pytest.param(*case, marks=() if case in USUAL else pytest.mark.soak, id="-".join(case))
        for case in sorted(CASES)
    ],
)
def test_the_same_answers(golden: str, layout: str, weights: str) -> None:
    keys = LAYOUTS[layout]
    stages = keys["devices"].count(";") + 1 if "devices" in keys else 2
    if stages > 1:
        shape = LAYERS.get(golden, LAYERS["llama2"])
        keys = {**keys, "layers": shape[stages]}
    limit = 0 if layout in ("1x1", "4x1", "3x1") else 1e-4
    check_answers(golden, limit, weights, **keys)
