"""Session: a loaded model and the thread that runs it, which `LLM` and `AsyncLLM` share."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jinfer.api.activation_checks import SteeringVectors, compile_for, request_activations
from jinfer.api.build_engine import (
    all_shapes,
    announce_first,
    announce_stored,
    build_engine,
    build_image_encoder,
    encoded_images,
    forget_tokenizer,
    load,
    load_image_encoder,
    open_drafts,
    plan_images,
)
from jinfer.api.image_inputs import EncodedPrompt, encode_conversation, take_images
from jinfer.api.loaded_adapters import Adapters, with_merged_adapters
from jinfer.api.model_weights import ModelWeights
from jinfer.api.prepare_request import (
    check_thinking,
    parallel_sampling,
    prompt_images,
    sampling_row,
    start_grammar,
    thinking_limit,
)
from jinfer.api.prompt_inputs import (
    Ids,
    Params,
    Prompt,
    is_conversation,
    no_decoder_error,
    no_head_error,
    parse_messages,
    parse_params,
    parse_prompt,
)
from jinfer.engine.engine_thread import EngineThread
from jinfer.engine.requests import AdapterUse, ImageSpan, Request, RequestError
from jinfer.engine.runner.device_state import SamplingRow
from jinfer.engine.runner.program_cache import use_persistent_cache
from jinfer.engine.scheduling.cache_size import block_bytes, free_memory
from jinfer.engine.search.search_driver import SearchDriver, make_driver
from jinfer.engine.thread_pools import explain_shutdown, note_model_opened
from jinfer.loader.open_model import Opened, open_model
from jinfer.loader.weights.model_size import count_text, sizes_of
from jinfer.loader.weights.plan_weights import WeightPlan, plan_weights
from jinfer.loader.weights.quantized_cache import with_formats
from jinfer.modelspec.spec_errors import show_value
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.ops.attention.kv_cache import BLOCK
from jinfer.ops.backend import start
from jinfer.ops.cpu_library import limit_threads
from jinfer.ops.disable_kernels import disabled_kernels
from jinfer.parallel.distributed.current_group import refuse_on_worker
from jinfer.progress import track
from jinfer.sampling.logits_processors import LogitsProcessors
from jinfer.sampling.param_field import parameter_hint
from jinfer.sampling.sampling_keywords import is_parameter
from jinfer.sampling.sampling_params import PARAMETERS, SamplingParams
from jinfer.template.chat_prompt import CONTINUE, Message
from jinfer.tokenizer import Tokenizer

MAX_THREADS = 4096

if TYPE_CHECKING:
    from jinfer.sampling.structured import Matcher


@dataclass(frozen=True)
class PreparedRequest:
    """A request, checked and ready to be submitted."""

    request: Request
    choice: SamplingRow
    driver: SearchDriver | None
    matcher: Matcher | None


class Session:
    """A loaded model, with a thread that runs its engine.

    Attributes:
        opened: the opened model, after loading without its checkpoint's tensors and metadata.
        family, stored_as: of the model, in a word each (`jinfer.loader.open_model`).
        image_encoder: its encoder of images; None if it has none.
        processors: the logits processors that requests have named.
        thread: runs its engine.
        load_seconds: time that loading the weights took.
        steering: its named steering vectors.
        closed: whether it was closed.
        source, overrides: what was opened.
        sleep_level, weights_at_host: while it sleeps, see `jinfer.api.sleep_mode`; 0: it is awake.
    """

    closed = False
    sleep_level = 0
    weights_at_host: tuple[np.ndarray, ...] | None = None

    @explain_shutdown()
    def __init__(
        self,
        source: str | Path,
        overrides: Mapping[str, Any],
        *,
        progress: bool = False,
        threads: int | None = None,
        first: Callable[[Session], Sized] | None = None,
    ) -> None:
        """Opens and loads a model; arguments as `LLM`."""
        if threads is not None and not (type(threads) is int and 1 <= threads <= MAX_THREADS):
            raise RequestError(f"threads is {threads!r}; give how many cores may compute, from 1")
        note_model_opened()
        # Environment variables with unknown values are refused before anything is read.
        disabled_kernels()
        refuse_on_worker()
        program_cache = use_persistent_cache()
        # Before anything starts XLA; the bound on threads ends with this object.
        lift_limit = (lambda: None) if threads is None else limit_threads(threads)
        self._lift = weakref.finalize(self, lift_limit)
        start()
        self.source, self.overrides, self.changing = source, overrides, threading.Lock()
        opened = open_model(source, overrides)
        drafters = open_drafts(opened, source, overrides)
        self.opened = opened = opened if drafters is None else drafters.opened
        self._forget = weakref.finalize(self, forget_tokenizer, opened.tokenizer)
        self._model = build_abstract_model(opened.spec, np.dtype(opened.dtype), program_cache)
        self.adapters = Adapters.of(opened)
        plan = self.plan(opened)
        images = plan_images(opened, program_cache)
        model = self.adapters.room_in(plan.model)
        self.engine = build_engine(opened, model, program_cache, images)
        self.image_encoder = (
            None if images is None else build_image_encoder(images, self.engine, program_cache)
        )
        if self.image_encoder is not None:
            self.engine.runner.images = encoded_images(opened, self.image_encoder)
        drafts = None if drafters is None else drafters.drafts(self.engine)
        self.engine.speculator = None if drafts is None else drafts.speculation
        self.thread = EngineThread(self.engine, opened.tokenizer)
        self.family, self.stored_as = opened.family, opened.stored_as
        self._ids, self.steering = count(), SteeringVectors()
        sizes = self.engine.runner.programs.sizes
        self.processors = LogitsProcessors(sizes.vocab, sizes.context)
        if opened.spec.engine.warm_up:
            self.warm_up(progress)
        elif first is not None:
            announce_first(self.engine, len(first(self)), progress=progress)
        else:
            announce_stored(self.engine)
        begun = time.perf_counter()
        load(self.engine, plan, images, progress=progress)
        if self.image_encoder is not None and images is not None:
            load_image_encoder(self.image_encoder, images, progress=progress)
        for load_draft in drafts.load if drafts else ():
            load_draft(progress)
        self.adapters.load_listed(self.engine, self.thread)
        self.weights = ModelWeights.of(self.engine, self.thread, plan)
        self.load_seconds = time.perf_counter() - begun
        # A file stays mapped as long as its tensors are referenced, and a GGUF file's metadata are
        # a hundred thousand strings, of which the tokenizer has copies.
        file = replace(opened.checkpoint, tensors={}, metadata={})
        self.opened = replace(opened, checkpoint=file, images=None)
        self.thread.start()
        # What is loaded stays, and need not be searched for garbage again. Garbage is collected
        # first: it would stay too, and keep the callers' frames and this object alive.
        gc.collect(0)
        gc.freeze()

    def plan(self, opened: Opened) -> WeightPlan:
        """The plan of the model's weights, from a checkpoint that is open."""
        return with_formats(
            plan_weights(
                self._model,
                opened.spec,
                with_merged_adapters(opened, self._model).checkpoint,
                opened.activations,
                # Equalization would move channels from keys to queries under the adapters.
                kv_cache=opened.kv_cache if self.adapters.slots is None else None,
                free_memory=free_memory,
            )
        )

    def close(self) -> None:
        """As `LLM.close`."""
        self.closed = True
        self.thread.close()
        if self.image_encoder is not None:
            self.image_encoder.runner.release()
        self._lift()
        self._forget()

    def warm_up(self, progress: bool = False) -> None:
        """Compiles all programs that requests may need, with one progress bar."""
        futures = self.engine.runner.programs.announce(all_shapes(self.engine))
        if self.engine.speculator is not None:
            futures += self.engine.speculator.announce()
        for future in track(futures, "compiling", unit="program", shown=progress):
            future.result()

    def described(self) -> str:
        """A few words: name, family, size, format of weights, context."""
        spec, model = self.opened.spec, self.engine.runner.model
        words = [self.opened.title, *([self.family] if self.family else [])]
        words.append(f"{count_text(sizes_of(spec, model).parameters)} parameters")
        words += [self.stored_as, f"context {self.opened.context}"]
        return ", ".join([*words, "closed"] if self.closed else words)

    def cache_report(self) -> str:
        """One line: tokens and bytes of the KV cache."""
        sizes = self.engine.runner.programs.sizes
        bytes_ = block_bytes(self.engine.runner.model.caches, sizes.kv_cache)
        total = sum(bytes_[group] * count for group, count in sizes.blocks.items())
        tokens = max(sizes.blocks.values(), default=0) * BLOCK
        return f"cache for {tokens:,} tokens, {total / 2**30:.2f} GiB"

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have: the context, or less if the KV cache is smaller."""
        pools = self.engine.scheduler.blocks.pools.values()
        counts = [pool.count * BLOCK for pool in pools if pool.window is None]
        return min([self.opened.context, *counts])

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises `RequestError` where there is none."""
        if self.opened.tokenizer is None:
            raise RequestError(
                "the checkpoint has no tokenizer; give token ids, or set tokenizer=... in the spec"
            )
        return self.opened.tokenizer

    def encode(self, given: Prompt, *, special: bool | None = None) -> list[int]:
        """As `LLM.encode`."""
        return _without_images(self.encode_prompt(given, special=special))

    def encode_prompt(self, given: Prompt, *, special: bool | None = None) -> EncodedPrompt:
        """Tokenize a prompt with its images; arguments as `LLM.encode`."""
        prompt = parse_prompt(given)
        if isinstance(prompt, EncodedPrompt):
            return prompt
        if isinstance(prompt, str):
            return EncodedPrompt(self.tokenizer.encode(prompt, parse_special=special is not False))
        if is_conversation(prompt):
            return self.encode_conversation(prompt, special=bool(special))
        ids = cast("list[int]", prompt)
        vocab = self.opened.spec.dims["vocab"]
        for id in ids:
            if not 0 <= id < vocab:
                raise RequestError(f"token {id} is outside the vocabulary of {vocab}")
        return EncodedPrompt(ids)

    def encode_chat(self, given: str | Sequence[Message], **variables: Any) -> list[int]:
        """As `LLM.encode_chat`."""
        return _without_images(self.encode_conversation(given, **variables))

    def encode_conversation(
        self, given: str | Sequence[Message], **variables: Any
    ) -> EncodedPrompt:
        """Tokenize a conversation with its images; arguments as `LLM.encode_chat`."""
        messages, images = take_images(parse_messages(given))
        conversation = self.opened.conversation
        return encode_conversation(conversation, self.tokenizer, messages, images, **variables)

    def chat(
        self, given: str | Sequence[Message], params: Params | None, keywords: Mapping[str, Any]
    ) -> tuple[EncodedPrompt, SamplingParams]:
        """A conversation's tokens and parameters; some of the keywords are the template's.

        Raises:
            RequestError: a keyword that neither sampling nor the template knows.
        """
        changes, variables = {}, dict(keywords)
        named = variables.pop("variables", {})
        if not isinstance(named, Mapping) or named.keys() & {"messages", "tokenizer", "special"}:
            raise RequestError(
                f"variables is {show_value(named)}; give the chat template's own, by name"
            )
        conversation = self.opened.conversation
        if variables.get("tools") or named.get("tools"):
            conversation = conversation.for_tools()
        for name in keywords.keys() - {"variables", "special"}:
            if is_parameter(name):
                changes[name] = variables.pop(name)
            elif name != CONTINUE and not conversation.reads(name):
                hint = parameter_hint(name, (*PARAMETERS, "special", "variables"))
                raise RequestError(
                    f"neither sampling nor the model's chat template knows {show_value(name)}{hint}"
                )
        encoded = self.encode_conversation(given, **{**variables, **named})
        return encoded, self.sampling(params, changes)

    def sampling(self, params: object, changes: Mapping[str, Any]) -> SamplingParams:
        """Parameters of a request, overridden by keywords. Raises `RequestError`."""
        return parse_params(self.opened.defaults, params, changes)

    def params(self, **changes: Any) -> SamplingParams:
        """As `LLM.params`."""
        return self.sampling(None, changes)

    def prefix(self, given: Ids, language: str | None) -> list[int]:
        """The tokens that the answer of an encoder-decoder starts from."""
        prefix = self.encode(given)
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
        adapter: AdapterUse | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> list[PreparedRequest]:
        """The requests that answer a prompt: `best_of` or `n` of them.

        Args:
            prefix: the tokens that the answer of an encoder-decoder starts from.
            priority: lower ones go first.
            timeout: seconds after which they are aborted.
            adapter: the LoRA adapter that they are computed with.
            images: those of the prompt, with the places of their features.

        Raises:
            RequestError: it cannot be run.
        """
        sampling = params if params is not None else self.params()
        if self.opened.spec.decoder is None:
            raise RequestError(no_decoder_error(self.opened.spec))
        if not self.opened.spec.generates:
            raise RequestError(no_head_error(self.opened.spec))
        encoder: tuple[int, ...] = ()
        if self.engine.runner.model.has_cross_attention:
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
        end = context if sampling.max_tokens is None else len(ids) + sampling.max_tokens
        limit = min(end, context)
        activations = request_activations(self.engine, sampling, len(ids), limit)
        request = Request(
            next(self._ids),
            tuple(ids),
            sampling,
            limit,
            self.opened.end_ids,
            encoder,
            priority,
            None if timeout is None else time.monotonic() + timeout,
            # What is captured has to be computed.
            reuse=activations is None or not activations.capture,
            adapter=adapter,
            thinking=thinking_limit(self.opened, sampling, ids),
            activations=activations,
            images=prompt_images(self.engine, self.opened.spec.image, ids, images, sampling),
        )
        self._check_room(request)
        answers = parallel_sampling(request, self._ids)
        prepared = [self._prepared(answer, rank) for rank, answer in enumerate(answers)]
        compile_for(self.engine, request)
        return prepared

    def _prepared(self, request: Request, rank: int) -> PreparedRequest:
        choice = sampling_row(request, self.opened, self.processors)
        check_thinking(request, choice, self.engine.runner.model.never)
        bound = request.sampling.constrained
        matcher = start_grammar(request, self.tokenizer) if bound else None
        return PreparedRequest(request, choice, make_driver(request, rank), matcher)

    def _check_room(self, request: Request) -> None:
        sampling = request.sampling
        rows = {"beam": sampling.beams, "contrastive": sampling.top_k}.get(sampling.strategy, 1)
        for pool in self.engine.scheduler.blocks.pools.values():
            needed = -(-request.limit // BLOCK)
            if rows > 1:  # they share the prompt alone, at worst
                prompt = len(request.prompt) // BLOCK
                begun = len(request.prompt) % BLOCK > 0  # a block that each copies
                needed = prompt + begun + rows * (needed - prompt + 1)
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

    def submit(self, prepared: PreparedRequest, sink: Callable[[Any], None]) -> None:
        """Submits a request; `sink` gets its chunks, then its usage, or an exception."""
        driver, matcher = prepared.driver, prepared.matcher
        self.thread.submit(prepared.request, prepared.choice, sink, driver, matcher)


def _without_images(prompt: EncodedPrompt) -> list[int]:
    """The token ids of a prompt of text. Raises `RequestError` if it has images."""
    if prompt.images:
        raise RequestError("images can be read by generate, stream and chat only; leave them out")
    return prompt.ids
