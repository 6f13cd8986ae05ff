"""The library's front door: a model that generates, streams, chats and gives logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jinfer.engine.collector import paused
from jinfer.engine.compilation import use_persistent_cache
from jinfer.engine.engine import Engine
from jinfer.engine.generation import Chunk, Completion, RequestError, TokenLogprob, Usage
from jinfer.engine.programs import Programs
from jinfer.engine.requests import Request
from jinfer.engine.running import Running
from jinfer.model import Want, build
from jinfer.opening.conversation import Message
from jinfer.opening.pooling import Pooling, cut, pool
from jinfer.opening.settings import open_model, sampling_params
from jinfer.sampling.params import SamplingParams
from jinfer.tokenizer import Tokenizer
from jinfer.weights.find import find_weights

Prompt = str | Sequence[int]


class LLM:
    """A model, loaded and ready.

    Attributes:
        spec: the resolved specification.
        tokenizer: None where the checkpoint has none; token ids are served all the same.
        context: tokens a sequence may have, prompt included.
        load_seconds: time the weights took.
    """

    @paused()
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
        self._opened = opened = open_model(source, overrides)
        self.spec, self.tokenizer, self.context = opened.spec, opened.tokenizer, opened.context
        dtype = jnp.dtype(opened.dtype)
        weights = find_weights(
            build(opened.spec, dtype), opened.spec, opened.checkpoint, opened.activations
        )
        self._engine = Engine(
            Programs(weights.model, opened.kv_cache),
            (),
            context=opened.context,
            max_slots=opened.spec.engine.slots,
            prefill_chunk=opened.spec.engine.prefill_chunk,
        )
        self._running = Running(self._engine, opened.tokenizer)
        self._ids = count()
        if first is not None:
            request = self._request(first(self), None)
            self._engine.programs.announce(self._engine.shapes(request))
        begun = time.perf_counter()
        self._engine.leaves = weights.load(progress)
        self.load_seconds = time.perf_counter() - begun

    @property
    def compile_seconds(self) -> float:
        """Time that requests have waited for programs to be compiled."""
        return self._engine.programs.waited

    @property
    def last_usage(self) -> Usage:
        """Tokens and seconds of the request that ended last."""
        return self._running.last_usage

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
        special: bool | None = None,
    ) -> list[Completion]:
        """Continues prompts, several at a time; of an encoder-decoder, answers them.

        Args:
            prompts: texts, or lists of token ids; a single one counts as a list of one. An
                encoder-decoder reads them with its encoder.
            params: for all, or one for each; None: the specification's `[generation]`.
            decoder_prefix: what an encoder-decoder's answer starts from; empty: as the
                checkpoint says (decoder_start_token_id, forced_bos_token_id).
            language: of the answer, for a model that translates; its token joins the prefix.
            special: as `encode`.

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
            start = prefix or self._opened.decoder_prefix[:1]
            prefix = [*start, self._text_tokenizer().language_id(language)]
        requests = [
            self._request(self.encode(prompt, special=special), chosen, prefix)
            for prompt, chosen in zip(listed, each, strict=True)
        ]
        return self._running.complete(requests)

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[Chunk]:
        """Continues a prompt, or answers a conversation, piece by piece.

        Closing the iterator stops the generation. Raises `RequestError` like `generate`, at once.
        """
        request = self._request(self.encode(prompt), params)
        if request.sampling.strategy == "beam":
            raise RequestError("a beam search knows its answer only at the end; use generate")
        return self._stream(request)

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **variables: Any
    ) -> Completion:
        """Answers a conversation.

        Args:
            messages: `{"role": "user", "content": "..."}` and so on.
            **variables: for the chat template, such as `tools`; and `special=True`: special tokens
                that are written in messages count, which else are text.

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

    def score(
        self, prompts: Sequence[Prompt], *, encoder_ids: Sequence[Prompt] | None = None
    ) -> list[Float[np.ndarray, " tokens-1"]]:
        """The log-probability of every token of each prompt given those before it, float32.

        Args:
            prompts: texts or token ids; of an encoder-decoder, the decoder's.
            encoder_ids: what the encoder of an encoder-decoder reads, one for each prompt.

        Raises:
            RequestError: a prompt of fewer than two tokens, or a model without a decoder.
        """
        if self.spec.decoder is None:
            raise RequestError("the model has no decoder, so no token follows from those before")
        return self._forward(prompts, "score", encoder_ids, None)

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
        limit = min(self.context, self._opened.pooling.max_tokens or self.context)
        ids = [cut(self.encode(text), limit) for text in _as_list(texts)]
        hidden = self._forward(ids, "hidden", None, token_type_ids)
        own = self._opened.pooling
        unit = own.normalize if normalize is None else normalize
        return pool(hidden, pooling or own.take, unit, own.projections)

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
        logprobs = jax.nn.log_softmax(self.logits([ids])[0][places], axis=-1)
        return [
            [self._likely(int(id), float(row[id])) for id in np.argsort(-row)[:top]]
            for row in np.asarray(logprobs)
        ]

    def _likely(self, id: int, logprob: float) -> TokenLogprob:
        text = self._text_tokenizer().decode([id], skip_special=False)
        return TokenLogprob(id, text, logprob)

    def encode(
        self, prompt: Prompt | Sequence[Message], *, special: bool | None = None
    ) -> list[int]:
        """Token ids of a text (with BOS where the model wants one), of a conversation, or as given.

        Args:
            special: special tokens written in a text count as such; None: in a text they do, in
                the messages of a conversation they are text.

        Raises:
            RequestError: there is no tokenizer, or an id is outside the vocabulary.
        """
        if isinstance(prompt, str):
            return self._text_tokenizer().encode(prompt, parse_special=special is not False)
        if prompt and isinstance(prompt[0], Mapping):
            return self.encode_chat(cast("Sequence[Message]", prompt), special=bool(special))
        ids = [int(id) for id in cast("Sequence[int]", prompt)]
        vocab = self.spec.dims["vocab"]
        for id in ids:
            if not 0 <= id < vocab:
                raise RequestError(f"token {id} is outside the vocabulary of {vocab}")
        return ids

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a conversation, ready for the model's answer; arguments as `chat`."""
        return self._opened.conversation.encode(self._text_tokenizer(), messages, **variables)

    @property
    def can_chat(self) -> bool:
        """Whether there is a tokenizer and a chat template."""
        return self.tokenizer is not None and self._opened.conversation.has_template

    def params(self, **changes: Any) -> SamplingParams:
        """The specification's `[generation]` with changes. Raises `SpecError`, `ValueError`."""
        return sampling_params({**self._opened.defaults, **changes}, self.spec.path)

    def _repr_html_(self) -> str:
        """The model as a notebook shows it: its wiring and sizes."""
        return self.spec._repr_html_()

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
            encoder, ids = tuple(ids), list(prefix or self._opened.decoder_prefix)
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
        return Request(next(self._ids), tuple(ids), sampling, limit, self._opened.end_ids, encoder)

    def _stream(self, request: Request) -> Generator[Chunk]:
        # Submitted only here: a generator that is never started would keep its slot for ever.
        generation = self._running.submit(request)
        try:
            yield from self._running.chunks(generation)
        finally:
            self._running.abandon([generation])

    def _forward(
        self,
        prompts: Sequence[Prompt],
        want: Literal["logits", "hidden", "pooled", "score"],
        encoder_ids: Sequence[Prompt] | None,
        token_type_ids: Sequence[Sequence[int]] | None,
    ) -> list[np.ndarray]:
        texts = [self.encode(prompt) for prompt in _as_list(prompts)]
        for ids in texts:
            self._check_text(ids)
        if self.spec.decoder is None:
            if want not in {"hidden", *self.spec.stacks[0].head.results}:
                raise RequestError(f"the model has no head that gives {want}")
            types = token_type_ids or [[0] * len(ids) for ids in texts]
            if [len(row) for row in types] != [len(ids) for ids in texts]:
                raise RequestError("token_type_ids must be as long as the texts")
            return self._engine.encode(texts, types, cast("Want", want))
        if want == "pooled":
            raise RequestError("the model has no pooler; use embed")
        encoders: list[list[int]] = [[]] * len(texts)
        if self._engine.model.has_cross_attention:
            encoders = [self.encode(prompt) for prompt in _as_list(encoder_ids or [])]
            if len(encoders) != len(texts):
                raise RequestError("an encoder-decoder needs encoder_ids, one for each prompt")
            for ids in encoders:
                self._check_text(ids)
        pairs = list(zip(texts, encoders, strict=True))
        if want == "score":
            if any(len(ids) < 2 for ids in texts):
                raise RequestError("a prompt to be scored needs at least two tokens")
            return [self._engine.score(ids, encoder) for ids, encoder in pairs]
        return [self._engine.forward(ids, want, encoder) for ids, encoder in pairs]

    def _check_text(self, ids: Sequence[int]) -> None:
        if not 0 < len(ids) <= self.context:
            raise RequestError(
                f"a prompt has {len(ids)} tokens; from 1 to {self.context} can be computed"
            )


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, np.integer))):
        return [prompts]
    return list(prompts)
