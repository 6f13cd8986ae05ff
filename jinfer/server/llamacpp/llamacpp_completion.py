"""llama.cpp completion: /completion, /infill, and /props, which clients query."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, RootModel

from jinfer.api.image_inputs import EncodedPrompt, encode_images
from jinfer.api.session import Session
from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.output.completion import Chunk, Completion, TokenLogprob, completion
from jinfer.server.core import usage
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.image_parts import ImageParts
from jinfer.server.core.prompt_builder import (
    _no_tokens,
    check_prompt_count,
    fim_options,
    is_single_prompt,
    prompt_ids,
)
from jinfer.server.core.prompt_requests import PromptRequests, prepare_prompt
from jinfer.server.core.request_params import LLAMA_CPP, RequestOptions, request_options
from jinfer.server.core.request_runner import RequestRunner
from jinfer.server.core.sampling_fields import (
    NO_CAPTURE,
    SamplingFields,
    check_stream,
    reject_fields,
)
from jinfer.server.core.service import Prepare, RequestContext
from jinfer.server.http import schema_base as base
from jinfer.server.http.http_errors import as_api_error, invalid_request, unsupported_field
from jinfer.server.http.http_responses import (
    SSE_MEDIA_TYPE,
    HttpResponse,
    StreamedResponse,
    batch_bytes,
    sse_event,
)
from jinfer.server.http.server_settings import ServerSettings
from jinfer.server.llamacpp.llamacpp_response import set_parameters, slot_of, statistics
from jinfer.server.models.served_model import ServedModel
from jinfer.tokenizer import TokenizerError
from jinfer.tokenizer.fill_in_middle import infill_prompt
from jinfer.version import __version__

MEDIA_MARKER = "<__media__>"

routes = Routes(tag="llama.cpp")


class LlamaText(base.RequestModel):
    """A prompt with images."""

    prompt_string: str = Field(description=f"has {MEDIA_MARKER} at the place of each image")
    multimodal_data: list[str] | None = Field(None, description="images in base64")


_Piece = str | int
LlamaPrompt = str | LlamaText | list[_Piece] | list[str | LlamaText | list[_Piece]]


class LlamaRequest(SamplingFields):
    """A request to /completion; a list that mixes texts and ids is one prompt."""

    prompt: LlamaPrompt
    model: str | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = Field(None, description="returned fields; a/b means b in a")


class ExtraFile(base.RequestModel):
    """Another file, as context."""

    text: str
    filename: str | None = None


class InfillRequest(LlamaRequest):
    """A request to /infill: the text between a prefix and a suffix."""

    input_prefix: str
    input_suffix: str
    prompt: LlamaPrompt = Field("", description="text after input_prefix")
    input_extra: list[ExtraFile] | None = Field(None, max_length=base.MAX_ITEMS)


class LlamaCompletion(base.ResponseModel):
    """A whole answer, or the last event of a stream; `response_fields` selects fields."""

    index: int = 0
    content: str = ""
    tokens: list[int] | None = None
    id_slot: int = -1
    stop: bool = True
    model: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    tokens_cached: int = 0
    generation_settings: dict[str, Any] | None = None
    has_new_line: bool = False
    truncated: bool = False
    stop_type: Literal["eos", "limit", "word", "none"] = "none"
    stopping_word: str = ""
    timings: base.Timings | None = None


class LlamaResponse(RootModel[LlamaCompletion | list[LlamaCompletion]]):
    """The response of /completion: one answer, or a list of several."""


class Props(base.ResponseModel):
    """The response of /props."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    modalities: dict[str, bool]
    media_marker: str
    is_sleeping: bool
    build_info: str


_ROUTE = frozenset(LlamaRequest.model_fields) - frozenset(SamplingFields.model_fields)


@routes.add("POST /completion", LlamaResponse, stream=SSE_MEDIA_TYPE)
async def completion_route(
    request: RequestContext[LlamaRequest],
) -> HttpResponse | StreamedResponse:
    """Continue texts."""
    return await answer_prompts(request, _prepare_prompts)


async def answer_prompts(
    request: RequestContext[LlamaRequest], prepare: Prepare
) -> HttpResponse | StreamedResponse:
    """Answer prompts in llama.cpp's format, whole or streamed."""
    body = request.body
    check_stream(body, body.stream, None)
    if body.prompt_logprobs is not None:
        raise unsupported_field("use /v1/completions", "prompt_logprobs")
    reject_fields(body, return_token_ids="use return_tokens", capture=NO_CAPTURE)
    if body.stream:
        return StreamedResponse(_stream_events(request, prepare))
    async with request.running(prepare) as (model, run):
        answer = _CompletionFormatter(request, model, run)
        whole = [
            (i, completion)
            for i, group in enumerate(await run.completions())
            for completion in group
        ]
        answers = [answer.body(number, *item) for number, item in enumerate(whole)]
        return HttpResponse(answers[0] if answer.single else answers)


def _prepare_prompts(
    request: RequestContext[LlamaRequest], model: ServedModel
) -> list[PromptRequests]:
    session, limit = model.session, request.service.settings.max_prompts
    sampling = request_options(request.body, session, LLAMA_CPP, None, _ROUTE)
    prompt, settings = request.body.prompt, request.service.settings
    listed = prompt if isinstance(prompt, list) else [prompt]
    if not any(isinstance(item, LlamaText) and item.multimodal_data for item in listed):
        prompts = prompt_ids(_plain(prompt), session, limit)
        return prepare_llama(request, session, prompts, sampling)
    check_prompt_count(listed, limit, "prompt")
    encoded = [
        _with_images(item, session, settings)
        if isinstance(item, LlamaText)
        else EncodedPrompt(prompt_ids([item], session, limit)[0])
        for item in listed
    ]
    return prepare_llama(request, session, encoded, sampling)


def _with_images(prompt: LlamaText, session: Session, settings: ServerSettings) -> EncodedPrompt:
    """Tokenize a text with images at its markers. Raises `ApiError`."""
    conversation, tokenizer = session.opened.conversation, session.tokenizer
    spec = conversation.image
    images = ImageParts(settings, spec is not None)
    for data in prompt.multimodal_data or ():
        images.add(f"data:;base64,{data}", "prompt.multimodal_data")
    text = prompt.prompt_string
    if (count := text.count(MEDIA_MARKER)) != len(images.images):
        raise invalid_request(
            f"prompt_string has {count} times {MEDIA_MARKER}, and multimodal_data has "
            f"{len(images.images)} images",
            "prompt",
        )
    # Imported here, because text alone does not need it.
    from jinfer.images import hide_marker

    marker = conversation.image_marker(tokenizer)
    pieces = [hide_marker(piece, marker) for piece in text.split(MEDIA_MARKER)]
    try:
        text = marker.join(pieces)
        return encode_images(tokenizer, text, images.images, spec, special=True)
    except USER_ERRORS as error:
        raise as_api_error(error, param="prompt") from error


def prepare_llama(
    request: RequestContext[LlamaRequest],
    session: Session,
    prompts: Sequence[list[int] | EncodedPrompt],
    sampling: RequestOptions,
    param: str = "prompt",
) -> list[PromptRequests]:
    """Prepare the engine requests of prompts. Raises `ApiError`."""
    timeout = request.service.settings.timeout
    return [
        prepare_prompt(session, prompt, sampling, param=param, timeout=timeout)
        for prompt in prompts
    ]


def _plain(prompt: LlamaPrompt) -> str | list[Any]:
    """Convert a prompt to the format of the other routes."""
    if isinstance(prompt, list):
        return [part.prompt_string if isinstance(part, LlamaText) else part for part in prompt]
    return prompt.prompt_string if isinstance(prompt, LlamaText) else prompt


@dataclass
class _CompletionFormatter:
    """Formats the answers to a completion request."""

    request: RequestContext[LlamaRequest]
    model: ServedModel
    run: RequestRunner

    @property
    def single(self) -> bool:
        """Whether the request has a single answer, which is returned without a list."""
        return is_single_prompt(_plain(self.request.body.prompt)) and len(self.run.prepared) == 1

    def body(self, index: int, prompt: int, answer: Completion) -> dict[str, Any]:
        """Return the response body of an answer."""
        shown = {
            "index": index,
            "content": answer.text,
            "tokens": answer.token_ids if self.request.body.return_tokens else [],
            **statistics(self.model, self.run.jobs[prompt], answer),
        }
        if self.request.body.n_probs:
            shown["completion_probabilities"] = self.probabilities(answer.logprobs or ())
        return self._selected(shown)

    def _selected(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Select the requested response fields."""
        paths = self.request.body.response_fields
        if not paths:
            return shown
        selected: dict[str, Any] = {}
        for path in paths:
            value: Any = shown
            for step in path.split("/"):
                value = value.get(step) if isinstance(value, dict) else None
            if value is not None:
                selected[path] = value
        return selected

    def probabilities(self, entries: Any) -> list[dict[str, Any]]:
        """Convert log-probabilities to llama.cpp's format."""
        name = "top_probs" if self.request.body.post_sampling_probs else "top_logprobs"
        tops = [[*map(self._entry, self._top(entry))] for entry in entries]
        return [{**self._entry(entry), name: top} for entry, top in zip(entries, tops, strict=True)]

    def _top(self, entry: TokenLogprob) -> list[TokenLogprob]:
        """Return the likeliest tokens that could be sampled."""
        after = self.request.body.post_sampling_probs
        return [token for token in entry.top if not after or token.logprob > -math.inf]

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        data = self.model.session.tokenizer.spelled(entry.id)
        shown = {"logprob": usage.finite_logprob(entry.logprob)}
        if self.request.body.post_sampling_probs:
            shown = {"prob": math.exp(entry.logprob)}
        return {
            "id": entry.id,
            "token": data.decode("utf-8", "replace"),
            "bytes": list(data),
            **shown,
        }

    def chunk(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """Return a streamed chunk other than the last."""
        self.run.mark_shown(index, chunk)
        so_far = self.run.shown_usage(index)
        shown = {
            "index": index,
            "content": chunk.text,
            "tokens": list(chunk.token_ids),
            "stop": False,
            "id_slot": slot_of(self.run.jobs[self.run.owners[index]]),
            "tokens_predicted": so_far.completion_tokens,
            "tokens_evaluated": so_far.prompt_tokens,
        }
        if self.request.body.n_probs:
            shown["completion_probabilities"] = self.probabilities(chunk.logprobs)
        return shown | self._timings(index)

    def progress(self, *, first: bool) -> list[bytes]:
        """Return prefill progress events; see `RequestRunner.progress`."""
        shown = {"content": "", "tokens": [], "stop": False}
        return [
            sse_event({"index": index, **shown, "prompt_progress": known, **self._timings(index)})
            for index, known in self.run.progress(first=first)
        ]

    def _timings(self, index: int) -> dict[str, Any]:
        """Return the timings so far, if requested."""
        if not self.request.body.timings_per_token:
            return {}
        return {"timings": usage.llamacpp_timings(self.run.shown_usage(index))}


async def _stream_events(
    request: RequestContext[LlamaRequest], prepare: Prepare
) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of a stream; the last event of an answer has its statistics."""
    async with request.running(prepare) as (model, run):
        answer = _CompletionFormatter(request, model, run)
        chunks: list[list[Chunk]] = [[] for _ in run.prepared]
        ended: set[int] = set()
        async with contextlib.aclosing(run.chunks()) as pieces:
            async for batch in pieces:
                events = answer.progress(first=batch != []) if request.body.return_progress else []
                for index, chunk in batch or ():
                    chunks[index].append(chunk)
                    events.append(sse_event(answer.chunk(index, chunk)))
                for index in run.usages.keys() - ended:
                    ended.add(index)
                    events.append(_end(answer, index, chunks[index]))
                yield batch_bytes(events, batch)
        left = sorted(run.usages.keys() - ended)
        yield b"".join(_end(answer, index, chunks[index]) for index in left)


def _end(answer: _CompletionFormatter, index: int, chunks: list[Chunk]) -> bytes:
    """Format the final event of an answer, without its text."""
    run = answer.run
    whole = answer.body(index, run.owners[index], completion(chunks, run.usages[index]))
    empty: dict[str, Any] = {"content": "", "tokens": []}
    whole.pop("completion_probabilities", None)
    return sse_event({name: empty.get(name, value) for name, value in whole.items()})


@routes.add("GET /props", Props, query=("model",))
async def props(request: RequestContext[Any]) -> HttpResponse:
    """Describe a model and its default parameters."""
    name = request.http.query_params.get("model")
    async with request.service.models.peek(name) as model:
        session, opened = model.session, model.session.opened
        tokenizer = opened.tokenizer
        names = {}
        if tokenizer is not None:
            bos = tokenizer.bos_id
            names["bos_token"] = "" if bos is None else tokenizer.token(bos)
            names["eos_token"] = "".join(tokenizer.token(id) for id in tokenizer.eos_ids[:1])
        defaults = set_parameters(session.params()) if opened.spec.generates else {}
        conversation = opened.conversation
        return HttpResponse(
            {
                "default_generation_settings": {"n_ctx": opened.context, "params": defaults},
                "total_slots": session.engine.scheduler.slots,
                "model_alias": model.name,
                "model_path": model.source.path,
                "chat_template": conversation.prompt.template or conversation.jinja or "",
                **names,
                "modalities": {"vision": conversation.image is not None, "audio": False},
                "media_marker": MEDIA_MARKER,
                "is_sleeping": model.state == "sleeping",
                "build_info": f"jinfer {__version__}",
            }
        )


_INFILL_ROUTE = frozenset(InfillRequest.model_fields) - frozenset(SamplingFields.model_fields)


@routes.add("POST /infill", LlamaResponse, stream=SSE_MEDIA_TYPE)
async def infill(request: RequestContext[InfillRequest]) -> HttpResponse | StreamedResponse:
    """Fill in the middle of a text."""
    if not isinstance(request.body.prompt, str):
        raise invalid_request("it must be a text, which follows input_prefix", "prompt")
    return await answer_prompts(request, _prepare_infill)


def _prepare_infill(
    request: RequestContext[InfillRequest], model: ServedModel
) -> list[PromptRequests]:
    body, session = request.body, model.session
    sampling = request_options(body, session, LLAMA_CPP, None, _INFILL_ROUTE)
    files = [(file.filename or "file", file.text) for file in body.input_extra or ()]
    # Editors send whole files: they are truncated to the context, with room for an answer.
    context = session.opened.context
    answer = min(sampling.params.max_tokens or context // 4, context // 2)
    try:
        ids = infill_prompt(
            session.tokenizer,
            f"{body.input_prefix}{body.prompt}",
            body.input_suffix,
            files,
            room=context - answer,
        )
    except TokenizerError as error:
        raise _no_tokens(error, "input_suffix") from error
    options = fim_options(session, sampling)
    return prepare_llama(request, session, [ids], options, param="input_prefix")
