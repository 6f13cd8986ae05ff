"""Model runner: weights, KV cache and device state of a model, and the programs that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import Array

from jinfer.engine.activation_use import ActivationUse
from jinfer.engine.requests import EngineError, Request, Token
from jinfer.engine.runner.captured_calls import CapturedCalls
from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.edit_tables import StepTaps, edit_tables, taps_of
from jinfer.engine.runner.flat_batch import padded
from jinfer.engine.runner.huge_pages import CacheHugePages
from jinfer.engine.runner.image_rows import EncodedImages
from jinfer.engine.runner.sampler_output import MAX_COPIES, SamplerOutput
from jinfer.engine.runner.sampler_state import SamplerStates
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.scheduling.block_manager import RELEASED, BlockCopy, BlockTables
from jinfer.engine.scheduling.cache_size import trim
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.engine.scheduling.step_plan import StepPlan
from jinfer.nn.abstract_model import AbstractModel
from jinfer.nn.row_edits import IMAGES, ImageRows
from jinfer.ops.attention.kv_cache import ADAPTER, BLOCK, LONG_TEXT, OFFSET, STATE, Cache

# Sizes of flat batches, in tokens; the largest is `prefill_chunk`.
SIZES: tuple[int, ...] = (16, 32, 64, 96, 256)
_LARGE = 512  # larger sizes are doubled
# Sizes for steps that only decode, and for the ends of prompts.
SMALL_SIZES: tuple[int, ...] = (1, 4, 8)


def _nothing() -> None:
    """Nothing has to be done before a call."""


@dataclass(kw_only=True)
class ModelRunner:
    """Owns the device arrays of a model that runs.

    Attributes:
        programs: its compiled steps.
        leaves: its weights as programs take them: the arrays of the parameters, then pointer
            tables; see `CompiledPrograms.with_weight_pointers`.
        before_call: called before a program is given the KV cache, which it may overwrite.
        samplers: sampling parameters and sampler state of each request.
        captured: activations of calls that the host has not read.
        images: the features of images; None: the model sees none.
    """

    programs: CompiledPrograms
    leaves: tuple[Array, ...] = ()
    before_call: Callable[[], None] = field(default=_nothing, repr=False)
    samplers: SamplerStates = field(default_factory=SamplerStates)
    captured: CapturedCalls = field(default_factory=CapturedCalls)
    images: EncodedImages | None = None
    _cache: Cache | None = field(default=None, init=False)
    _huge_pages: CacheHugePages | None = field(default=None, init=False, repr=False)
    _state: State | None = field(default=None, init=False)
    _edits: tuple[Any, dict[str, Any]] = field(default=(None, {}), init=False)

    @property
    def model(self) -> AbstractModel:
        """The model that it runs."""
        return self.programs.model

    @property
    def weights(self) -> tuple[Array, ...]:
        """The arrays of its parameters, without pointer tables."""
        return self.leaves[: len(self.leaves) - bool(self.programs.pointer_layers)]

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The model's parameters, in the order of its names.

        Raises:
            EngineError: they are split over several devices.
        """
        like, tree = jax.tree.flatten(self.model.parameters)
        divided = any(len(array.sharding.device_set) > 1 for array in self.weights)
        if divided or [array.shape for array in self.weights] != [one.shape for one in like]:
            raise EngineError("the weights are in parts on several devices; leave out [partition]")
        return tuple(jax.tree.unflatten(tree, self.weights))

    @parameters.setter
    def parameters(self, parameters: tuple[Any, ...]) -> None:
        self.leaves = self.programs.with_weight_pointers(parameters)

    @property
    def cache(self) -> Cache:
        """The KV cache, allocated at first use. A call donates it; `set_cache` sets the new one."""
        if self._cache is None:
            self._cache = self.programs.allocate_kv_cache()
            self._huge_pages = CacheHugePages(self.model.caches)
        self.before_call()
        return self._cache

    def release(self) -> None:
        """Frees weights, KV cache, device state and programs; nothing runs afterwards."""
        self.leaves, self._cache, self._state, self._edits = (), None, None, (None, {})
        self.captured.clear()
        self.samplers.clear()
        self.images = None
        self.before_call = _nothing  # breaks a reference cycle
        self.programs.release()
        trim()

    def reset(self) -> None:
        """Discard KV cache and device state after a failed step, which may have lost them."""
        self._cache = self._state = None
        self.captured.clear()

    def set_cache(self, cache: Cache, state: State | None = None) -> None:
        """Sets the KV cache after a call, and the device state if that was donated too."""
        self._cache, self._state = cache, self._state if state is None else state

    @property
    def state(self) -> State:
        """The device state of all slots."""
        if self._state is None:
            self._state = self.programs.empty_state()
        return self._state

    def set_slot(self, sequence: RunningSequence) -> None:
        """Upload a sequence's tokens, limits and sampler state to its slot of the device state."""
        self.upload_row(self.samplers.row(sequence, self.programs.sizes.context), sequence.slot)

    def upload_row(self, row: State, slot: int) -> None:
        """Replace one row of the device state."""
        self._state = self.programs.get(StepKey("set_slot"))(self.state, row, np.int32(slot))

    def decode(
        self,
        key: StepKey,
        sequences: Sequence[RunningSequence],
        tables: dict[str, Any],
        steps: int,
        interrupt: np.int32,
    ) -> SamplerOutput:
        """Compute the next tokens of some sequences; see `steps.decode`.

        Args:
            tables: as `slot_tables` makes them.
            steps: tokens of each sequence, at most.
            interrupt: number of the flag that ends the call early.
        """
        rows = padded([s.slot for s in sequences], key.tokens, -1)
        self._cache, self._state, output, *more = self.programs.get(key)(
            self.leaves, self.cache, self.state, rows, tables, np.int32(steps), interrupt
        )
        for captured in more:
            self.captured.note(captured, {s: [row] for row, s in enumerate(sequences)})
        return output

    def compute_logits(
        self,
        size: int,
        batch: Sequence[tuple[int, int]],
        last: Sequence[int],
        running: Sequence[RunningSequence],
        images: ImageRows | None = None,
    ) -> tuple[Array, Array]:
        """Logits after some tokens, and the state rows that they belong to; see `steps.logits`.

        Args:
            size: tokens of the padded batch.
            batch: slot and position of each token; position -1: the last token, which only the
                device may know.
            last: indices of the tokens after which one is sampled.
            running: the sequences that have slots.
            images: as `image_rows` makes them.
        """
        chosen = self.sampled_rows(size, len(last))
        slots = {slot for slot, _ in batch}
        using = [s for s in running if s.slot in slots and s.request.activations is not None]
        taps = self.taps_of(using)
        at = np.full((2, size), -1, np.int32)
        at[:, : len(batch)] = np.array(batch, np.int32).T
        key, tables = (
            StepKey("logits", size, chosen, taps=taps),
            self.slot_tables(running, taps, using),
        )
        if images is not None and self.images is not None:
            key, tables = replace(key, images=self.images.shapes), tables | {IMAGES: images}
        program = self.programs.get(key)
        arguments = (at[0], at[1], tables, padded(last, chosen, -1))
        self._cache, out, rows, *more = program(self.leaves, self.cache, self.state, *arguments)
        for captured in more:
            own = {s: [i for i, (slot, _) in enumerate(batch) if slot == s.slot] for s in using}
            self.captured.note(captured, own)
        return out, rows

    def image_rows(self, size: int, plan: StepPlan) -> ImageRows | None:
        """What images change in a step of so many rows; None: nothing."""
        if self.images is None or not plan.has_images:
            return None
        return self.images.rows_of(size, plan)

    def sample(
        self,
        logits: Array,
        rows: Array | np.ndarray,
        sequences: Sequence[RunningSequence],
        mask: np.ndarray | None = None,
    ) -> SamplerOutput:
        """Sample the next tokens of some sequences; see `steps.sample_logits`."""
        count = logits.shape[0]
        stages, extras = self.samplers.stages(sequences), self.samplers.extras(sequences)
        key = StepKey("sample", chosen=count, stages=stages, extras=extras)
        program = self.programs.get(key)
        guided = np.bool_(mask is not None)
        mask = np.zeros((count, self.programs.words), np.uint32) if mask is None else mask
        self._state, output = program(self.state, logits, rows, mask, guided)
        return output

    def slot_tables(
        self,
        running: Sequence[RunningSequence],
        taps: StepTaps | None = None,
        using: Sequence[RunningSequence] = (),
    ) -> dict[str, Any]:
        """The block table of each slot's sequence, by group, and the tables of edits.

        Args:
            running: the sequences that have slots.
            taps: activations that the step captures and edits.
            using: the sequences for which it does.
        """
        slots = self.programs.sizes.slots
        tables = [(s.slot, s.block_tables) for s in running if s.block_tables]
        edits = self.edits_of_rows(taps, using, slots, range(slots))
        return self.block_tables(slots, tables) | edits

    def taps_of(self, sequences: Iterable[RunningSequence]) -> StepTaps | None:
        """The activations that a step of some sequences captures and edits; None: none."""
        return taps_of(sequence.request.activations for sequence in sequences)

    def edits_of_rows(
        self,
        taps: StepTaps | None,
        using: Iterable[RunningSequence],
        rows: int,
        owners: Iterable[int],
    ) -> dict[str, Any]:
        """The tables of a step's edits, which go among the block tables; empty without taps.

        Args:
            taps, using: as of `slot_tables`.
            rows: rows of the block tables.
            owners: the slot of each row.
        """
        if taps is None:
            return {}
        uses = {s.slot: s.request.activations for s in using}
        of_rows = ((row, uses.get(slot)) for row, slot in enumerate(owners))
        return self.edit_tables(taps, rows, [(row, use) for row, use in of_rows if use])

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks of the KV cache, `MAX_COPIES` of each group in a call."""
        groups = self.programs.sizes.blocks
        by_group = {name: [c for c in copies if c.group == name] for name in groups}
        count = max(map(len, by_group.values()), default=0)
        for begin in range(0, count, MAX_COPIES):
            sources, targets = (
                {name: np.zeros(MAX_COPIES, np.int32) for name in groups} for _ in range(2)
            )
            for name, listed in by_group.items():
                for i, copy in enumerate(listed[begin : begin + MAX_COPIES]):
                    sources[name][i], targets[name][i] = copy.source, copy.target
            copied = np.int32(min(MAX_COPIES, count - begin))
            program = self.programs.get(StepKey("copy_blocks"))
            self._cache = program(self.cache, sources, targets, copied)

    def fill_encoder_blocks(self, tables: BlockTables, text: tuple[int, ...]) -> None:
        """Computes an encoder's output into its blocks, unless they have it already."""
        if tables.encoder_filled:
            return
        size = padded_length(len(text))
        tokens, table = padded(text, size), padded(tables.encoder, self.programs.sizes.table)
        program = self.programs.get(StepKey("fill_cross_attention", size))
        lengths = np.array([len(text)], np.int32)
        self._cache = program(self.leaves, self.cache, tokens[None], lengths, table[None])
        tables.encoder_filled = True

    def block_tables(
        self, rows: int, sequences: Sequence[tuple[int, BlockTables]]
    ) -> dict[str, Any]:
        """Block tables as programs take them: an array [rows, blocks] of each group.

        Where there may be adapters, also each row's (`AdapterUse.entry`).

        Args:
            sequences: (row, block tables); the other rows are zero.
        """
        sizes = self.programs.sizes
        tables = {n: np.zeros(shape, np.int32) for n, shape in sizes.table_shapes(rows).items()}
        for row, of_row in sequences:
            for group, blocks in (*of_row.by_group.items(), ("encoder", of_row.encoder)):
                if blocks:
                    tables[group][row, : len(blocks)] = blocks
            if of_row.state is not None:
                tables[STATE][row, 0] = of_row.state
                for border, block in of_row.copies.items():  # see `sequence_runs`
                    tables[STATE][row, border] = block + 1
            if of_row.adapter is not None:
                tables[ADAPTER][row] = of_row.adapter.entry
            if sizes.offsets:
                tables[OFFSET][row] = of_row.offset
        for group in sizes.blocks:
            tables[group][tables[group] == RELEASED] = 0
            self._use(group, tables[group])
            most = LONG_TEXT // BLOCK
            long = [row for row, of in sequences if len(of.by_group.get(group, ())) > most]
            if long:
                self._use(group, tables[group][long], int8_keys=True)
        return tables

    def _use(self, group: str, table: np.ndarray, *, int8_keys: bool = False) -> None:
        """Blocks of a table, or their int8 keys, are about to be used."""
        if self._huge_pages is not None:
            blocks = int(table.max(initial=-1)) + 1
            self._huge_pages.use(self._cache, group, blocks, int8_keys=int8_keys)

    def edit_tables(
        self, taps: StepTaps, rows: int, uses: Sequence[tuple[int, ActivationUse]]
    ) -> dict[str, Any]:
        """The tables of edits, to stand among block tables: on the device as long as they stay.

        Args:
            uses: (row, activations of its sequence).
        """
        key = taps, rows, tuple(uses)
        if self._edits[0] != key:
            self._edits = key, jax.device_put(edit_tables(taps, rows, uses))
        return self._edits[1]

    def sampled_rows(self, size: int, chosen: int) -> int:
        """Number of sampled tokens that a program over `size` tokens is compiled for."""
        return 1 if chosen <= 1 else min(size, self.programs.sizes.slots)

    def padded_rows(self, sequences: int) -> int:
        """Number of sequences padded to a power of two, at most the number of slots."""
        return min(1 << max(0, sequences - 1).bit_length(), self.programs.sizes.slots)


def make_token(output: SamplerOutput, step: int, row: int, request: Request) -> Token:
    """A sequence's token from the output of a call."""
    id, wanted = int(np.asarray(output.tokens)[step, row]), request.sampling.logprobs
    if wanted is None:
        return Token(request.id, id)
    wanted = len(request.sampling.logprob_token_ids) or wanted
    ids, logprobs = (
        np.asarray(part)[step, row, :wanted] for part in (output.top_ids, output.top_logprobs)
    )
    top = tuple((int(i), float(p)) for i, p in zip(ids, logprobs, strict=True))
    return Token(request.id, id, float(np.asarray(output.logprob)[step, row]), top)


def padded_length(tokens: int) -> int:
    """Padded length of a text: a power of two, at least the smallest of `SIZES`."""
    return max(SIZES[0], 1 << max(0, tokens - 1).bit_length())


def flat_sizes(chunk: int, mixed: int, slots: int) -> tuple[int, ...]:
    """Sizes of flat batches, ascending; the largest has room for a chunk and for all slots."""
    most = max(chunk, mixed, slots + 1)
    doubled = (_LARGE << n for n in range(most.bit_length()))
    return (*(size for size in (*SMALL_SIZES, *SIZES, *doubled) if size < most), most)
