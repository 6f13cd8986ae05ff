"""Model loading: loads a served model, and checks whether a model can be opened."""

from __future__ import annotations

import contextlib
import logging

from jinfer.api.build_engine import all_shapes
from jinfer.api.llm import LLM
from jinfer.api.user_errors import USER_ERRORS
from jinfer.loader.open_keywords import override_tables
from jinfer.loader.open_model import open_files
from jinfer.ops.backend import start
from jinfer.sampling.request_errors import ConstraintError
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models.model_details import ModelDetails, details_of
from jinfer.server.models.model_worker import ModelWorker

_log = logging.getLogger("jinfer.server")
type Opened = tuple[LLM | ModelWorker, ModelDetails]
_WARM_UP_TOKENS = 33  # tokens of the warm-up prompt


def open_llm(source: ModelSource, warm_up: bool) -> Opened:
    """Open and load a model.

    Args:
        warm_up: whether to compile all programs in the background of the first requests.
    """
    # The warm-up's programs are compiled while the weights are read.
    llm = LLM(source.path, first=lambda llm: [0] * _WARM_UP_TOKENS, **source.overrides)
    if llm.spec.engine.warm_up:
        warm_up_constraints(llm)
    elif warm_up:
        engine = llm.session.engine
        engine.runner.programs.announce(all_shapes(engine))
    return llm, details_of(llm)


def has_own_processes(settings: ServerSettings) -> bool:
    """Return whether models that are loaded later have their own processes."""
    start()
    import jax

    return settings.model_processes and jax.default_backend() == "cpu"


def open_beside(source: ModelSource, settings: ServerSettings) -> Opened:
    """Load a model in its own process, so that the streams of other models continue.

    On a GPU the model is loaded here, because two processes would contend for its memory.
    """
    if not has_own_processes(settings):
        return open_llm(source, settings.warm_up)
    worker = ModelWorker(source, settings)
    return worker, worker.details


def warm_up_constraints(llm: LLM) -> None:
    """Build the vocabulary tables of structured outputs before the first constraint needs them."""
    # Imported here, because it is not needed at startup.
    from jinfer.sampling.structured import compile_constraint, forget_constraints

    if llm.tokenizer is not None and llm.spec.generates:
        with contextlib.suppress(ConstraintError):
            compile_constraint(llm.tokenizer, json_schema=True)
        if llm.session.closed:  # meanwhile
            forget_constraints(llm.tokenizer)


def examine(source: ModelSource) -> tuple[str, int]:
    """Return why a model's files cannot be opened ("": they can), and the bytes of the weights."""
    try:
        checkpoint = open_files(source.path, override_tables(source.overrides)).checkpoint
    except USER_ERRORS as error:
        return " ".join(str(error).split()), 0
    except Exception as error:
        _log.exception("%s could not be opened", source.name)
        return f"{type(error).__name__}: {error}", 0
    return "", sum(tensor.nbytes for tensor in checkpoint.tensors.values())
