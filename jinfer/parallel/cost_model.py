"""Cost model: estimates a decode step of a layout from data sheets: reads, products, messages.

No estimate has been compared with hardware other than this machine's: trust the order of layouts,
not the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jinfer.modelspec.partition_table import PartitionSpec


@dataclass(frozen=True)
class Hardware:
    """The speeds of a kind of device, by its maker's data sheet.

    Attributes:
        memory: bytes.
        read: memory bandwidth, bytes a second.
        flops: operations of matrix products a second.
        link: bandwidth between two devices in one direction, bytes a second.
        host_link: the same between a device and host memory.
        latency: seconds of an empty message, and of the launch of a program.
    """

    memory: float
    read: float
    flops: float
    link: float
    host_link: float = 2.5e10
    latency: float = 1e-5


# Of this order; memory is measured.
HOST_HARDWARE = Hardware(0, 2e10, 2e11, 1e10, 1e10, 1e-4)

HARDWARE = {
    "v100": Hardware(32e9, 0.9e12, 1.12e14, 1.2e10),  # PCIe
    "rtx4090": Hardware(24e9, 1.0e12, 1.65e14, 2.5e10),
    "a100": Hardware(80e9, 2.0e12, 3.12e14, 3e11),  # NVLink
    "h100": Hardware(80e9, 3.35e12, 9.9e14, 4.5e11),
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
        cache: bytes of a token's keys and values, in all layers.
        kv_heads: key and value heads; the cache is divided among at most so many devices.
        tables: bytes of the weights that are only looked up by token, such as the embedding.
    """

    weights: float
    active: float
    parameters: float
    layers: int
    hidden: float
    cache: float
    kv_heads: int
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
    """

    pipe: int
    tensor: int
    step: float
    tokens: float
    device: float


def estimate_decode(
    work: ModelCost,
    machine: Hardware,
    pipe: int,
    tensor: int,
    *,
    context: int = 1024,
    offload: PartitionSpec | None = None,
) -> CostEstimate:
    """The cost of a decode step, of one sequence for each stage.

    A stage reads its weights and its sequence's cache once while it multiplies (roofline), and
    all-reduces twice per layer: in a ring each of T devices sends and receives 2 (T - 1) / T of the
    hidden states.

    Args:
        context: tokens of a sequence in the cache.
        offload: says what is offloaded to the host; None: nothing.
    """
    host, latency, own = HOST_HARDWARE, machine.latency, offload or PartitionSpec()
    on_host, cached = own.cpu_layers / work.layers, context * work.cache
    heads = min(tensor, max(1, work.kv_heads))  # the other devices replicate the cache
    reads = min(work.weights - work.tables, work.active) / tensor
    reads += (1 - own.host_kv_cache) * cached / heads
    computing = max(reads / machine.read, 2 * work.parameters / tensor / machine.flops)
    reducing = 2 * latency + 2 * (tensor - 1) / tensor * work.hidden / machine.link
    reducing *= 2 * work.layers * (tensor > 1)
    passing = latency + (pipe > 1) * (latency + work.hidden / machine.link)
    step = (1 - on_host) * (computing + reducing) + pipe * passing
    trip = latency + work.hidden / machine.host_link
    if own.host_embeddings or own.cpu_layers:
        step += trip + host.latency + on_host * (work.active + cached) / host.read
    if own.host_kv_cache:
        # A layer waits for its queries, a launch on the host, and the partial result; the device
        # attends to its own blocks meanwhile.
        waited = own.host_kv_cache / host.read - (1 - own.host_kv_cache) / machine.read
        step += (1 - on_host) * (
            work.layers * (2 * trip + host.latency) + max(0.0, cached * waited)
        )
    # Weights are copied while layers compute: the slower of the two decides.
    step = max(step, own.streamed_layers * work.weights / work.layers / tensor / machine.host_link)
    held = work.weights / (pipe * tensor) + cached / heads
    return CostEstimate(pipe, tensor, step, pipe / step, held)


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
        for layout in allowed
        if (cost := estimate_decode(work, machine, *layout, context=context)).device
        <= 0.9 * machine.memory
    ]
    return min(fitting, key=lambda e: (round(e.step, 9), e.pipe * e.tensor), default=None)
