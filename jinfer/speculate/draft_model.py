"""A draft model: a smaller one, or the model itself with less of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import jax
import numpy as np

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.runner.compiled_programs import Program, Programs, Shape, Sizes
from jinfer.engine.runner.model_runner import FEW, SIZES, Device
from jinfer.engine.runner.sampler_output import MAX_STEPS
from jinfer.engine.scheduling.scheduler import Running
from jinfer.modelspec.cache_dtype import Kind
from jinfer.nn.abstract_model import AbstractModel
from jinfer.sampling.sampler_chain import stage_sets
from jinfer.speculate.draft_length import Mean
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.other_device import PlacedPrograms
from jinfer.speculate.token_tree import ROOT, Tree

_CHUNK = 256  # tokens of prompts that a draft computes before others wait too long


def draft_programs(
    model: AbstractModel, target: Sizes, kv_cache: Kind, device: jax.Device | None = None
) -> Programs:
    """A draft model's programs: a cache with room for the whole context of each slot.

    Args:
        device: where it is to run; None: where JAX runs what nobody has placed.
    """
    blocks = target.slots * target.table
    groups = {shape.group: blocks for shape in model.caches.values()}
    sizes = Sizes(target.slots, target.context, target.vocab, groups, kv_cache)
    if device is None:
        return Programs(model, sizes)
    return PlacedPrograms(model=model, sizes=sizes, device=device)


@dataclass(eq=False, kw_only=True)
class DraftModel(Device, Drafter):
    """Drafts what a model finds likeliest, under the noise that the target draws with.

    Attributes:
        target: the engine that it drafts for.
        name: what its tokens are said to be from.
        seconds: of a level of a draft.
        siblings: tokens of each level, of which the first goes on.
        expansion: how many tokens follow each one, level by level; none: as `siblings` says.
            What follows another than the first is found one such token after the other.
    """

    target: EngineCore
    name: str
    seconds: float = 1e-3
    siblings: int = 2
    expansion: tuple[int, ...] = ()
    _took: Mean = field(default_factory=lambda: Mean(0.0))
    _computed: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    _blocks: dict[str, np.ndarray] = field(default_factory=dict)

    def draft(self, asked: Sequence[tuple[Running, int]]) -> list[Tree]:
        """As `Drafter.draft`."""
        most = len(self.expansion) or MAX_STEPS
        wanted = {s.slot: (s, min(most, levels)) for s, levels in asked if levels > 0}
        ready = [(s, levels) for s, levels in wanted.values() if self._catch_up(s)]
        if not ready:
            return [Tree() for _ in asked]
        begun, deepest = time.perf_counter(), max(levels for _, levels in ready)
        tokens = self._run([s for s, _ in ready], deepest)
        trees = {}
        for row, (sequence, levels) in enumerate(ready):
            chain = tokens[: levels - 1, row, 0].tolist()
            self._computed[sequence.slot] = (sequence.request.id, self._after(sequence, chain))
            grown = _Growing(self.name)
            self._grow(sequence, tokens[:levels, row], [], grown)
            trees[sequence.slot] = grown.tree()
        self._took.add((time.perf_counter() - begun) / deepest)
        self.seconds = self._took.value
        return [trees.get(sequence.slot, Tree()) for sequence, _ in asked]

    def _after(self, sequence: Running, chain: list[int]) -> list[int]:
        """The tokens that the cache has after a chain was drafted."""
        return [*sequence.tokens, *chain]

    def _known(self, sequence: Running) -> list[int]:
        """The tokens of a sequence, as this model is given them."""
        return sequence.tokens

    def _run(self, sequences: Sequence[Running], levels: int) -> np.ndarray:
        """The likeliest tokens of so many levels, [levels, sequences, width]."""
        count = self.row_count(len(sequences))
        rows = np.full(count, -1, np.int32)
        rows[: len(sequences)] = [s.slot for s in sequences]
        program = self.programs.get(
            Shape("propose", count, stages=self.target.samplers.stages(sequences))
        )
        given = (rows, self.tables(), np.int32(levels))
        cache, state, found = program(self.leaves, self.cache, self.state, *given)
        self.keep_cache(cache, state)
        return np.asarray(found)

    def _grow(
        self, sequence: Running, levels: np.ndarray, above: list[int], grown: _Growing
    ) -> None:
        """Takes in what follows a node: a chain with others beside each, and below those."""
        path = list(above)
        for level, row in enumerate(levels.tolist()):
            depth = len(above) + level
            width = self.expansion[depth] if self.expansion else self.siblings
            listed = [id for id in row[:width] if 0 <= id < self.programs.sizes.vocab]
            if not listed:
                return
            for id in listed:
                grown.add([*path, id])
            if self.expansion:
                for id in listed[1:]:
                    self._grow_below(sequence, [*path, id], len(levels) - level - 1, grown)
            path.append(listed[0])

    def _grow_below(self, sequence: Running, path: list[int], levels: int, grown: _Growing) -> None:
        """What follows a node beside the chain, which takes the chain's place for the moment."""
        if levels < 1:
            return
        self._enter(sequence, path)
        place = len(sequence.tokens)
        request, computed = self._computed[sequence.slot]
        self._computed[sequence.slot] = (request, computed[:place])
        self._compute(sequence, place - 1, place - 1 + len(path))
        found = self._run([sequence], levels)
        self._grow(sequence, found[:levels, 0], path, grown)

    def _catch_up(self, sequence: Running) -> bool:
        """Computes what is known before a sequence's last token; False where there is more."""
        known = self._known(sequence)
        last = len(known) - 1
        before = self._computed.get(sequence.slot)
        begin = 0
        if before is not None and before[0] == sequence.request.id:
            begin = _common(before[1], known, last)
        self._enter(sequence, [])
        end = min(last, begin + _CHUNK)
        self._compute(sequence, begin, end)
        self._computed[sequence.slot] = (sequence.request.id, known[:end])
        return end == last

    def _compute(self, sequence: Running, begin: int, end: int) -> None:
        """Computes tokens that the device knows."""
        while begin < end:
            count = min(end - begin, SIZES[-1])
            size = next(size for size in (*FEW, *SIZES) if size >= count)
            rows, positions = (np.full(size, -1, np.int32) for _ in range(2))
            rows[:count], positions[:count] = sequence.slot, range(begin, begin + count)
            given = (rows, positions, self.tables(), np.full(1, -1, np.int32))
            program = self.programs.get(Shape("logits", size, 1))
            self.keep_cache(program(self.leaves, self.cache, self.state, *given)[0])
            begin += count

    def _enter(self, sequence: Running, more: list[int]) -> None:
        """Tells the device what is known of a sequence, and what may follow."""
        row = self.target.samplers.row(sequence, self.programs.sizes.context, more)
        self._state = self.programs.get(Shape("admit"))(self.state, row, np.int32(sequence.slot))

    def tables(self) -> dict[str, np.ndarray]:
        """Each slot has the same blocks for ever."""
        sizes = self.programs.sizes
        if not self._blocks:
            every = np.arange(sizes.slots * sizes.table, dtype=np.int32)
            self._blocks = {group: every.reshape(sizes.slots, -1) for group in sizes.blocks}
        return self._blocks

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
        for stages in stage_sets():
            for rows in sorted({self.row_count(n) for n in range(1, slots + 1)}):
                yield Shape("propose", rows, stages=stages)


@dataclass
class _Growing:
    """A tree while its paths come in.

    Attributes:
        source: of its nodes.
        paths: to each node -> its place.
    """

    source: str
    paths: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, path: list[int]) -> None:
        """Takes a node in, whose parent is there."""
        self.paths.setdefault(tuple(path), len(self.paths))

    def tree(self) -> Tree:
        """The whole."""
        parents = (self.paths[path[:-1]] if len(path) > 1 else ROOT for path in self.paths)
        tokens = tuple(path[-1] for path in self.paths)
        return Tree(tokens, tuple(parents), (self.source,) * len(tokens))


def _common(before: Sequence[int], known: Sequence[int], most: int) -> int:
    """Tokens that were computed and still hold, at most so many."""
    least = min(len(before), most)
    if list(before[:least]) == list(known[:least]):
        return least
    return next(i for i in range(least) if before[i] != known[i])
