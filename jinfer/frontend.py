"""What `LLM` and `AsyncLLM` share: a model that is open, and requests in its terms."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jinfer.engine.beam import BeamSearch
from jinfer.engine.blocks import BlockManager, BlockPool
from jinfer.engine.compilation import use_persistent_cache
from jinfer.engine.contrastive import Contrastive
from jinfer.engine.device import flat_sizes
from jinfer.engine.driver import Driver
from jinfer.engine.engine import Engine
from jinfer.engine.memory import block_bytes, cache_blocks
from jinfer.engine.programs import Programs, Shape, Sizes
from jinfer.engine.requests import Request, RequestError
from jinfer.engine.scheduler import Scheduler
from jinfer.engine.state import Choice
from jinfer.engine.thread import EngineThread
from jinfer.model import AbstractModel, build
from jinfer.opening.conversation import Message
from jinfer.opening.settings import Opened, open_model, sampling_params
from jinfer.ops.cache import BLOCK, ENCODER
from jinfer.sampling.beam import Beams
from jinfer.sampling.names import STAGES
from jinfer.sampling.order import PLAIN
from jinfer.sampling.params import SamplingParams
from jinfer.tokenizer import Tokenizer
from jinfer.weights.find import find_weights

Prompt = str | Sequence[int]

if TYPE_CHECKING:
    from jinfer.sampling.structured import Matcher


@dataclass(frozen=True)
class Prepared:
    """A request that fits the model, and what it runs with."""

    request: Request
    choice: Choice
    driver: Driver | None
    matcher: Matcher | None


class Frontend:
    """A model, loaded, with a thread that runs it.

    Attributes:
        opened: what was settled before its weights were read.
        thread: runs its engine.
        load_seconds: time the weights took.
    """

    def __init__(
        self,
        source: str | Path,
        overrides: Mapping[str, Any],
        *,
        progress: bool = False,
        first: Callable[[Frontend], list[int]] | None = None,
    ) -> None:
        """Opens and loads a model; arguments as `LLM`."""
        use_persistent_cache()
        self.opened = opened = open_model(source, overrides)
        weights = find_weights(
            build(opened.spec, jnp.dtype(opened.dtype)),
            opened.spec,
            opened.checkpoint,
            opened.activations,
        )
        self.engine = _engine(weights.model, opened)
        self.thread = EngineThread(self.engine, opened.tokenizer)
        self._ids = count()
        if opened.spec.engine.warm_up:
            self.warm_up(progress)
        elif first is not None:
            self.engine.programs.announce(first_shapes(self.engine, len(first(self))))
        begun = time.perf_counter()
        self.engine.parameters = weights.load(progress)
        self.load_seconds = time.perf_counter() - begun
        # What is loaded stays: nobody needs to search it for garbage again.
        gc.freeze()

    def warm_up(self, progress: bool = False) -> None:
        """Makes all programs that requests may need, behind one bar."""
        futures = self.engine.programs.announce(all_shapes(self.engine))
        for future in tqdm(futures, "compiling", unit="program", leave=False, disable=not progress):
            future.result()

    def cache_report(self) -> str:
        """One line: room in the cache, and its size."""
        sizes = self.engine.programs.sizes
        bytes_ = block_bytes(self.engine.model.caches, sizes.kv_cache)
        total = sum(bytes_[group] * count for group, count in sizes.blocks.items())
        tokens = max(sizes.blocks.values(), default=0) * BLOCK
        return f"cache for {tokens:,} tokens, {total / 2**30:.2f} GiB"

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises `RequestError` where there is none."""
        if self.opened.tokenizer is None:
            raise RequestError(
                "the checkpoint has no tokenizer; give token ids, or set tokenizer=... in the spec"
            )
        return self.opened.tokenizer

    def encode(
        self, prompt: Prompt | Sequence[Message], *, special: bool | None = None
    ) -> list[int]:
        """As `LLM.encode`."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, parse_special=special is not False)
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self.encode_chat(cast("Sequence[Message]", prompt), special=bool(special))
        ids = [int(id) for id in cast("Sequence[int]", prompt)]
        vocab = self.opened.spec.dims["vocab"]
        for id in ids:
            if not 0 <= id < vocab:
                raise RequestError(f"token {id} is outside the vocabulary of {vocab}")
        return ids

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """As `LLM.encode_chat`."""
        return self.opened.conversation.encode(self.tokenizer, messages, **variables)

    def params(self, **changes: Any) -> SamplingParams:
        """As `LLM.params`."""
        return sampling_params({**self.opened.defaults, **changes}, self.opened.spec.path)

    def prefix(self, given: Sequence[int], language: str | None) -> list[int]:
        """What the answer of an encoder-decoder starts from."""
        prefix = list(given)
        if language is not None:
            start = prefix or self.opened.decoder_prefix[:1]
            prefix = [*start, self.tokenizer.language_id(language)]
        return prefix

    def prepare(
        self,
        ids: Sequence[int],
        params: SamplingParams | None,
        prefix: Sequence[int] = (),
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[Prepared]:
        """The requests that answer a prompt: `best_of` or `n` of them.

        Args:
            prefix: what the answer of an encoder-decoder starts from.
            priority: lower ones go first.
            timeout: seconds after which they are given up.

        Raises:
            RequestError: it cannot be run.
        """
        sampling = params if params is not None else self.params()
        if self.opened.spec.decoder is None:
            raise RequestError("the model has no decoder; use embed, fill_mask, logits or hidden")
        encoder: tuple[int, ...] = ()
        if self.engine.model.has_cross_attention:
            encoder, ids = tuple(ids), list(prefix or self.opened.decoder_prefix)
            self.check_text(encoder)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        context = self.opened.context
        if len(ids) >= context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, which leaves no room in a context of "
                f"{context}; shorten it, or set engine.context"
            )
        if sampling.stop and self.opened.tokenizer is None:
            raise RequestError("stop texts need a tokenizer; use stop_token_ids")
        most = context if sampling.max_tokens is None else len(ids) + sampling.max_tokens
        request = Request(
            next(self._ids),
            tuple(ids),
            sampling,
            min(most, context),
            self.opened.end_ids,
            encoder,
            priority,
            None if timeout is None else time.monotonic() + timeout,
        )
        self._check_room(request)
        return [self._prepared(each) for each in self._each(request)]

    def _each(self, request: Request) -> list[Request]:
        """A request for each answer; seeds differ, and log-probabilities tell the best ones."""
        sampling = request.sampling
        count = sampling.best_of or sampling.n
        if count == 1:
            return [request]
        if sampling.strategy == "beam" or not sampling.draws:
            raise RequestError(
                "n and best_of need answers that differ: set a temperature above 0; "
                "a beam search gives one"
            )
        requests = []
        for index in range(count):
            seed = None if sampling.seed is None else (sampling.seed + index) % 2**64
            logprobs = sampling.logprobs
            if count > sampling.n:
                logprobs = logprobs or 0
            one = replace(sampling, seed=seed, logprobs=logprobs, n=1, best_of=None)
            id = request.id if index == 0 else next(self._ids)
            requests.append(replace(request, id=id, sampling=one))
        return requests

    def _prepared(self, request: Request) -> Prepared:
        sampling, spec = request.sampling, self.opened.spec
        tokenizer = self.opened.tokenizer
        encode = partial(tokenizer.encode, special=False) if tokenizer else None
        try:
            choice = Choice.of(sampling, request.end_ids, spec.dims["vocab"], encode)
        except ValueError as error:
            raise RequestError(str(error)) from error
        return Prepared(request, choice, _driver(request), self._matcher(request))

    def _matcher(self, request: Request) -> Matcher | None:
        sampling = request.sampling
        given: dict[str, Any] = {
            "json_schema": sampling.json_schema,
            "regex": sampling.regex,
            "choice": sampling.choice,
            "grammar": sampling.grammar,
        }
        if any(value is not None for value in given.values()):
            if sampling.strategy in ("beam", "contrastive"):
                raise RequestError(f"a grammar cannot be kept with strategy={sampling.strategy!r}")
            # Half a tenth of a second to import, which most requests need not pay.
            from jinfer.sampling.structured import compile_constraint

            constraint = compile_constraint(
                self.tokenizer, **given, at_text_start=bool(request.encoder)
            )
            return constraint.start()
        return None

    def _check_room(self, request: Request) -> None:
        sampling = request.sampling
        rows = {"beam": sampling.beams, "contrastive": sampling.top_k}.get(sampling.strategy, 1)
        for pool in self.engine.scheduler.blocks.pools.values():
            needed = -(-request.limit // BLOCK)
            if rows > 1:  # they share the prompt, and at worst nothing else
                prompt = len(request.prompt) // BLOCK
                needed = prompt + rows * (needed - prompt + 1)
            if pool.window is None and needed > pool.count:
                raise RequestError(
                    f"{rows} sequences of {request.limit} tokens do not fit into a cache of "
                    f"{pool.count * BLOCK}; set engine.kv_tokens, or ask for fewer"
                )

    def check_text(self, ids: Sequence[int]) -> None:
        """Raises `RequestError` for a text that is empty or longer than the context."""
        if not 0 < len(ids) <= self.opened.context:
            raise RequestError(
                f"a prompt has {len(ids)} tokens; from 1 to {self.opened.context} can be computed"
            )

    def submit(self, prepared: Prepared, sink: Callable[[Any], None]) -> None:
        """Starts a request; `sink` gets its chunks, then its usage, or an exception."""
        driver, matcher = prepared.driver, prepared.matcher
        self.thread.submit(prepared.request, prepared.choice, sink, driver, matcher)


def _driver(request: Request) -> Driver | None:
    """Who drives the strategies that are not a choice of one token after the other."""
    sampling = request.sampling
    if sampling.strategy == "contrastive":
        return Contrastive(max(1, sampling.top_k), sampling.penalty_alpha)
    if sampling.strategy == "beam":
        ends = frozenset() if sampling.ignore_eos else frozenset(request.end_ids)
        every = ends | set(sampling.stop_token_ids)
        most = request.limit - len(request.prompt)
        early = sampling.early_stopping
        start = partial(Beams, sampling.beams, sampling.length_penalty, every, early, most)
        return BeamSearch(start)
    return None


def _engine(model: AbstractModel, opened: Opened) -> Engine:
    """An engine whose weights are yet to be loaded."""
    spec, context = opened.spec.engine, opened.context
    shapes = model.caches
    used = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.parameters))
    blocks = cache_blocks(
        shapes,
        opened.kv_cache,
        slots=spec.slots,
        context=context,
        chunk=spec.prefill_chunk,
        tokens=spec.kv_tokens,
        used=used,
    )
    windows = {shape.group: shape.window for shape in shapes.values()}
    pools = {g: BlockPool(n, windows[g]) for g, n in blocks.items() if g != ENCODER}
    encoder = BlockPool(blocks[ENCODER]) if ENCODER in blocks else None
    sizes = Sizes(spec.slots, context, opened.spec.dims.get("vocab", 0), blocks, opened.kv_cache)
    mixed = max(spec.mixed_chunk, spec.slots + 1)
    scheduler = Scheduler(
        BlockManager(pools, encoder),
        spec.slots,
        spec.prefill_chunk,
        mixed,
        flat_sizes(spec.prefill_chunk, mixed, spec.slots),
        spec.queue,
    )
    return Engine(programs=Programs(model, sizes), scheduler=scheduler)


def first_shapes(engine: Engine, prompt: int) -> list[Shape]:
    """The programs that a request needs if it comes alone, and asks for nothing unusual."""
    scheduler, shapes = engine.scheduler, [Shape("admit")]
    while prompt > 1:
        count = scheduler.filling(min(scheduler.chunk, prompt))
        shapes.append(Shape("logits", engine.size_of(count), 1))
        prompt -= count
    chosen = Shape("choose", chosen=1, stages=PLAIN)
    return [*dict.fromkeys(shapes), chosen, Shape("decode", 1, stages=PLAIN)]


def all_shapes(engine: Engine) -> list[Shape]:
    """The programs that requests of every kind but beam and contrastive search may need."""
    if not engine.model.caches:
        return []
    slots = engine.programs.sizes.slots
    counts = sorted({engine.row_count(n) for n in range(1, slots + 1)})
    flat = [
        Shape("logits", size, chosen)
        for size in engine.scheduler.sizes
        for chosen in sorted({1, engine.chosen_count(size, 2)})
    ]
    shapes = [Shape("admit"), Shape("copy"), *flat]
    choices = sorted({shape.chosen for shape in flat})
    for stages in (PLAIN, STAGES):
        shapes += [Shape("choose", chosen=count, stages=stages) for count in choices]
        shapes += [Shape("decode", count, stages=stages) for count in counts]
    return shapes
