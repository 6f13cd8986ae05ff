"""A model of what a step costs: memory read, sums among devices, vectors passed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What a device can do, and the links between devices.

    Attributes:
        memory: bytes of a device.
        read: bytes a second that it reads of its memory.
        flops: a second, of products.
        link: bytes a second between two devices.
        latency: seconds that a message takes at least.
        call: seconds that starting a stage takes.
    """

    memory: float
    read: float
    flops: float
    link: float
    latency: float
    call: float


# As their makers' data sheets say, links in one direction; what a call costs is a guess.
MACHINES = {
    "v100": Machine(32e9, 0.9e12, 1.12e14, 1.2e10, 1e-5, 1e-4),  # PCIe
    "rtx4090": Machine(24e9, 1.0e12, 1.65e14, 2.5e10, 1e-5, 1e-4),
    "a100": Machine(80e9, 2.0e12, 3.12e14, 3e11, 5e-6, 1e-4),  # NVLink
    "h100": Machine(80e9, 3.35e12, 9.9e14, 4.5e11, 5e-6, 1e-4),
}


@dataclass(frozen=True)
class Work:
    """What a model asks for.

    Attributes:
        weights: bytes of all layers, embeddings and head...
        active: ...and of those that one token is multiplied with: of experts, the chosen ones.
        parameters: numbers of them that a token is multiplied with.
        layers: whose attentions and feed-forwards are summed up.
        hidden: bytes of a token's vector between layers.
        vocab: bytes of a token's logits.
        cache: bytes of a token's keys and values, in all layers.
        kv_heads: key and value heads, at most so many of which the cache is divided among.
        sums: in a layer.
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


@dataclass(frozen=True)
class Estimate:
    """What a layout costs.

    Attributes:
        pipe, tensor: the layout.
        step: seconds from a token to the next one of the same sequence.
        tokens: a second, of all sequences together, with all stages busy.
        device: bytes that a device has of weights and cache.
        moved: bytes that leave a device in a step.
    """

    pipe: int
    tensor: int
    step: float
    tokens: float
    device: float
    moved: float


def estimate(
    work: Work, machine: Machine, pipe: int, tensor: int, *, batch: int = 1, context: int = 1024
) -> Estimate:
    """What a step of decoding costs.

    A stage reads its weights and its sequences' cache once, multiplies, and adds up twice a layer:
    each device sends and receives 2 (T - 1) / T of the vectors.

    Args:
        batch: sequences of a lane.
        context: tokens that each has in the cache.
    """
    shared = min(tensor, max(1, work.kv_heads))
    of_cache = batch * context * work.cache / (pipe * shared)
    of_weights = work.weights / (pipe * tensor)
    read = min(work.weights, batch * work.active) / (pipe * tensor)
    reading = (read + of_cache) / machine.read
    computing = 2 * batch * work.parameters / (pipe * tensor) / machine.flops
    vectors = batch * work.hidden
    ring = 2 * (tensor - 1) / tensor
    layers = work.layers / pipe
    sums = work.sums * layers * (tensor > 1)
    adding = sums * (2 * machine.latency + ring * vectors / machine.link)
    passing = (pipe > 1) * (machine.latency + vectors / machine.link)
    gathering = (tensor > 1) * (machine.latency + batch * work.vocab / machine.link) / pipe
    stage = max(reading, computing) + adding + passing + gathering + machine.call
    moved = sums * ring * vectors + (pipe > 1) * vectors
    # As many lanes as stages, so that each stage always has one of them.
    held = of_weights + pipe * of_cache
    return Estimate(pipe, tensor, pipe * stage, batch / stage, held, moved)


def layouts(devices: int) -> Iterator[tuple[int, int]]:
    """(stages, devices of a stage) that all these devices make."""
    yield from (
        (devices // tensor, tensor) for tensor in range(1, devices + 1) if not devices % tensor
    )


def best(
    work: Work, machine: Machine, allowed: Sequence[tuple[int, int]], *, context: int
) -> Estimate | None:
    """The layout whose sequences wait least, of those that fit; None where none does.

    Of equally fast ones that of fewer devices.
    """
    fitting = [
        found
        for pipe, tensor in allowed
        if (found := estimate(work, machine, pipe, tensor, context=context)).device
        <= 0.9 * machine.memory
    ]
    return min(fitting, key=lambda e: (round(e.step, 9), e.pipe * e.tensor), default=None)
