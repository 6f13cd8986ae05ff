"""Model details: format, sizes and capabilities of a model, known after it was opened."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jinfer.api.llm import LLM
from jinfer.loader.open_model import Opened, open_model
from jinfer.loader.weights.model_size import sizes_of
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.ops.attention.kv_cache import nbytes
from jinfer.server.http.server_settings import ModelSource


@dataclass(frozen=True)
class ModelDetails:
    """A model's format, sizes and abilities.

    Attributes:
        format: format of the checkpoint.
        family: model family; "": unknown.
        stored_as: format of most weights.
        context: tokens that a sequence may have.
        trained_context: context length in training.
        vocab, hidden: vocabulary size and hidden size; 0: the model has none.
        parameters: number of parameters.
        size: bytes of the weights in memory, or in the files before the first load.
        capabilities: embeddings, completion, chat, multimodal (it sees images), fill-mask,
            classify, rerank.
    """

    format: str
    family: str
    stored_as: str
    context: int
    trained_context: int
    vocab: int
    hidden: int
    parameters: int
    size: int
    capabilities: tuple[str, ...]


def details_of(llm: LLM) -> ModelDetails:
    """Return the details of a loaded model."""
    session = llm.session
    model, weights = session.engine.runner.model, session.engine.runner.weights
    return _details(session.opened, model, session.family, session.stored_as, nbytes(weights))


def opened_details(source: ModelSource) -> tuple[Opened, ModelDetails]:
    """Open a model without its weights. Slow: call it in a worker thread.

    Raises:
        USER_ERRORS: the model cannot be opened.
    """
    opened = open_model(source.path, source.overrides)
    model = build_abstract_model(opened.spec, np.dtype(opened.dtype))
    size = sum(tensor.nbytes for tensor in opened.checkpoint.tensors.values())
    return opened, _details(opened, model, opened.family, opened.stored_as, size)


def _details(
    opened: Opened, model: AbstractModel, family: str, stored_as: str, size: int
) -> ModelDetails:
    dims = opened.spec.dims
    return ModelDetails(
        format=opened.checkpoint.format,
        family=family,
        stored_as=stored_as,
        context=opened.context,
        trained_context=dims.get("context", opened.context),
        vocab=dims.get("vocab", 0),
        hidden=dims.get("hidden", 0),
        parameters=sizes_of(opened.spec, model).parameters,
        size=size,
        capabilities=tuple(_capabilities(opened)),
    )


def _capabilities(opened: Opened) -> list[str]:
    spec, tokenizer = opened.spec, opened.tokenizer
    result = ["embeddings"]
    if spec.generates:
        result.append("completion")
        if tokenizer is not None and opened.conversation.has_template:
            result.append("chat")
            result += ["multimodal"] if opened.conversation.image is not None else []
    if spec.decoder is None and tokenizer is not None and tokenizer.mask_id is not None:
        result.append("fill-mask")
    result += ["classify"] if opened.classification is not None else []
    ranks = opened.classification is not None and opened.classification.relevance is not None
    return [*result, "rerank"] if ranks or opened.pooling.late else result
