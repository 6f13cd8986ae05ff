"""`AsyncLLM`: the asyncio Python API, with `LLM`'s methods as coroutines and async iterators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Unpack

from jinfer.api.base_llm import BaseLLM
from jinfer.api.generation_requests import (
    RequestKeywords,
    build_requests,
    build_stream_request,
)
from jinfer.api.llm import LLM, Prompts
from jinfer.api.prompt_inputs import Params, Prompt
from jinfer.api.session import PreparedRequest
from jinfer.engine.output.completion import (
    Chunk,
    Completion,
    Completions,
    Usage,
    best_of,
    completion,
)
from jinfer.engine.requests import RequestError
from jinfer.sampling.sampling_keywords import ChatKeywords, completing
from jinfer.sampling.sampling_params import CONSTRAINTS, SamplingParams
from jinfer.template.chat_prompt import Message


def _in_thread[**P, T](
    method: Callable[Concatenate[LLM, P], T],
) -> Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, T]]:
    """A method of `LLM` as a coroutine, which runs it in another thread."""

    @wraps(method)
    async def run(self: AsyncLLM, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self.llm, *args, **kwargs)

    return run


class AsyncLLM(BaseLLM):
    """A loaded model for an event loop. Cancelling a task or closing an iterator ends its request.

    It has all of `LLM`'s methods, with the same parameters. Those that compute are coroutines,
    `stream` is an async iterator, and the others (tokenization, properties) are as in `LLM`.

    Attributes:
        llm: the same model's synchronous API.
    """

    def __init__(self, source: str | Path | LLM, **arguments: Any) -> None:
        """Opens and loads a model, as `LLM`, or wraps an open one."""
        if isinstance(source, LLM) and arguments:
            raise RequestError(
                f"the model is open already; give {', '.join(arguments)} to LLM(...)"
            )
        self.llm = source if isinstance(source, LLM) else LLM(source, **arguments)
        self.session = self.llm.session

    @completing(RequestKeywords)
    async def generate(
        self,
        prompts: Prompts,
        params: Params | Sequence[Params] | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> list[Completion]:
        """As `LLM.generate`."""
        requests = await _call_beside_loop(
            [keywords, *(params if isinstance(params, list | tuple) else [params])],
            build_requests,
            self.session,
            prompts,
            params,
            **keywords,
        )
        answers = await asyncio.gather(
            *(
                asyncio.gather(*(self._whole(prepared) for prepared in group))
                for group, _ in requests
            )
        )
        return Completions(
            answer
            for group, (_, resolved) in zip(answers, requests, strict=True)
            for answer in best_of(list(group), resolved)
        )

    @completing(RequestKeywords)
    async def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> AsyncGenerator[Chunk]:
        """As `LLM.stream`."""
        prepared = await _call_beside_loop(
            [keywords, params],
            build_stream_request,
            self.session,
            prompt,
            params,
            **keywords,
        )
        pieces = self._pieces(prepared)
        try:
            async for piece in pieces:
                if isinstance(piece, Chunk):
                    yield piece
        finally:
            await pieces.aclose()

    @completing(ChatKeywords)
    async def chat(
        self,
        messages: str | Sequence[Message],
        params: Params | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> Completion:
        """As `LLM.chat`."""
        prompt, resolved = self.session.chat(messages, params, keywords)
        request: RequestKeywords = {"priority": priority, "timeout": timeout, "adapter": adapter}
        return (await self.generate(prompt, resolved, **request))[0]

    load_adapter = _in_thread(LLM.load_adapter)
    unload_adapter = _in_thread(LLM.unload_adapter)
    update_weights = _in_thread(LLM.update_weights)
    save_cache = _in_thread(LLM.save_cache)
    load_cache = _in_thread(LLM.load_cache)
    sleep = _in_thread(LLM.sleep)
    wake_up = _in_thread(LLM.wake_up)
    logits = _in_thread(LLM.logits)
    score = _in_thread(LLM.score)
    hidden = _in_thread(LLM.hidden)
    pooled = _in_thread(LLM.pooled)
    embed = _in_thread(LLM.embed)
    token_vectors = _in_thread(LLM.token_vectors)
    classify = _in_thread(LLM.classify)
    fill_mask = _in_thread(LLM.fill_mask)
    trace = _in_thread(LLM.trace)
    close = _in_thread(LLM.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _whole(self, prepared: PreparedRequest) -> Completion:
        chunks: list[Chunk] = []
        async for piece in self._pieces(prepared):
            if isinstance(piece, Usage):
                return completion(chunks, piece)
            chunks.append(piece)
        raise RequestError("the answer ended without its last piece")

    async def _pieces(self, prepared: PreparedRequest) -> AsyncGenerator[Chunk | Usage]:
        """The chunks of an answer, then its usage; closing the iterator cancels the request."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self.session.submit(prepared, _sink(loop, pieces))
        try:
            while not isinstance(piece := await pieces.get(), Usage):
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
            yield piece
        finally:
            self.session.thread.cancel(prepared.request.id)


async def _call_beside_loop[**P, T](
    given: Sequence[Any], make: Callable[P, T], /, *arguments: P.args, **more: P.kwargs
) -> T:
    """Calls a function, in another thread if it has a constraint to compile.

    Compiling would block the event loop.

    Args:
        given: sampling parameters, which may have a constraint.
    """
    tables = [
        vars(params) if isinstance(params, SamplingParams) else params for params in given if params
    ]
    if any(
        table.get(name) is not None
        for table in tables
        if isinstance(table, Mapping)
        for name in CONSTRAINTS
    ):
        return await asyncio.to_thread(make, *arguments, **more)
    return make(*arguments, **more)


def _sink(loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[Any]) -> Callable[[Any], None]:
    """A function that puts chunks into a queue of an event loop of another thread."""

    def put(piece: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    return put
