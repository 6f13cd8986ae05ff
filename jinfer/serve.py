"""Command-line entry point of the HTTP server: `python -m jinfer.serve SOURCE...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinfer.loader.config.source_errors import SourceError
from jinfer.modelspec.spec_errors import SpecError
from jinfer.parallel.distributed.job_config import JobConfig, find_job
from jinfer.progress import task
from jinfer.startup import gc_paused, importing


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until a signal stops it; returns the exit status. Errors are one line."""
    try:
        with gc_paused():
            from jinfer.server.serve_flags import parse_options
        settings = parse_options(arguments, os.environ)
        job = find_job(settings, os.environ)
        with task("starting"), importing():
            from jinfer.server.run_server import serve
    except ModuleNotFoundError as error:
        needed = f"run: {sys.executable} -m pip install 'jinfer[serve]'"
        print(f"error: the service needs the package {error.name}; {needed}", file=sys.stderr)
        return 2
    except (SourceError, SpecError) as error:
        return _refused(error)
    try:
        return serve(settings) if job is None else _serve_in_job(job, settings)
    except (SourceError, SpecError) as error:
        return _refused(error)


def _refused(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


def _serve_in_job(job: JobConfig, settings: Mapping[str, Any]) -> int:
    # Imported here, since a single process does not need it.
    from jinfer.api.job_processes import run_job, run_worker
    from jinfer.api.user_errors import USER_ERRORS
    from jinfer.server.run_server import serve
    from jinfer.server.serve_flags import model_sources_of

    if settings["models_dir"] or settings["models"]:
        flag = "--models-dir" if settings["models_dir"] else "--models"
        raise SourceError(f"{job.size} processes serve one model; leave out {flag}")
    source, *others = model_sources_of(settings)
    if others:
        raise SourceError(f"{job.size} processes serve one model; leave out {others[0].path}")
    try:
        return run_job(
            job, lambda: serve(settings), lambda: run_worker(source.path, source.overrides)
        )
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _exit() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    _exit()
