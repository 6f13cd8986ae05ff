"""What an engine does with its device: the cache and the state, and the programs that move them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import Array

from jinfer.engine.requests import EngineError, Request, Token
from jinfer.engine.runner.compiled_programs import Programs, Shape
from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.sampler_output import MAX_COPIES, Chosen
from jinfer.engine.scheduling.block_manager import GIVEN_BACK, Copy, Held
from jinfer.engine.scheduling.cache_size import trim
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import Cache
from jinfer.xla import trees

# Tokens of flat batches; the largest is `prefill_chunk`.
SIZES: tuple[int, ...] = (16, 32, 64, 96, 256)
_LARGE = 512  # from here on doubled
# Those of steps that only continue sequences, and of the ends of prompts.
FEW: tuple[int, ...] = (1, 4, 8)


@dataclass(kw_only=True)
class Device:
    """The arrays of a model that runs.

    Attributes:
        programs: its compiled programs.
        leaves: what programs are given of it: parameters, quantized ones in their parts, and
            tables of where they are.
    """

    programs: Programs
    leaves: tuple[Array, ...] = ()
    _cache: Cache | None = field(default=None, init=False)
    _state: State | None = field(default=None, init=False)

    @property
    def model(self) -> AbstractModel:
        """What it runs."""
        return self.programs.model

    @property
    def weights(self) -> tuple[Array, ...]:
        """The arrays of its parameters."""
        return self.leaves[: len(self.leaves) - bool(self.programs.told)]

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The model's parameters, in the order of its names.

        Raises:
            EngineError: several devices have parts of them.
        """
        like, tree = trees.flatten(self.model.parameters)
        if [one.shape for one in self.weights] != [one.shape for one in like]:
            raise EngineError("the weights are in parts on several devices; leave out [partition]")
        return tuple(trees.unflatten(tree, self.weights))

    @parameters.setter
    def parameters(self, parameters: tuple[Any, ...]) -> None:
        self.leaves = self.programs.with_tables(parameters)

    @property
    def cache(self) -> Cache:
        """The pools; what takes them gives new ones back to `keep_cache`."""
        if self._cache is None:
            self._cache = self.programs.empty_cache()
        return self._cache

    def release(self) -> None:
        """Gives the memory of weights, cache, state and programs back; nothing runs afterwards."""
        self.leaves, self._cache, self._state = (), None, None
        self.programs.release()
        trim()

    def keep_cache(self, cache: Cache, state: State | None = None) -> None:
        """Takes the pools back, and the state where it was given away too."""
        self._cache, self._state = cache, self._state if state is None else state

    @property
    def state(self) -> State:
        """What the device knows of the slots."""
        if self._state is None:
            self._state = self.programs.empty_state()
        return self._state

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies blocks."""
        groups = self.programs.sizes.blocks
        by_group = {name: [c for c in copies if c.group == name] for name in groups}
        count = max((len(own) for own in by_group.values()), default=0)
        for begin in range(0, count, MAX_COPIES):
            sources, targets = (
                {name: np.zeros(MAX_COPIES, np.int32) for name in groups} for _ in range(2)
            )
            for name, own in by_group.items():
                for i, copy in enumerate(own[begin : begin + MAX_COPIES]):
                    sources[name][i], targets[name][i] = copy.source, copy.target
            most = np.int32(min(MAX_COPIES, count - begin))
            program = self.programs.get(Shape("copy"))
            self._cache = program(self.cache, sources, targets, most)

    def fill(self, held: Held, text: tuple[int, ...]) -> None:
        """Puts an encoder's output into the blocks for it, unless it is there already."""
        if held.filled:
            return
        size = padded_length(len(text))
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(text)] = text
        table = np.zeros((1, self.programs.sizes.table), np.int32)
        table[0, : len(held.encoder)] = held.encoder
        program = self.programs.get(Shape("fill", size))
        lengths = np.array([len(text)], np.int32)
        self._cache = program(self.leaves, self.cache, tokens, lengths, table)
        held.filled = True

    def tables_of(self, rows: int, held: Sequence[tuple[int, Held]]) -> dict[str, np.ndarray]:
        """Tables of some blocks, by (row, blocks)."""
        sizes = self.programs.sizes
        tables = {group: np.zeros((rows, sizes.table), np.int32) for group in sizes.blocks}
        for row, blocks in held:
            for group, own in (*blocks.tables.items(), ("encoder", blocks.encoder)):
                if own:
                    tables[group][row, : len(own)] = own
        for table in tables.values():
            table[table == GIVEN_BACK] = 0
        return tables

    def chosen_count(self, size: int, chosen: int) -> int:
        """The number of choices that a program is made for which computes `size` tokens."""
        return 1 if chosen <= 1 else min(size, self.programs.sizes.slots)

    def row_count(self, sequences: int) -> int:
        """A power of two, at most the number of slots."""
        return min(1 << max(0, sequences - 1).bit_length(), self.programs.sizes.slots)


def token_of(chosen: Chosen, step: int, row: int, request: Request) -> Token:
    """A token of a sequence."""
    id, wanted = int(np.asarray(chosen.tokens)[step, row]), request.sampling.logprobs
    if wanted is None:
        return Token(request.id, id)
    ids, logprobs = (
        np.asarray(part)[step, row, :wanted] for part in (chosen.top_ids, chosen.top_logprobs)
    )
    top = tuple((int(i), float(p)) for i, p in zip(ids, logprobs, strict=True))
    return Token(request.id, id, float(np.asarray(chosen.logprob)[step, row]), top)


def padded_length(tokens: int) -> int:
    """The size that a text is padded to: a power of two, and not a small one."""
    return max(SIZES[0], 1 << max(0, tokens - 1).bit_length())


def flat_sizes(chunk: int, mixed: int, slots: int) -> tuple[int, ...]:
    """Sizes of flat batches, rising; the largest has room for a chunk, a mixed step, all slots."""
    most = max(chunk, mixed, slots + 1)
    doubled = (_LARGE << n for n in range(most.bit_length()))
    return (*(size for size in (*FEW, *SIZES, *doubled) if size < most), most)
