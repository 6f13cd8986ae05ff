"""Matrices quantized a few rows at a time are those quantized whole."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jinfer.loader.open_model import open_model
from jinfer.loader.weights import read_parameter
from jinfer.loader.weights.read_parameter import quantized, read_values
from jinfer.loader.weights.storage_plan import choose_storages
from jinfer.loader.weights.tensor_mapping import find_origins, parameter_shapes
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.quant import OutlierTensor, QuantizedTensor
from jinfer.quant.calibration_stats import InputStats

GOLDENS = Path(__file__).parents[2] / "goldens"


@pytest.mark.parametrize(
    ("source", "weights", "method"),
    [
        ("llama2", "q3.5", "mse"),
        ("llama2", "q4_b128", "rtn"),
        ("bloom", "q4", "rtn"),  # fused, by groups
        ("mixtral", "q5", "mse"),  # a tensor for each expert
        ("gguf_mixtral", "q3", "mse"),  # a stack of matrices
        # Weights on a grid: where a search finds ties, how long the pieces are decides.
        ("gguf_llama_mixed", "q4", "rtn"),
        ("gpt2", "q4", "rtn"),  # turned: not in pieces
        ("aquila2", "q2_sym", "mse"),
    ],
)
def test_pieces_are_parts_of_the_whole(
    source: str, weights: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_parameter, "PIECE", 1000)
    settings = {"weights": weights, "method": method, "threshold": 0}
    keys = {f"quantization.{key}": value for key, value in settings.items()}
    opened = open_model(GOLDENS / source, keys)
    model, spec = build_abstract_model(opened.spec, "float32"), opened.spec
    origins, shapes = find_origins(model, opened.checkpoint, spec.tensors), parameter_shapes(model)
    storages = choose_storages(model, spec.quantization, origins, "float", spec.path)
    assert storages
    largest = 0
    for name, storage in storages.items():
        origin = origins[name]
        seen: list[np.ndarray] = []
        mean = np.random.default_rng(0).random((*shapes[name][:-2], shapes[name][-1]), np.float32)
        inputs = InputStats(mean, np.ones(shapes[name][:-2], np.float32))

        def watch(
            _: QuantizedTensor | OutlierTensor,
            values: np.ndarray,
            __: InputStats | None,
            seen: list[np.ndarray] = seen,
        ) -> None:
            seen.append(values)

        ours = quantized(model, origin, shapes, storage, inputs, watch)
        values = read_values(model, origin, shapes, np.float32)
        expected = storage.quantize(values, inputs)
        assert str(jax.tree.structure(ours)) == str(jax.tree.structure(expected))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            assert np.array_equal(a, b), name
        assert np.array_equal(np.concatenate(seen).reshape(values.shape), values)
        largest = max(largest, len(seen))
    assert largest > 1
