"""Stored responses: retrieved, streamed again, cancelled, deleted; and the tokens of an input."""

from __future__ import annotations

from typing import Any

from jinfer.server.core.chat_request import field_names, ignore_as
from jinfer.server.core.prompt_builder import build_chat_prompt
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import ApiError, invalid_request
from jinfer.server.http.http_responses import HttpResponse, StreamedResponse
from jinfer.server.http.query_params import last_event_id, listed_page, query_value
from jinfer.server.models.served_model import ServedModel
from jinfer.server.openai.response_input import ResponseInput, read_input, to_chat_request
from jinfer.server.openai.response_schemas import InputTokensRequest
from jinfer.server.openai.responses import check_response, failed_event, response_field
from jinfer.server.stores.response_store import UNFINISHED, StoredResponse


async def retrieve(call: RequestContext[Any]) -> HttpResponse | StreamedResponse:
    """A stored response, or the events of one that was made in the background."""
    id = _id(call)
    job = call.service.response_jobs.jobs.get(id)
    after = query_value(call, "starting_after")
    if query_value(call, "stream", False):
        after = last_event_id(call) if after is None else after
        if job is None:
            await _stored(call)
            raise invalid_request(
                "only what is answered in the background, or was lately, is streamed again",
                "stream",
            )
        events = job.events(-1 if after is None else after, call.service.settings.ping)
        return StreamedResponse(events, failed=failed_event)
    if after is not None:
        raise invalid_request("it needs stream=true", "starting_after")
    return HttpResponse(await _response(call))


async def cancel(call: RequestContext[Any]) -> HttpResponse:
    """Ends a response that is made in the background; one that has ended stays as it is."""
    jobs, id = call.service.response_jobs, _id(call)
    if jobs.running(id) is None and not (await _stored(call)).response["background"]:
        raise invalid_request("only an answer in the background can be cancelled")
    await jobs.cancel(id)
    return HttpResponse(await _response(call))


async def delete(call: RequestContext[Any]) -> HttpResponse:
    """Removes a stored response."""
    jobs, id = call.service.response_jobs, _id(call)
    await jobs.cancel(id)
    jobs.jobs.pop(id, None)
    if not await call.service.in_thread(call.service.responses.delete, id):
        raise _missing(id)
    return HttpResponse({"id": id, "object": "response", "deleted": True})


async def input_items(call: RequestContext[Any]) -> HttpResponse:
    """The items that a stored response answers, those of earlier responses included."""
    return HttpResponse(listed_page(call, (await _stored(call)).input))


async def input_tokens(call: RequestContext[InputTokensRequest]) -> HttpResponse:
    """Counts the tokens that a response would answer."""
    check_response(call)
    given = await call.service.in_thread(read_input, call.body, call.service.responses)
    async with call.service.models.use(call.body.model) as hosted:
        call.note(model=hosted.name)
        count = await call.service.in_thread(_count, call, hosted, given)
    return HttpResponse({"object": "response.input_tokens", "input_tokens": count})


def _count(
    call: RequestContext[InputTokensRequest], hosted: ServedModel, given: ResponseInput
) -> int:
    chat = to_chat_request(call.body, given, call.ignore)
    with field_names(response_field):
        ignore = ignore_as(call.ignore, response_field)
        prompt = build_chat_prompt(chat, hosted.session, call.service.settings, ignore)
        return len(prompt.ids())


def _id(call: RequestContext[Any]) -> str:
    return str(call.request.path_params["response_id"])


async def _response(call: RequestContext[Any]) -> dict[str, Any]:
    """The response object as far as it is known."""
    if (job := call.service.response_jobs.running(_id(call))) is not None:
        return job.response
    response = (await _stored(call)).response
    if response["status"] in UNFINISHED:  # of a process that was killed
        error = {"code": "server_error", "message": "the service ended before the answer was done"}
        response = {**response, "status": "failed", "error": error}
    return response


async def _stored(call: RequestContext[Any]) -> StoredResponse:
    """The stored response that the path names. Raises `ApiError`."""
    found = await call.service.in_thread(call.service.responses.get, _id(call))
    if found is None:
        raise _missing(_id(call))
    return found


def _missing(id: str) -> ApiError:
    return ApiError(404, f"Response with id {id[:80]!r} not found.", param="response_id")
