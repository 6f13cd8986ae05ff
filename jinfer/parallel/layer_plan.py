"""Partition plan: divides a model's layers among pipeline stages, balanced by bytes.

The plan follows from `[partition]`, the number of devices, and the bytes of each layer. Layers
whose weights or KV cache are offloaded to the host become sub-stages of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from jinfer.modelspec.blocks import HeadSpec
from jinfer.modelspec.layer_spec import StackSpec, some_layers
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.partition_table import CPU, PartitionSpec, device_groups
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import nbytes
from jinfer.parallel.sharding_rules import ShardingError

type StageDeviceNames = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ModelSlice:
    """The slice of a model that a pipeline stage has.

    Attributes:
        layers: the layers of each stack, by the stack's name.
        first: whether it has what comes before the layers, such as the embedding.
        last: whether it has what comes after them, such as the head.
    """

    layers: Mapping[str, range]
    first: bool = True
    last: bool = True


def whole_model(spec: ModelSpec) -> ModelSlice:
    """The slice that is the whole model."""
    return ModelSlice({stack.name: range(len(stack.layers)) for stack in spec.stacks})


def stage_spec(spec: ModelSpec, part: ModelSlice) -> ModelSpec:
    """The specification of a pipeline stage, with its layers numbered from 0."""
    stacks = tuple(_stage_stack(stack, part) for stack in spec.stacks)
    named = {name for stack in stacks for name in _called_modules(stack, part)}
    blocks = [block for name, block in spec.shared if name in named]
    blocks += [block for stack in stacks for _, block in stack.modules]
    if any(isinstance(block, HeadSpec) and block.tied for block in blocks):
        named.add("embed")
    shared = tuple((name, block) for name, block in spec.shared if name in named)
    return replace(spec, shared=shared, stacks=stacks)


def _stage_stack(stack: StackSpec, part: ModelSlice) -> StackSpec:
    span = part.layers[stack.name]
    try:
        layers = some_layers(stack.layers, span)
    except LookupError as error:
        raise ShardingError(f"{error}; keep these in one stage") from None
    onward = None if part.last else stack.values_before(span.stop)
    stage_stack = replace(stack, layers=layers, onward=onward)
    called = set(_called_modules(stage_stack, part))
    modules = tuple(module for module in stack.modules if module[0] in called)
    return replace(stage_stack, modules=modules)


def _called_modules(stack: StackSpec, part: ModelSlice) -> Iterator[str]:
    """Names of the modules that a stage calls."""
    yield from stack.stem.calls if part.first else ()
    yield from stack.head.calls if part.last else ()
    for layer in stack.layers:
        yield from layer.wiring.calls


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model's weights, as they are stored.

    Attributes:
        layers: bytes of each layer of each stack.
        before: bytes that the first stage has in addition to its layers, such as the embedding's.
        after: bytes that the last stage has in addition to its layers, such as the head's.
    """

    layers: Mapping[str, Sequence[int]]
    before: int
    after: int

    @property
    def total(self) -> int:
        """Bytes of the whole model."""
        return self.before + self.after + sum(sum(sizes) for sizes in self.layers.values())


def model_bytes(spec: ModelSpec, model: AbstractModel) -> ModelBytes:
    """The bytes of a model's layers, and of the modules before and after them.

    Args:
        model: the model, with its parameters as they will be stored.
    """
    layers = {stack.name: [0] * len(stack.layers) for stack in spec.stacks}
    none, ends = {stack.name: range(0) for stack in spec.stacks}, [0, 0]
    outside = [
        [
            *(f"{name}." for name, _ in stage.shared),
            *(f"{stack.name}.{name}." for stack in stage.stacks for name, _ in stack.modules),
        ]
        for first in (True, False)
        for stage in [stage_spec(spec, ModelSlice(none, first, not first))]
    ]
    for name, parameter in zip(model.names, model.parameters, strict=True):
        stack, number, *_ = (*name.split("."), "")
        if stack in layers and number.isdigit():
            layers[stack][int(number)] += nbytes(parameter)
            continue
        for end, prefixes in enumerate(outside):
            ends[end] += nbytes(parameter) * name.startswith(tuple(prefixes))
    return ModelBytes(layers, *ends)


@dataclass(frozen=True)
class PlannedStage:
    """A pipeline stage of a plan.

    Attributes:
        devices: their numbers, or "cpu". Several are a tensor-parallel group.
        slice: the slice of the model that they have.
    """

    devices: tuple[str, ...]
    slice: ModelSlice


@dataclass(frozen=True)
class PartitionPlan:
    """Which devices have which slice of the model.

    Attributes:
        stages: in pipeline order.
        lanes: the number of micro-batches.
    """

    stages: tuple[PlannedStage, ...]
    lanes: int


def make_partition_plan(
    spec: PartitionSpec,
    model_bytes: ModelBytes,
    devices: int,
    slots: int,
    path: object,
    automatic: Callable[[], StageDeviceNames],
) -> PartitionPlan:
    """The plan that `[partition]` asks for.

    Args:
        devices: how many devices there are, without the host.
        slots: sequences that run at a time (`engine.slots`).
        path: the specification's file, for errors.
        automatic: chooses the groups of devices for "auto".

    Raises:
        SpecError: the devices or layers do not allow it; the message says what there is.
    """
    groups = _stage_device_names(spec, devices, path, automatic)
    main = max(
        model_bytes.layers, key=lambda name: (name == "decoder", len(model_bytes.layers[name]))
    )
    counts = _layer_counts(spec, model_bytes, groups, main, path)
    if spec.lanes is not None and spec.lanes > slots:
        reason = f"{spec.lanes} is more than engine.slots = {slots}"
        raise SpecError(path, "partition.lanes", reason)
    layers = {
        name: balance_layers(sizes, 0, 0, len(groups), 0)
        for name, sizes in model_bytes.layers.items()
    }
    layers[main] = counts
    stages = []
    for i, group in enumerate(groups):
        spans = {name: range(sum(n[:i]), sum(n[: i + 1])) for name, n in layers.items()}
        stages.append(PlannedStage(group, ModelSlice(spans, i == 0, i == len(groups) - 1)))
    return PartitionPlan(tuple(stages), spec.lanes or min(len(groups), slots))


def _stage_device_names(
    spec: PartitionSpec, devices: int, path: object, automatic: Callable[[], StageDeviceNames]
) -> StageDeviceNames:
    key = "partition.devices"
    if spec.mesh is not None:
        pipe, tensor, key = spec.mesh.pipe, spec.mesh.tensor, "partition.mesh"
        if pipe * tensor > devices:
            reason = f"needs {pipe} x {tensor} = {pipe * tensor} devices, but there are {devices}"
            raise SpecError(path, key, reason)
        groups: StageDeviceNames = tuple(
            tuple(str(row * tensor + i) for i in range(tensor)) for row in range(pipe)
        )
    elif spec.devices is None:
        groups = (("0",),)
    else:
        groups = device_groups(spec.devices, path) or automatic()
    for name in (name for group in groups for name in group):
        if name != CPU and int(name) >= devices:
            there = f"there are {devices}, from 0 on" if devices > 1 else "there is one, number 0"
            raise SpecError(path, key, f"device {name} is not there: {there}")
    if (spec.cpu_layers or spec.host_embeddings) and (CPU,) in groups:
        key = "cpu_layers" if spec.cpu_layers else "host_embeddings"
        raise SpecError(path, f"partition.{key}", "devices has a stage on the host already")
    return ((CPU,), *groups) if spec.cpu_layers or spec.host_embeddings else groups


def _layer_counts(
    spec: PartitionSpec, weight: ModelBytes, groups: StageDeviceNames, main: str, path: object
) -> list[int]:
    """How many layers of the main stack each stage has."""
    sizes, stages = weight.layers[main], len(groups)
    host = spec.cpu_layers
    added = bool(host or spec.host_embeddings)
    if spec.layers is not None:
        if added:
            reason = (
                f'cannot be combined with an added stage on the host; write devices = "{CPU};..."'
            )
            raise SpecError(path, "partition.layers", reason)
        if len(spec.layers) != stages or sum(spec.layers) != len(sizes):
            raise SpecError(
                path,
                "partition.layers",
                f"{list(spec.layers)} are {sum(spec.layers)} layers of {len(spec.layers)} stages, "
                f"but there are {len(sizes)} layers and {stages} stages",
            )
        return list(spec.layers)
    if len(sizes) - host < stages - added:
        key = "cpu_layers" if host else "mesh" if spec.mesh is not None else "devices"
        raise SpecError(
            path,
            f"partition.{key}",
            f"{stages} stages are more than the {main}'s {len(sizes)} layers allow; take fewer, "
            "or say in partition.layers which stages have none",
        )
    if added:
        return [host, *balance_layers(sizes[host:], 0, weight.after, stages - 1, 1)]
    return balance_layers(sizes, weight.before, weight.after, stages, 1)


def balance_layers(
    sizes: Sequence[int], before: int, after: int, stages: int, minimum: int
) -> list[int]:
    """How many layers each stage has, such that the largest stage is as small as possible.

    Of divisions with equally large largest stages, the second largest stage decides, and so on.

    Args:
        sizes: bytes of each layer.
        before, after: bytes of the first and the last stage without their layers.
        minimum: the fewest layers of a stage.
    """
    count = len(sizes)
    sums = [sum(sizes[:end]) for end in range(count + 1)]
    # Dynamic programming over stages. best[end]: stage sizes, largest first, and layer counts of
    # the best division of the first `end` layers among the stages so far.
    best: dict[int, tuple[tuple[int, ...], list[int]]] = {0: ((), [])}
    for stage in range(stages):
        extra = (before if stage == 0 else 0) + (after if stage == stages - 1 else 0)
        fuller: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        for begin, (loads, counts) in best.items():
            for end in range(begin + minimum, count + 1):
                load = sums[end] - sums[begin] + extra
                key = tuple(sorted((*loads, load), reverse=True))
                if end not in fuller or key < fuller[end][0]:
                    fuller[end] = key, [*counts, end - begin]
        best = fuller
    return best[count][1]


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
    span, alone = part.layers[main], {*streamed, *hosted}
    runs = [
        range(first, first + 1 + len(list(others)))
        for _, others in groupby(span, lambda layer: layer if layer in alone else -1)
        for first in [next(others)]
    ]
    others = any(len(rest) for name, rest in part.layers.items() if name != main)
    if not runs or (runs[0].start in alone and (part.first or others)):
        runs.insert(0, range(span.start, span.start))
    if runs[-1].start in alone and len(runs[-1]) and part.last:
        runs.append(range(span.stop, span.stop))
    split = []
    for index, run in enumerate(runs):
        first, last = index == 0, index == len(runs) - 1
        layers = {
            name: run if name == main else span if first else range(span.stop, span.stop)
            for name, span in part.layers.items()
        }
        run_slice = ModelSlice(layers, part.first and first, part.last and last)
        is_offloaded = (len(run) == 1 and run.start in which for which in (streamed, hosted))
        split.append(SubStage(run_slice, *is_offloaded))
    return split
