"""Speculation on an engine: drafts are gathered, verified in one call, and learned from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.output.drafted_step import DraftedStep
from jinfer.engine.runner.compiled_programs import Program, Shape
from jinfer.engine.runner.in_flight import Launched
from jinfer.engine.scheduling.block_manager import Copy, Held
from jinfer.engine.scheduling.scheduler import Plan, Running
from jinfer.engine.search.guided_decoding import Guides
from jinfer.sampling.sampler_chain import stage_sets
from jinfer.speculate.backoff import Pace
from jinfer.speculate.draft_length import Control, Mean
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.grammar_drafts import EVERYTHING, allowed
from jinfer.speculate.token_tree import Tree, merged
from jinfer.speculate.tree_batch import PLACES, Layout, Planted
from jinfer.speculate.tree_blocks import first_path, grown, laid_out

SIZES = (4, 8, 16, 32, 64)  # of batches that verify
_DEEPEST = 16  # tokens that a draft looks ahead
_NEW = 16  # tokens of an answer, before which it counts as new
_LOOKS = 128  # calls from one look at what a plain step takes to the next


@dataclass
class _Verified:
    """A tree that was launched.

    Attributes:
        tree: its nodes.
        branches: paths but the first, with the blocks that hold what is before and on them.
    """

    tree: Tree
    branches: list[tuple[list[int], Held]]


@dataclass(eq=False)
class Speculation:
    """What an engine's drafters propose, as far as it pays.

    Attributes:
        drafters: those whose nodes come first count as likelier among siblings.
        control: how much is drafted.
        branched: whether trees may have branches; else their first paths are taken.
    """

    drafters: Sequence[Drafter]
    control: Control = field(default_factory=Control)
    branched: bool = True
    _pending: dict[int, _Verified] = field(default_factory=dict)
    _pace: Pace = field(default_factory=Pace)
    _calls: dict[int, tuple[Launched, int]] = field(default_factory=dict)
    _since: int = 0
    _run: set[int] = field(default_factory=set)

    def waits(self, sequences: Sequence[Running]) -> bool:
        """As `Speculator.waits`: not while drafts do not pay, nor beside prompts."""
        if any(call.has(sequences) for call, _ in self._calls.values()):
            return True
        looks = not self._pace.resting and any(map(_wants, sequences))
        return looks and not any(s.in_prompt for s in sequences)

    def steps(self, most: int) -> int:
        """As `Speculator.steps`."""
        return self._pace.steps(most)

    def launch(self, engine: EngineCore, plan: Plan, guides: Guides) -> bool:
        """As `Speculator.launch`."""
        decoding = plan.decoding
        if plan.chunks or not decoding or self._pace.rest():
            return False
        if any(s.unread for s in decoding):
            return False
        wanting = [s for s in decoding if _wants(s) and s.left > 1 and not _ended(s)]
        if not wanting or self._unknown(decoding):
            return False
        sizes = self._sizes(engine, decoding)
        if not sizes or sizes[-1] <= len(decoding):
            self._pace.missed(rests=self.control.nodes is None)
            return False
        trees = self._drafts(wanting, len(decoding), sizes)
        if trees is not None and not any(map(len, trees)):
            self._pace.missed(rests=self.control.nodes is None)
            return False
        # What costs nothing was watched during the rest, and need not be tried to be known.
        tries = self._pace.probing and not self._free
        chosen = trees and self.control.choose(trees, len(decoding), sizes, tries)
        if not chosen or not any(map(len, chosen)):
            self._pace.useless()
            return False
        planted = {s.slot: tree for s, tree in zip(wanting, chosen, strict=True)}
        masks = None
        if any(s.guided for s in decoding):
            masks = self._masks(engine, guides, decoding, planted, sizes)
            if masks is None:
                self._pace.missed(rests=self.control.nodes is None)
                return False
        self._pace.drafted()
        self._verify(engine, decoding, planted, masks, sizes)
        return True

    def _unknown(self, decoding: Sequence[Running]) -> bool:
        """Whether a plain step is to be made, to know what it takes; once in a while again."""
        if self.control.nodes is not None or any(s.guided for s in decoding):
            return False
        self._since += 1
        if self._since % _LOOKS and self.control.knows(len(decoding)):
            return False
        self._since = 0
        return True

    def _masks(
        self,
        engine: EngineCore,
        guides: Guides,
        decoding: Sequence[Running],
        trees: dict[int, Tree],
        sizes: Sequence[int],
    ) -> dict[int, list[np.ndarray]] | None:
        """Masks after the nodes of each sequence; trees become chains that the grammars allow.

        None: there is nothing left of them, or no program for them yet.
        """
        words, masks = engine.programs.words, dict[int, list[np.ndarray]]()
        for sequence in decoding:
            tree = first_path(trees.get(sequence.slot, Tree()))
            masks[sequence.slot] = [np.full(words, EVERYTHING)] * (1 + len(tree))
            if sequence.guided:
                guide = guides.of[sequence.request.id]
                assert guide.mask is not None, "its turn is done, and tokens may follow"
                forcing, state = sequence.request.sampling.logprobs is None, guide.matcher.fork()
                found = guides.promptly(sequence, allowed, state, guide.mask, tree, forcing=forcing)
                if found is None:
                    return None
                tree, masks[sequence.slot] = found
            trees[sequence.slot] = tree
        size = _size_of(decoding, trees, sizes)
        shape = self._shape(engine, size, decoding, 0, masked=True)
        ready = self.control.nodes is not None or engine.programs.ready(shape)
        return masks if ready and any(map(len, trees.values())) else None

    def _drafts(
        self, wanting: Sequence[Running], sequences: int, sizes: Sequence[int]
    ) -> list[Tree] | None:
        """All that drafters propose; None where none of them is worth its time."""
        each = []
        for drafter in self.drafters:
            levels = _DEEPEST
            if drafter.seconds:
                levels = self.control.levels(
                    drafter.name,
                    drafter.seconds,
                    len(wanting),
                    sequences,
                    sizes,
                    self._pace.probing,
                )
            if levels:
                each.append(drafter.draft([(s, min(levels, s.left - 1)) for s in wanting]))
        if not each:
            return None
        trees = [merged(proposed) for proposed in zip(*each, strict=True)]
        return trees if self.branched else [first_path(tree) for tree in trees]

    def _sizes(self, engine: EngineCore, decoding: Sequence[Running]) -> list[int]:
        """Sizes of batches that there are programs for, rising."""
        if self.control.nodes is not None:
            return [*SIZES]
        return [
            n
            for n in sizes_of(engine)
            if engine.programs.ready(self._shape(engine, n, decoding, 0))
        ]

    def _shape(
        self,
        engine: EngineCore,
        size: int,
        decoding: Sequence[Running],
        places: int,
        *,
        masked: bool = False,
    ) -> Shape:
        chosen, stages = engine.chosen_count(size, len(decoding)), engine.samplers.stages(decoding)
        return Shape("verify", size, chosen, places, stages=stages, masked=masked)

    def _verify(
        self,
        engine: EngineCore,
        decoding: Sequence[Running],
        trees: dict[int, Tree],
        masks: dict[int, list[np.ndarray]] | None,
        sizes: Sequence[int],
    ) -> None:
        """Launches a call."""
        layout, held, copies = Layout(), list[tuple[int, Held]](), list[Copy]()
        size = _size_of(decoding, trees, sizes)
        if not self._branches(engine, decoding, trees, size):
            trees = {slot: first_path(tree) for slot, tree in trees.items()}
        for sequence in decoding:
            assert sequence.held is not None, "it is planned"
            tree = self._fitting(engine, sequence, trees.get(sequence.slot, Tree()), size, layout)
            tree, branches = grown(engine, sequence, tree, copies)
            planted = _planted(sequence, tree)
            rows = layout.add(planted)
            held += zip(rows, [sequence.held, *(own for _, own in branches)], strict=True)
            self._pending[sequence.request.id] = _Verified(tree, branches)
        engine.copy(copies)
        places = PLACES * size if layout.branched else 0
        shape = self._shape(engine, size, decoding, places, masked=masks is not None)
        program = engine.programs.get(shape)
        nodes = layout.nodes(size, engine.chosen_count(size, len(decoding)))
        tables = engine.tables_of(size, held)
        begun = time.perf_counter()
        given: tuple[Any, ...] = (nodes, tables)
        if masks is not None:
            given = (*given, laid_out(masks, decoding, layout, size, engine.programs.words))
        cache, state, chosen = program(engine.leaves, engine.cache, engine.state, *given)
        engine.keep_cache(cache, state)
        launched = Launched(chosen, tuple(enumerate(decoding)), size, begun)
        engine.note(launched)
        self._calls[decoding[0].slot % engine.scheduler.lanes] = (launched, size)

    def _branches(
        self, engine: EngineCore, decoding: Sequence[Running], trees: dict[int, Tree], size: int
    ) -> bool:
        """Whether there is a program for trees with branches, or none of these has one."""
        if self.control.nodes is not None or all(len(tree.paths()) < 2 for tree in trees.values()):
            return True
        return engine.programs.ready(self._shape(engine, size, decoding, PLACES * size))

    def _fitting(
        self, engine: EngineCore, sequence: Running, tree: Tree, size: int, layout: Layout
    ) -> Tree:
        """What of a tree there is room for."""
        assert sequence.held is not None, "it is planned"
        if tree and len(layout.sources) + _planted(sequence, tree).places > (PLACES - 1) * size:
            tree = first_path(tree)
        for path in tree.paths()[:1]:
            if not engine.scheduler.blocks.reserve(sequence.held, len(sequence.tokens) + len(path)):
                return Tree()
        return tree

    def read(
        self, engine: EngineCore, launched: Launched, sequence: Running, ids: list[int]
    ) -> list[str]:
        """As `Speculator.read`."""
        lane = sequence.slot % engine.scheduler.lanes
        if lane in self._calls and self._calls[lane][0] is launched:
            size = self._calls.pop(lane)[1]
            if size in self._run:  # the first call of a program takes longer than any other
                self.control.costs.setdefault(size, Mean(0.0)).add(engine.call_seconds)
            self._run.add(size)
        elif launched.decodes:
            mean = self.control.plain.setdefault(len(launched.rows), Mean(0.0))
            mean.add(engine.step_seconds)
        verified = self._pending.pop(sequence.request.id, None)
        if verified is None:
            self._watch(launched, sequence, ids)
            return []
        accepted = verified.tree.walk(ids)
        self.control.learn(verified.tree, accepted)
        if len(verified.tree):
            for counts in (engine.drafted, sequence):
                counts.drafted += len(verified.tree)
                counts.accepted += len(accepted)
            engine.drafted.drafts += 1
            tree = verified.tree
            sequence.trees.append(
                DraftedStep(tree.tokens, tree.parents, tree.sources, tuple(accepted), tuple(ids))
            )
        # The last token's keys and values are yet to be computed, whether or not it was drafted.
        needed = set(accepted[: max(0, len(ids) - 1)])
        for path, held in verified.branches:
            if needed - set(verified.tree.paths()[0]) and needed <= set(path):
                assert sequence.held is not None, "it runs"
                sequence.held, held = held, sequence.held
                needed = set()
            engine.scheduler.blocks.free(held)
        return [verified.tree.sources[node] for node in accepted]

    def _watch(self, launched: Launched, sequence: Running, ids: list[int]) -> None:
        """While drafts rest: what those would have been worth that cost nothing."""
        if not self._pace.resting or not launched.decodes or not ids or not _wants(sequence):
            return
        known = len(sequence.tokens) - len(sequence.request.prompt)
        if not self._pace.watches(new=known < _NEW):
            return
        free = [drafter for drafter in self.drafters if not drafter.seconds]
        tree = merged([drafter.draft([(sequence, _DEEPEST)])[0] for drafter in free])
        near = tree.only(_above(tree, len(ids)))
        right = near.walk(ids)
        self._pace.watched(right=bool(right))
        self.control.learn(near, right)
        if len(tree) and self.control.best_size([tree], 1, SIZES) is not None:
            self._pace.drafted()

    @property
    def _free(self) -> bool:
        """Whether nothing that drafts takes time."""
        return not any(drafter.seconds for drafter in self.drafters)

    def drop(self, engine: EngineCore, sequence: Running) -> None:
        """As `Speculator.drop`."""
        verified = self._pending.pop(sequence.request.id, None)
        for _, held in verified.branches if verified else ():
            engine.scheduler.blocks.free(held)

    def end(self, sequence: Running) -> None:
        """As `Speculator.end`."""
        for drafter in self.drafters:
            drafter.end(sequence)

    def reset(self) -> None:
        """As `Speculator.reset`."""
        self._calls.clear()
        for drafter in self.drafters:
            drafter.reset()

    def release(self) -> None:
        """As `Speculator.release`."""
        for drafter in self.drafters:
            drafter.release()

    def announce(self, engine: EngineCore) -> list[Future[Program]]:
        """As `Speculator.announce`."""
        futures = engine.programs.announce(self._shapes(engine))
        return [*futures, *(future for one in self.drafters for future in one.announce())]

    def _shapes(self, engine: EngineCore) -> Iterator[Shape]:
        for stages in stage_sets():
            for size in sizes_of(engine):
                for chosen in sorted({1, engine.chosen_count(size, 2)}):
                    for places in (0, PLACES * size) if self.branched else (0,):
                        yield Shape("verify", size, chosen, places, stages=stages)
                    yield Shape("verify", size, chosen, stages=stages, masked=True)


def sizes_of(engine: EngineCore) -> list[int]:
    """Sizes that may pay: up to four tokens of each sequence, or 32 of a few."""
    return [n for n in SIZES if n <= max(32, 4 * engine.programs.sizes.slots)]


def _size_of(decoding: Sequence[Running], trees: dict[int, Tree], sizes: Sequence[int]) -> int:
    """The size of the batch that some trees fit into."""
    count = len(decoding) + sum(map(len, trees.values()))
    return next(size for size in sizes if size >= count)


def _wants(sequence: Running) -> bool:
    return sequence.request.sampling.speculation and not sequence.driven


def _ended(sequence: Running) -> bool:
    """Whether its last token is one that ends it, so that the device gives it no other."""
    request = sequence.request
    own = request.sampling.stop_token_ids
    return sequence.tokens[-1] in (*request.end_ids, *own) and not request.sampling.ignore_eos


def _planted(sequence: Running, tree: Tree) -> Planted:
    last = len(sequence.tokens) - 1
    return Planted(tree, sequence.tokens[last], last, sequence.slot)


def _above(tree: Tree, levels: int) -> list[int]:
    """The nodes of the first levels."""
    return [node for node, depth in enumerate(tree.depths()) if depth <= levels]
