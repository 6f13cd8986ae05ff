"""Slots of llama.cpp: their state, and actions that save, restore and erase their caches."""

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
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.query_params import query_value
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
