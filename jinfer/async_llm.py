"""The library's front door for services: the same model, in coroutines and async iterators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from jinfer.engine.answers import best
from jinfer.engine.generation import Chunk, Completion, TokenLogprob, Usage, completion
from jinfer.engine.requests import RequestError
from jinfer.engine.stats import Stats
from jinfer.frontend import Prepared
from jinfer.inputs import Params, Prompt
from jinfer.llm import LLM, Prompts
from jinfer.opening.conversation import Message
from jinfer.opening.pooling import Pooling
from jinfer.sampling.keywords import ChatKeywords, Sampling
from jinfer.shapes import Float

Types = Sequence[Sequence[int]]


class AsyncLLM:
    """A model for an event loop. Closing an iterator, or cancelling a task, ends its request.

    Attributes:
        llm: the same model for threads.
    """

    def __init__(self, source: str | Path | LLM, **arguments: Any) -> None:
        """Opens and loads a model, as `LLM`, or takes one that is open."""
        self.llm = source if isinstance(source, LLM) else LLM(source, **arguments)

    async def generate(
        self,
        prompts: Prompts,
        params: Params | Sequence[Params] | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[Completion]:
        """As `LLM.generate`.

        Args:
            priority: lower ones go first.
            timeout: seconds after which it is given up with a `DeadlineError`.
        """
        listed = self.llm.listed(prompts, params, **sampling)
        frontend = self.llm.frontend
        groups = [
            frontend.prepare(self.llm.encode(prompt), one, priority=priority, timeout=timeout)
            for prompt, one in listed
        ]
        answers = await asyncio.gather(
            *(asyncio.gather(*(self._whole(one) for one in group)) for group in groups)
        )
        return [
            answer
            for group, (_, chosen) in zip(answers, listed, strict=True)
            for answer in best(list(group), chosen)
        ]

    async def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[Chunk]:
        """As `LLM.stream`; arguments as `generate`."""
        chosen = self.llm.frontend.sampling(params, sampling)
        prepared = self.llm.streamed(prompt, chosen, priority=priority, timeout=timeout)
        pieces = self._pieces(prepared)
        try:
            async for piece in pieces:
                if isinstance(piece, Chunk):
                    yield piece
        finally:
            await pieces.aclose()

    async def chat(
        self,
        messages: str | Sequence[Message],
        params: Params | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> Completion:
        """As `LLM.chat`."""
        ids, chosen = self.llm.frontend.chat(messages, params, keywords)
        return (await self.generate(ids, chosen))[0]

    async def logits(
        self,
        prompts: Prompts,
        *,
        encoder_ids: Prompts | None = None,
        token_type_ids: Types | None = None,
    ) -> list[Float[np.ndarray, "tokens vocab"]]:
        """As `LLM.logits`."""
        return await asyncio.to_thread(
            self.llm.logits, prompts, encoder_ids=encoder_ids, token_type_ids=token_type_ids
        )

    async def score(
        self, prompts: Prompts, *, encoder_ids: Prompts | None = None
    ) -> list[Float[np.ndarray, " tokens-1"]]:
        """As `LLM.score`."""
        return await asyncio.to_thread(self.llm.score, prompts, encoder_ids=encoder_ids)

    async def hidden(
        self,
        prompts: Prompts,
        *,
        encoder_ids: Prompts | None = None,
        token_type_ids: Types | None = None,
    ) -> list[Float[np.ndarray, "tokens hidden"]]:
        """As `LLM.hidden`."""
        return await asyncio.to_thread(
            self.llm.hidden, prompts, encoder_ids=encoder_ids, token_type_ids=token_type_ids
        )

    async def embed(
        self,
        texts: Prompts,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        token_type_ids: Types | None = None,
    ) -> Float[np.ndarray, "texts hidden"]:
        """As `LLM.embed`."""
        return await asyncio.to_thread(
            self.llm.embed,
            texts,
            pooling=pooling,
            normalize=normalize,
            token_type_ids=token_type_ids,
        )

    async def fill_mask(self, text: Prompt, *, top: int = 5) -> list[list[TokenLogprob]]:
        """As `LLM.fill_mask`."""
        return await asyncio.to_thread(self.llm.fill_mask, text, top=top)

    def stats(self) -> Stats:
        """As `LLM.stats`."""
        return self.llm.stats()

    async def close(self) -> None:
        """As `LLM.close`."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Async{self.llm!r}"

    async def _whole(self, prepared: Prepared) -> Completion:
        chunks: list[Chunk] = []
        async for piece in self._pieces(prepared):
            if isinstance(piece, Usage):
                return completion(chunks, piece)
            chunks.append(piece)
        raise RequestError("the answer ended without its last piece")

    async def _pieces(self, prepared: Prepared) -> AsyncGenerator[Chunk | Usage]:
        """The pieces of an answer, its usage last; the request ends with the iterator."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Any]()
        frontend = self.llm.frontend
        frontend.submit(prepared, _sink(loop, pieces))
        try:
            while not isinstance(piece := await pieces.get(), Usage):
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
            yield piece
        finally:
            frontend.thread.cancel(prepared.request.id)


def _sink(loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[Any]) -> Callable[[Any], None]:
    """Puts pieces into a queue of an event loop that runs on another thread."""

    def put(piece: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    return put
