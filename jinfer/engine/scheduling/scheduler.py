"""Continuous batching: the scheduler admits, plans and preempts. Counts only, no arrays.

Every step has a token budget. Each decoding sequence takes one token of it. Prompts share the rest
(chunked prefill), so that no stream waits for a long prompt, and no short prompt for a long one.
When the KV cache runs out of blocks, the latest sequence of the lowest priority is preempted: it
frees its blocks and is recomputed later. So is one that runs while a request of a higher priority
waits for a slot or for blocks; and while the prompt of such a request is computed, sequences of
lower priorities wait, so that its first token comes as soon as if they were not there.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from jinfer.engine.requests import QueueFullError
from jinfer.engine.scheduling.block_manager import (
    MIN_COPY_TOKENS,
    BlockCopy,
    BlockManager,
    BlockTables,
)
from jinfer.engine.scheduling.block_pool import common_prefix_length
from jinfer.engine.scheduling.border_snapshots import plan_borders
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.engine.scheduling.step_plan import PrefillChunk, StepPlan, split_budget
from jinfer.ops.attention.kv_cache import BLOCK

STEP = 16  # a step's fixed cost, in tokens


@dataclass
class Scheduler:
    """Decides which sequences the next call computes.

    Attributes:
        blocks: the paged KV cache's blocks.
        slots: maximum number of admitted sequences.
        chunk: token budget of a step in which no sequence decodes.
        mixed: token budget of a step in which some sequence decodes.
        sizes: sizes of the compiled flat batches, ascending.
        queue: maximum number of waiting requests; None: unlimited.
        micro_batches: number of micro-batches: groups of slots that take turns, one call each; slot
            s is in micro-batch s % micro_batches.
        preemptions: number of preemptions so far.
        admission_paused: whether no sequence is admitted for the moment.
        slotless: sequences that have blocks but no slot, during a forward pass without sampling.
        running: the sequences that have slots.
        on_release: called before a sequence's blocks are freed.
        fetching: whether cached blocks of a waiting sequence's prefix are still on their way to the
            device; it is admitted when they are there.
    """

    blocks: BlockManager
    slots: int
    chunk: int
    mixed: int
    sizes: tuple[int, ...]
    queue: int | None = None
    micro_batches: int = 1
    preemptions: int = 0
    admission_paused: bool = False
    slotless: int = 0
    running: list[RunningSequence] = field(default_factory=list)
    on_release: Callable[[RunningSequence], None] = lambda _: None
    fetching: Callable[[RunningSequence], bool] = lambda _: False
    _waiting: list[tuple[tuple[int, int], RunningSequence]] = field(default_factory=list)
    _free: deque[int] = field(default_factory=deque)
    _turn: int = 0

    def __post_init__(self) -> None:
        self._free = deque(range(self.slots))

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    def submit(self, sequence: RunningSequence) -> None:
        """Queues a sequence. Raises `QueueFullError`."""
        if self.queue is not None and self._ahead(sequence) >= self.queue:
            raise QueueFullError(
                f"{self.queue} requests wait already, which is all that engine.queue allows; "
                f"try again later"
            )
        heapq.heappush(self._waiting, (sequence.priority_key, sequence))

    def _ahead(self, sequence: RunningSequence) -> int:
        """Requests that wait before a new one, as far as there are no slots for them."""
        priority = sequence.request.priority
        waiting = sum(other.request.priority <= priority for _, other in self._waiting)
        # Sequences of a lower priority give their slots up.
        behind = sum(other.request.priority > priority for other in self.running)
        return waiting - len(self._free) - behind

    def remove(self, sequence: RunningSequence) -> None:
        """Removes a sequence, waiting or running; its blocks and its slot are free at once."""
        if sequence.block_tables is not None:
            self._release(sequence)
            self.running.remove(sequence)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)

    def expired(self, now: float) -> list[RunningSequence]:
        """Sequences whose deadline has passed."""
        known = [*self.running, *(sequence for _, sequence in self._waiting)]
        return [s for s in known if s.request.deadline is not None and s.request.deadline <= now]

    def plan(self, steps: int) -> StepPlan:
        """Plans the next call.

        Args:
            steps: new tokens that the call may compute for each decoding sequence.
        """
        admitted, copies, must_read = self._admit()
        begun = StepPlan(tuple(admitted), tuple(copies), must_read=must_read)
        if must_read:
            return begun
        micro_batch = self._next_micro_batch()
        plan = self._step(begun, *_first_prompts(micro_batch), steps)
        if plan.empty and not plan.must_read:
            # The prompts wait for blocks that sequences of lower priorities have.
            prompts = [s for s in micro_batch if s.prefilling]
            plan = self._step(begun, prompts, [s for s in micro_batch if s not in prompts], steps)
        return plan

    def _step(
        self,
        begun: StepPlan,
        prompts: Sequence[RunningSequence],
        decoding: Sequence[RunningSequence],
        steps: int,
    ) -> StepPlan:
        """A plan that computes of some prompts and decoding sequences what there is room for."""
        one = prompts or any(s.guided or s.awaits_first_token for s in decoding)
        steps = 1 if one else min(steps, max((s.remaining for s in decoding), default=1))
        for sequence in sorted(decoding, key=lambda s: s.priority_key):
            if sequence.block_tables is not None and not self.make_room(sequence, steps):
                return replace(begun, must_read=True)
        # Making room may have preempted some of them.
        prompts, decoding, admitted = (
            [s for s in group if s.block_tables is not None]
            for group in (prompts, decoding, begun.admitted)
        )
        if prompts and len(decoding) + _least_chunk(prompts) > self.sizes[-1]:
            decoding = []  # an image that is not cut takes the whole step
        chunks = self._chunks(prompts, len(decoding))
        plan = replace(begun, admitted=tuple(admitted), chunks=tuple(chunks))
        return replace(plan, decoding=tuple(decoding), steps=steps)

    def upcoming(self) -> list[RunningSequence]:
        """The sequences that the next call may compute: those of the micro-batch whose turn it is.

        Sequences with tokens in flight count, as they may have more.
        """
        return self._of_turn([s for s in self.running if s.in_flight or _computable(s)])[1]

    def calls_ahead(self, launched: bool, unread: int) -> int:
        """How many calls may stay in flight: one for each micro-batch that has sequences.

        Args:
            launched: whether this step launched a call; if not, at least one call has to be read.
            unread: number of calls in flight.
        """
        busy = len({sequence.slot % self.micro_batches for sequence in self.running})
        return busy if launched else max(0, min(busy, unread) - 1)

    def _next_micro_batch(self) -> list[RunningSequence]:
        """The sequences that can be computed, of the micro-batch whose turn it is."""
        micro_batch, sequences = self._of_turn([s for s in self.running if _computable(s)])
        self._turn = (micro_batch + 1) % self.micro_batches
        return sequences

    def _of_turn(self, sequences: Sequence[RunningSequence]) -> tuple[int, list[RunningSequence]]:
        """The first micro-batch that has any of these, from the one whose turn it is on."""
        for turn in range(self._turn, self._turn + self.micro_batches):
            if micro_batch := [
                s for s in sequences if s.slot % self.micro_batches == turn % self.micro_batches
            ]:
                return turn, micro_batch
        return self._turn - 1, []

    def _free_slot(self) -> int:
        """A free slot of the micro-batch that has the fewest sequences."""
        counts = Counter(sequence.slot % self.micro_batches for sequence in self.running)
        slot = min(self._free, key=lambda slot: counts[slot % self.micro_batches])
        self._free.remove(slot)
        return slot

    def _admit(self) -> tuple[list[RunningSequence], list[BlockCopy], bool]:
        """Admits waiting sequences: a slot, cached blocks of the prefix, blocks for the rest.

        Returns:
            The sequences, blocks to copy, and whether calls in flight must be read before a
            sequence of a lower priority can be preempted.
        """
        admitted: list[RunningSequence] = []
        copies: list[BlockCopy] = []
        later: list[tuple[tuple[int, int], RunningSequence]] = []
        must_read = False
        while self._waiting and not self.admission_paused:
            sequence = self._waiting[0][1]
            lower = self._lower_priority(sequence)
            if not self._free and lower is None:
                break
            if self.fetching(sequence):
                later.append(heapq.heappop(self._waiting))
                continue
            tables, cached, made = self._share_prefix(sequence)
            if self._comes_soon(sequence, cached):
                self.blocks.free(tables)
                later.append(heapq.heappop(self._waiting))
                continue
            # One block more for each running sequence, or one would be preempted at once.
            spare = len(self.running)
            if (
                not self._free
                or not self.blocks.reserve_all(tables, len(sequence.tokens), spare)
                or (
                    sequence.request.encoder
                    and not self.blocks.reserve_encoder(tables, sequence.request.encoder)
                )
            ):
                self.blocks.free(tables)
                if lower is None:
                    break
                if any(s.in_flight for s in self.running):
                    must_read = True
                    break
                self.preempt(lower)
                continue
            heapq.heappop(self._waiting)
            tables.adapter = sequence.request.adapter
            if sequence.request.images is not None:
                tables.offset = sequence.request.images.shift_at(cached)
            sequence.block_tables, sequence.slot = tables, self._free_slot()
            sequence.computed = cached
            if sequence.cached is None:
                sequence.cached = min(cached, len(sequence.request.prompt))
            if sequence.request.reuse:
                plan_borders(self.blocks, tables, sequence.cache_ids, cached)
            self.running.append(sequence)
            admitted.append(sequence)
            copies += made
        for entry in later:
            heapq.heappush(self._waiting, entry)
        return admitted, copies, must_read

    def _share_prefix(self, sequence: RunningSequence) -> tuple[BlockTables, int, list[BlockCopy]]:
        """As `BlockManager.share_prefix`, of a prefix that ends before or after whole images."""
        tokens, images, limit = sequence.cache_ids, sequence.request.images, None
        while True:
            tables, cached, copies = self.blocks.share_prefix(
                tokens, sequence.seed, reuse=sequence.request.reuse, limit=limit
            )
            limit = cached if images is None else images.whole_begin(cached)
            if limit == cached or images is None or images.seed:
                return tables, cached, copies
            self.blocks.free(tables)

    def _lower_priority(self, sequence: RunningSequence) -> RunningSequence | None:
        """The running sequence that gives way to a waiting one; None if all are as important."""
        last = max(self.running, key=lambda s: s.priority_key, default=None)
        if last is None or last.request.priority <= sequence.request.priority:
            return None
        return last

    def _comes_soon(self, sequence: RunningSequence, cached: int) -> bool:
        """Whether a running sequence is about to compute a longer prefix of this one."""
        if not sequence.request.reuse:
            return False
        tokens = sequence.cache_ids
        here = slice(cached, min(cached + BLOCK, len(tokens) - 1))
        for other in self.running:
            if other.request.priority > sequence.request.priority:
                continue  # its prompt may have to wait
            if other.prefilling and other.request.reuse and other.seed == sequence.seed:
                if self.blocks.states is not None:
                    if _wants_snapshot(other, sequence, cached):
                        return True
                    continue
                theirs = other.cache_ids
                same = common_prefix_length(theirs[here], tokens[here])
                soon = same >= MIN_COPY_TOKENS and other.computed < cached + same
                if soon and theirs[:cached] == tokens[:cached]:
                    return True
        return False

    def make_room(self, sequence: RunningSequence, steps: int) -> bool:
        """Reserves blocks for new tokens of a sequence, preempting the latest ones if needed.

        Returns:
            False if calls in flight must be read first: all tokens of a sequence that is preempted
            have to be known.
        """
        length = len(sequence.tokens) + sequence.in_flight + steps - 1
        while sequence.block_tables is not None:
            if self.blocks.reserve(sequence.block_tables, min(length, sequence.request.limit)):
                return True
            if any(s.in_flight for s in self.running):
                return False
            self.preempt(max(self.running, key=lambda s: s.priority_key))
        return True

    def preempt(self, sequence: RunningSequence) -> None:
        """Preemption by recomputation: frees a sequence's blocks and queues it again."""
        assert not sequence.in_flight, "its new tokens would be lost"
        self._release(sequence)
        self.running.remove(sequence)
        sequence.preempted += 1
        sequence.looked_up = False
        self.preemptions += 1
        heapq.heappush(self._waiting, (sequence.priority_key, sequence))

    def _release(self, sequence: RunningSequence) -> None:
        assert sequence.block_tables is not None
        self.on_release(sequence)
        if sequence.state_is_known:
            self.blocks.keep_state(sequence.block_tables, sequence.cache_ids[: sequence.computed])
        self.blocks.free(sequence.block_tables)
        self._free.append(sequence.slot)
        sequence.block_tables, sequence.slot, sequence.computed, sequence.in_flight = None, -1, 0, 0

    def _chunks(self, prompts: Sequence[RunningSequence], decoding: int) -> list[PrefillChunk]:
        """Chunked prefill: the parts of prompts that a step computes."""
        needed = [
            (s, s.prefill_end - s.computed) for s in sorted(prompts, key=lambda s: s.priority_key)
        ]
        total = sum(count for _, count in needed)
        limit = self.mixed if decoding else self.chunk
        if not decoding and len(needed) > 1:
            # Short enough steps, so that the first prompt has its token soon.
            limit = min(limit, max(self.mixed, min(count for _, count in needed)))
        total = self.fit_batch(min(limit, decoding + total), decoding)
        budget, room = max(1, total - decoding), self.sizes[-1] - decoding
        chunks = []
        for sequence, share in split_budget(needed, budget):
            assert sequence.block_tables is not None
            count = _whole_images(sequence, share)
            if count > room:
                continue
            if not self.blocks.reserve(sequence.block_tables, sequence.computed + count):
                continue  # all blocks of a sliding-window group are in use for the moment
            room -= count
            last = sequence.computed + count == len(sequence.tokens)
            chunks.append(PrefillChunk(sequence, sequence.computed, count, last))
        return chunks

    def fit_batch(self, count: int, decoding: int = 0) -> int:
        """How many of some tokens to compute in one step, so that its batch is not mostly padding.

        Args:
            decoding: how many of them are decoding sequences', which every step computes.
        """
        size = self._size(count)
        smaller = [size for size in self.sizes if decoding < size < count]
        if not smaller:
            return min(size, count)
        steps, rest = divmod(count - decoding, smaller[-1] - decoding)
        divided = steps * (smaller[-1] + STEP)
        if rest:
            divided += self._size(rest + decoding) + STEP
        return smaller[-1] if divided < size + STEP else min(size, count)

    def batch_size(self, tokens: int) -> int:
        """Size of the smallest compiled batch that has room for so many tokens."""
        return next(size for size in self.sizes if size >= tokens)

    def _size(self, count: int) -> int:
        return next((size for size in self.sizes if size >= count), self.sizes[-1])


def _first_prompts(
    micro_batch: Sequence[RunningSequence],
) -> tuple[list[RunningSequence], list[RunningSequence]]:
    """The prompts to compute, and the decoding sequences that do not wait for them.

    Of the prompts those of the highest priority, and of the decoding sequences none below it.
    """
    first = min((s.request.priority for s in micro_batch if s.prefilling), default=None)
    if first is None:
        return [], list(micro_batch)
    prompts = [s for s in micro_batch if s.prefilling and s.request.priority == first]
    return prompts, [s for s in micro_batch if not s.prefilling and s.request.priority <= first]


def _whole_images(sequence: RunningSequence, count: int) -> int:
    """Tokens of a chunk that cuts no image whose tokens attend both ways; `count` or near it."""
    images, begin = sequence.request.images, sequence.computed
    return count if images is None else images.whole_end(begin, begin + count) - begin


def _least_chunk(prompts: Sequence[RunningSequence]) -> int:
    """Tokens that a chunk of the first of some prompts has at least."""
    return _whole_images(min(prompts, key=lambda s: s.priority_key), 1)


def _computable(sequence: RunningSequence) -> bool:
    """Whether the next call can compute tokens of it."""
    needed = sequence.prefilling or (not sequence.host_driven and sequence.remaining > 0)
    return needed and not sequence.waits_for_grammar


def _wants_snapshot(other: RunningSequence, sequence: RunningSequence, cached: int) -> bool:
    """Whether a running prompt will come past a prefix of a sequence; it leaves a snapshot."""
    limit = len(sequence.tokens) - 1
    same = common_prefix_length(other.cache_ids, sequence.cache_ids[:limit])
    if same < max(cached + MIN_COPY_TOKENS, other.computed + 1):
        return False
    other.snapshots.add(same)
    return True
