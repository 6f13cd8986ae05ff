"""LoRA adapter of a request: which one it means."""

from __future__ import annotations

from jinfer.api.session import Session
from jinfer.engine.requests import AdapterUse, RequestError
from jinfer.server.http_errors import as_api_error, invalid_request
from jinfer.server.schemas.sampling_fields import SamplingFields


def adapter_of(body: SamplingFields, session: Session) -> AdapterUse | None:
    """The adapter of a request: that whose name its `model` is, or the one of its `lora`.

    Raises:
        ApiError: there is none of that number, or there are several.
    """
    adapters = session.adapters
    asked = [one for one in body.lora or () if one.scale]
    if not asked:
        named = getattr(body, "model", None)
        return adapters.find(named) if named in adapters.loaded else None
    if len(asked) > 1:
        raise invalid_request("one adapter at a time has a scale other than 0", "lora")
    names = list(adapters.loaded)
    if not 0 <= asked[0].id < len(names):
        raise invalid_request(f"there is no adapter {asked[0].id}; there are {len(names)}", "lora")
    try:
        return adapters.find(names[asked[0].id], asked[0].scale)
    except RequestError as error:
        raise as_api_error(error, param="lora") from error
