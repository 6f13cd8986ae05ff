"""A draft model: a smaller one, or the model itself with less of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from jinfer.engine.blocks import Held
from jinfer.engine.device import FEW, SIZES, Device
from jinfer.engine.engine import Engine
from jinfer.engine.programs import Program, Programs, Shape, Sizes
from jinfer.engine.scheduler import Running
from jinfer.engine.steps import MAX_STEPS
from jinfer.model import AbstractModel
from jinfer.quant.kind import Kind
from jinfer.sampling.names import STAGES
from jinfer.sampling.order import PLAIN
from jinfer.speculate.control import Mean
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.tree import ROOT, Tree

_CHUNK = 256  # tokens of prompts that a draft computes before others wait too long


def draft_programs(model: AbstractModel, target: Sizes, kv_cache: Kind) -> Programs:
    """A draft model's programs: a cache with room for the whole context of each slot."""
    blocks = target.slots * target.table
    groups = {shape.group: blocks for shape in model.caches.values()}
    sizes = Sizes(target.slots, target.context, target.vocab, groups, kv_cache)
    return Programs(model, sizes)


@dataclass(eq=False, kw_only=True)
class DraftModel(Device, Drafter):
    """Drafts what a model finds likeliest, under the noise that the target draws with.

    Attributes:
        target: the engine that it drafts for.
        name: what its tokens are said to be from.
        seconds: of a level of a draft.
        siblings: tokens of each level, of which the first goes on.
        expansion: how many tokens follow each one, level by level; none: as `siblings` says.
    """

    target: Engine
    name: str
    seconds: float = 1e-3
    siblings: int = 2
    expansion: tuple[int, ...] = ()
    _took: Mean = field(default_factory=lambda: Mean(0.0))
    _computed: dict[int, tuple[int, list[int]]] = field(default_factory=dict)

    def draft(self, asked: Sequence[tuple[Running, int]]) -> list[Tree]:
        """As `Drafter.draft`."""
        ready = [s for s, _ in asked if self._catch_up(s)]
        levels = min(MAX_STEPS, max((most for _, most in asked), default=0))
        if not ready or levels < 1:
            return [Tree() for _ in asked]
        begun = time.perf_counter()
        stages = self.target.stages_of(ready)
        program = self.programs.get(Shape("propose", self._rows(len(ready)), stages=stages))
        rows = np.full(self._rows(len(ready)), -1, np.int32)
        rows[: len(ready)] = [s.slot for s in ready]
        cache, state, found = program(
            self.leaves, self.cache, self.state, rows, self.tables(), np.int32(levels)
        )
        self.keep_cache(cache, state)
        tokens = np.asarray(found)
        self._took.add((time.perf_counter() - begun) / levels)
        self.seconds = self._took.value
        trees = {}
        for row, sequence in enumerate(ready):
            own = tokens[:, row]
            trees[sequence.slot] = self._tree(own[:levels])
            chain = own[: levels - 1, 0].tolist()
            self._computed[sequence.slot] = (sequence.request.id, [*sequence.tokens, *chain])
        return [trees.get(sequence.slot, Tree()) for sequence, _ in asked]

    def _tree(self, levels: np.ndarray) -> Tree:
        """The likeliest tokens one after the other, with others beside each."""
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for level in levels.tolist():
            listed = [id for id in level[: self.siblings] if id >= 0]
            if not listed:
                break
            first = len(tokens)
            tokens += listed
            parents += [parent] * len(listed)
            parent = first
        return Tree(tuple(tokens), tuple(parents), (self.name,) * len(tokens))

    def _catch_up(self, sequence: Running) -> bool:
        """Computes what is known before a sequence's last token; False where there is more."""
        known, last = sequence.tokens, len(sequence.tokens) - 1
        before = self._computed.get(sequence.slot)
        begin = 0
        if before is not None and before[0] == sequence.request.id:
            begin = _common(before[1], known, last)
        self._enter(sequence)
        end = min(last, begin + _CHUNK)
        while begin < end:
            count = min(end - begin, SIZES[-1])
            size = next(size for size in (*FEW, *SIZES) if size >= count)
            rows, positions = (np.full(size, -1, np.int32) for _ in range(2))
            rows[:count], positions[:count] = sequence.slot, range(begin, begin + count)
            program = self.programs.get(Shape("logits", size, 1))
            none = np.full(1, -1, np.int32)
            cache, _, _ = program(
                self.leaves, self.cache, self.state, rows, positions, self.tables(), none
            )
            self.keep_cache(cache)
            begin += count
        self._computed[sequence.slot] = (sequence.request.id, known[:begin])
        return begin == last

    def _enter(self, sequence: Running) -> None:
        """Tells the device what is known of a sequence."""
        row = self.target.samplers.row(sequence, self.programs.sizes.context)
        self._state = self.programs.get(Shape("admit"))(self.state, row, np.int32(sequence.slot))

    def tables(self) -> dict[str, np.ndarray]:
        """Each slot has the same blocks for ever."""
        sizes = self.programs.sizes
        each = [
            (
                slot,
                Held(
                    b"",
                    {
                        group: [*range(slot * sizes.table, (slot + 1) * sizes.table)]
                        for group in sizes.blocks
                    },
                ),
            )
            for slot in range(sizes.slots)
        ]
        return self.tables_of(sizes.slots, each)

    def _rows(self, sequences: int) -> int:
        return self.row_count(sequences)

    def reset(self) -> None:
        """As `Drafter.reset`."""
        self._cache = self._state = None
        self._computed.clear()

    def announce(self) -> list[Future[Program]]:
        """As `Drafter.announce`."""
        return self.programs.announce(self._shapes())

    def _shapes(self) -> Iterator[Shape]:
        slots = self.programs.sizes.slots
        yield Shape("admit")
        for size in (*FEW, *SIZES):
            yield Shape("logits", size, 1)
        for stages in (PLAIN, STAGES):
            for rows in sorted({self._rows(n) for n in range(1, slots + 1)}):
                yield Shape("propose", rows, stages=stages)


def _common(before: Sequence[int], known: Sequence[int], most: int) -> int:
    """Tokens that were computed and still hold, at most so many."""
    least = min(len(before), most)
    if list(before[:least]) == list(known[:least]):
        return least
    return next(i for i in range(least) if before[i] != known[i])
