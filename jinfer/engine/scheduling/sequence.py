"""Sequences: the state of a request in the engine, from the queue to its last token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jinfer.engine.requests import Request
from jinfer.engine.scheduling.block_manager import BlockTables
from jinfer.engine.thinking_budget import Thought

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(eq=False)
class CapturedValues:
    """The captured values of one request, as far as they were computed.

    Attributes:
        names: of the values.
    """

    names: Sequence[str]
    _pieces: list[tuple[np.ndarray, Mapping[str, np.ndarray]]] = field(default_factory=list)

    def add(self, positions: Int[np.ndarray, " rows"], values: Mapping[str, np.ndarray]) -> None:
        """Adds values [rows, ...] at some positions, -1 for none.

        Those of a position that is computed again replace the earlier ones, which are equal.
        """
        self._pieces.append((positions, values))

    def until(self, count: int) -> dict[str, Float[np.ndarray, "tokens ..."]]:
        """The values of the first tokens by name, float32."""
        found = dict[str, np.ndarray]()
        for positions, values in self._pieces:
            there = (positions >= 0) & (positions < count)
            for name in self.names:
                part = values[name]
                if name not in found:
                    found[name] = np.zeros((count, *part.shape[1:]), np.float32)
                found[name][positions[there]] = part[there]
        return found


ROOT = -1  # parent of the first level: the sequence's last token


@dataclass(frozen=True)
class DraftTree:
    """Tokens that may follow a sequence, parents before their children.

    Attributes:
        tokens: token of each node.
        parents: index of each node's parent; `ROOT`: the sequence's last token.
        sources: draft source of each node.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()

    def depths(self) -> list[int]:
        """Depth of each node; 1: a child of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths


@dataclass(frozen=True)
class DraftedStep(DraftTree):
    """A token tree that one call verified.

    Attributes:
        accepted: the accepted nodes, from a child of the root on.
        chosen: all tokens that the call gave; the last may not have been drafted.
    """

    accepted: tuple[int, ...] = ()
    chosen: tuple[int, ...] = ()


@dataclass(eq=False)
class RunningSequence:
    """A request in the engine, waiting or running.

    Attributes:
        request: prompt, sampling parameters and limits.
        arrival: number of requests that were submitted before it.
        tokens: the prompt and the new tokens that the host has read.
        seed: what the contents of its blocks depend on besides the tokens.
        block_tables: its blocks, while it has a slot.
        slot: its row of the device state, while it has one; else -1.
        computed: tokens whose keys and values are in the cache, or will be after the calls in
            flight.
        in_flight: new tokens, at most, of calls whose results the host has not read.
        cached: tokens of the prompt that were in the prefix cache when it was first admitted.
        host_driven: a `SearchDriver` computes its tokens one by one; the scheduler only prefills
            what comes before its last token.
        guided: it has a grammar, so the host has to know each token before the next is sampled.
        waits_for_grammar: nothing is computed for it until its grammar has taken its last tokens.
        ended: nothing more is computed for it.
        preempted: number of preemptions.
        looked_up: whether the prefix cache offload was asked for its prefix since it waits.
        drafted, accepted: tokens that were drafted for it, and those of them that were accepted.
        trees: the draft trees that were verified for it, call by call.
        snapshots: prefix lengths after which its recurrent states are copied for waiting requests.
        captured: the activations that its request asked for; None: none were computed yet.
        admitted: when it first got a slot, in seconds of `time.perf_counter`.
        limit: number of tokens that it may have before the host has to look at it; at most the
            request's.
        thought: how far its thought is, if that has a budget.
        must: the only token that may come next; None: any.
    """

    request: Request
    arrival: int
    tokens: list[int]
    seed: bytes = b""
    block_tables: BlockTables | None = None
    slot: int = -1
    computed: int = 0
    in_flight: int = 0
    cached: int | None = None
    host_driven: bool = False
    guided: bool = False
    waits_for_grammar: bool = False
    ended: bool = False
    preempted: int = 0
    looked_up: bool = False
    drafted: int = 0
    accepted: int = 0
    trees: list[DraftedStep] = field(default_factory=list)
    snapshots: set[int] = field(default_factory=set)
    captured: CapturedValues | None = None
    admitted: float | None = None
    limit: int = field(init=False)
    thought: Thought | None = field(init=False)
    must: int | None = None

    def __post_init__(self) -> None:
        thinking = self.request.thinking
        self.limit = self.request.limit
        self.thought = None if thinking is None else Thought(thinking)

    def append(self, id: int) -> None:
        """Adds a new token that the host has read, or forces."""
        self.tokens.append(id)
        if self.thought is not None:
            self.thought.push(id)

    @property
    def priority_key(self) -> tuple[int, int]:
        """Sequences with a lower key go first: by priority, then by arrival."""
        return (self.request.priority, self.arrival)

    @property
    def known_slot(self) -> int:
        """The slot that it is known by: the one that its request names, or its own."""
        return self.slot if self.request.slot is None else self.request.slot

    @property
    def cache_ids(self) -> list[int]:
        """Its tokens as the prefix cache knows them: those of images by the images' content."""
        images = self.request.images
        if images is None:
            return self.tokens
        return [*images.cache_ids, *self.tokens[len(images.cache_ids) :]]

    @property
    def inputs(self) -> list[int]:
        """Its tokens as the model is given them."""
        images = self.request.images
        if images is None or images.lookup is None:
            return self.tokens
        prompt = np.where(images.owner >= 0, images.lookup, self.request.prompt)
        return [*prompt.tolist(), *self.tokens[len(images.owner) :]]

    @property
    def prefilling(self) -> bool:
        """Whether more than its last token has to be computed before the next can be sampled."""
        known, left = self.in_flight == 0 and not self.ended, len(self.tokens) - self.computed
        return known and (left > 1 or (left == 1 and self._ends_in_image))

    @property
    def _ends_in_image(self) -> bool:
        """Whether its last token is an image's, which a decoding step does not compute."""
        images, last = self.request.images, len(self.tokens) - 1
        return images is not None and last < len(images.owner) and images.owner[last] >= 0

    @property
    def prefill_end(self) -> int:
        """Number of tokens to prefill before something else has to happen."""
        end = len(self.tokens) - self.host_driven
        return min((at for at in self.snapshots if self.computed < at < end), default=end)

    @property
    def state_is_known(self) -> bool:
        """Whether its recurrent states are those after its first `computed` tokens."""
        driven = self.guided or self.host_driven  # others may have computed one token more
        return self.request.reuse and not self.in_flight and not driven

    @property
    def awaits_first_token(self) -> bool:
        """Whether its first new token has not been launched yet."""
        return not self.in_flight and len(self.tokens) == len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """New tokens that it may have beyond those in flight, before the host has to look."""
        return 0 if self.ended else self.limit - len(self.tokens) - self.in_flight

    @property
    def room(self) -> int:
        """New tokens that its request allows beyond those in flight."""
        return 0 if self.ended else self.request.limit - len(self.tokens) - self.in_flight
