"""Speculative decoding: collects drafts, verifies them in one call, learns acceptance rates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jinfer.engine.engine import Engine
from jinfer.engine.runner.captured_calls import captured_names
from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.in_flight import CallInFlight
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.scheduling.block_manager import BlockCopy, BlockTables
from jinfer.engine.scheduling.sequence import DraftedStep, RunningSequence
from jinfer.engine.scheduling.step_plan import StepPlan
from jinfer.engine.search.guided_decoding import Guides
from jinfer.sampling.sampler_chain import sampler_sets
from jinfer.speculate.draft_length import Backoff, DraftLength, RunningMean
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.token_tree import TokenTree, merge_trees
from jinfer.speculate.tree_batch import (
    EVERYTHING,
    PLACES_PER_TOKEN,
    SIZES,
    RootedTree,
    TreeLayout,
    allocate_branches,
    allowed_chain,
    batch_sizes,
    first_path,
    fitting_size,
    layout_masks,
)

_DEEPEST = 16  # maximum depth of a draft
_NEW = 16  # an answer of fewer tokens counts as new
_LOOKS = 128  # calls between two timings of a plain step


@dataclass
class _Verified:
    """A tree whose verification is in flight.

    Attributes:
        tree: its nodes.
        branches: (path, block tables) of each path but the first.
    """

    tree: TokenTree
    branches: list[tuple[list[int], BlockTables]]


@dataclass(eq=False)
class SpeculativeDecoder:
    """Verifies what an engine's drafters propose, as far as it pays.

    Attributes:
        engine: the engine that it drafts for.
        drafters: draft sources; among siblings, nodes of earlier ones count as likelier.
        draft_length: how much is drafted and verified.
        branched: whether trees may have branches, unless the model has recurrent states; else only
            their first paths are verified.
    """

    engine: Engine
    drafters: Sequence[Drafter]
    draft_length: DraftLength = field(default_factory=DraftLength)
    branched: bool = True
    _pending: dict[int, _Verified] = field(default_factory=dict)
    _backoff: Backoff = field(default_factory=Backoff)
    _calls: dict[int, tuple[CallInFlight, int]] = field(default_factory=dict)
    _since: int = 0
    _run: set[int] = field(default_factory=set)

    def needs_tokens(self, sequences: Sequence[RunningSequence]) -> bool:
        """As `Speculator.needs_tokens`: not during a rest, nor while prompts are prefilled."""
        if any(call.involves(sequences) for call, _ in self._calls.values()):
            return True
        looks = not self._backoff.resting and any(map(_wants, sequences))
        return looks and not any(s.prefilling for s in sequences)

    def max_steps(self, limit: int) -> int:
        """As `Speculator.max_steps`."""
        return self._backoff.steps(limit)

    def launch(self, plan: StepPlan, guides: Guides) -> bool:
        decoding = plan.decoding
        if plan.chunks or not decoding or self._backoff.rest():
            return False
        if any(s.in_flight or captured_names(s) for s in decoding):
            return False
        wanting = [s for s in decoding if _wants(s) and s.remaining > 1 and not _ended(s)]
        if not wanting or self._unknown(decoding):
            return False
        sizes = self._sizes(decoding)
        if not sizes or sizes[-1] <= len(decoding):
            self._backoff.missed(rests=self.draft_length.nodes is None)
            return False
        trees = self._drafts(wanting, len(decoding), sizes)
        if trees is not None and not any(map(len, trees)):
            self._backoff.missed(rests=self.draft_length.nodes is None)
            return False
        # Sources that cost nothing were observed during the rest, so they need no probe.
        tries = self._backoff.probing and not self._free
        chosen = trees and self.draft_length.select(trees, len(decoding), sizes, tries)
        if not chosen or not any(map(len, chosen)):
            self._backoff.useless()
            return False
        by_slot = {s.slot: tree for s, tree in zip(wanting, chosen, strict=True)}
        masks = None
        if any(s.guided for s in decoding):
            masks = self._masks(guides, decoding, by_slot, sizes)
            if masks is None:
                self._backoff.missed(rests=self.draft_length.nodes is None)
                return False
        self._backoff.drafted()
        self._verify(decoding, by_slot, masks, sizes)
        return True

    def _unknown(self, decoding: Sequence[RunningSequence]) -> bool:
        """Whether to make a plain step in order to time it; repeated once in a while."""
        if self.draft_length.nodes is not None or any(s.guided for s in decoding):
            return False
        self._since += 1
        if self._since % _LOOKS and self.draft_length.knows(len(decoding)):
            return False
        self._since = 0
        return True

    def _masks(
        self,
        guides: Guides,
        decoding: Sequence[RunningSequence],
        trees: dict[int, TokenTree],
        sizes: Sequence[int],
    ) -> dict[int, list[np.ndarray]] | None:
        """Grammar masks of each sequence's nodes; cuts trees to chains that the grammars allow.

        Returns:
            None if nothing is left of the trees, or their program is not compiled yet.
        """
        words, masks = self.engine.runner.programs.words, dict[int, list[np.ndarray]]()
        for sequence in decoding:
            tree = first_path(trees.get(sequence.slot, TokenTree()))
            masks[sequence.slot] = [np.full(words, EVERYTHING)] * (1 + len(tree))
            if sequence.guided:
                guide = guides.by_request[sequence.request.id]
                assert guide.mask is not None, "its mask is computed, and tokens may follow"
                forcing, state = sequence.request.sampling.logprobs is None, guide.matcher.fork()
                allowed = guides.run_briefly(
                    sequence, allowed_chain, state, guide.mask, tree, forcing=forcing
                )
                if allowed is None:
                    return None
                tree, masks[sequence.slot] = allowed
            trees[sequence.slot] = tree
        size = fitting_size(decoding, trees, sizes)
        key = self._step_key(size, decoding, 0, masked=True)
        ready = self.draft_length.nodes is not None or self.engine.runner.programs.ready(key)
        return masks if ready and any(map(len, trees.values())) else None

    def _branched(self) -> bool:
        return self.branched and self.engine.scheduler.blocks.states is None

    def _drafts(
        self,
        wanting: Sequence[RunningSequence],
        sequences: int,
        sizes: Sequence[int],
    ) -> list[TokenTree] | None:
        """The union of all drafters' trees; None if no drafter is worth its time."""
        items = []
        for drafter in self.drafters:
            levels = _DEEPEST
            if drafter.seconds_per_level:
                levels = self.draft_length.draft_depth(
                    drafter.name,
                    drafter.seconds_per_level,
                    len(wanting),
                    sequences,
                    sizes,
                    self._backoff.probing,
                )
            if levels:
                items.append(drafter.draft([(s, min(levels, s.remaining - 1)) for s in wanting]))
        if not items:
            return None
        never = frozenset(self.engine.runner.model.never)
        trees = [merge_trees(proposed).without(never) for proposed in zip(*items, strict=True)]
        return trees if self._branched() else [first_path(tree) for tree in trees]

    def _sizes(self, decoding: Sequence[RunningSequence]) -> list[int]:
        """Sizes of batches that there are programs for, rising."""
        if self.draft_length.nodes is not None:
            return [*SIZES]
        return [
            n
            for n in batch_sizes(self.engine.runner)
            if self.engine.runner.programs.ready(self._step_key(n, decoding, 0))
        ]

    def _step_key(
        self,
        size: int,
        decoding: Sequence[RunningSequence],
        places: int,
        *,
        masked: bool = False,
    ) -> StepKey:
        chosen, stages = (
            self.engine.runner.sampled_rows(size, len(decoding)),
            self.engine.runner.samplers.stages(decoding),
        )
        key = StepKey("verify", size, chosen, places, stages=stages, masked=masked)
        taps = self.engine.runner.taps_of(decoding)
        return replace(key, extras=self.engine.runner.samplers.extras(decoding), taps=taps)

    def _verify(
        self,
        decoding: Sequence[RunningSequence],
        trees: dict[int, TokenTree],
        masks: dict[int, list[np.ndarray]] | None,
        sizes: Sequence[int],
    ) -> None:
        """Launches a verifying call."""
        layout, of_rows, copies = TreeLayout(), list[tuple[int, BlockTables]](), list[BlockCopy]()
        size = fitting_size(decoding, trees, sizes)
        if not self._branches(decoding, trees, size):
            trees = {slot: first_path(tree) for slot, tree in trees.items()}
        for sequence in decoding:
            assert sequence.block_tables is not None, "it is planned"
            tree = self._fitting(sequence, trees.get(sequence.slot, TokenTree()), size, layout)
            tree, branches = allocate_branches(self.engine.scheduler.blocks, sequence, tree, copies)
            rows = layout.add(_rooted(sequence, tree))
            of_paths = [sequence.block_tables, *(branch for _, branch in branches)]
            of_rows += zip(rows, of_paths, strict=True)
            self._pending[sequence.request.id] = _Verified(tree, branches)
        self.engine.runner.copy_blocks(copies)
        places = PLACES_PER_TOKEN * size if layout.branched else 0
        key = self._step_key(size, decoding, places, masked=masks is not None)
        program = self.engine.runner.programs.get(key)
        nodes = layout.nodes(size, self.engine.runner.sampled_rows(size, len(decoding)))
        tables = self.engine.runner.block_tables(size, of_rows)
        tables |= self.engine.runner.edits_of_rows(key.taps, decoding, size, layout.owners)
        begun = time.perf_counter()
        arguments: tuple[Any, ...] = (nodes, tables)
        if masks is not None:
            arguments += (
                layout_masks(masks, decoding, layout, size, self.engine.runner.programs.words),
            )
        cache, state, output = program(
            self.engine.runner.leaves,
            self.engine.runner.cache,
            self.engine.runner.state,
            *arguments,
        )
        self.engine.runner.set_cache(cache, state)
        call = CallInFlight(output, tuple(enumerate(decoding)), size, begun)
        self.engine.record_in_flight(call)
        self._calls[decoding[0].slot % self.engine.scheduler.micro_batches] = (call, size)

    def _branches(
        self,
        decoding: Sequence[RunningSequence],
        trees: dict[int, TokenTree],
        size: int,
    ) -> bool:
        """Whether no tree has branches, or there is a compiled program for them."""
        branched = any(len(tree.paths()) > 1 for tree in trees.values())
        if self.draft_length.nodes is not None or not branched:
            return True
        key = self._step_key(size, decoding, PLACES_PER_TOKEN * size)
        return self.engine.runner.programs.ready(key)

    def _fitting(
        self,
        sequence: RunningSequence,
        tree: TokenTree,
        size: int,
        layout: TreeLayout,
    ) -> TokenTree:
        """The part of a tree that there are blocks and places for."""
        assert sequence.block_tables is not None, "it is planned"
        places = len(layout.sources) + _rooted(sequence, tree).places
        if tree and places > (PLACES_PER_TOKEN - 1) * size:
            tree = first_path(tree)
        for path in tree.paths()[:1]:
            length = len(sequence.tokens) + len(path)
            if not self.engine.scheduler.blocks.reserve(sequence.block_tables, length):
                return TokenTree()
        return tree

    def observe(
        self, launched: CallInFlight, sequence: RunningSequence, ids: list[int]
    ) -> list[str]:
        micro_batch = sequence.slot % self.engine.scheduler.micro_batches
        if micro_batch in self._calls and self._calls[micro_batch][0] is launched:
            size = self._calls.pop(micro_batch)[1]
            if size in self._run:  # a program's first call takes longer
                self.draft_length.costs.setdefault(size, RunningMean(0.0)).add(
                    self.engine.call_seconds
                )
            self._run.add(size)
        elif launched.decodes:
            mean = self.draft_length.plain.setdefault(len(launched.rows), RunningMean(0.0))
            mean.add(self.engine.step_seconds)
        verified = self._pending.pop(sequence.request.id, None)
        if verified is None:
            self._watch(launched, sequence, ids)
            return []
        accepted = verified.tree.follow(ids)
        self.draft_length.record(verified.tree, accepted)
        if len(verified.tree):
            for counts in (self.engine.drafted, sequence):
                counts.drafted += len(verified.tree)
                counts.accepted += len(accepted)
            self.engine.drafted.drafts += 1
            tree = verified.tree
            sequence.trees.append(
                DraftedStep(tree.tokens, tree.parents, tree.sources, tuple(accepted), tuple(ids))
            )
        # The last token's keys and values are not computed yet, even if it was drafted.
        needed = set(accepted[: max(0, len(ids) - 1)])
        for path, branch in verified.branches:
            if needed - set(verified.tree.paths()[0]) and needed <= set(path):
                assert sequence.block_tables is not None, "it runs"
                sequence.block_tables, branch = branch, sequence.block_tables
                needed = set()
            self.engine.scheduler.blocks.free(branch)
        return [verified.tree.sources[node] for node in accepted]

    def _watch(self, launched: CallInFlight, sequence: RunningSequence, ids: list[int]) -> None:
        """During a rest: observes which drafts of sources that cost nothing would be accepted."""
        if not self._backoff.resting or not launched.decodes or not ids or not _wants(sequence):
            return
        known = len(sequence.tokens) - len(sequence.request.prompt)
        if not self._backoff.watches(new=known < _NEW):
            return
        free = [drafter for drafter in self.drafters if not drafter.seconds_per_level]
        tree = merge_trees([drafter.draft([(sequence, _DEEPEST)])[0] for drafter in free])
        near = tree.subtree(_above(tree, len(ids)))
        right = near.follow(ids)
        self._backoff.watched(right=bool(right))
        self.draft_length.record(near, right)
        if len(tree) and self.draft_length.best_size([tree], 1, SIZES) is not None:
            self._backoff.drafted()

    @property
    def _free(self) -> bool:
        """Whether no drafter takes time."""
        return not any(drafter.seconds_per_level for drafter in self.drafters)

    def release_blocks(self, sequence: RunningSequence) -> None:
        """As `Speculator.release_blocks`."""
        verified = self._pending.pop(sequence.request.id, None)
        for _, branch in verified.branches if verified else ():
            self.engine.scheduler.blocks.free(branch)

    def forget(self, sequence: RunningSequence) -> None:
        for drafter in self.drafters:
            drafter.forget(sequence)

    def reset(self) -> None:
        self._calls.clear()
        for drafter in self.drafters:
            drafter.reset()

    def release(self) -> None:
        for drafter in self.drafters:
            drafter.release()

    def announce(self) -> list[Future[Program]]:
        futures = self.engine.runner.programs.announce(self._step_keys())
        return [*futures, *(future for drafter in self.drafters for future in drafter.announce())]

    def _step_keys(self) -> Iterator[StepKey]:
        for stages in sampler_sets():
            for size in batch_sizes(self.engine.runner):
                for chosen in sorted({1, self.engine.runner.sampled_rows(size, 2)}):
                    for places in (0, PLACES_PER_TOKEN * size) if self._branched() else (0,):
                        yield StepKey("verify", size, chosen, places, stages=stages)
                    yield StepKey("verify", size, chosen, stages=stages, masked=True)


def _wants(sequence: RunningSequence) -> bool:
    return sequence.request.sampling.speculation and not sequence.host_driven


def _ended(sequence: RunningSequence) -> bool:
    """Whether its last token ends it, so that the device samples no other."""
    request = sequence.request
    stops = request.sampling.stop_token_ids
    return sequence.tokens[-1] in (*request.end_ids, *stops) and not request.sampling.ignore_eos


def _rooted(sequence: RunningSequence, tree: TokenTree) -> RootedTree:
    last = len(sequence.tokens) - 1
    return RootedTree(tree, sequence.tokens[last], last, sequence.slot)


def _above(tree: TokenTree, levels: int) -> list[int]:
    """The nodes of the first levels of a tree."""
    return [node for node, depth in enumerate(tree.depths()) if depth <= levels]
