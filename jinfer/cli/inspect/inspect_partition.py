"""Inspect a partition plan: shards, memory, collectives (`jinfer inspect --partition`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

import numpy as np

from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.scheduling.cache_size import block_bytes
from jinfer.html.svg_drawing import CHARACTER, svg
from jinfer.loader.open_model import Opened, open_model
from jinfer.loader.weights.model_size import bytes_text
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.modelspec.partition_table import CPU
from jinfer.modelspec.toml_tables import merge
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.nn.transformer_layer import HiddenState
from jinfer.ops.attention.kv_cache import BLOCK, ENCODER, nbytes, zero_cache
from jinfer.ops.backend import target_platform
from jinfer.parallel.cost_model import HARDWARE, CostEstimate, estimate_decode
from jinfer.parallel.memory_plan import HOST, MemoryPlan, aligned, memory_planner
from jinfer.parallel.placement import ModelToPlace, model_cost, partition_plan, stage_models
from jinfer.parallel.sharding_rules import TENSOR_AXIS
from jinfer.parallel.stage_model import StageModel, decoder_forward, encoder_forward

_FREE = 0.9  # of a device's memory; programs and vectors on their way need some
_SUMS = {"psum": "sum", "psum_invariant": "sum", "all_gather": "gather"}


@dataclass(frozen=True)
class StageView:
    """A pipeline stage and what its devices hold.

    Attributes:
        devices: their names.
        layers: "decoder 0-3", for each stack it has layers of, and its other modules.
        weights: bytes.
        cache: bytes of a token's keys and values.
        collectives: of a step, by kind.
    """

    devices: tuple[str, ...]
    layers: tuple[str, ...]
    weights: int
    cache: float
    collectives: Mapping[str, int]


@dataclass(frozen=True)
class PlanView:
    """A partition plan.

    Attributes:
        moved: bytes of a token's vector, passed between stages.
        context: tokens of a sequence.
        machine: of the estimate.
        memory: the memory plan, if devices have the machine's memory.
    """

    stages: tuple[StageView, ...]
    moved: int
    context: int
    machine: str
    estimate: CostEstimate
    memory: MemoryPlan


def view(source: str, overrides: Mapping[str, Any], devices: str, machine: str) -> PlanView:
    """The plan of a model for some devices, which need not exist.

    Args:
        devices: as `partition.devices`.
        machine: one of `HARDWARE`.

    Raises:
        SpecError, LoadError, ...: one line each.
    """
    opened = open_model(source, merge(dict(overrides), {"partition": {"devices": devices}}))
    dtype = np.dtype(opened.dtype)
    plain = build_abstract_model(opened.spec, dtype)
    model = plan_weights(plain, opened.spec, opened.checkpoint, opened.activations).model
    whole = ModelToPlace(opened.spec, model, opened.context, dtype, opened.kv_cache)
    plan = partition_plan(whole, dry_run=True)
    stages = zip(stage_models(plan, whole), plan.stages, strict=True)
    planner = memory_planner(plan, whole, free_of(machine))
    with target_platform("gpu"):  # a cache on a CPU may have int8 keys as well
        views = tuple(_stage(stage, row.devices, opened) for stage, row in stages)
        work, memory = model_cost(whole), planner.requested()
    tensor = max(len(row.devices) for row in plan.stages)
    found = estimate_decode(
        work, HARDWARE[machine], len(plan.stages), tensor, context=opened.context
    )
    return PlanView(views, int(work.hidden), opened.context, machine, found, memory)


def free_of(machine: str) -> Callable[[str], float]:
    """Bytes available for weights and cache, by device name; unlimited for the host."""
    most = _FREE * HARDWARE[machine].memory
    return lambda name: float("inf") if name in (CPU, HOST) else most


def _stage(stage: StageModel, devices: tuple[str, ...], opened: Opened) -> StageView:
    model, part = stage.model, stage.slice
    own = {name: shape for name, shape in model.caches.items() if shape.group != ENCODER}
    cache = sum(block_bytes(own, opened.kv_cache).values()) / BLOCK if own else 0.0
    layers = [f"{stack} {_run(rows)}" for stack, rows in part.layers.items() if len(rows)]
    words = [*(["embedding"] if part.first else []), *layers, *(["head"] if part.last else [])]
    names = tuple(name if name == "cpu" else f"device {name}" for name in devices)
    counts = collectives(stage, opened)
    return StageView(names, tuple(words), nbytes(model.parameters), cache, counts)


def _run(rows: range) -> str:
    return str(rows.start) if len(rows) == 1 else f"{rows.start}-{rows.stop - 1}"


def collectives(stage: StageModel, opened: Opened) -> dict[str, int]:
    """Count the collectives of a stage in one step, in its jaxpr."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AbstractMesh
    from jax.sharding import PartitionSpec as P

    if stage.devices == 1:
        return {}
    ints: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
    leaves = tuple(jax.tree.leaves(stage.model.parameters))
    vectors: Any = jax.ShapeDtypeStruct((1, 1, opened.spec.dims["hidden"]), jnp.dtype(opened.dtype))
    carried = opened.spec.stacks[-1].carried
    x = HiddenState(vectors, dict.fromkeys(carried, vectors), {})
    given: tuple[Any, ...]
    if opened.spec.decoder is None:
        texts = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        run: Any = partial(encoder_forward, stage, ("hidden", "logits"))
        given = (None if stage.slice.first else x, texts, texts, ints)
        several = False
    else:
        shapes = stage.model.caches
        pools = jax.eval_shape(lambda: zero_cache(shapes, 1, opened.kv_cache))
        groups = [shape.group for shape in shapes.values()] or ["all"]
        tables: Any = dict.fromkeys(groups, jax.ShapeDtypeStruct((1, 1), jnp.int32))
        batch = FlatBatch(ints, ints, ints, ints, ints, tables)
        run = partial(decoder_forward, stage, ("logits",), False)
        given = (pools, None if stage.slice.first else x, batch, None)
        several = True

    out = (P(), P()) if several else P()
    mesh = AbstractMesh((stage.devices,), (TENSOR_AXIS,))
    shared = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=out, check_vma=False)
    counted = Counter(_exchanges(jax.make_jaxpr(shared)(leaves, *given).jaxpr))
    return dict(counted)


def _exchanges(jaxpr: Any) -> Iterator[str]:
    """The collectives of a jaxpr and of its inner ones."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _SUMS:
            yield _SUMS[name]
        values = equation.params.values()
        for value in (
            each for one in values for each in (one if isinstance(one, tuple) else [one])
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _exchanges(inner)


def to_text(plan: PlanView) -> str:
    """The plan as a table."""
    lines = [("device", "has", "weights", "cache", "exchanges a step")]
    for stage in plan.stages:
        cells = (
            " + ".join(stage.layers),
            bytes_text(stage.weights),
            bytes_text(stage.cache * plan.context),
            _exchanged(stage),
        )
        lines += [(name, *cells) for name in stage.devices]
    return "\n".join([*aligned(lines), "", str(plan.memory), "", *_notes(plan)])


def _exchanged(stage: StageView) -> str:
    counts = sorted(stage.collectives.items(), reverse=True)
    named = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts]
    return ", ".join(named) or "nothing"


def _notes(plan: PlanView) -> list[str]:
    found = plan.estimate
    return [
        f"cache: of a sequence of {plan.context:,} tokens; "
        f"{bytes_text(plan.moved)} a token go from stage to stage",
        f"estimate for {plan.machine}: {found.step * 1e3:.1f} ms from a token to the next, "
        f"{found.tokens:.0f} tokens a second with every stage busy with one sequence",
    ]


_STYLE = """
.jp .stage{fill:#f3f4f5;stroke:#d5d8dc}
.jp .device{fill:#e6eef7;stroke:#6b8fb5}
.jp .wire{stroke:#3d5a80;stroke-width:2}.jp .tip{fill:#3d5a80}
"""
_DARK = """
.jp .stage{fill:#26292d;stroke:#43484f}.jp .device{fill:#27384a}
.jp .wire{stroke:#8fb0d6}.jp .tip{fill:#8fb0d6}
"""
_LINE, _PAD, _GAP = 17, 12, 96


def to_svg(plan: PlanView) -> str:
    """The plan as a picture: a column for each stage, a box for each device."""
    parts, left, bottom = list[str](), float(_PAD), 0.0
    for number, stage in enumerate(plan.stages):
        if number:
            parts += _arrow(left, _PAD + 3 * _LINE, bytes_text(plan.moved))
            left += _GAP
        drawn, width, height = _column(plan, stage, number, left)
        parts += drawn
        left, bottom = left + width, max(bottom, _PAD + height)
    notes = _notes(plan)
    width = max(left, CHARACTER * max(map(len, notes)) + _PAD) + _PAD
    height = bottom + _LINE * (len(notes) + 1) + _PAD
    parts += [
        _text(_PAD, bottom + _LINE * (index + 1) + 4, note, "soft")
        for index, note in enumerate(notes)
    ]
    return svg("jp", width, height, "".join(parts), style=_STYLE, dark=_DARK) + "\n"


def _column(
    plan: PlanView, stage: StageView, number: int, left: float
) -> tuple[list[str], float, float]:
    """A stage, its width and height."""
    boxes = [[name, *_facts(plan, stage)] for name in stage.devices]
    inside = CHARACTER * max(len(line) for box in boxes for line in box) + 2 * _PAD
    tall = _LINE * len(boxes[0]) + _PAD
    width, height = inside + 2 * _PAD, 2 * _LINE + len(boxes) * (tall + _PAD)
    title = _text(left + _PAD, _PAD + _LINE + 2, f"stage {number}", "name")
    parts = [_rect("stage", left, _PAD, width, height), title]
    for place, box in enumerate(boxes):
        top = _PAD + 1.6 * _LINE + place * (tall + _PAD)
        parts.append(_rect("device", left + _PAD, top, inside, tall))
        parts += [
            _text(left + 2 * _PAD, top + _LINE * (index + 1), line, "soft" if index else "name")
            for index, line in enumerate(box)
        ]
    return parts, width, height


def _arrow(left: float, y: float, label: str) -> list[str]:
    """The transfer between two stages."""
    ends = f'x1="{left + 4:.0f}" y1="{y:.0f}" x2="{left + _GAP - 10:.0f}" y2="{y:.0f}"'
    tip = left + _GAP - 3
    return [
        f'<line class="wire" {ends}/>',
        f'<path class="tip" d="M{tip:.0f} {y:.0f}l-9 -5v10z"/>',
        _text(left + _GAP / 2, y - 8, label, "soft", "middle"),
    ]


def _facts(plan: PlanView, stage: StageView) -> list[str]:
    return [
        *stage.layers,
        f"weights {bytes_text(stage.weights)}",
        f"cache {bytes_text(stage.cache * plan.context)}",
        f"exchanges {_exchanged(stage)}",
    ]


def _rect(style: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{style}" rx="6" x="{x:.0f}" y="{y:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}"/>'
    )


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    return (
        f'<text class="{style}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
