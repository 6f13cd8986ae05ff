"""Model loading: opens a served model in a thread, and says why a model cannot be opened."""

from __future__ import annotations

import contextlib
import logging

from jinfer.api.build_engine import all_shapes
from jinfer.api.llm import LLM
from jinfer.api.user_errors import USER_ERRORS
from jinfer.opening.open_keywords import override_tables
from jinfer.opening.open_model import open_files
from jinfer.ops.backend import start
from jinfer.sampling.request_errors import ConstraintError
from jinfer.server.model_details import ModelDetails, details_of
from jinfer.server.model_worker import ModelWorker
from jinfer.server.server_settings import ModelSource, ServerSettings

_log = logging.getLogger("jinfer.server")
type Opened = tuple[LLM | ModelWorker, ModelDetails]
_WARM_UP_TOKENS = 33  # tokens of the warm-up prompt


def open_llm(source: ModelSource, warm_up: bool) -> Opened:
    """Opens and loads a model.

    Args:
        warm_up: all programs are made in the background, beside its first requests.
    """
    # The warm-up's programs are compiled while the weights are read.
    llm = LLM(source.path, first=lambda llm: [0] * _WARM_UP_TOKENS, **source.overrides)
    if llm.spec.engine.warm_up:
        warm_up_constraints(llm)
    elif warm_up:
        engine = llm.session.engine
        engine.programs.announce(all_shapes(engine))
    return llm, details_of(llm)


def has_own_processes(settings: ServerSettings) -> bool:
    """Whether models that are opened beside others have processes of their own."""
    start()
    import jax

    return settings.model_processes and jax.default_backend() == "cpu"


def open_beside(source: ModelSource, settings: ServerSettings) -> Opened:
    """Loads a model beside others, whose streams go on meanwhile: in a process of its own.

    Two processes would contend for the memory of a GPU, so there it is loaded in this one.
    """
    if not has_own_processes(settings):
        return open_llm(source, settings.warm_up)
    worker = ModelWorker(source, settings)
    return worker, worker.details


def warm_up_constraints(llm: LLM) -> None:
    """Builds the vocabulary tables of structured outputs before the first constraint needs them."""
    # Here: it is not needed at startup.
    from jinfer.sampling.structured import compile_constraint, forget_constraints

    if llm.tokenizer is not None and llm.spec.generates:
        with contextlib.suppress(ConstraintError):
            compile_constraint(llm.tokenizer, json_schema=True)
        if llm.session.closed:  # meanwhile
            forget_constraints(llm.tokenizer)


def examine(source: ModelSource) -> tuple[str, int]:
    """Why a model's files cannot be opened ("": they can), and the bytes of its weights."""
    try:
        checkpoint = open_files(source.path, override_tables(source.overrides)).checkpoint
    except USER_ERRORS as error:
        return " ".join(str(error).split()), 0
    except Exception as error:
        _log.exception("%s could not be opened", source.name)
        return f"{type(error).__name__}: {error}", 0
    return "", sum(tensor.nbytes for tensor in checkpoint.tensors.values())
