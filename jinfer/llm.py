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
from jinfer.embedding import Pooling, cut, find_pooling, pool
from jinfer.engine import Engine, Request
from jinfer.generation import (
    Chunk,
    Completion,
    Generation,
    RequestError,
    TokenLogprob,
    Usage,
    completion,
)
from jinfer.model import build
from jinfer.programs import Programs
from jinfer.recognize import Recognized, recognize
from jinfer.sampling import SamplingParams
from jinfer.spec.blocks import Rope
from jinfer.spec.bounds import DEFAULT_CONTEXT
from jinfer.spec.errors import SpecError, nearest
from jinfer.spec.files import nested
from jinfer.spec.model import ModelSpec, StackSpec
from jinfer.spec.resolve import merge
from jinfer.tokenizer import Tokenizer, load_tokenizer

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
        self.tokenizer = _tokenizer(found)
        self._conversation = Conversation.of(found.spec, found.tokenizer, found.config)
        self._defaults = _generation_defaults(found)
        self._decoder_prefix = decoder_prefix(found)
        self._pooling = find_pooling(found)
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
        *,
        decoder_prefix: Sequence[int] = (),
        language: str | None = None,
    ) -> list[Completion]:
        """Continues prompts, several at a time; of an encoder-decoder, answers them.

        Args:
            prompts: texts, or lists of token ids; a single one counts as a list of one. An
                encoder-decoder reads them with its encoder.
            params: for all, or one for each; None: the specification's `[generation]`.
            decoder_prefix: what an encoder-decoder's answer starts from; empty: as the
                checkpoint says (decoder_start_token_id, forced_bos_token_id).
            language: of the answer, for a model that translates; its token joins the prefix.

        Returns:
            One completion per prompt, in their order.

        Raises:
            RequestError: a prompt is empty or too long, or there is no tokenizer for a text.
        """
        listed = _as_list(prompts)
        each = params if isinstance(params, Sequence) else [params] * len(listed)
        if len(each) != len(listed):
            raise RequestError(f"{len(listed)} prompts, but {len(each)} sampling parameters")
        prefix = list(decoder_prefix)
        if language is not None:
            start = prefix or self._decoder_prefix[:1]
            prefix = [*start, self._text_tokenizer().language_id(language)]
        requests = [
            self._request(self.encode(prompt), chosen, prefix)
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

    def logits(
        self,
        prompts: Sequence[Prompt],
        *,
        encoder_ids: Sequence[Prompt] | None = None,
        token_type_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[Float[np.ndarray, "tokens vocab"]]:
        """The logits after every token of each prompt, float32; of a masked model, at each token.

        Args:
            prompts: texts or token ids; of an encoder-decoder, the decoder's.
            encoder_ids: what the encoder of an encoder-decoder reads, one for each prompt.
            token_type_ids: for an encoder that has them: which of two texts a token belongs to.

        Raises:
            RequestError: a prompt that cannot be computed, or a model without such a head.
        """
        return self._forward(prompts, "logits", encoder_ids, token_type_ids)

    def hidden(
        self,
        prompts: Sequence[Prompt],
        *,
        encoder_ids: Sequence[Prompt] | None = None,
        token_type_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[Float[np.ndarray, "tokens hidden"]]:
        """The last hidden state of every token of each prompt, float32; arguments as `logits`."""
        return self._forward(prompts, "hidden", encoder_ids, token_type_ids)

    def pooled(
        self,
        prompts: Sequence[Prompt],
        *,
        token_type_ids: Sequence[Sequence[int]] | None = None,
    ) -> Float[np.ndarray, "texts hidden"]:
        """What an encoder's own pooler makes of each text, float32."""
        return np.stack(self._forward(prompts, "pooled", None, token_type_ids))

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        token_type_ids: Sequence[Sequence[int]] | None = None,
    ) -> Float[np.ndarray, "texts hidden"]:
        """One vector per text, float32.

        Args:
            texts: texts or lists of token ids; longer ones than the model reads are cut.
            pooling: "mean", "first" (CLS) or "last" token; None: as the checkpoint says
                (sentence-transformers' modules.json), else "mean" for an encoder, "last" for a
                decoder.
            normalize: to length 1; None: as the checkpoint says, else yes.
        """
        limit = min(self.context, self._pooling.max_tokens or self.context)
        ids = [cut(self.encode(text), limit) for text in _as_list(texts)]
        hidden = self._forward(ids, "hidden", None, token_type_ids)
        take, unit = pooling or self._pooling.take, self._pooling.normalize
        return pool(hidden, take, unit if normalize is None else normalize)

    def fill_mask(self, text: Prompt, *, top: int = 5) -> list[list[TokenLogprob]]:
        """The likeliest tokens at each mask of a text, likeliest first.

        Raises:
            RequestError: there is no mask in the text, or the tokenizer has none.
        """
        tokenizer = self._text_tokenizer()
        if tokenizer.mask_id is None:
            raise RequestError("the tokenizer has no mask token")
        ids = self.encode(text)
        places = [place for place, id in enumerate(ids) if id == tokenizer.mask_id]
        if not places:
            raise RequestError(f"the text has no {tokenizer.token(tokenizer.mask_id)}")
        logits = self.logits([ids])[0][places].astype(np.float64)
        logprobs = (
            logits
            - np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1, keepdims=True))
            - logits.max(-1, keepdims=True)
        )
        return [
            [
                TokenLogprob(
                    int(id), tokenizer.decode([int(id)], skip_special=False), float(row[id])
                )
                for id in np.argsort(-row, kind="stable")[:top]
            ]
            for row in logprobs
        ]

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

    def _request(
        self, ids: list[int], params: SamplingParams | None, prefix: Sequence[int] = ()
    ) -> Request:
        sampling = params if params is not None else self.params()
        if self.spec.decoder is None:
            raise RequestError("the model has no decoder; use embed, fill_mask, logits or hidden")
        encoder: tuple[int, ...] = ()
        if self._engine.model.has_cross_attention:
            encoder, ids = tuple(ids), list(prefix or self._decoder_prefix)
            self._check_text(encoder)
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
        return Request(next(self._ids), tuple(ids), sampling, limit, self._end_ids, encoder)

    def _announce(self, request: Request) -> None:
        """Starts to compile what a request will need."""
        self._engine.programs.announce(self._engine.shapes(request))

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
        self,
        prompts: Sequence[Prompt],
        want: Literal["logits", "hidden", "pooled"],
        encoder_ids: Sequence[Prompt] | None,
        token_type_ids: Sequence[Sequence[int]] | None,
    ) -> list[np.ndarray]:
        texts = [self.encode(prompt) for prompt in _as_list(prompts)]
        for ids in texts:
            self._check_text(ids)
        if self.spec.decoder is None:
            if want not in results_of(self.spec.stacks[0]):
                raise RequestError(f"the model has no head that gives {want}")
            types = token_type_ids or [[0] * len(ids) for ids in texts]
            if [len(row) for row in types] != [len(ids) for ids in texts]:
                raise RequestError("token_type_ids must be as long as the texts")
            return self._engine.encode(texts, types, want)
        if want == "pooled":
            raise RequestError("the model has no pooler; use embed")
        encoders: list[list[int]] = [[]] * len(texts)
        if self._engine.model.has_cross_attention:
            encoders = [self.encode(prompt) for prompt in _as_list(encoder_ids or [])]
            if len(encoders) != len(texts):
                raise RequestError("an encoder-decoder needs encoder_ids, one for each prompt")
            for ids in encoders:
                self._check_text(ids)
        return [
            self._engine.forward(ids, want, encoder)
            for ids, encoder in zip(texts, encoders, strict=True)
        ]

    def _check_text(self, ids: Sequence[int]) -> None:
        if not 0 < len(ids) <= self.context:
            raise RequestError(
                f"a prompt has {len(ids)} tokens; from 1 to {self.context} can be computed"
            )


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
    if asked and trained and asked > trained * _stretch(found.spec):
        raise SpecError(
            found.spec.path,
            "engine.context",
            f"{asked} is above the {trained} tokens the model was made for; "
            f"if its positions allow more, set dims.context too",
        )
    return asked or min(trained or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def _stretch(spec: ModelSpec) -> float:
    """How many times longer than trained sequences may be: "dynamic" scaling adapts itself."""
    layers = (layer for stack in spec.stacks for layer in stack.layers)
    ropes = (getattr(block, "position", None) for layer in layers for _, block in layer.modules)
    scalings = (rope.scaling for rope in ropes if isinstance(rope, Rope) and rope.scaling)
    return max((s.factor for s in scalings if s.rope_type == "dynamic"), default=1.0)


def _end_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = config.get("eos_token_id", config.get("tokenizer.ggml.eos_token_id"))
    listed = ids if isinstance(ids, list) else [ids]
    return tuple(id for id in listed if isinstance(id, int))


def decoder_prefix(found: Recognized) -> tuple[int, ...]:
    """What the answer of an encoder-decoder starts from."""
    keys = ("decoder_start_token_id", "forced_bos_token_id")
    ids = (found.config.get(key) for key in keys)
    return tuple(id for id in ids if isinstance(id, int))


def results_of(stack: StackSpec) -> set[str]:
    """The results that the head of an encoder gives."""
    return {"hidden", *stack.head.results}


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
