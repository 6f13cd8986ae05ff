"""The step loop: requests enter slots, their prompts are computed, their tokens come out.

All that a step needs of the step before stays on the device, so call n + 1 is launched before the
host has seen the tokens of call n; a token computed for a request that has meanwhile ended is
dropped. Where steps are short, a call takes several.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from jinfer.engine.programs import Programs, Shape
from jinfer.engine.requests import Request, Token, token_of
from jinfer.engine.steps import MAX_STEPS, State, empty_state
from jinfer.model import AbstractModel, Want
from jinfer.ops import cache as kv_cache
from jinfer.ops.cache import Cache
from jinfer.sampling.sampler import Sampled

SMALLEST_CHUNK = 16
SMALLEST_CACHE = 256
# A call takes as many steps as fit into this, in seconds: what is new, a request or a wish to stop,
# waits no longer than two calls, and the host has little to do with a small model's short steps.
CALL_SECONDS = 0.02


@dataclass(frozen=True)
class _Launched:
    """A call whose tokens the host has not read yet.

    Attributes:
        sampled: with a leading axis of steps.
        rows: (row of the result, request).
        steps: tokens of each request, at most.
        at: when, in seconds.
    """

    sampled: Sampled
    rows: tuple[tuple[int, Request], ...]
    steps: int
    at: float


@dataclass
class _Slots:
    """The cache, the device's state, and who is in which slot.

    Attributes:
        length, encoded: tokens of decoder and encoder that a slot has room for.
        requests: None where a slot is free.
        held: the tokens of a slot's last sequence; the cache has all of them but perhaps the last.
        prompts: tokens of its prompt.
    """

    count: int
    length: int
    encoded: int
    cache: Cache
    state: State
    requests: list[Request | None]
    held: list[list[int]]
    prompts: list[int]


@dataclass
class Engine:
    """Runs one model.

    Attributes:
        programs: its compiled programs.
        leaves: its parameters.
        context: tokens a sequence may have.
        max_slots: sequences decoded together.
        prefill_chunk: tokens of a prompt computed at once.
    """

    programs: Programs
    leaves: tuple[Array, ...]
    context: int
    max_slots: int
    prefill_chunk: int
    _slots: _Slots | None = None
    _waiting: deque[Request] = field(default_factory=deque)
    _launched: deque[_Launched] = field(default_factory=deque)
    _last_read: float = 0.0  # when
    _step_seconds: float = CALL_SECONDS  # of the last decode

    @property
    def model(self) -> AbstractModel:
        return self.programs.model

    def shapes(self, request: Request) -> list[Shape]:
        """The programs that a request will need if it comes alone."""
        logprobs = request.sampling.logprobs is not None
        length, encoded = self.padded_length(request.limit), self.padded_encoder(request.encoder)
        chunks = {size for _, _, size in self.chunks(0, len(request.prompt), length)}
        shapes = [Shape("prefill", 1, length, encoded, c, logprobs) for c in sorted(chunks)]
        if encoded:
            shapes.append(Shape("fill", 1, length, encoded, self.padded_encoder(request.encoder)))
        return [*shapes, Shape("decode", 1, length, encoded, 1, logprobs)]

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._waiting or self._running())

    def _running(self) -> list[Request]:
        requests = self._slots.requests if self._slots else []
        return [request for request in requests if request is not None]

    def submit(self, request: Request) -> None:
        """Queues a request. It stays in its slot until `finish`."""
        self._waiting.append(request)

    def finish(self, request: int) -> None:
        """Frees a request's slot, or takes it out of the queue."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting.id != request)
        if self._slots is not None:
            requests = self._slots.requests
            for slot, running in enumerate(requests):
                if running is not None and running.id == request:
                    requests[slot] = None

    def step(self) -> list[Token]:
        """Admits what fits, launches one decode, and returns the tokens of the step before.

        What interrupts it (Ctrl-C, an error of the device) may leave a cache that was donated and
        not given back: all requests are then lost, and later ones start with a new cache.
        """
        try:
            return self._step()
        except BaseException:
            self._slots = None
            self._launched.clear()
            self._waiting.clear()
            raise

    def _step(self) -> list[Token]:
        slots = self._admit()
        left = {slot: self._left(slots, slot) for slot in range(slots.count)}
        rows = tuple(
            (slot, request)
            for slot, request in enumerate(slots.requests)
            if request is not None and left[slot] > 0
        )
        begun = bool(rows) and self._decode(slots, rows, max(left.values()))
        tokens: list[Token] = []
        while len(self._launched) > int(begun):
            tokens += self._read(slots, self._launched.popleft())
        return tokens

    def _left(self, slots: _Slots, slot: int) -> int:
        """Tokens that a slot's sequence may still have beyond those launched; 0 where nobody is."""
        if (request := slots.requests[slot]) is None:
            return 0
        ahead = sum(
            call.steps for call in self._launched if any(r is request for _, r in call.rows)
        )
        return request.limit - len(slots.held[slot]) - ahead

    def _admit(self) -> _Slots:
        """Moves waiting requests into free slots, and computes their prompts."""
        slots = self._slots
        if slots is None or (self._waiting and not self._running()):
            slots = self._slots = self._make_room()
        while self._waiting and _fits(self._waiting[0], slots):
            free = [slot for slot, running in enumerate(slots.requests) if running is None]
            if not free:
                break
            request = self._waiting.popleft()
            slot = max(free, key=lambda s: _common(slots.held[s], request.prompt))
            self._prefill(slots, slot, request)
        return slots

    def _make_room(self) -> _Slots:
        """Slots for what is waiting: those there are, if they are many and long enough."""
        count = self._slot_count(len(self._waiting))
        length = self.padded_length(max((request.limit for request in self._waiting), default=1))
        encoded = self.padded_encoder(
            max((request.encoder for request in self._waiting), key=len, default=())
        )
        if (old := self._slots) is not None:
            if old.count >= count and old.length >= length and old.encoded >= encoded:
                return old
            count, length = max(count, old.count), max(length, old.length)
            encoded = max(encoded, old.encoded)
        self._slots = old = None  # freed before the new one is made, not after
        self._launched.clear()
        cache = kv_cache.empty(self.model.caches, count, length, encoded, self.programs.kv_cache)
        requests: list[Request | None] = [None] * count
        held: list[list[int]] = [[] for _ in range(count)]
        state = empty_state(count, length, self.model.vocab)
        return _Slots(count, length, encoded, cache, state, requests, held, [0] * count)

    def _prefill(self, slots: _Slots, slot: int, request: Request) -> None:
        logprobs = request.sampling.logprobs is not None
        if request.encoder:
            self._fill(slots, slot, request.encoder)
        prompt, reused = request.prompt, self._reused(slots, slot, request)
        for start, count, size in self.chunks(reused, len(prompt), slots.length):
            tokens = np.zeros(size, np.int32)
            tokens[:count] = prompt[start : start + count]
            program = self.programs.get(
                Shape("prefill", slots.count, slots.length, slots.encoded, size, logprobs)
            )
            at = (np.int32(start), np.int32(count), np.int32(len(prompt)), np.int32(slot))
            slots.cache, slots.state, sampled = program(
                self.leaves, slots.cache, slots.state, tokens, *at, request.row
            )
            if start + count == len(prompt):
                self._launched.append(_Launched(sampled, ((0, request),), 1, time.perf_counter()))
        slots.requests[slot], slots.held[slot] = request, list(prompt)
        slots.prompts[slot] = len(prompt)

    def _reused(self, slots: _Slots, slot: int, request: Request) -> int:
        """Tokens at the beginning of a prompt that the slot's cache holds as they have to be."""
        if request.encoder:
            return 0  # what the decoder kept belongs to another text
        # One token at least must be computed anew, for its logits, and the last one held may
        # never have reached the cache. Chunks begin at multiples of the smallest.
        held, prompt = slots.held[slot], request.prompt
        reused = max(0, min(_common(held, prompt), len(held) - 1, len(prompt) - 1))
        if (steady := self.model.steady) is not None:
            longest = max(len(prompt), slots.prompts[slot])
            reused = min(reused, steady) if longest <= steady else 0
        return reused - reused % SMALLEST_CHUNK

    def _fill(self, slots: _Slots, slot: int, encoder: tuple[int, ...]) -> None:
        tokens, lengths = padded([encoder], self.padded_encoder(encoder))
        shape = Shape("fill", slots.count, slots.length, slots.encoded, tokens.shape[1])
        program = self.programs.get(shape)
        slots.cache = program(self.leaves, slots.cache, tokens, lengths, np.int32(slot))
        count = jnp.asarray(lengths)
        encoded = lax.dynamic_update_slice_in_dim(slots.state.encoded, count, slot, 0)
        slots.state = slots.state._replace(encoded=encoded)

    def _decode(self, slots: _Slots, rows: tuple[tuple[int, Request], ...], longest: int) -> bool:
        """Launches a call; not while its program is compiled and there are tokens to give out."""
        logprobs = any(request.sampling.logprobs is not None for _, request in rows)
        shape = Shape("decode", slots.count, slots.length, slots.encoded, 1, logprobs)
        if self._launched and not self.programs.ready(shape):
            return False
        program = self.programs.get(shape)
        limits = np.zeros(slots.count, np.int32)
        for slot, request in rows:
            limits[slot] = request.limit
        steps = min(longest, MAX_STEPS, max(1, int(CALL_SECONDS / self._step_seconds)))
        begun = time.perf_counter()
        slots.cache, slots.state, sampled = program(
            self.leaves, slots.cache, slots.state, limits, np.int32(steps)
        )
        self._launched.append(_Launched(sampled, rows, steps, begun))
        return True

    def _read(self, slots: _Slots, launched: _Launched) -> Iterator[Token]:
        sampled = jax.tree.map(np.asarray, launched.sampled)
        now = time.perf_counter()
        steps = max(1, int(np.count_nonzero((sampled.tokens >= 0).any(axis=1))))
        self._step_seconds = max(1e-6, now - max(launched.at, self._last_read)) / steps
        self._last_read = now
        for i in range(launched.steps):
            step = jax.tree.map(lambda part, i=i: part[i], sampled)
            for row, request in launched.rows:
                slot = next((s for s, r in enumerate(slots.requests) if r is request), None)
                # It may have ended meanwhile: the host knows it, or already the device.
                if slot is not None and step.tokens[row] >= 0:
                    slots.held[slot].append(int(step.tokens[row]))
                    yield token_of(step, row, request)

    def chunks(self, start: int, end: int, length: int) -> Iterator[tuple[int, int, int]]:
        """(first token, tokens, padded size) of each piece of a prompt.

        Sizes are powers of two, few programs for all lengths; a piece never reaches beyond the
        cache, whose length is a multiple of the smallest.
        """
        while start < end:
            size = SMALLEST_CHUNK
            while size < min(end - start, self.prefill_chunk):
                size *= 2
            while size > SMALLEST_CHUNK and start + size > length:
                size //= 2
            count = min(size, end - start)
            yield start, count, size
            start += count

    def _slot_count(self, wanted: int) -> int:
        """A power of two, at most `max_slots`."""
        return min(1 << max(0, wanted - 1).bit_length(), self.max_slots)

    def padded_length(self, tokens: int) -> int:
        """A power of two, at most the context, a multiple of the smallest chunk."""
        length = max(SMALLEST_CACHE, 1 << (tokens - 1).bit_length())
        whole = -(-self.context // SMALLEST_CHUNK) * SMALLEST_CHUNK
        return min(length, whole)

    def padded_encoder(self, text: Sequence[int]) -> int:
        """A padded length for an encoder's text; 0 where a decoder reads none."""
        if not self.model.has_cross_attention:
            return 0
        return max(SMALLEST_CHUNK, 1 << max(0, len(text) - 1).bit_length())

    def forward(
        self, prompt: Sequence[int], want: Literal["logits", "hidden"], encoder: Sequence[int] = ()
    ) -> Float[np.ndarray, "tokens width"]:
        """Logits or last hidden states of every token of a decoder's prompt."""
        return self._pass("forward", want, prompt, len(prompt), encoder)

    def score(
        self, prompt: Sequence[int], encoder: Sequence[int] = ()
    ) -> Float[np.ndarray, " tokens-1"]:
        """The log-probability of each token of a decoder's prompt but the first."""
        return self._pass("score", "logits", prompt, len(prompt) - 1, encoder)

    def _pass(
        self,
        kind: Literal["forward", "score"],
        want: Want,
        prompt: Sequence[int],
        computed: int,
        encoder: Sequence[int],
    ) -> np.ndarray:
        """The results of a program for the first tokens of a prompt, chunk by chunk."""
        length, encoded = self.padded_length(len(prompt)), self.padded_encoder(encoder)
        cache = kv_cache.empty(self.model.caches, 1, length, encoded, self.programs.kv_cache)
        total, lengths = (np.array([len(ids)], np.int32) for ids in (prompt, encoder))
        if encoded:
            texts, lengths = padded([encoder], encoded)
            fill = self.programs.get(Shape("fill", 1, length, encoded, encoded))
            cache = fill(self.leaves, cache, texts, lengths, np.int32(0))
        parts = []
        for start, count, size in self.chunks(0, computed, length):
            given = size + (kind == "score")  # the token after the last is looked at too
            tokens, _ = padded([prompt[start : start + count + given - size]], given)
            program = self.programs.get(Shape(kind, 1, length, encoded, size, want=want))
            cache, out = program(self.leaves, cache, tokens, np.int32(start), total, lengths)
            parts.append(np.asarray(out)[:count])
        return np.concatenate(parts).astype(np.float32)

    def encode(
        self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]], want: Want
    ) -> list[Float[np.ndarray, ...]]:
        """A result of the encoder for each text: [tokens, width], or [width] for "pooled".

        Args:
            types: token types, one list per text.
        """
        longest = max(map(len, texts))
        size = max(SMALLEST_CHUNK, 1 << (longest - 1).bit_length())
        # Not beyond the context: a learned table of positions ends there.
        size = max(longest, min(size, self.context))
        rows = self._slot_count(len(texts))
        results = []
        for begin in range(0, len(texts), rows):
            batch = list(texts[begin : begin + rows])
            empty: list[Sequence[int]] = [[0]] * (rows - len(batch))
            tokens, lengths = padded([*batch, *empty], size)
            token_types, _ = padded([*types[begin : begin + rows], *empty], size)
            program = self.programs.get(Shape("encode", rows, tokens=size, want=want))
            out = np.asarray(program(self.leaves, {}, tokens, token_types, lengths))
            results += [
                out[i] if want == "pooled" else out[i, : len(text)] for i, text in enumerate(batch)
            ]
        return results


def _fits(request: Request, slots: _Slots) -> bool:
    return request.limit <= slots.length and len(request.encoder) <= slots.encoded


def padded(rows: Sequence[Sequence[int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids padded with zeros to `size`, and their lengths."""
    padded = np.zeros((len(rows), size), np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded, np.array([len(row) for row in rows], np.int32)


def _common(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(held, prompt, strict=False)):
        if a != b:
            return index
    return min(len(held), len(prompt))
