"""Importance matrices (imatrix) for llama.cpp's quantizer: the mean square of each tensor's inputs.

As llama.cpp's own tool does, but over the text that GPTQ reads, so that both quantizers know the
same. llama.cpp takes it as an array of entries by the name of the GGUF file's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from jinfer.engine.requests import RequestError
from jinfer.loader.open_model import (
    Opened,
    open_files,
    open_model,
)
from jinfer.loader.resolve_model import resolve_model
from jinfer.loader.weights.layer_forward import (
    LayerwiseForward,
    Texts,
    default_texts,
    in_batches,
    with_firsts,
)
from jinfer.loader.weights.layerwise_gptq import known
from jinfer.loader.weights.plan_weights import TOKENS, WeightPlan, plan_weights
from jinfer.loader.weights.read_parameter import read_values
from jinfer.loader.weights.tensor_mapping import Origin, parameter_shapes
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.quant.calibration_stats import RecordedWeight, record_inputs

LENGTH = 512  # tokens of a window


def text_windows(opened: Opened, text: str, most: int, length: int = LENGTH) -> list[Texts]:
    """Batches of token ids; an incomplete last window is dropped.

    Args:
        opened: the model that reads it.
        most: max tokens, before some of them are repeated as first ones.
        length: tokens per window.

    Raises:
        RequestError: the text is too short, or the model reads text pairs.
    """
    if len(opened.spec.stacks) != 1:
        raise RequestError("calibration is for a model with an encoder or a decoder alone")
    if opened.tokenizer is None:
        raise RequestError("the model has no tokenizer for the calibration text")
    length = min(length, opened.context)
    some = opened.tokenizer.encode(text)[:most]
    ids = np.asarray(some[: len(some) // length * length], np.int32).reshape(-1, length)
    if not len(ids):
        raise RequestError("the calibration text is shorter than a window; give a longer one")
    # An encoder sees all of a text from everywhere.
    return in_batches(ids) if opened.spec.decoder is None else with_firsts(ids)


_PLAIN: dict[str, Any] = {"dtype": "float32", "quantization": {"weights": "plain"}}
_WRITES: dict[str, Any] = {"quantization": {"weights": "q8", "method": "rtn"}}


def importance_matrix(
    source: str, *, calibration: str | None = None, tokens: int = TOKENS, progress: bool = False
) -> dict[str, np.ndarray]:
    """Mean squares of the inputs of each matrix of a GGUF file, [inputs], by its tensors' names.

    Experts' stacks have those of all experts, one after the other, as llama.cpp wants them; tables
    and matrices that nothing is multiplied with are left out.

    Args:
        source: a GGUF file of a model with one stack.
        calibration: the text; none: the one that the model writes for GPTQ.
        tokens: max tokens of it.

    Raises:
        SourceError, SpecError, CheckpointError, LoadError, RequestError: one line each.
    """
    import jax
    import jax.numpy as jnp

    if calibration is None:
        texts = default_texts(_plan(source, _WRITES), tokens=tokens, progress=progress)
    else:
        texts = text_windows(open_model(source, _PLAIN), calibration, tokens)
    plan = _plan(source, _PLAIN)
    walk = LayerwiseForward(plan.plain, plan.spec.stacks[0].name)
    origins, shapes = cast("dict[str, Origin]", plan.origins), parameter_shapes(plan.plain)
    roles = dict(zip(plan.plain.names, plan.plain.roles, strict=True))

    def read(name: str) -> jax.Array:
        stored = read_values(plan.plain, origins[name], shapes, np.dtype(np.float32))
        return jnp.asarray(stored, jnp.float32)

    found = dict[str, np.ndarray]()

    def recorded(names: Sequence[str], run: Callable[..., Any], vectors: list[Any]) -> list[Any]:
        """Results for each text; the mean squares are added to `found`."""
        own = {name: read(name) for name in names}
        taps = {
            name: record_inputs(leaf, "squares")
            for name, leaf in own.items()
            if roles[name] in ("matrix", "head")
        }
        each = zip(vectors, texts, strict=True)
        results = [jax.block_until_ready(run({**others, **own, **taps}, x, ids)) for x, ids in each]
        for name, tap in taps.items():
            found.update(_by_tensor(origins[name], tap))
        return results

    heads = [name for name in walk.others if roles[name] == "head"]
    others = {name: read(name) for name in walk.others if name not in heads}
    vectors: list[Any] = [walk.embed(others, ids) for ids in texts]
    for number, names in enumerate(walk.layers):
        vectors = recorded(names, partial(walk.layer, number), vectors)
    recorded(heads, walk.finish, vectors)
    return found


def _plan(source: str, overrides: dict[str, Any]) -> WeightPlan:
    files = open_files(source, overrides)
    spec, _ = resolve_model(files, overrides)
    return plan_weights(build_abstract_model(spec, "float32"), spec, files.checkpoint, "float")


def _by_tensor(origin: Origin, tap: RecordedWeight) -> dict[str, np.ndarray]:
    inputs = tap.inputs()
    if not inputs.rows.any():
        return {}
    squares = known(inputs).importance
    if origin.stacked:
        return {file.name: each for file, each in zip(origin.tensors, squares, strict=True)}
    return {origin.tensors[0].name: squares.reshape(-1)}
