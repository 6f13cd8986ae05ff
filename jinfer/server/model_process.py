"""Model process: serves one model at a Unix socket, for the server that started it.

It reads its job as a line of JSON from standard input, and writes a line of JSON to standard output
when the model is loaded or failed. It ends when its standard input does: with its server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from jinfer.startup import importing, lower_priority

_SWITCH_INTERVAL = 0.001  # as in the server
_POLL = 0.01  # seconds between two checks whether the model is loaded


def main() -> int:
    """Serve until the server has ended; return the exit status."""
    # Terminals and service managers signal all processes; the server ends its models itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries must not print to the answer
    job = json.loads(sys.stdin.buffer.readline())
    sys.setswitchinterval(_SWITCH_INTERVAL)
    if not job["socket"]:
        lower_priority()
    # With a low priority, for the streams of other models: see `jinfer.startup`.
    with ThreadPoolExecutor(1, initializer=lower_priority) as thread:
        thread.submit(_import).result()
    from jinfer.server.http import request_log

    log = request_log.set_up_logging(**job["settings"]["log"])
    # The server logs that the model was loaded.
    logging.getLogger("jinfer.server").setLevel(logging.WARNING)
    try:
        if job["socket"]:
            asyncio.run(_serve(job, output))
        else:
            _describe(job, output)
    finally:
        log.stop()
    return 0


def _import() -> None:
    """Import slow modules."""
    with importing():
        import uvicorn  # noqa: F401

        import jinfer.server.app
        import jinfer.server.run_server  # noqa: F401


def _describe(job: dict[str, Any], output: Any) -> None:
    """Describe a model without its weights."""
    from jinfer.api.user_errors import USER_ERRORS
    from jinfer.server.http.server_settings import ModelSource
    from jinfer.server.ollama.ollama_models import describe

    try:
        text, details = describe(ModelSource(**job["source"]))
        answer: dict[str, Any] = {"description": text, "details": asdict(details)}
    except USER_ERRORS as error:
        answer = {"error": " ".join(str(error).split())}
    print(json.dumps(answer), file=output, flush=True)


async def _serve(job: dict[str, Any], output: Any) -> None:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from jinfer import progress
    from jinfer.server.app import build_app
    from jinfer.server.core.service import Service
    from jinfer.server.http.server_settings import ModelSource, ServerSettings
    from jinfer.server.models.model_registry import ModelRegistry
    from jinfer.server.run_server import http_protocol
    from jinfer.server.serve_flags import named_functions

    progress.show(False)
    source, processors = ModelSource(**job["source"]), named_functions(job["processors"])
    settings = ServerSettings(**{**job["settings"], "logits_processors": processors})
    services, failures = list[Service](), list[BaseException]()

    async def described(request: Request) -> JSONResponse:
        """Return the model's statistics and adapters."""
        (model,) = services[0].models.models
        adapters = model.adapter_sources
        return JSONResponse({"stats": asdict(model.llm.stats()), "adapters": adapters})

    app = build_app(
        ModelRegistry((source,)),
        settings,
        on_load_error=failures.append,
        on_service=services.append,
        more=[Route("/worker", described)],
    )
    (service,) = services
    (model,) = service.models.models

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(job["socket"])
        listener.listen()
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            http=http_protocol(),
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=1,
            lifespan="on",
        )
        config.load()
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve([listener]))
        while not (service.models.ready or failures or serving.done()):
            await asyncio.sleep(_POLL)
        answer: dict[str, Any] = {"error": " ".join(str(failures[0]).split())} if failures else {}
        if model.details is not None:
            answer = {"details": asdict(model.details), "adapters": model.adapter_sources}
        print(json.dumps(answer), file=output, flush=True)
        if not failures:
            await asyncio.to_thread(sys.stdin.buffer.read)  # until the server has ended
            lower_priority()
            service.cancel_answers()
            await asyncio.sleep(_POLL)
        server.should_exit = True
        await serving


if __name__ == "__main__":
    sys.exit(main())
