"""Who is computed next: plain Python over counts, without arrays.

Every step has a budget of tokens. A sequence that decodes needs one of them, prompts share the
rest, so that no stream waits behind a long prompt and no short prompt behind a long one. When
blocks run out the sequence that came last, of the lowest priority, gives its own back and is
computed again later.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jinfer.engine.output.drafted_step import DraftedStep
from jinfer.engine.requests import QueueFullError, Request
from jinfer.engine.scheduling.block_manager import WORTH_A_COPY, BlockManager, Copy, Held, common
from jinfer.ops.attention.kv_cache import BLOCK

STEP = 16  # tokens that cost as much as a step does beside its tokens


@dataclass(eq=False)
class Running:
    """A request on its way through the engine.

    Attributes:
        request: what was asked.
        arrival: how many came before it.
        tokens: the prompt and what came after it, as far as the host knows.
        seed: what its blocks depend on beside the tokens.
        held: its blocks, while it is admitted.
        slot: its row of the device's state, while it is admitted.
        computed: tokens whose keys and values are in the cache, or will be by what was launched.
        unread: new tokens, at most, of calls whose results the host has not read.
        cached: tokens of the prompt that were found in the cache when it was first admitted.
        driven: the host drives it token by token; only what comes before its last token is
            computed in chunks.
        guided: it has a grammar, so the host has to know each token before the next is chosen.
        waits: for its grammar; until then nothing is computed of it.
        ended: nothing more is computed of it.
        preempted: how often it had to give its blocks back.
        drafted, accepted: tokens that were drafted for it, and those of them that were right.
        trees: of the calls that verified drafts for it.
        admitted: when it was first given a slot, in seconds of `time.perf_counter`.
    """

    request: Request
    arrival: int
    tokens: list[int]
    seed: bytes = b""
    held: Held | None = None
    slot: int = -1
    computed: int = 0
    unread: int = 0
    cached: int | None = None
    driven: bool = False
    guided: bool = False
    waits: bool = False
    ended: bool = False
    preempted: int = 0
    drafted: int = 0
    accepted: int = 0
    trees: list[DraftedStep] = field(default_factory=list)
    admitted: float | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Those with less of it go first."""
        return (self.request.priority, self.arrival)

    @property
    def in_prompt(self) -> bool:
        """Whether more than its last token has to be computed before a new one can come."""
        known = self.unread == 0 and not self.ended
        return known and len(self.tokens) - self.computed > 1

    @property
    def silent(self) -> bool:
        """Whether somebody waits for its first token."""
        return not self.unread and len(self.tokens) == len(self.request.prompt)

    @property
    def left(self) -> int:
        """New tokens it may still have beyond those launched."""
        return 0 if self.ended else self.request.limit - len(self.tokens) - self.unread


@dataclass(frozen=True)
class Chunk:
    """Some known tokens of a sequence.

    Attributes:
        start, count: which.
        chooses: whether a new token is chosen after the last of them.
    """

    sequence: Running
    start: int
    count: int
    chooses: bool


@dataclass(frozen=True)
class Plan:
    """One call of the device.

    Attributes:
        admitted: sequences that get a slot first.
        copies: blocks to be copied first.
        chunks: of prompts.
        decoding: sequences whose next token is computed.
        steps: tokens of each of those, at most; 1 beside chunks, or where one has a grammar or
            has not had a token yet.
        wait: nothing can be planned before the results of earlier calls are read.
    """

    admitted: tuple[Running, ...] = ()
    copies: tuple[Copy, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decoding: tuple[Running, ...] = ()
    steps: int = 1
    wait: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.chunks or self.decoding)


@dataclass
class Scheduler:
    """Admits, plans, preempts.

    Attributes:
        blocks: of the paged cache.
        slots: sequences that may be admitted at a time.
        chunk: tokens of a step while nobody decodes.
        mixed: tokens of a step while somebody does.
        sizes: of flat batches there are programs for, rising.
        queue: requests that may wait; None: any number.
        lanes: groups of slots that take turns, a call each; slot s is of group s % lanes.
        preemptions: so far.
        hold: whether nobody is admitted for the moment.
        apart: sequences that hold blocks without a slot, for the time that a pass takes.
        running: those that have slots.
        on_release: is told of each sequence that is about to give its blocks back.
    """

    blocks: BlockManager
    slots: int
    chunk: int
    mixed: int
    sizes: tuple[int, ...]
    queue: int | None = None
    lanes: int = 1
    preemptions: int = 0
    hold: bool = False
    apart: int = 0
    running: list[Running] = field(default_factory=list)
    on_release: Callable[[Running], None] = lambda _: None
    _waiting: list[tuple[tuple[int, int], Running]] = field(default_factory=list)
    _free: deque[int] = field(default_factory=deque)
    _turn: int = 0

    def __post_init__(self) -> None:
        self._free = deque(range(self.slots))

    @property
    def waiting(self) -> int:
        """Requests that wait to be admitted."""
        return len(self._waiting)

    def submit(self, sequence: Running) -> None:
        """Queues a sequence. Raises `QueueFullError`."""
        # Those that free slots are there for do not wait for anything.
        if self.queue is not None and len(self._waiting) >= self.queue + len(self._free):
            raise QueueFullError(
                f"{self.queue} requests wait already, which is all that engine.queue allows; "
                f"try again later"
            )
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def drop(self, sequence: Running) -> None:
        """Ends a sequence, wherever it is; its blocks and its slot are free at once."""
        if sequence.held is not None:
            self._release(sequence)
            self.running.remove(sequence)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)

    def expired(self, now: float) -> list[Running]:
        """Sequences whose deadline has passed."""
        everyone = [*self.running, *(sequence for _, sequence in self._waiting)]
        return [s for s in everyone if s.request.deadline is not None and s.request.deadline <= now]

    def plan(self, steps: int) -> Plan:
        """What to compute next.

        Args:
            steps: tokens that a call may compute of each decoding sequence.
        """
        admitted, copies = self._admit()
        own = self._next_lane()
        prompts = [s for s in own if s.in_prompt]
        decoding = [s for s in own if not s.in_prompt]
        one = prompts or any(s.guided or s.silent for s in decoding)
        steps = 1 if one else min(steps, max((s.left for s in decoding), default=1))
        for sequence in sorted(decoding, key=lambda s: s.order):
            if sequence.held is not None and not self.make_room(sequence, steps):
                return Plan(tuple(admitted), tuple(copies), wait=True)
        # Making room may have cost some of them theirs.
        prompts, decoding, admitted = (
            [s for s in group if s.held is not None] for group in (prompts, decoding, admitted)
        )
        chunks = self._chunks(prompts, len(decoding))
        return Plan(tuple(admitted), tuple(copies), tuple(chunks), tuple(decoding), steps)

    def upcoming(self) -> list[Running]:
        """The sequences of the lane whose turn it is, unless those have no tokens left.

        How many those have that are not read nobody knows.
        """
        return self._of_turn([s for s in self.running if s.unread or _able(s)])[1]

    def calls_ahead(self, launched: bool, unread: int) -> int:
        """Calls whose results need not be read yet: one of each lane that has sequences.

        Args:
            launched: whether there was anything to launch; if not, one at least is to be read.
            unread: calls whose results were not read.
        """
        busy = len({sequence.slot % self.lanes for sequence in self.running})
        return busy if launched else max(0, min(busy, unread) - 1)

    def _next_lane(self) -> list[Running]:
        """The sequences that a call can do something for, of the lane whose turn it is."""
        lane, own = self._of_turn([s for s in self.running if _able(s)])
        self._turn = (lane + 1) % self.lanes
        return own

    def _of_turn(self, sequences: Sequence[Running]) -> tuple[int, list[Running]]:
        """The first lane, from the one on whose turn it is, that has any of these."""
        for turn in range(self._turn, self._turn + self.lanes):
            if own := [s for s in sequences if s.slot % self.lanes == turn % self.lanes]:
                return turn, own
        return self._turn - 1, []

    def _free_slot(self) -> int:
        """A slot of the lane that has the fewest sequences."""
        counts = Counter(sequence.slot % self.lanes for sequence in self.running)
        slot = min(self._free, key=lambda slot: counts[slot % self.lanes])
        self._free.remove(slot)
        return slot

    def _admit(self) -> tuple[list[Running], list[Copy]]:
        """Gives waiting sequences slots, what is cached of their tokens, and room for the rest."""
        admitted: list[Running] = []
        copies: list[Copy] = []
        later: list[tuple[tuple[int, int], Running]] = []
        while self._waiting and self._free and not self.hold:
            sequence = self._waiting[0][1]
            held, cached, made = self.blocks.start(
                sequence.tokens, sequence.seed, reuse=sequence.request.reuse
            )
            if self._comes_soon(sequence, cached):
                self.blocks.free(held)
                later.append(heapq.heappop(self._waiting))
                continue
            # A block more for each that runs, or somebody would be preempted at once.
            spare = len(self.running)
            if not self.blocks.reserve_all(held, len(sequence.tokens), spare) or (
                sequence.request.encoder
                and not self.blocks.take_encoder(held, sequence.request.encoder)
            ):
                self.blocks.free(held)
                break
            heapq.heappop(self._waiting)
            sequence.held, sequence.slot = held, self._free_slot()
            sequence.computed = cached
            if sequence.cached is None:
                sequence.cached = min(cached, len(sequence.request.prompt))
            self.running.append(sequence)
            admitted.append(sequence)
            copies += made
        for entry in later:
            heapq.heappush(self._waiting, entry)
        return admitted, copies

    def _comes_soon(self, sequence: Running, cached: int) -> bool:
        """Whether another sequence is about to compute what this one begins with, too."""
        if not sequence.request.reuse:
            return False
        here = slice(cached, min(cached + BLOCK, len(sequence.tokens) - 1))
        for other in self.running:
            if other.in_prompt and other.request.reuse and other.seed == sequence.seed:
                same = common(other.tokens[here], sequence.tokens[here])
                soon = same >= WORTH_A_COPY and other.computed < cached + same
                if soon and other.tokens[:cached] == sequence.tokens[:cached]:
                    return True
        return False

    def make_room(self, sequence: Running, steps: int) -> bool:
        """Makes room for new tokens of a sequence; those that came last are preempted for it.

        Returns:
            False where results must be read before; a preempted sequence's tokens have to be known.
        """
        length = len(sequence.tokens) + sequence.unread + steps - 1
        while sequence.held is not None:
            if self.blocks.reserve(sequence.held, min(length, sequence.request.limit)):
                return True
            if any(s.unread for s in self.running):
                return False
            self.preempt(max(self.running, key=lambda s: s.order))
        return True

    def preempt(self, sequence: Running) -> None:
        """Takes a sequence's blocks; it waits to be computed again."""
        assert not sequence.unread, "its new tokens would be lost"
        self._release(sequence)
        self.running.remove(sequence)
        sequence.preempted += 1
        self.preemptions += 1
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def _release(self, sequence: Running) -> None:
        assert sequence.held is not None
        self.on_release(sequence)
        self.blocks.free(sequence.held)
        self._free.append(sequence.slot)
        sequence.held, sequence.slot, sequence.computed, sequence.unread = None, -1, 0, 0

    def _chunks(self, prompts: Sequence[Running], decoding: int) -> list[Chunk]:
        """The pieces of prompts that a step computes."""
        wanted = [
            (s, len(s.tokens) - s.computed - s.driven)
            for s in sorted(prompts, key=lambda s: s.order)
        ]
        total = sum(count for _, count in wanted)
        most = self.mixed if decoding else self.chunk
        if not decoding and len(wanted) > 1:
            # Steps that are long enough, so that the first of them has a token soon.
            most = min(most, max(self.mixed, min(count for _, count in wanted)))
        total = self.filling(min(most, decoding + total), decoding)
        budget = max(1, total - decoding)
        chunks = []
        for sequence, count in shares(wanted, budget):
            assert sequence.held is not None
            if not self.blocks.reserve(sequence.held, sequence.computed + count):
                continue  # a windowed group's blocks are all held for the moment
            last = sequence.computed + count == len(sequence.tokens)
            chunks.append(Chunk(sequence, sequence.computed, count, last))
        return chunks

    def filling(self, count: int, decoding: int = 0) -> int:
        """So many of some tokens that a program is not mostly padding.

        Args:
            decoding: those of them that are in each step, whatever it takes besides.
        """
        size = self._size(count)
        smaller = [size for size in self.sizes if decoding < size < count]
        if not smaller:
            return min(size, count)
        steps, rest = divmod(count - decoding, smaller[-1] - decoding)
        apart = steps * (smaller[-1] + STEP)
        if rest:
            apart += self._size(rest + decoding) + STEP
        return smaller[-1] if apart < size + STEP else min(size, count)

    def _size(self, count: int) -> int:
        return next((size for size in self.sizes if size >= count), self.sizes[-1])


def _able(sequence: Running) -> bool:
    """Whether a call can do something for it."""
    able = sequence.in_prompt or (not sequence.driven and sequence.left > 0)
    return able and not sequence.waits


def shares[T](wanted: Sequence[tuple[T, int]], budget: int) -> list[tuple[T, int]]:
    """Divides a budget: half to the first, the rest to those that want least.

    Prompts of equal lengths are done one after the other, which halves the mean time to the first
    token of what came together; a short one does not wait for a long one, nor the oldest for ever.
    """
    counts = dict.fromkeys(range(len(wanted)), 0)
    if wanted and budget > 0:
        counts[0] = min(wanted[0][1], -(-budget // 2))
        budget -= counts[0]
    for i in sorted(counts, key=lambda i: wanted[i][1] - counts[i]):
        more = min(wanted[i][1] - counts[i], budget)
        counts[i] += more
        budget -= more
    return [(one, counts[i]) for i, (one, _) in enumerate(wanted) if counts[i]]
