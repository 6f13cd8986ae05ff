"""Router loads: how often each expert of a mixture of experts is chosen, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jinfer.modelspec.feed_forward_blocks import MoESpec
from jinfer.sampling.request_errors import RequestError
from jinfer.views.cell_grid import Cell, cell_grid
from jinfer.views.heat_map import Matrix, heat_maps
from jinfer.views.view import Table, View, beneath

if TYPE_CHECKING:
    from jaxtyping import Int

    from jinfer.api.llm import LLM
    from jinfer.api.prompt_inputs import Prompt

_FEW = 64  # experts that have a cell each


@dataclass(frozen=True)
class ExpertLoads:
    """How often experts were chosen.

    Attributes:
        layers: names of the mixtures.
        counts: tokens that chose each expert.
        tokens: how many there were.
    """

    layers: Sequence[str]
    counts: Int[np.ndarray, "layers experts"]
    tokens: int


def router_loads(llm: LLM, prompt: Prompt) -> View:
    """Which experts a prompt's tokens are sent to.

    Raises:
        RequestError: the model has no mixture of experts.
    """
    from jinfer.views.traced_values import captured, layer_count

    layer_count(llm)
    assert llm.spec.decoder is not None
    sizes = {
        f"decoder.{at}.{name}": block.experts + block.identity_experts
        for at, layer in enumerate(llm.spec.decoder.layers)
        for name, block in layer.modules
        if isinstance(block, MoESpec)
    }
    if not sizes:
        raise RequestError("the model has no mixture of experts, so there is no router to look at")
    ids = llm.encode(prompt)
    found = captured(llm, ids, [f"{name}.experts" for name in sizes])
    counts = np.zeros((len(sizes), max(sizes.values())), np.int64)
    for row, name in zip(counts, sizes, strict=True):
        chosen = np.asarray(found[f"{name}.experts"]).astype(np.int64).ravel()
        row += np.bincount(chosen, minlength=len(row))
    names = [name.removeprefix("decoder.") for name in sizes]
    return draw_loads(ExpertLoads(names, counts, len(ids)))


def draw_loads(loads: ExpertLoads) -> View:
    """The view of loads: a row for each layer, with how even it is."""
    experts = loads.counts.shape[1]
    largest = max(1, int(loads.counts.max(initial=0)))
    shares = loads.counts / max(1, loads.tokens)
    summary = [
        Cell(f"{row.max() / max(row.mean(), 1e-9):.1f}", f"layer {name}: the busiest expert has "
             f"{row.max() / max(row.mean(), 1e-9):.2f} times the mean")
        for name, row in zip(loads.layers, loads.counts, strict=True)
    ]  # fmt: skip
    unused = [
        Cell(str(int((row == 0).sum())), f"layer {name}: {int((row == 0).sum())} experts unused")
        for name, row in zip(loads.layers, loads.counts, strict=True)
    ]
    columns, rows = ["busiest", "unused"], []
    few = experts <= _FEW
    columns += [str(expert) for expert in range(experts)] if few else []
    for at, name in enumerate(loads.layers):
        cells = [summary[at], unused[at]]
        if few:
            cells += [
                Cell(f"{share:.0%}", f"layer {name}, expert {expert}: {count} of {loads.tokens} "
                     f"tokens", int(count) / largest)
                for expert, (share, count) in enumerate(
                    zip(shares[at], loads.counts[at], strict=True)
                )
            ]  # fmt: skip
        rows.append((name, cells))
    grid = cell_grid("layer", columns, rows, wide=7 if not few else 5, number=True)
    if not few:
        names = [str(expert) for expert in range(experts)]
        matrix = Matrix("loads", "share of tokens", shares)
        grid = beneath(heat_maps([matrix], list(loads.layers), names, "of the tokens"), grid)
    about = (
        f"{len(loads.layers)} layers × {experts} experts, {loads.tokens} tokens; the share of "
        "tokens that each expert sees; busiest: times the mean"
    )
    return View("router loads", about, grid, lambda: _table(loads))


def _table(loads: ExpertLoads) -> Table:
    layers, experts = loads.counts.shape
    return {
        "layer": np.repeat(np.array(loads.layers, object), experts),
        "expert": np.tile(np.arange(experts), layers),
        "tokens": loads.counts.ravel(),
    }
