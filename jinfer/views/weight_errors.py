"""Quantization error: how far weights, and the residual stream, are from a reference, by layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jinfer.progress import track
from jinfer.sampling.request_errors import RequestError
from jinfer.views.cell_grid import Cell, cell_grid
from jinfer.views.view import Table, View

if TYPE_CHECKING:
    from jaxtyping import Float

    from jinfer.api.llm import LLM
    from jinfer.api.prompt_inputs import Prompt

STREAM = "stream"  # the column of the residual stream
_LAYER = re.compile(r"(?:(?P<stack>\w+)\.)?(?P<layer>\d+)\.(?P<name>.+)")


@dataclass(frozen=True)
class WeightErrors:
    """Relative errors, |value - reference| / |reference| in the Frobenius norm.

    Attributes:
        errors: of each matrix, by its name without ".weight".
        formats: how each is stored.
        stream: of the residual stream after each layer, if a prompt was given.
    """

    errors: Mapping[str, float]
    formats: Mapping[str, str] = field(default_factory=dict)
    stream: Mapping[int, float] = field(default_factory=dict)


def quantization_error(llm: LLM, reference: LLM, prompt: Prompt | None = None) -> View:
    """What quantization changed, matrix by matrix.

    Args:
        reference: the same model with its weights in full, such as
            `LLM(source, **{"quantization.weights": "plain"})`. For a checkpoint of
            quantized blocks it is the one before quantization: "plain" decodes the same blocks.
        prompt: a text for which the residual streams are compared too; None: weights alone.

    Raises:
        RequestError: the models have no matrix in common.
    """
    from jinfer.views.traced_values import check_llm, residual_streams

    check_llm(llm)
    check_llm(reference)
    shared = [name for name in llm.weights if name in set(reference.weights)]
    errors, formats = dict[str, float](), dict[str, str]()
    for name in track(shared, "comparing weights", unit="matrix"):
        weight = llm.weights[name]
        if weight.values.ndim < 2:
            continue
        other = np.asarray(reference.weights[name].values, np.float32)
        if other.shape != weight.values.shape:
            continue
        short = name.removesuffix(".weight")
        errors[short] = relative_error(np.asarray(weight.values, np.float32), other)
        formats[short] = weight.format
    if not errors:
        raise RequestError("the models have no matrix of the same name and shape to compare")
    stream: dict[int, float] = {}
    if prompt is not None:
        ids = reference.encode(prompt)
        pairs = zip(residual_streams(llm, ids)[1], residual_streams(reference, ids)[1], strict=True)
        stream = {at - 1: relative_error(value, other) for at, (value, other) in enumerate(pairs)}
        del stream[-1]  # the embedding's
    return draw_errors(WeightErrors(errors, formats, stream))


def relative_error(value: Float[np.ndarray, ...], reference: Float[np.ndarray, ...]) -> float:
    """|value - reference| / |reference|; 0 where both are zero."""
    size = float(np.linalg.norm(reference))
    return float(np.linalg.norm(value - reference)) / size if size else float(np.any(value))


def draw_errors(found: WeightErrors) -> View:
    """The view of errors: a row for each layer, a column for each matrix; others below."""
    rows: dict[str, dict[str, float]] = {}
    others: dict[str, float] = {}
    for name, error in found.errors.items():
        if match := _LAYER.fullmatch(name):
            stack = "" if match["stack"] in (None, "decoder") else f"{match['stack']}."
            rows.setdefault(f"{stack}{match['layer']}", {})[match["name"]] = error
        else:
            others[name] = error
    for layer, error in found.stream.items():
        rows.setdefault(str(layer), {})[STREAM] = error
    columns = list(dict.fromkeys(name for row in rows.values() for name in row if name != STREAM))
    columns += [STREAM] if found.stream else []
    weights = max(found.errors.values(), default=0) or 1.0
    streams = max(found.stream.values(), default=0) or 1.0

    def cell(name: str, where: str, error: float | None) -> Cell | None:
        if error is None:
            return None
        stored = found.formats.get(where, "")
        title = f"{where}: {error:.4%}" + (f", stored as {stored}" if stored else "")
        return Cell(percent(error), title, error / (streams if name == STREAM else weights))

    listed = [
        (layer, [cell(n, f"decoder.{layer}.{n}", of.get(n)) for n in columns])
        for layer, of in rows.items()
    ]
    listed += [
        (name, [cell(name, name, error), *[None] * (len(columns) - 1)])
        for name, error in others.items()
    ]
    wide = max((len(name) for name in columns), default=6) + 1
    mean = float(np.mean(list(found.errors.values())))
    count = len(found.errors)
    about = f"{count} matrices, on average {percent(mean)} of the reference's norm"
    if not mean:
        about = f"{count} matrices, each as in the reference; compare with what was quantized"
    about += "; stream: of the residual stream after the layer" if found.stream else ""
    grid = cell_grid("layer", columns or ["error"], listed, wide=max(7, wide), number=True)
    return View("quantization error", about, grid, lambda: _table(found))


def percent(share: float) -> str:
    """0.01234 -> "1.2%", 0.0000123 -> ".001%", 0 -> "0"."""
    if not share:
        return "0"
    return f"{share:.1%}" if share >= 0.001 else f"{share:.3%}".removeprefix("0")


def _table(found: WeightErrors) -> Table:
    names = [*found.errors, *(f"decoder.{layer}.x" for layer in found.stream)]
    return {
        "name": names,
        "relative_error": [*found.errors.values(), *found.stream.values()],
        "format": [found.formats.get(name) for name in names],
    }
