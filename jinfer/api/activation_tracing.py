"""Activation tracing: what `LLM.names` and `LLM.trace` do with a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jinfer.api.activation_names import ActivationName, ActivationNames, activation_names, matching
from jinfer.api.forward_results import encoded_prompts, token_types
from jinfer.api.prompt_inputs import Params
from jinfer.api.session import Session
from jinfer.api.trace import Trace
from jinfer.api.traced_edits import edited_keys, traced_edits
from jinfer.engine.activation_use import ActivationUse
from jinfer.engine.adapter_use import AdapterUse
from jinfer.engine.engine import Engine
from jinfer.engine.output.generation import Completion
from jinfer.engine.requests import RequestError
from jinfer.engine.runner.trace_passes import (
    TracePlan,
    Values,
    key_width,
    trace_decoder,
    trace_encoder,
)
from jinfer.engine.scheduling.cache_size import host_memory
from jinfer.modelspec.spec_errors import show_value
from jinfer.nn.activation_shapes import ActivationShape
from jinfer.nn.activation_taps import TapError
from jinfer.sampling.sampling_params import ACTIVATIONS, SamplingParams

type Generate = Callable[..., Sequence[Completion]]

_ENCODER = "encoder."  # begins the names of an encoder beside a decoder


@dataclass(frozen=True)
class TraceInputs:
    """One prompt to trace.

    Attributes:
        ids: of the prompt, then of the answer.
        prompt: tokens of the prompt.
        encoder: what the encoder of an encoder-decoder reads.
        types: token types, of an encoder.
    """

    ids: list[int]
    prompt: int
    encoder: list[int]
    types: list[int]


def names_of(session: Session, pattern: str) -> ActivationNames:
    """As `LLM.names`."""
    return activation_names(session.engine.model.activations, pattern)


def trace_prompts(
    session: Session,
    generate: Generate,
    given: object,
    capture: str | Sequence[str],
    *,
    edits: object = (),
    steer: object = (),
    max_tokens: int = 0,
    params: Params | None = None,
    encoder_given: object | None = None,
    token_type_ids: Sequence[Sequence[int]] | None = None,
    adapter: str | None = None,
) -> Trace | list[Trace]:
    """As `LLM.trace`.

    Args:
        generate: `LLM.generate`, for answers.
    """
    if session.engine.programs.pipeline is not None:
        raise RequestError(
            "trace: the model is divided among devices or processes; open it without [partition]"
        )
    shapes = _chosen(session.engine.model.activations, capture)
    edited = SamplingParams.from_names({"edits": edits, "steer": steer})
    use = None if adapter is None else session.adapters.find(adapter)
    inputs = _inputs(session, given, encoder_given, token_type_ids)
    if max_tokens:
        changes = {"max_tokens": max_tokens, "edits": edited.edits, "steer": edited.steer}
        answer = partial(generate, adapter=adapter)
        answers = _answers(session, answer, inputs, params, changes)
        inputs = [_with_answer(session, one, ids) for one, ids in zip(inputs, answers, strict=True)]
    elif params is not None:
        raise RequestError("trace: params are for answers; give max_tokens too")
    scored = edited_keys(edited, session.engine.model.activations)
    plans = [_plans(session, shapes, scored, one) for one in inputs]
    _check_memory([plan for each in plans for plan in each.values()])
    traces = [
        _trace(session, one, each, shapes, edited, use)
        for one, each in zip(inputs, plans, strict=True)
    ]
    return traces[0] if _is_one(given) else traces


def _chosen(known: Mapping[str, ActivationShape], capture: object) -> dict[str, ActivationShape]:
    """The values that patterns choose."""
    patterns = [capture] if isinstance(capture, str) else capture
    if not isinstance(patterns, Iterable):
        raise RequestError(f"capture is {show_value(capture)}; give names: ['decoder.*.x']")
    patterns = list(patterns)
    if not patterns:
        raise RequestError("capture is empty; give names, as llm.names() lists them")
    patterns = [one.name if isinstance(one, ActivationName) else one for one in patterns]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise RequestError(f"capture has {show_value(pattern)}; give names: ['decoder.*.x']")
    found = {name for pattern in patterns for name in matching(pattern, known)}
    return {name: shape for name, shape in known.items() if name in found}


def _inputs(
    session: Session,
    given: object,
    encoder_given: object | None,
    token_type_ids: Sequence[Sequence[int]] | None,
) -> list[TraceInputs]:
    spec, crossed = session.opened.spec, session.engine.model.has_cross_attention
    if encoder_given is not None and not crossed:
        raise RequestError(
            "encoder_ids are for a model with an encoder and a decoder; leave them out"
        )
    if token_type_ids is not None and spec.decoder is not None:
        raise RequestError("token_type_ids are for an encoder; leave them out")
    texts = encoded_prompts(session, given)
    encoders: list[list[int]] = [[]] * len(texts)
    if crossed:
        encoders = [] if encoder_given is None else encoded_prompts(session, encoder_given)
        if len(encoders) != len(texts):
            raise RequestError("an encoder-decoder needs encoder_ids, one for each prompt")
    types = token_types(texts, token_type_ids, spec.dims.get("types"))
    each = zip(texts, encoders, types, strict=True)
    return [TraceInputs(ids, len(ids), encoder, kinds) for ids, encoder, kinds in each]


def _answers(
    session: Session,
    generate: Generate,
    inputs: Sequence[TraceInputs],
    params: Params | None,
    changes: Mapping[str, Any],
) -> list[list[int]]:
    """The token ids of each prompt's answer."""
    given = session.sampling(params, {})
    for name in ACTIVATIONS:
        if getattr(given, name):
            raise RequestError(f"trace: {name} stands among the params; give it to trace itself")
    sampling = session.sampling(params, changes)
    if sampling.n != 1 or sampling.best_of not in (None, 1):
        raise RequestError("trace: a prompt has one answer; leave n and best_of out")
    if not session.engine.model.has_cross_attention:
        found = generate([one.ids for one in inputs], sampling)
    else:
        found = [generate([one.encoder], sampling, decoder_prefix=one.ids)[0] for one in inputs]
    return [list(answer.token_ids) for answer in found]


def _with_answer(session: Session, one: TraceInputs, answer: list[int]) -> TraceInputs:
    ids = [*one.ids, *answer][: session.opened.context]
    return TraceInputs(ids, one.prompt, one.encoder, [0] * len(ids))


def _plans(
    session: Session,
    shapes: Mapping[str, ActivationShape],
    scored: Sequence[str],
    one: TraceInputs,
) -> dict[str, TracePlan]:
    """The plan of each stack that has captured values.

    Args:
        scored: the scores and patterns that are edited.
    """
    found = dict[str, TracePlan]()
    beside = bool(one.encoder)
    for stack in session.opened.spec.stacks:
        inside = beside and stack.name == "encoder"
        own = {n: s for n, s in shapes.items() if not beside or n.startswith(_ENCODER) == inside}
        tokens = len(one.encoder if inside else one.ids)
        caches = session.engine.model.caches
        known = session.engine.model.activations
        names = [*own, *(n for n in scored if n.startswith(f"{stack.name}."))]
        keys = {
            name: len(one.encoder) if _reads_encoder(caches, name) else tokens
            for name in names
            if "keys" in known[name].axes
        }
        if own:
            found[stack.name] = TracePlan(own, tokens, keys)
    return found


def _reads_encoder(caches: Mapping[str, Any], name: str) -> bool:
    """Whether a score is a cross-attention's."""
    cache = caches.get(name.rpartition(".")[0])
    return cache is not None and cache.group == "encoder"


def _check_memory(plans: Sequence[TracePlan]) -> None:
    """Raises `RequestError` where the values would not fit into memory."""
    needed, free = sum(plan.bytes for plan in plans), host_memory()
    if needed > 0.9 * free:
        count, tokens = (
            max((len(plan.shapes) for plan in plans), default=0),
            sum(plan.tokens for plan in plans),
        )
        raise RequestError(
            f"trace: {count} values of {tokens:,} tokens take {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB of memory are free; capture fewer values or shorter prompts"
        )


def _trace(
    session: Session,
    one: TraceInputs,
    plans: Mapping[str, TracePlan],
    shapes: Mapping[str, ActivationShape],
    edited: SamplingParams,
    adapter: AdapterUse | None,
) -> Trace:
    values: Values = {}
    known = session.engine.model.activations
    # An encoder beside a decoder is computed as it is.
    changed = "decoder" if one.encoder else session.opened.spec.stacks[0].name
    of_stack = {n: s for n, s in known.items() if not (one.encoder and n.startswith(_ENCODER))}
    for stack, plan in plans.items():
        edits = None
        if stack == changed:
            width = key_width(session.engine, stack, plan)
            edits = traced_edits(edited, of_stack, one.prompt, len(one.ids), width, plan.keys)
        try:
            values |= session.thread.run(partial(_pass, stack, one, plan, edits, adapter))
        except TapError as error:
            raise RequestError(f"edits: {error}") from error
    tokenizer = session.opened.tokenizer
    tokens = [str(id) if tokenizer is None else tokenizer.token_text(id) for id in one.ids]
    ordered = {name: values[name] for name in shapes}
    axes = {name: shape.axes for name, shape in shapes.items()}
    return Trace(ordered, axes, one.ids, tokens, one.prompt)


def _pass(
    stack: str,
    one: TraceInputs,
    plan: TracePlan,
    edits: ActivationUse | None,
    adapter: AdapterUse | None,
    engine: Engine,
) -> Any:
    if stack == "decoder":
        return trace_decoder(engine, one.ids, plan, one.encoder, adapter, edits)
    text = one.encoder or one.ids
    types = [0] * len(text) if one.encoder else one.types
    return trace_encoder(engine, text, types, plan, edits)


def _is_one(given: object) -> bool:
    """Whether a single prompt is given, and not a list of them."""
    if isinstance(given, str):
        return True
    listed = np.asarray(given) if hasattr(given, "__array__") else given
    if isinstance(listed, np.ndarray):
        return listed.ndim == 1
    first = listed[0] if isinstance(listed, Sequence) and len(listed) else None
    return not isinstance(first, str | Sequence | np.ndarray)
