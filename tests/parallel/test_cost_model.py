"""The cost model: what follows from its assumptions, whatever the numbers."""

import pytest

from jinfer.parallel.cost_model import HARDWARE, best_layout, device_layouts, estimate_decode
from tools.bench_partition import SHAPES

WORK = SHAPES["Llama-2-70B"].work(16)
A100 = HARDWARE["a100"]


def test_sizes_of_known_models() -> None:
    billions = {name: shape.work(16).weights / 2e9 for name, shape in SHAPES.items()}
    assert billions == pytest.approx(
        {
            "Llama-2-7B": 6.74,
            "Llama-2-13B": 13.0,
            "Yi-34B": 34.4,
            "Falcon-40B": 41.8,
            "Mixtral-8x7B": 46.7,
            "Llama-2-70B": 69.0,
        },
        rel=0.02,
    )


def test_layouts_use_all_devices() -> None:
    assert list(device_layouts(8)) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert list(device_layouts(3)) == [(3, 1), (1, 3)]


def test_stages_alone_make_no_token_come_sooner() -> None:
    one, four = (estimate_decode(WORK, A100, pipe, 1) for pipe in (1, 4))
    assert four.step >= one.step
    assert four.tokens == pytest.approx(4 * one.tokens, rel=0.05)


def test_tensors_make_a_token_come_sooner_and_move_more() -> None:
    one, four = (estimate_decode(WORK, A100, 1, tensor) for tensor in (1, 4))
    assert one.step / 4 < four.step < one.step
    assert (one.moved, four.moved > 0) == (0, True)
    # Two sums of each layer, of each of which a device sends 2 * 3 / 4 of a vector.
    assert four.moved == pytest.approx(2 * 80 * 1.5 * 2 * 8192)


def test_a_device_has_its_share() -> None:
    whole = estimate_decode(WORK, A100, 1, 1, context=4096).device
    parts = estimate_decode(WORK, A100, 2, 4, context=4096).device
    assert parts == pytest.approx(WORK.weights / 8 + 4096 * WORK.cache / 4)
    assert parts < whole


def test_the_best_fits_into_the_devices() -> None:
    found = best_layout(WORK, A100, [*device_layouts(1), *device_layouts(4)], context=4096)
    assert found is not None
    assert found.pipe * found.tensor == 4
    assert found.device <= A100.memory
    assert best_layout(WORK, A100, [(1, 1)], context=4096) is None
