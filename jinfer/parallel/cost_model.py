"""Cost model: estimates a decode step from memory reads, all-reduces and pipeline transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True)
class Interconnect:
    """A link between two devices.

    Attributes:
        rate: bandwidth in bytes a second, in one direction.
        latency: seconds of an empty message.
    """

    rate: float
    latency: float

    def seconds(self, size: float) -> float:
        """Seconds that a message takes."""
        return self.latency + size / self.rate


@dataclass(frozen=True)
class Hardware:
    """The speeds of a kind of device, and of the links between devices.

    Attributes:
        memory: bytes of a device's memory.
        read: memory bandwidth, bytes a second.
        flops: matrix multiplication, operations a second.
        sums: the link for all-reduces within a stage.
        passes: the link between stages.
        call: seconds to launch a stage's program.
        host: the link to host memory.
        together: bandwidth of all devices together, where they share a memory.
        apart: seconds of a step in addition to reading and multiplying, which tensor parallelism
            does not reduce.
    """

    memory: float
    read: float
    flops: float
    sums: Interconnect
    passes: Interconnect
    call: float
    host: Interconnect = Interconnect(2.5e10, 1e-5)  # PCIe of today
    together: float = inf
    apart: float = 0.0


def _gpu(memory: float, read: float, flops: float, link: Interconnect) -> Hardware:
    """A device by its maker's data sheet; the cost of a launch is a guess."""
    return Hardware(memory, read, flops, link, link, 1e-4)


# Links are in one direction.
HARDWARE = {
    "v100": _gpu(32e9, 0.9e12, 1.12e14, Interconnect(1.2e10, 1e-5)),  # PCIe
    "rtx4090": _gpu(24e9, 1.0e12, 1.65e14, Interconnect(2.5e10, 1e-5)),
    "a100": _gpu(80e9, 2.0e12, 3.12e14, Interconnect(3e11, 5e-6)),  # NVLink
    "h100": _gpu(80e9, 3.35e12, 9.9e14, Interconnect(4.5e11, 5e-6)),
}


@dataclass(frozen=True)
class ModelCost:
    """The sizes of a model that its cost follows from.

    Attributes:
        weights: bytes of all weights.
        active: bytes of the weights that one token is multiplied with; of experts, the chosen ones.
        parameters: number of the weights that one token is multiplied with.
        layers: number of layers.
        hidden: bytes of a token's hidden state between layers.
        vocab: bytes of a token's logits.
        cache: bytes of a token's keys and values, in all layers.
        kv_heads: key and value heads; the cache is divided among at most so many devices.
        sums: all-reduces in a layer.
        tables: bytes of the weights that are only looked up by token, such as the embedding.
    """

    weights: float
    active: float
    parameters: float
    layers: int
    hidden: float
    vocab: float
    cache: float
    kv_heads: int
    sums: int = 2
    tables: float = 0.0


@dataclass(frozen=True)
class CostEstimate:
    """The estimated cost of a layout.

    Attributes:
        pipe: number of pipeline stages.
        tensor: devices of each stage.
        step: latency: seconds between two tokens of a sequence.
        tokens: throughput: tokens a second of all sequences, with all stages busy.
        device: bytes of weights and cache on a device.
        moved: bytes that a device sends in a step.
    """

    pipe: int
    tensor: int
    step: float
    tokens: float
    device: float
    moved: float


def estimate_decode(
    work: ModelCost,
    machine: Hardware,
    pipe: int,
    tensor: int,
    *,
    batch: int = 1,
    context: int = 1024,
    shares: Sequence[float] = (),
) -> CostEstimate:
    """The cost of a decode step.

    A stage reads its weights and its sequences' cache once, multiplies, and all-reduces twice per
    layer: in a ring each of T devices sends and receives 2 (T - 1) / T of the hidden states.

    Args:
        batch: sequences of a micro-batch.
        context: tokens of each in the cache.
        shares: each stage's fraction of the model; empty: all the same.
    """
    fractions = shares or (1 / pipe,) * pipe
    vectors, ring = batch * work.hidden, 2 * (tensor - 1) / tensor
    sums = work.sums * work.layers / pipe * (tensor > 1)
    adding = sums * (2 * machine.sums.latency + ring * vectors / machine.sums.rate)
    passing = (pipe > 1) * machine.passes.seconds(vectors)
    gathering = (tensor > 1) * machine.sums.seconds(batch * work.vocab) / pipe
    moving = adding + passing + gathering + machine.call + machine.apart / pipe
    alone, busy = (
        [
            _compute_seconds(work, machine, part, tensor, batch, context, devices)
            for part in fractions
        ]
        for devices in (tensor, pipe * tensor)
    )
    shared = pipe * _cache_shards(work, tensor)
    # As many micro-batches as stages, so that all stages are busy.
    held = work.weights / (pipe * tensor) + pipe * batch * context * work.cache / shared
    moved = sums * ring * vectors + (pipe > 1) * vectors
    step = sum(alone) + pipe * moving
    return CostEstimate(pipe, tensor, step, batch / (max(busy) + moving), held, moved)


def _compute_seconds(
    work: ModelCost,
    machine: Hardware,
    part: float,
    tensor: int,
    batch: int,
    context: int,
    devices: int,
) -> float:
    """Seconds that a device of a stage reads and multiplies: the larger of the two (roofline).

    Args:
        part: the stage's fraction of the model.
        devices: how many devices, of all stages, read at the same time.
    """
    weights = min(work.weights - work.tables, batch * work.active) / tensor
    cache = batch * context * work.cache / _cache_shards(work, tensor)
    reading = part * (weights + cache) / min(machine.read, machine.together / devices)
    return max(reading, part * 2 * batch * work.parameters / tensor / machine.flops)


def _cache_shards(work: ModelCost, tensor: int) -> int:
    """How many devices of a stage the cache is divided among; the others replicate it."""
    return min(tensor, max(1, work.kv_heads))


def estimate_with_offload(
    work: ModelCost,
    machine: Hardware,
    host: Hardware,
    layout: tuple[int, int],
    *,
    context: int,
    host_embeddings: bool = False,
    host_kv_cache: float = 0.0,
    cpu_layers: int = 0,
    streamed_layers: int = 0,
) -> float:
    """Seconds of a decode step with offload to the host, given by keys of `[partition]`.

    Args:
        layout: stages, and devices of each, without the host.
        context: tokens in the cache.
    """
    pipe, tensor = layout
    on_host, vector = cpu_layers / work.layers, machine.host.seconds(work.hidden)
    rest = _cost_of_layers(work, 1 - on_host)
    on_device = replace(rest, cache=(1 - host_kv_cache) * rest.cache)
    step = estimate_decode(on_device, machine, pipe, tensor, context=context).step
    if host_embeddings or cpu_layers:
        step += (
            vector
            + estimate_decode(_cost_of_layers(work, on_host), host, 1, 1, context=context).step
        )
    if host_kv_cache:
        # A layer waits for the transfer of its queries, a launch on the host, and the transfer
        # back; the device attends to its own blocks meanwhile.
        reads = host_kv_cache / host.read - (1 - host_kv_cache) / machine.read
        waited = max(0.0, context * rest.cache * reads)
        step += rest.layers * (2 * vector + host.call) + waited
    # Weight copies overlap with computation: the slower of the two decides.
    copied = machine.host.seconds(work.weights / work.layers / tensor)
    return max(step, streamed_layers * copied)


def _cost_of_layers(work: ModelCost, share: float) -> ModelCost:
    """The cost of a fraction of the layers."""
    names = ("weights", "active", "parameters", "cache", "tables")
    sizes = {name: share * getattr(work, name) for name in names}
    return replace(work, **sizes, layers=round(share * work.layers))


def device_layouts(devices: int) -> Iterator[tuple[int, int]]:
    """All layouts (stages, devices per stage) that use all devices."""
    yield from (
        (devices // tensor, tensor) for tensor in range(1, devices + 1) if not devices % tensor
    )


def best_layout(
    work: ModelCost, machine: Hardware, allowed: Sequence[tuple[int, int]], *, context: int
) -> CostEstimate | None:
    """The layout with the lowest latency of those that fit into memory; None where none does.

    Of equally fast ones the one with fewer devices.
    """
    fitting = [
        cost
        for pipe, tensor in allowed
        if (cost := estimate_decode(work, machine, pipe, tensor, context=context)).device
        <= 0.9 * machine.memory
    ]
    return min(fitting, key=lambda e: (round(e.step, 9), e.pipe * e.tensor), default=None)
