"""`LLM`: the synchronous Python API, with generate, stream, chat, embed, logits and score."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Sized
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from jinfer.api.base_llm import BaseLLM
from jinfer.api.classification import Classes, classification_of, classify, tokenize
from jinfer.api.forward_results import fill_mask, forward_results
from jinfer.api.generation_requests import RequestKeywords, build_requests, build_stream_request
from jinfer.api.prompt_inputs import Params, Prompt
from jinfer.api.session import PreparedRequest, Session
from jinfer.api.sleep_mode import fall_asleep, wake_up
from jinfer.api.text_embeddings import embed_texts, token_vectors, tokenize_texts
from jinfer.engine.output.completion import (
    Chunk,
    Completion,
    Completions,
    TokenLogprob,
    Usage,
    best_of,
    collect,
    next_piece,
)
from jinfer.engine.requests import RequestError
from jinfer.loader.config.pooling_config import Pooling
from jinfer.progress import task, watched
from jinfer.sampling.activation_edits import Edit, Steer
from jinfer.sampling.sampling_keywords import ChatKeywords, completing
from jinfer.startup import gc_paused
from jinfer.template.chat_prompt import Message

if TYPE_CHECKING:
    from jaxtyping import Float

    from jinfer.api.saved_cache import SavedCache

Prompts = Prompt | Sequence[Prompt]


class LLM(BaseLLM):
    """A loaded model. Thread-safe: any number of threads may call it at a time.

    Attributes:
        session: the session, which `AsyncLLM` shares.
    """

    @gc_paused()
    def __init__(
        self,
        source: str | Path,
        *,
        progress: bool | None = None,
        threads: int | None = None,
        first: Callable[[LLM], Sized] | None = None,
        **overrides: Any,
    ) -> None:
        """Opens and loads a model.

        Args:
            source: a specification, a checkpoint folder, a .gguf, a llama2.c .bin,
                `package://module/file` or `hf://owner/name`.
            progress: whether to show progress while the model loads; None: on a terminal and in a
                notebook.
            threads: CPU cores to compute with. The limit is for the process: of several open
                models the smallest counts, and XLA's own thread pools keep the size that they had
                when XLA started. None: all cores that the process may use.
            first: returns the token ids of the first prompt, to warm up: its programs are
                compiled while the weights load.
            **overrides: any key of the specification, dotted names in a `**{...}`:
                `LLM(path, **{"engine.context": 8192, "dtype": "float32"})`.

        Raises:
            SourceError, SpecError, CheckpointError, LoadError, TokenizerError, TemplateError: one
                line that names the file, the key or tensor, and what to do.
            RequestError: an invalid argument.
        """
        if not isinstance(source, str | PathLike):
            raise RequestError(f"a source is {source!r:.80}; give a path, or a model's name")
        start = None if first is None else lambda session: first(self._with(session))
        shown = watched() if progress is None else progress
        with task(f"opening {Path(source).name or source}", shown=shown):
            self._with(Session(source, overrides, progress=shown, threads=threads, first=start))

    def _with(self, session: Session) -> LLM:
        self.session = session
        return self

    def close(self) -> None:
        """Cancels running requests and frees the memory; the model cannot be used afterwards.

        This also happens when the object is garbage-collected.
        """
        self.session.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @completing(RequestKeywords)
    def generate(
        self,
        prompts: Prompts,
        params: Params | Sequence[Params] | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> list[Completion]:
        """Generates completions of prompts, which run together in continuous batching.

        An interrupt (Ctrl-C, a notebook's stop button) cancels all of them, and nothing is
        returned; with `stream` the text so far stays.

        Args:
            prompts: texts, lists or arrays of token ids, or conversations, which are answered; a
                single one counts as a list of one. An encoder-decoder reads them with its encoder.
            params: parameters for all prompts, or a list with one for each. A dictionary is merged
                into the specification's `[generation]`; `SamplingParams` replace it.
            **keywords: fields of `SamplingParams`, which override `params`: `max_tokens=50`; and
                decoder_prefix: what an encoder-decoder's decoder starts with; without it, as the
                    checkpoint says (decoder_start_token_id, forced_bos_token_id);
                language: target language of a translation model; its token joins the prefix;
                special: as `encode`;
                priority: requests with lower numbers go first, those without one have 0;
                timeout: seconds after which the requests fail with a `DeadlineError`;
                adapter: name of the LoRA adapter to compute with;
                suffix: what follows a gap after each prompt, which is filled in (FIM).

        Returns:
            `params.n` completions per prompt (default one), in the prompts' order; those of a
            prompt are the likeliest of `best_of`, likeliest first. A notebook displays the list.

        Raises:
            DeadlineError: it took longer than `timeout`.
            RequestError: a prompt is empty or too long, a text without a tokenizer, or an invalid
                parameter.
        """
        requests = build_requests(self.session, prompts, params, **keywords)
        with contextlib.ExitStack() as running:
            answers = [
                [running.enter_context(self._answer(prepared)) for prepared in group]
                for group, _ in requests
            ]
            return Completions(
                answer
                for group, (_, resolved) in zip(answers, requests, strict=True)
                for answer in best_of(list(map(collect, group)), resolved)
            )

    @completing(RequestKeywords)
    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> Generator[Chunk]:
        """Streams one completion; arguments as `generate`.

        Closing the iterator cancels the request. Raises `RequestError` like `generate`, before the
        first iteration.
        """
        return self._stream(build_stream_request(self.session, prompt, params, **keywords))

    @completing(ChatKeywords)
    def chat(
        self,
        messages: str | Sequence[Message],
        params: Params | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> Completion:
        """Answers a conversation.

        Args:
            messages: `{"role": "user", "content": "..."}` and so on; content may be a list of
                parts `{"type": "text", "text": "..."}` and `{"type": "image", "image": image}`,
                where an image is a path, the bytes of a file, an array or a Pillow image. A text
                is a message of the user.
            params, priority, timeout, adapter: as `generate`.
            **keywords: fields of `SamplingParams`; variables of the chat template, such as
                `tools`, or all of them in `variables`; and `special=True` to recognize special
                tokens that are written in messages.

        Raises:
            RequestError: as `generate`; or an unknown keyword.
            TemplateError: there is no chat template, or it rejects the conversation.
        """
        prompt, resolved = self.session.chat(messages, params, keywords)
        request: RequestKeywords = {"priority": priority, "timeout": timeout, "adapter": adapter}
        return self.generate(prompt, resolved, **request)[0]

    def load_adapter(self, name: str, source: str | Path) -> None:
        """Load a LoRA adapter into a slot, for requests with `adapter=name`.

        Nothing is compiled. `engine.max_adapters` says how many there can be at a time.

        Args:
            source: PEFT's folder (adapter_config.json and adapter_model.safetensors or .bin), or
                a GGUF file.

        Raises:
            RequestError: the name is taken, or there is no room.
            SourceError, CheckpointError, LoadError: there is no such adapter, or it is damaged, or
                of another model, or of too high a rank.
        """
        self.session.adapters.load(name, source, self.session.engine, self.session.thread)

    def update_weights(self, values: Mapping[str, Any]) -> None:
        """Puts other values in place of some weights; what the cache has is forgotten.

        Args:
            values: by the names of `weights`: arrays of the same shapes. Those of quantized
                weights are rounded to nearest in the same format.

        Raises:
            RequestError: a name or a shape that there is not, or requests run.
            EngineError: the weights are in parts on several devices.
        """
        self.session.weights.update(values)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; requests that are computed with it are finished.

        Raises:
            RequestError: there is none of that name.
        """
        self.session.adapters.unload(name)

    def save_cache(self, path: str | Path) -> SavedCache:
        """Writes the prefix cache (`jinfer.engine.scheduling.block_manager`) to a file.

        Raises:
            RequestError: the file cannot be written; the model has no cache.
        """
        from jinfer.api.saved_cache import save_cache

        return save_cache(self.session, path)

    def load_cache(self, path: str | Path) -> SavedCache:
        """Enters what `save_cache` has written into the prefix cache, up to a damaged block.

        Raises:
            RequestError: the file cannot be read, or was written with another model, other
                settings or another version.
        """
        from jinfer.api.saved_cache import load_cache

        return load_cache(self.session, path)

    def logits(
        self,
        prompts: Prompts,
        *,
        encoder_ids: Prompts | None = None,
        token_type_ids: Sequence[Sequence[int]] | None = None,
        last: bool = False,
    ) -> list[Float[NDArray[np.float32], "*tokens vocab"]]:
        """The logits after every token of each prompt, float32; of a masked model, at each token.

        Args:
            prompts: texts or token ids; of an encoder-decoder, the decoder's.
            encoder_ids: what the encoder of an encoder-decoder reads, one for each prompt.
            token_type_ids: for an encoder that has them: which of two texts a token belongs to.
            last: return only those after the last token of each prompt, [vocab]. The whole prompt
                is computed all the same; `generate(..., max_tokens=1, logprobs=20)` uses the
                prefix cache instead.

        Raises:
            RequestError: an invalid prompt, or a model without such a head.
        """
        return forward_results(self.session, prompts, "logits", encoder_ids, token_type_ids, last)

    def score(
        self, prompts: Prompts, *, encoder_ids: Prompts | None = None
    ) -> list[Float[NDArray[np.float32], " tokens-1"]]:
        """The log-probability of every token of each prompt given those before it, float32.

        Args:
            prompts: texts or token ids; of an encoder-decoder, the decoder's.
            encoder_ids: what the encoder of an encoder-decoder reads, one for each prompt.

        Raises:
            RequestError: a prompt of fewer than two tokens, or a model without a decoder.
        """
        if self.spec.decoder is None:
            raise RequestError("the model has no decoder, so no token follows from those before")
        return forward_results(self.session, prompts, "score", encoder_ids)

    def hidden(
        self,
        prompts: Prompts,
        *,
        encoder_ids: Prompts | None = None,
        token_type_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[Float[NDArray[np.float32], "tokens hidden"]]:
        """The last hidden state of every token of each prompt, float32; arguments as `logits`."""
        return forward_results(self.session, prompts, "hidden", encoder_ids, token_type_ids)

    def pooled(
        self,
        prompts: Prompts,
        *,
        token_type_ids: Sequence[Sequence[int]] | None = None,
    ) -> Float[NDArray[np.float32], "texts hidden"]:
        """The output of an encoder's own pooler, a row per text, float32."""
        return np.stack(forward_results(self.session, prompts, "pooled", None, token_type_ids))

    def embed(
        self,
        texts: Prompts,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        token_type_ids: Sequence[Sequence[int]] | None = None,
    ) -> Float[NDArray[np.float32], "texts hidden"]:
        """One vector per text, float32: [1, hidden] of a single text.

        Args:
            texts: texts or lists of token ids; longer ones than the model reads are truncated.
            pooling: "mean", "first" (CLS) or "last" token, "max", "mean_sqrt_len" or
                "weighted_mean"; None: as the checkpoint says (sentence-transformers' modules.json,
                GGUF's pooling_type), else "mean" for an encoder, "last" for a decoder.
            normalize: whether to scale vectors to length 1; None: as the checkpoint says, else yes.
            prompt_name: which of the checkpoint's prompts to put before the texts
                (config_sentence_transformers.json); None: its default one, if it has one.

        Raises:
            RequestError: there is no such prompt; the checkpoint is not for embeddings.
        """
        return embed_texts(
            self.session,
            tokenize_texts(self.session, texts, prompt_name),
            pooling=pooling,
            normalize=normalize,
            token_type_ids=token_type_ids,
        )

    def token_vectors(
        self,
        texts: Prompts,
        *,
        normalize: bool | None = None,
        prompt_name: str | None = None,
    ) -> list[Float[NDArray[np.float32], "tokens width"]]:
        """One vector per token of each text, float32, as late interaction compares them (ColBERT).

        Args:
            texts, normalize, prompt_name: as `embed`. A checkpoint whose modules.json has dense
                layers and no pooling projects each token's vector; of others it is the last hidden
                state.

        Raises:
            RequestError: as `embed`.
        """
        tokens = tokenize_texts(self.session, texts, prompt_name)
        return token_vectors(self.session, tokens, normalize=normalize)

    def classify(self, texts: Prompts | Sequence[tuple[str, str]]) -> Classes:
        """Scores of classes for each text, by the model's classification head.

        Args:
            texts: texts, lists of token ids, or pairs of texts, `[("query", "document")]`; longer
                ones than the model reads are truncated at their end.

        Returns:
            `scores`, [texts, labels], as the head gives them (logits); `labels`, their names;
            `probabilities`, [texts, labels], after the checkpoint's activation.

        Raises:
            RequestError: the model has no such head, or its tokenizer no form for pairs.
        """
        classification_of(self.session)
        return classify(self.session, tokenize(self.session, texts))

    def fill_mask(self, text: Prompt, *, top: int = 5) -> list[list[TokenLogprob]]:
        """The likeliest tokens at each mask of a text, likeliest first.

        Raises:
            RequestError: the text has no mask, or the tokenizer has no mask token.
        """
        return fill_mask(self.session, text, top)

    def trace(
        self,
        prompts: Prompt | Sequence[Prompt],
        capture: str | Sequence[str],
        *,
        edits: Edit | Sequence[Edit] = (),
        steer: Steer | Sequence[Steer] = (),
        max_tokens: int = 0,
        params: Params | None = None,
        encoder_ids: Prompt | Sequence[Prompt] | None = None,
        token_type_ids: Sequence[Sequence[int]] | None = None,
        adapter: str | None = None,
    ) -> Any:
        """Values inside the model at every token: `llm.trace(text, "decoder.*.x")["decoder.3.x"]`.

        Prompts are computed by the engine, in chunks, with the weights that it has; only what is
        captured, and the values that it depends on, is computed.

        Args:
            prompts: texts, lists of token ids, or conversations; of an encoder-decoder, the
                decoder's.
            capture: names of values, as `names` lists them; `*` matches any text.
            edits, steer: changes of values on the way, as of `SamplingParams`.
            max_tokens: length of an answer, whose tokens are traced too; 0: none.
            params: sampling parameters of the answer, as of `generate`.
            encoder_ids, token_type_ids: as `logits`.
            adapter: name of the LoRA adapter to compute with.

        Returns:
            A `Trace` of a single prompt, a list of them of several.

        Raises:
            RequestError: there is no such value, or memory for so many; the model is divided among
                devices; an invalid prompt.
        """
        from jinfer.api.activation_tracing import trace_prompts

        return trace_prompts(
            self.session,
            self.generate,
            prompts,
            capture,
            edits=edits,
            steer=steer,
            max_tokens=max_tokens,
            params=params,
            encoder_given=encoder_ids,
            token_type_ids=token_type_ids,
            adapter=adapter,
        )

    def sleep(self, level: int = 1) -> None:
        """Gives memory back until `wake_up`: as vLLM's sleep mode. Requests are refused meanwhile.

        Programs, tokenizer and adapters stay, so that waking takes no longer than reading the
        weights. The prefix cache is emptied.

        Args:
            level: 1: the KV cache is freed, and the weights are in the host's memory; 2: both are
                freed, and waking reads the weights from their files again, without what
                `update_weights` has changed. Weights of draft models stay.

        Raises:
            RequestError: requests run; or the model is divided among devices or processes.
        """
        fall_asleep(self.session, level)

    def wake_up(self) -> None:
        """Takes the memory again that `sleep` gave back; nothing happens if the model is awake.

        Raises:
            RequestError: the files of the weights have become those of another model.
            SourceError, CheckpointError, LoadError: the weights cannot be read any more.
        """
        wake_up(self.session)

    @contextlib.contextmanager
    def _answer(self, prepared: PreparedRequest) -> Iterator[SimpleQueue[Any]]:
        """Submits a request; the queue of its chunks. Leaving the context cancels it."""
        pieces: SimpleQueue[Any] = SimpleQueue()
        self.session.submit(prepared, pieces.put)
        try:
            yield pieces
        finally:
            self.session.thread.cancel(prepared.request.id)

    def _stream(self, prepared: PreparedRequest) -> Generator[Chunk]:
        # Submitted at the first iteration: a generator that is never started must not hold a slot.
        with self._answer(prepared) as pieces:
            while not isinstance(piece := next_piece(pieces), Usage):
                yield piece
