"""A model of what a step costs: memory read, sums among devices, vectors passed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True)
class Link:
    """What carries bytes from one device to another.

    Attributes:
        rate: bytes a second.
        latency: seconds that a message takes at least.
    """

    rate: float
    latency: float

    def seconds(self, size: float) -> float:
        """What a message takes."""
        return self.latency + size / self.rate


@dataclass(frozen=True)
class Machine:
    """What a device can do, and the links between devices.

    Attributes:
        memory: bytes of a device.
        read: bytes a second that it reads of its memory.
        flops: a second, of products.
        sums: the link over which devices of a stage add up.
        passes: the link over which stages pass vectors on.
        call: seconds that starting a stage takes.
        host: the link to the host's memory.
        together: bytes a second that all devices read, where they share a memory.
        apart: seconds of a step that neither reading nor multiplying explains: what the devices of
            a stage do each for themselves.
    """

    memory: float
    read: float
    flops: float
    sums: Link
    passes: Link
    call: float
    host: Link = Link(2.5e10, 1e-5)  # PCIe of today
    together: float = inf
    apart: float = 0.0


def _card(memory: float, read: float, flops: float, link: Link) -> Machine:
    """A device as its maker's data sheet says; what a call costs is a guess."""
    return Machine(memory, read, flops, link, link, 1e-4)


# Links are in one direction.
MACHINES = {
    "v100": _card(32e9, 0.9e12, 1.12e14, Link(1.2e10, 1e-5)),  # PCIe
    "rtx4090": _card(24e9, 1.0e12, 1.65e14, Link(2.5e10, 1e-5)),
    "a100": _card(80e9, 2.0e12, 3.12e14, Link(3e11, 5e-6)),  # NVLink
    "h100": _card(80e9, 3.35e12, 9.9e14, Link(4.5e11, 5e-6)),
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
        tables: of the weights those that are looked up by tokens alone.
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
    work: Work,
    machine: Machine,
    pipe: int,
    tensor: int,
    *,
    batch: int = 1,
    context: int = 1024,
    shares: Sequence[float] = (),
) -> Estimate:
    """What a step of decoding costs.

    A stage reads its weights and its sequences' cache once, multiplies, and adds up twice a layer:
    each device sends and receives 2 (T - 1) / T of the vectors.

    Args:
        batch: sequences of a lane.
        context: tokens that each has in the cache.
        shares: of what is read, which part each stage has; all the same where it is empty.
    """
    parts = shares or (1 / pipe,) * pipe
    vectors, ring = batch * work.hidden, 2 * (tensor - 1) / tensor
    sums = work.sums * work.layers / pipe * (tensor > 1)
    adding = sums * (2 * machine.sums.latency + ring * vectors / machine.sums.rate)
    passing = (pipe > 1) * machine.passes.seconds(vectors)
    gathering = (tensor > 1) * machine.sums.seconds(batch * work.vocab) / pipe
    moving = adding + passing + gathering + machine.call + machine.apart / pipe
    alone, busy = (
        [_computing(work, machine, part, tensor, batch, context, devices) for part in parts]
        for devices in (tensor, pipe * tensor)
    )
    shared = pipe * _among(work, tensor)
    # As many lanes as stages, so that each stage always has one of them.
    held = work.weights / (pipe * tensor) + pipe * batch * context * work.cache / shared
    moved = sums * ring * vectors + (pipe > 1) * vectors
    step = sum(alone) + pipe * moving
    return Estimate(pipe, tensor, step, batch / (max(busy) + moving), held, moved)


def _computing(
    work: Work,
    machine: Machine,
    part: float,
    tensor: int,
    batch: int,
    context: int,
    devices: int,
) -> float:
    """Seconds that a device reads and multiplies for a stage.

    Args:
        part: of the model that the stage has.
        devices: how many of all stages read at the same time.
    """
    weights = min(work.weights - work.tables, batch * work.active) / tensor
    cache = batch * context * work.cache / _among(work, tensor)
    reading = part * (weights + cache) / min(machine.read, machine.together / devices)
    return max(reading, part * 2 * batch * work.parameters / tensor / machine.flops)


def _among(work: Work, tensor: int) -> int:
    """How many devices of a stage the cache is divided among."""
    return min(tensor, max(1, work.kv_heads))


def with_host(
    work: Work,
    machine: Machine,
    host: Machine,
    layout: tuple[int, int],
    *,
    context: int,
    embeddings: bool = False,
    cache: float = 0.0,
    layers: int = 0,
    streamed: int = 0,
) -> float:
    """Seconds from a token to the next one of a sequence, where the host takes part.

    Args:
        layout: stages and devices of each, beside the host.
        context: tokens in the cache.
        embeddings: whether the host has the table of embeddings.
        cache: the share of the cache's blocks that it has.
        layers: that it computes.
        streamed: layers whose weights come from its memory.
    """
    pipe, tensor = layout
    there, vector = layers / work.layers, machine.host.seconds(work.hidden)
    rest = _portion(work, 1 - there)
    step = estimate(
        replace(rest, cache=(1 - cache) * rest.cache), machine, pipe, tensor, context=context
    ).step
    if embeddings or layers:
        step += vector + estimate(_portion(work, there), host, 1, 1, context=context).step
    if cache:
        # A layer waits for its queries to arrive, for a call there, and for what comes back; the
        # device attends to its own blocks meanwhile.
        waited = max(0.0, context * rest.cache * (cache / host.read - (1 - cache) / machine.read))
        step += rest.layers * (2 * vector + host.call) + waited
    # Copies go on while layers compute, and a token waits for the slower of both.
    copied = machine.host.seconds(work.weights / work.layers / tensor)
    return max(step, streamed * copied)


def _portion(work: Work, share: float) -> Work:
    """The work of some of the layers."""
    names = ("weights", "active", "parameters", "cache", "tables")
    sizes = {name: share * getattr(work, name) for name in names}
    return replace(work, **sizes, layers=round(share * work.layers))


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
