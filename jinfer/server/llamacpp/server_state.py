"""Routes of llama.cpp besides completions: slots, models, adapters, resumable streams."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from pydantic import Field, RootModel

from jinfer.api.saved_cache import erase_slot, load_cache, save_cache
from jinfer.api.session import Session
from jinfer.api.user_errors import USER_ERRORS
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import (
    ApiError,
    as_api_error,
    invalid_request,
)
from jinfer.server.http.http_responses import SSE_MEDIA_TYPE, HttpResponse, StreamedResponse
from jinfer.server.http.query_params import last_event_id, query_value
from jinfer.server.http.schema_base import RequestModel, ResponseModel

routes = Routes(tag="llama.cpp")


class SlotAction(RequestModel):
    """The body of an action; empty to erase."""

    filename: str | None = Field(None, description="in the folder of --slot-save-path")


class SlotChange(ResponseModel):
    """The result of an action: numbers of tokens and of bytes."""

    id_slot: int
    filename: str | None = None
    n_saved: int | None = None
    n_written: int | None = None
    n_restored: int | None = None
    n_read: int | None = None
    n_erased: int | None = None
    timings: dict[str, float] | None = None


class SlotState(ResponseModel):
    """A slot for a running sequence."""

    id: int
    n_ctx: int
    is_processing: bool


class SlotStates(RootModel[list[SlotState]]):
    """The list of slots."""


_LONGEST = 200  # characters of a file name


@routes.add("POST /slots/{id}", SlotChange, query=("action", "model"))
async def slot_action(request: RequestContext[SlotAction]) -> HttpResponse:
    """Save, restore or erase the cache of a slot."""
    folder = request.service.settings.slot_save_path
    if folder is None:
        reason = "the server does not save slots; serve with --slot-save-path"
        raise ApiError(501, reason, code="not_supported")
    action = query_value(request.http, "action")
    if action is None:
        raise invalid_request("there is no action; use save, restore or erase", "action")
    async with request.service.models.use(query_value(request.http, "model")) as model:
        session = model.session
        slot = _slot(request.http.path_params["id"], session.engine.scheduler.slots)
        known: dict[str, Any] = {"id_slot": slot}
        if action == "erase":
            job = session.thread.run
            erased = await request.service.in_engine_thread(job, lambda e: erase_slot(e, slot))
            return HttpResponse({**known, "n_erased": erased})
        name = _checked_name(request.body.filename)
        known |= {"filename": name}
        work = _save if action == "save" else _restore
        try:
            done = await request.service.in_engine_thread(work, session, Path(folder) / name, slot)
        except USER_ERRORS as error:
            raise as_api_error(error, param="filename") from error
        return HttpResponse({**known, **done})


def _slot(text: str, slots: int) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) >= slots:
        raise invalid_request(f"there is no slot {text[:50]!r}; slots are 0 to {slots - 1}", "id")
    return int(text)


def _checked_name(name: str | None) -> str:
    """Check that a file name stays within the folder. Raises `ApiError`."""
    if name is None:
        raise invalid_request("there is no filename", "filename")
    plain = name.isprintable() and name.isascii() and not set(name) & set('/\\:*?"<>|')
    if not plain or not 0 < len(name) <= _LONGEST or name.startswith(".") or name.endswith("."):
        raise invalid_request(
            f"filename is {name[:50]!r}; use a plain file name",
            "filename",
        )
    return name


def _save(session: Session, path: Path, slot: int) -> dict[str, Any]:
    begun = time.perf_counter()
    os.makedirs(path.parent, mode=0o700, exist_ok=True)
    saved = save_cache(session, path, slot)
    seconds = time.perf_counter() - begun
    timings = {"save_ms": 1000 * seconds}
    return {"n_saved": saved.tokens, "n_written": saved.nbytes, "timings": timings}


def _restore(session: Session, path: Path, slot: int) -> dict[str, Any]:
    begun = time.perf_counter()
    loaded = load_cache(session, path, slot)
    seconds = time.perf_counter() - begun
    timings = {"restore_ms": 1000 * seconds}
    return {"n_restored": loaded.tokens, "n_read": loaded.nbytes, "timings": timings}


@routes.add("GET /slots", SlotStates, query=("model",))
async def slots(request: RequestContext[Any]) -> HttpResponse:
    """List the slots of a model."""
    async with request.service.models.use(request.http.query_params.get("model")) as model:
        session = model.session
        running = {sequence.slot: sequence for sequence in list(session.engine.scheduler.running)}
        shown = []
        for number in range(session.engine.scheduler.slots):
            item = running.get(number)
            state: dict[str, Any] = {
                "id": number,
                "n_ctx": session.opened.context,
                "is_processing": item is not None,
            }
            if item is not None:
                prompt = len(item.request.prompt)
                state |= {
                    "id_task": item.request.id,
                    "n_prompt_tokens": prompt,
                    "n_prompt_tokens_cache": item.cached or 0,
                    "n_prompt_tokens_processed": min(item.computed, prompt),
                    "next_token": {
                        "n_decoded": max(0, len(item.tokens) - prompt),
                        "n_remain": max(0, item.request.limit - len(item.tokens)),
                    },
                }
            shown.append(state)
        return HttpResponse(shown)


class ModelChoice(RequestModel):
    """A request to load or unload a model (llama.cpp)."""

    model: str = Field(description="name of a model")


class Success(ResponseModel):
    """The model was loaded or unloaded."""

    success: bool


@routes.add("POST /models/load", Success)
async def load_model(request: RequestContext[ModelChoice]) -> HttpResponse:
    """Load a model, or wake it."""
    model = await request.service.models.load(request.body.model)
    request.note(model=model.name)
    return HttpResponse({"success": True})


@routes.add("POST /models/unload", Success)
async def unload_model(request: RequestContext[ModelChoice]) -> HttpResponse:
    """Unload a model once its requests have ended."""
    models = request.service.models
    model = models.by_name(request.body.model)
    request.note(model=model.name)
    await models.unload(model)
    return HttpResponse({"success": True})


class AdapterState(ResponseModel):
    """An adapter, as llama.cpp's /lora-adapters."""

    id: int
    name: str
    path: str
    scale: float


class AdapterStates(RootModel[list[AdapterState]]):
    """The list of adapters."""


@routes.add("GET /lora-adapters", AdapterStates)
async def list_adapters(request: RequestContext[Any]) -> HttpResponse:
    """List the LoRA adapters of the first model."""
    async with request.service.models.use(None) as model:
        adapters = model.session.adapters
        listed = [
            {"id": number, "name": name, "path": adapters.sources.get(name, ""), "scale": 0.0}
            for number, name in enumerate(adapters.loaded)
        ]
    return HttpResponse(listed)


class StreamLookup(RequestModel):
    """A request for the states of streams."""

    conversation_ids: list[str] = Field(
        description="id of the conversation, as in X-Conversation-Id", max_length=1000
    )


class StreamState(ResponseModel):
    """The state of a stream."""

    conversation_id: str
    is_done: bool
    total_bytes: int
    started_at: int
    completed_at: int


class StreamStates(RootModel[list[StreamState]]):
    """The states of known streams."""


@routes.add(
    "GET /v1/stream",
    stream=SSE_MEDIA_TYPE,
    media_type=SSE_MEDIA_TYPE.partition(";")[0],
    query=("conv_id", "from"),
)
async def resume(request: RequestContext[Any]) -> StreamedResponse:
    """Read a stream again that began with X-Conversation-Id."""
    stream = request.service.streams.find(_id(request))
    after, offset = last_event_id(request.http), query_value(request.http, "from")
    if after is None or offset is not None:
        place, skip = stream.place_of(offset or 0)
    else:
        place, skip = after + 1, 0
    return StreamedResponse(stream.read(place, skip, request.service.settings.ping))


@routes.add("POST /v1/streams/lookup", StreamStates)
async def look_up(request: RequestContext[StreamLookup]) -> HttpResponse:
    """Look up such streams."""
    streams = request.service.streams.streams
    found = [
        stream for id in dict.fromkeys(request.body.conversation_ids) if (stream := streams.get(id))
    ]
    return HttpResponse(
        [
            {
                "conversation_id": item.id,
                "is_done": item.completed is not None,
                "total_bytes": item.total,
                "started_at": int(item.started),
                "completed_at": int(item.completed or 0),
            }
            for item in found
        ]
    )


@routes.add("DELETE /v1/stream", query=("conv_id",), success=204)
async def stop(request: RequestContext[Any]) -> HttpResponse:
    """Stop such a stream."""
    id, streams = _id(request), request.service.streams
    if id not in streams.streams:
        streams.forward(id)
    await streams.stop(id)
    return HttpResponse(b"", 204)


def _id(request: RequestContext[Any]) -> str:
    id = query_value(request.http, "conv_id")
    if not id:
        raise invalid_request("there is no conv_id; give the id of the conversation", "conv_id")
    return str(id)
