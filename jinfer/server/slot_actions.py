"""Slot actions of llama.cpp: saves, restores and erases what is cached of a slot's last prompt."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from jinfer.api.saved_cache import erase_slot, load_cache, save_cache
from jinfer.api.session import Session
from jinfer.api.user_errors import USER_ERRORS
from jinfer.server.http_errors import ApiError, as_api_error, invalid_request
from jinfer.server.http_responses import HttpResponse
from jinfer.server.query_params import query_value
from jinfer.server.schemas.slot_actions import SlotAction
from jinfer.server.service import RequestContext

_LONGEST = 200  # characters of a file's name


async def slot_action(call: RequestContext[SlotAction]) -> HttpResponse:
    """Handles an action on a slot."""
    folder = call.service.settings.slot_save_path
    if folder is None:
        reason = "slots are not saved here; serve with --slot-save-path"
        raise ApiError(501, reason, code="not_supported")
    action = query_value(call, "action")
    if action is None:
        raise invalid_request("there is no action; write save, restore or erase", "action")
    async with call.service.models.use(query_value(call, "model")) as hosted:
        session = hosted.session
        slot = _slot(call.request.path_params["id"], session.engine.scheduler.slots)
        known: dict[str, Any] = {"id_slot": slot}
        if action == "erase":
            job = session.thread.run
            erased = await call.service.in_engine_thread(job, lambda e: erase_slot(e, slot))
            return HttpResponse({**known, "n_erased": erased})
        name = _checked_name(call.body.filename)
        known |= {"filename": name}
        work = _save if action == "save" else _restore
        try:
            done = await call.service.in_engine_thread(work, session, Path(folder) / name, slot)
        except USER_ERRORS as error:
            raise as_api_error(error, param="filename") from error
        return HttpResponse({**known, **done})


def _slot(text: str, slots: int) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) >= slots:
        raise invalid_request(f"there is no slot {text[:50]!r}; slots are 0 to {slots - 1}", "id")
    return int(text)


def _checked_name(name: str | None) -> str:
    """A name that stays within the folder. Raises `ApiError`."""
    if name is None:
        raise invalid_request("there is no filename; give one", "filename")
    plain = name.isprintable() and name.isascii() and not set(name) & set('/\\:*?"<>|')
    if not plain or not 0 < len(name) <= _LONGEST or name.startswith(".") or name.endswith("."):
        raise invalid_request(
            f"filename is {name[:50]!r}; give a plain name of a file in the server's folder",
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
