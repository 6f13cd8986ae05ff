"""The library's front door: a model that generates, streams, chats and gives logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jinfer import load
from jinfer.compilation import use_persistent_cache
from jinfer.conversation import Conversation, Message
from jinfer.engine import Engine, Request
from jinfer.generation import Chunk, Completion, Generation, RequestError, Usage, completion
from jinfer.model import build
from jinfer.programs import Programs
from jinfer.recognize import Recognized, recognize
from jinfer.sampling import SamplingParams
from jinfer.spec.errors import SpecError, nearest
from jinfer.spec.files import nested
from jinfer.spec.resolve import merge
from jinfer.tokenizer import Tokenizer, load_tokenizer

DEFAULT_CONTEXT = 4096  # tokens; a cache for the whole context of a modern model fills a machine

Prompt = str | Sequence[int]


class LLM:
    """A model, loaded and ready.

    Attributes:
        spec: the resolved specification.
        tokenizer: None where the checkpoint has none; token ids are served all the same.
        context: tokens a sequence may have, prompt included.
        load_seconds: time the weights took.
        last_usage: tokens and seconds of the request that ended last.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        progress: bool = False,
        first: Callable[[LLM], list[int]] | None = None,
        **overrides: Any,
    ) -> None:
        """Opens and loads a model.

        Args:
            source: a specification, a checkpoint folder, a .gguf, a llama2.c .bin,
                `package://module/file` or `hf://owner/name`.
            progress: show a bar while weights load.
            first: gives the token ids of a prompt that will come first, with the default
                parameters: its programs are compiled while the weights load.
            **overrides: any key of the specification, dotted names in a `**{...}`:
                `LLM(path, **{"engine.context": 8192, "dtype": "float32"})`.

        Raises:
            SourceError, SpecError, CheckpointError, LoadError, TokenizerError, TemplateError: one
                line that names the file, the key or tensor, and what to do.
        """
        use_persistent_cache()
        found = recognize(source, _tables(overrides))
        self.spec = found.spec
        if found.spec.decoder is None:
            raise SpecError(found.spec.path, "", "has no [decoder]; there is nothing to generate")
        self.tokenizer = _tokenizer(found)
        self._conversation = Conversation.of(found.spec, found.tokenizer, found.config)
        self._defaults = _generation_defaults(found)
        self._end_ids = self.tokenizer.eos_ids if self.tokenizer else _end_ids(found.config)
        dtype = jnp.dtype(_dtype(found.spec.dtype))
        self.context = _context(found)
        self._engine = Engine(
            Programs(build(found.spec, dtype), dtype),
            (),
            context=self.context,
            max_slots=found.spec.engine.slots,
            prefill_chunk=found.spec.engine.prefill_chunk,
        )
        self._ids = count()
        self._running: dict[int, Generation] = {}
        self.last_usage = Usage(0, 0, 0.0, 0.0)
        if first is not None:
            self._announce(self._request(first(self), None))
        begun = time.perf_counter()
        self._engine.leaves = load.load(
            self._engine.model, found.checkpoint, found.spec.tensors, progress=progress
        )
        self.load_seconds = time.perf_counter() - begun

    @property
    def compile_seconds(self) -> float:
        """Time that requests have waited for programs to be compiled."""
        return self._engine.programs.waited

    @property
    def compilations(self) -> int:
        """Programs compiled, or taken from the persistent cache, so far."""
        return self._engine.programs.compilations

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continues prompts, several at a time.

        Args:
            prompts: texts, or lists of token ids; a single one counts as a list of one.
            params: for all, or one for each; None: the specification's `[generation]`.

        Returns:
            One completion per prompt, in their order.

        Raises:
            RequestError: a prompt is empty or too long, or there is no tokenizer for a text.
        """
        listed = _as_list(prompts)
        each = params if isinstance(params, Sequence) else [params] * len(listed)
        if len(each) != len(listed):
            raise RequestError(f"{len(listed)} prompts, but {len(each)} sampling parameters")
        requests = [
            self._request(self.encode(prompt), chosen)
            for prompt, chosen in zip(listed, each, strict=True)
        ]
        running = [self._submit(request) for request in requests]
        try:
            chunks = [list(self._chunks(generation)) for generation in running]
        finally:
            self._abandon(running)
        return [completion(g, part) for g, part in zip(running, chunks, strict=True)]

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[Chunk]:
        """Continues a prompt, or answers a conversation, piece by piece.

        Closing the iterator stops the generation. Raises `RequestError` like `generate`, at once.
        """
        return self._stream(self._submit(self._request(self.encode(prompt), params)))

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **variables: Any
    ) -> Completion:
        """Answers a conversation.

        Args:
            messages: `{"role": "user", "content": "..."}` and so on.
            **variables: for the chat template, such as `tools`.

        Raises:
            RequestError: as `generate`; or the model has no chat template.
            TemplateError: the template refuses the conversation.
        """
        ids = self.encode_chat(messages, **variables)
        return self.generate([ids], params)[0]

    def logits(self, prompts: Sequence[Prompt]) -> list[Float[np.ndarray, "tokens vocab"]]:
        """The logits after every token of each prompt, float32."""
        return self._forward(prompts, "logits")

    def hidden(self, prompts: Sequence[Prompt]) -> list[Float[np.ndarray, "tokens hidden"]]:
        """The last hidden state of every token of each prompt, float32: what the head sees."""
        return self._forward(prompts, "hidden")

    def encode(self, prompt: Prompt | Sequence[Message]) -> list[int]:
        """Token ids of a text (with BOS where the model wants one), of a conversation, or as given.

        Raises:
            RequestError: there is no tokenizer, or an id is outside the vocabulary.
        """
        if isinstance(prompt, str):
            return self._text_tokenizer().encode(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            return self.encode_chat(cast("Sequence[Message]", prompt))
        ids = [int(id) for id in cast("Sequence[int]", prompt)]
        vocab = self.spec.dims["vocab"]
        for id in ids:
            if not 0 <= id < vocab:
                raise RequestError(f"token {id} is outside the vocabulary of {vocab}")
        return ids

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a conversation, ready for the model's answer."""
        return self._conversation.encode(self._text_tokenizer(), messages, **variables)

    @property
    def can_chat(self) -> bool:
        """Whether there is a tokenizer and a chat template."""
        return self.tokenizer is not None and self._conversation.has_template

    def params(self, **changes: Any) -> SamplingParams:
        """The specification's `[generation]` with changes. Raises `SpecError`, `ValueError`."""
        return _sampling_params({**self._defaults, **changes}, self.spec.path)

    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "the checkpoint has no tokenizer; give token ids, or set tokenizer=... in the spec"
            )
        return self.tokenizer

    def _request(self, ids: list[int], params: SamplingParams | None) -> Request:
        sampling = params if params is not None else self.params()
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        if len(ids) >= self.context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, which leaves no room in a context of "
                f"{self.context}; shorten it, or set engine.context"
            )
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop texts need a tokenizer; use stop_token_ids")
        most = self.context if sampling.max_tokens is None else len(ids) + sampling.max_tokens
        limit = min(most, self.context)
        return Request(next(self._ids), tuple(ids), sampling, limit, self._end_ids)

    def _announce(self, request: Request) -> None:
        """Starts to compile what a request will need."""
        logprobs = request.sampling.logprobs is not None
        shapes = self._engine.shapes(1, request.limit, len(request.prompt), logprobs)
        self._engine.programs.announce(shapes)

    def _submit(self, request: Request) -> Generation:
        generation = Generation(request, self.tokenizer)
        self._running[request.id] = generation
        self._engine.submit(request)
        return generation

    def _stream(self, generation: Generation) -> Generator[Chunk]:
        try:
            yield from self._chunks(generation)
        finally:
            self._abandon([generation])

    def _chunks(self, generation: Generation) -> Iterator[Chunk]:
        """A generation's pieces as they come; other running generations advance with it."""
        while True:
            # While a piece is out, other streams may have advanced this one to its end.
            while pieces := generation.take():
                yield from pieces
            if generation.finish_reason is not None:
                return
            before = self.compile_seconds
            tokens = self._engine.step()
            for running in self._running.values():
                if not running.count:
                    running.waited += self.compile_seconds - before
            for token in tokens:
                running = self._running[token.request]
                if running.finish_reason is None:  # two tokens may come at once
                    running.push(token)
                if running.finish_reason is not None:
                    self._engine.finish(token.request)

    def _abandon(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            self.last_usage = generation.usage()
            self._engine.finish(generation.request.id)
            self._running.pop(generation.request.id, None)

    def _forward(
        self, prompts: Sequence[Prompt], want: Literal["logits", "hidden"]
    ) -> list[np.ndarray]:
        results = []
        for prompt in _as_list(prompts):
            ids = self.encode(prompt)
            if not 0 < len(ids) <= self.context:
                raise RequestError(
                    f"a prompt has {len(ids)} tokens; from 1 to {self.context} can be computed"
                )
            results.append(self._engine.forward(ids, want))
        return results


def _tables(overrides: Mapping[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for key, value in overrides.items():
        tables = merge(tables, nested(key, value))
    return tables


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, np.integer))):
        return [prompts]
    return list(prompts)


def _tokenizer(found: Recognized) -> Tokenizer | None:
    checkpoint = found.checkpoint
    metadata = checkpoint.metadata if checkpoint.format == "gguf" else None
    if found.tokenizer != checkpoint.path:
        metadata = None
    return load_tokenizer(
        found.tokenizer, metadata=metadata, vocab_size=found.spec.dims.get("vocab")
    )


def _dtype(name: str) -> str:
    if name != "auto":
        return name
    # One-row products in bfloat16 convert all weights first on XLA:CPU, and take five times longer.
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _context(found: Recognized) -> int:
    trained = found.spec.dims.get("context")
    asked = found.spec.engine.context
    if asked and trained and asked > trained:
        raise SpecError(
            found.spec.path,
            "engine.context",
            f"{asked} is above the {trained} tokens the model was made for; "
            f"if its positions allow more, set dims.context too",
        )
    return asked or min(trained or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def _end_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = config.get("eos_token_id", config.get("tokenizer.ggml.eos_token_id"))
    listed = ids if isinstance(ids, list) else [ids]
    return tuple(id for id in listed if isinstance(id, int))


def _generation_defaults(found: Recognized) -> dict[str, Any]:
    defaults = dict(found.spec.generation)
    _sampling_params(defaults, found.spec.path)
    return defaults


def _sampling_params(values: Mapping[str, Any], path: str) -> SamplingParams:
    allowed = [field.name for field in fields(SamplingParams)]
    for name in values:
        if name not in allowed:
            raise SpecError(path, f"generation.{name}", f"unknown key; {nearest(name, allowed)}")
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise SpecError(path, "generation", str(error)) from error
