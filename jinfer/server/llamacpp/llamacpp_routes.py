"""llama.cpp routes: the table of the endpoints of llama.cpp's dialect."""

from __future__ import annotations

from functools import partial

from jinfer.server.core.endpoint import Endpoint
from jinfer.server.http.http_responses import SSE_MEDIA_TYPE
from jinfer.server.llamacpp import llamacpp_completion as completion
from jinfer.server.llamacpp import model_routes, slots, stream_routes

_llamacpp = partial(Endpoint, tag="llama.cpp")
_stream = partial(_llamacpp, stream_media_type=SSE_MEDIA_TYPE)

LLAMACPP_ENDPOINTS: tuple[Endpoint, ...] = (
    _llamacpp(
        "POST /models/load",
        model_routes.load_model,
        "Load a model, or wake it",
        model_routes.Success,
    ),
    _llamacpp(
        "POST /models/unload",
        model_routes.unload_model,
        "Unload a model once its requests have ended",
        model_routes.Success,
    ),
    _llamacpp(
        "GET /lora-adapters",
        model_routes.list_adapters,
        "List the LoRA adapters of the first model",
        model_routes.AdapterStates,
    ),
    _stream(
        "POST /completion", completion.completion_route, "Continue texts", completion.LlamaResponse
    ),
    _stream(
        "POST /infill", completion.infill, "Fill in the middle of a text", completion.LlamaResponse
    ),
    _llamacpp(
        "GET /props",
        completion.props,
        "Describe a model and its default parameters",
        completion.Props,
        query=("model",),
    ),
    _llamacpp(
        "GET /slots",
        slots.slots,
        "List the slots of a model",
        slots.SlotStates,
        query=("model",),
    ),
    _llamacpp(
        "POST /slots/{id}",
        slots.slot_action,
        "Save, restore or erase the cache of a slot",
        slots.SlotChange,
        query=("action", "model"),
    ),
    _stream(
        "GET /v1/stream",
        stream_routes.resume,
        "Read a stream again that began with X-Conversation-Id",
        media_type=SSE_MEDIA_TYPE.partition(";")[0],
        query=("conv_id", "from"),
    ),
    _llamacpp(
        "DELETE /v1/stream",
        stream_routes.stop,
        "Stop such a stream",
        query=("conv_id",),
        success=204,
    ),
    _llamacpp(
        "POST /v1/streams/lookup",
        stream_routes.look_up,
        "Look up such streams",
        stream_routes.StreamStates,
    ),
)
