"""Sub-stages: splits a pipeline stage where weights or KV cache are offloaded to the host.

A layer whose weights are offloaded, or whose attention runs partly on the host, is a stage with
its own programs on the same devices; the layers between such layers stay together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jinfer.parallel.sharding_rules import ModelSlice


@dataclass(frozen=True)
class SubStage:
    """Some consecutive layers of a pipeline stage.

    Attributes:
        slice: the slice of the model that it has.
        streamed: whether its weights are offloaded to host memory.
        hosted: whether some of its KV cache is offloaded.
    """

    slice: ModelSlice
    streamed: bool = False
    hosted: bool = False


def spread_evenly(layers: Collection[int], count: int) -> frozenset[int]:
    """`count` of the layers, spread evenly, so that each copy overlaps with layers that compute."""
    total = len(layers)
    return frozenset(
        layer for i, layer in enumerate(layers) if (i + 1) * count // total > i * count // total
    )


def split_stage(
    part: ModelSlice, main: str, streamed: Collection[int], hosted: Collection[int]
) -> list[SubStage]:
    """A stage's sub-stages, in their order.

    Args:
        main: the stack that is split; the layers of others stay with the first sub-stage.
        streamed: layers of it whose weights are offloaded.
        hosted: layers of it some of whose KV cache is offloaded.
    """
    layers_of_stage = part.layers[main]
    runs: list[tuple[range, bool]] = []  # layers, and whether they are a single offloaded one
    for layer in layers_of_stage:
        alone = layer in hosted or layer in streamed
        if runs and not alone and not runs[-1][1]:
            runs[-1] = range(runs[-1][0].start, layer + 1), False
        else:
            runs.append((range(layer, layer + 1), alone))
    others = any(len(span) for name, span in part.layers.items() if name != main)
    if not runs or (runs[0][1] and (part.first or others)):
        runs.insert(0, (range(layers_of_stage.start, layers_of_stage.start), False))
    if runs[-1][1] and part.last:
        runs.append((range(layers_of_stage.stop, layers_of_stage.stop), False))
    split = []
    for index, (run, alone) in enumerate(runs):
        first, last = index == 0, index == len(runs) - 1
        layers = {
            name: run if name == main else span if first else range(span.stop, span.stop)
            for name, span in part.layers.items()
        }
        run_slice = ModelSlice(layers, part.first and first, part.last and last)
        offloaded = (alone and run.start in which for which in (streamed, hosted))
        split.append(SubStage(run_slice, *offloaded))
    return split
