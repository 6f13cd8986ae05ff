"""Draft model: a smaller model, or the target at fewer bits or layers, proposes tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np

from jinfer.engine.runner.compiled_programs import CompiledPrograms, Program
from jinfer.engine.runner.flat_batch import padded
from jinfer.engine.runner.model_runner import SIZES, SMALL_SIZES, ModelRunner
from jinfer.engine.runner.sampler_output import MAX_STEPS
from jinfer.engine.runner.step_key import Sizes, StepKey, StepKind
from jinfer.engine.scheduling.block_manager import BlockCopy
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.loader.weights.storage_plan import packed_for_target
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import STATE, Cache
from jinfer.ops.backend import target_platform
from jinfer.quant_format import Kind
from jinfer.sampling.sampler_chain import sampler_sets
from jinfer.speculate.draft_length import RunningMean
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.token_tree import ROOT, TokenTree

_CHUNK = 256  # tokens of a prompt that are prefilled before a draft


def draft_programs(
    model: AbstractModel, target: Sizes, kv_cache: Kind, device: jax.Device | None = None
) -> CompiledPrograms:
    """A draft model's programs: its KV cache has room for the whole context of each slot.

    Of each slot it has two recurrent states: after the known tokens, and after drafted ones.

    Args:
        target: sizes of the target's engine.
        device: where it runs; None: JAX's default device.
    """
    blocks = target.slots * target.table
    groups = {shape.group: blocks for shape in model.caches.values()}
    if STATE in groups:
        groups[STATE] = 2 * target.slots
    sizes = Sizes(target.slots, target.context, target.vocab, groups, kv_cache)
    return CompiledPrograms(model, sizes, device=device)


@dataclass(eq=False, kw_only=True)
class DraftModel(Drafter):
    """Drafts the model's likeliest tokens, under the noise that the target samples with.

    Attributes:
        runner: runs the draft model.
        target: runs the model that it drafts for.
        name: draft source of its nodes.
        seconds_per_level: time of a level of a draft.
        siblings: tokens of each level, the first of which is continued.
        expansion: number of children of each node, by level; empty: see `siblings`. Nodes other
            than the first of a level are continued one by one.
    """

    runner: ModelRunner
    target: ModelRunner
    name: str
    seconds_per_level: float = 1e-3
    siblings: int = 2
    expansion: tuple[int, ...] = ()
    _took: RunningMean = field(default_factory=lambda: RunningMean(0.0))
    _computed: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    _blocks: dict[str, np.ndarray] = field(default_factory=dict)
    first: ClassVar[int] = 0  # index of the first token of a sequence that it reads
    kinds: ClassVar[tuple[StepKind, StepKind]] = "logits", "propose"  # of a prefill and of a draft

    def draft(self, requests: Sequence[tuple[RunningSequence, int]]) -> list[TokenTree]:
        limit = len(self.expansion) or MAX_STEPS
        by_slot = {s.slot: (s, min(limit, levels)) for s, levels in requests if levels > 0}
        ready = [(s, levels) for s, levels in by_slot.values() if self._catch_up(s)]
        if not ready:
            return [TokenTree() for _ in requests]
        begun, deepest = time.perf_counter(), max(levels for _, levels in ready)
        self._branch([s for s, _ in ready])
        tokens = self._run([s for s, _ in ready], deepest)
        trees = {}
        for row, (sequence, levels) in enumerate(ready):
            chain = tokens[: levels - 1, row, 0].tolist()
            self._computed[sequence.slot] = (sequence.request.id, self._after(sequence, chain))
            grown = _TreeBuilder(self.name)
            self._grow(sequence, tokens[:levels, row], [], grown)
            trees[sequence.slot] = grown.tree()
        self._took.add((time.perf_counter() - begun) / deepest)
        self.seconds_per_level = self._took.value
        return [trees.get(sequence.slot, TokenTree()) for sequence, _ in requests]

    def _after(self, sequence: RunningSequence, chain: list[int]) -> list[int]:
        """The tokens in the KV cache after a chain was drafted; in a state, those before it."""
        return sequence.tokens[:-1] if self._has_states else [*sequence.tokens, *chain]

    @property
    def _has_states(self) -> bool:
        return STATE in self.runner.programs.sizes.blocks

    def _branch(self, sequences: Sequence[RunningSequence]) -> None:
        """Copies recurrent states, as drafted tokens are computed from copies."""
        if self._has_states:
            slots = self.runner.programs.sizes.slots
            self.runner.copy_blocks([BlockCopy(STATE, s.slot, slots + s.slot) for s in sequences])

    def _run(self, sequences: Sequence[RunningSequence], levels: int) -> np.ndarray:
        """The likeliest tokens of each level, [levels, sequences, width]."""
        count = self.runner.padded_rows(len(sequences))
        rows = padded([s.slot for s in sequences], count, -1)
        stages = self.target.samplers.stages(sequences)
        program = self.runner.programs.get(StepKey(self.kinds[1], count, stages=stages))
        tables = self.slot_tables(drafted=True)
        arguments = (rows, tables, np.int32(levels), *self._hidden(sequences, rows))
        cache, state, proposed = program(
            self.runner.leaves, self.runner.cache, self.runner.state, *arguments
        )
        self.runner.set_cache(cache, state)
        return np.asarray(proposed)

    def _grow(
        self, sequence: RunningSequence, levels: np.ndarray, above: list[int], grown: _TreeBuilder
    ) -> None:
        """Add the tokens after a node: a chain, its siblings, and the tokens after those."""
        path = list(above)
        for level, row in enumerate(levels.tolist()):
            depth = len(above) + level
            width = self.expansion[depth] if self.expansion else self.siblings
            listed = [id for id in row[:width] if 0 <= id < self.runner.programs.sizes.vocab]
            if not listed:
                return
            for id in listed:
                grown.add([*path, id])
            if self.expansion:
                for id in listed[1:]:
                    self._grow_below(sequence, [*path, id], len(levels) - level - 1, grown)
            path.append(listed[0])

    def _grow_below(
        self, sequence: RunningSequence, path: list[int], levels: int, grown: _TreeBuilder
    ) -> None:
        """Add the tokens after a node outside the chain, computed in the chain's place."""
        if levels < 1:
            return
        self._set_slot(sequence, path)
        known = len(sequence.tokens)
        request, computed = self._computed[sequence.slot]
        self._computed[sequence.slot] = (request, computed[:known])
        self._branch([sequence])
        self._compute(sequence, known - 1, known - 1 + len(path), drafted=True)
        proposed = self._run([sequence], levels)
        self._grow(sequence, proposed[:levels, 0], path, grown)

    def _catch_up(self, sequence: RunningSequence) -> bool:
        """Prefills the tokens before a sequence's last; False if some are left."""
        known = sequence.tokens[self.first :] if self.first else sequence.tokens
        last = len(known) - 1
        if last < 0:
            return False
        before = self._computed.get(sequence.slot)
        begin = 0
        if before is not None and before[0] == sequence.request.id:
            begin = _common(before[1], known, last)
            if self._has_states and begin < len(before[1]):  # a state cannot go back
                begin = 0
        self._set_slot(sequence, [])
        end = min(last, begin + _CHUNK)
        self._compute(sequence, begin, end)
        self._computed[sequence.slot] = (sequence.request.id, known[:end])
        return end == last

    def _compute(
        self, sequence: RunningSequence, begin: int, end: int, drafted: bool = False
    ) -> None:
        """Prefills tokens that the device state has."""
        tables = self.slot_tables(drafted)
        while begin < end:
            count = min(end - begin, SIZES[-1])
            size = next(size for size in (*SMALL_SIZES, *SIZES) if size >= count)
            rows, positions = np.full((2, size), -1, np.int32)
            rows[:count], positions[:count] = sequence.slot, range(begin, begin + count)
            self.runner.set_cache(self._prefill(rows, positions, tables))
            begin += count

    def _prefill(
        self, rows: np.ndarray, positions: np.ndarray, tables: dict[str, np.ndarray]
    ) -> Cache:
        """The KV cache with some tokens computed."""
        arguments = (rows, positions, tables, np.full(1, -1, np.int32))
        program = self.runner.programs.get(StepKey("logits", len(rows), 1))
        return program(self.runner.leaves, self.runner.cache, self.runner.state, *arguments)[0]

    def _hidden(self, sequences: Sequence[RunningSequence], rows: np.ndarray) -> Sequence[Any]:
        """The target's hidden states before the sequences' last tokens, if the model reads them."""
        return ()

    def _set_slot(self, sequence: RunningSequence, more: list[int]) -> None:
        """Sets a sequence's slot of the device state, with `more` tokens that may follow."""
        context = self.runner.programs.sizes.context
        row = self.target.samplers.row(sequence, context, more, self.first)
        self.runner.upload_row(row, sequence.slot)

    def slot_tables(self, drafted: bool = False) -> dict[str, np.ndarray]:
        """Block tables: each slot has fixed blocks; a state of its own for drafted tokens."""
        sizes = self.runner.programs.sizes
        if not self._blocks:
            every = np.arange(sizes.slots * sizes.table, dtype=np.int32)
            self._blocks = {group: every.reshape(sizes.slots, -1) for group in sizes.blocks}
        if not self._has_states:
            return self._blocks
        states = np.zeros((sizes.slots, sizes.table), np.int32)  # of which the first column counts
        states[:, 0] = np.arange(sizes.slots) + (sizes.slots if drafted else 0)
        return self._blocks | {STATE: states}

    def reset(self) -> None:
        self.runner.reset()
        self._computed.clear()

    def release(self) -> None:
        self.runner.release()

    def announce(self) -> list[Future[Program]]:
        return self.runner.programs.announce(self._step_keys())

    def _step_keys(self) -> Iterator[StepKey]:
        (prefill, propose), slots = self.kinds, self.runner.programs.sizes.slots
        yield StepKey("set_slot")
        if self._has_states:
            yield StepKey("copy_blocks")
        for size in (*SMALL_SIZES, *SIZES):
            yield StepKey(prefill, size, int(prefill == "logits"))
        for stages in sampler_sets():
            for rows in sorted({self.runner.padded_rows(n) for n in range(1, slots + 1)}):
                yield StepKey(propose, rows, stages=stages)


@dataclass
class _TreeBuilder:
    """Builds a tree from paths.

    Attributes:
        source: draft source of all nodes.
        paths: path to each node -> its index.
    """

    source: str
    paths: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, path: list[int]) -> None:
        """Adds a node, whose parent has been added."""
        self.paths.setdefault(tuple(path), len(self.paths))

    def tree(self) -> TokenTree:
        """The tree."""
        parents = (self.paths[path[:-1]] if len(path) > 1 else ROOT for path in self.paths)
        tokens = tuple(path[-1] for path in self.paths)
        return TokenTree(tokens, tuple(parents), (self.source,) * len(tokens))


def _common(before: Sequence[int], known: Sequence[int], limit: int) -> int:
    """Number of computed tokens that are still valid, at most `limit`."""
    least = min(len(before), limit)
    if list(before[:least]) == list(known[:least]):
        return least
    return next(i for i in range(least) if before[i] != known[i])


def put_on(device: jax.Device) -> Callable[[Sequence[str], Any], Any]:
    """A function of a parameter's names and NumPy arrays, which puts it on a device."""

    def put(names: Sequence[str], values: Any) -> Any:
        with target_platform(device.platform):
            values = packed_for_target(values)
        return jax.block_until_ready(jax.device_put(values, device))

    return put
