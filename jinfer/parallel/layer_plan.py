"""Pipeline parallelism: divides a model's layers among stages, balanced by bytes.

The plan follows from `[partition]`, the number of devices, and the bytes of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jinfer.modelspec.partition_table import CPU, PartitionSpec, device_groups
from jinfer.modelspec.spec_errors import SpecError
from jinfer.parallel.sharding_rules import ModelSlice

type StageDeviceNames = tuple[tuple[str, ...], ...]


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

    def of(self, part: ModelSlice) -> int:
        """Bytes of a slice of the model."""
        layers = sum(
            sum(self.layers[name][span.start : span.stop]) for name, span in part.layers.items()
        )
        return layers + part.first * self.before + part.last * self.after


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
    last = len(groups) - 1
    stages = tuple(
        PlannedStage(
            group,
            ModelSlice(
                {name: _layers_of_stage(n, i) for name, n in layers.items()}, i == 0, i == last
            ),
        )
        for i, group in enumerate(groups)
    )
    return PartitionPlan(stages, spec.lanes or min(len(groups), slots))


def _layers_of_stage(counts: Sequence[int], index: int) -> range:
    begin = sum(counts[:index])
    return range(begin, begin + counts[index])


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
