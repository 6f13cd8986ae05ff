"""Activation tracing: `LLM.names` and `LLM.trace`, their results and edits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.api.activation_checks import all_edits, edited_shapes
from jinfer.api.activation_names import (
    ActivationName,
    ActivationNames,
    activation_names,
    matching,
    nearest,
)
from jinfer.api.forward_results import encoded_prompts, token_types
from jinfer.api.prompt_inputs import Params
from jinfer.api.session import Session
from jinfer.engine.activation_use import ActivationUse, place_edits
from jinfer.engine.engine import Engine
from jinfer.engine.output.completion import Completion, import_pandas
from jinfer.engine.requests import AdapterUse, RequestError
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
from jinfer.sampling.activation_edits import OPEN, Edit, token_range
from jinfer.sampling.sampling_params import ACTIVATIONS, SamplingParams

if TYPE_CHECKING:
    from jaxtyping import Float

_SHOWN = 12  # names that a short text lists


class Trace(Mapping[str, "Float[np.ndarray, '...']"]):
    """Captured values by name, float32: `trace["decoder.3.x"]` is [tokens, hidden].

    Attributes:
        axes: name of each value -> names of its axes.
        ids: token ids of the prompt, and of the answer after it if there is one.
        tokens: the same as texts.
        prompt_tokens: how many of them are the prompt's.
    """

    def __init__(
        self,
        values: Mapping[str, np.ndarray],
        axes: Mapping[str, tuple[str, ...]],
        ids: Sequence[int],
        tokens: Sequence[str],
        prompt_tokens: int,
    ) -> None:
        self._values, self.axes = dict(values), dict(axes)
        self.ids, self.tokens, self.prompt_tokens = list(ids), list(tokens), prompt_tokens

    @property
    def names(self) -> list[str]:
        """The names of the values."""
        return [*self._values]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(value.nbytes for value in self._values.values())

    def __getitem__(self, name: str) -> Float[np.ndarray, ...]:
        if name not in self._values:
            hint = nearest(str(name), self._values).removesuffix(" llm.names() lists all")
            captured = ", ".join(self.names[:_SHOWN]) + (", ..." if len(self) > _SHOWN else "")
            raise KeyError(f"{show_value(name)} was not captured{hint} captured: {captured}")
        return self._values[name]

    # Arrays have no single answer to a comparison, which `Mapping` would ask them for.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _ipython_key_completions_(self) -> list[str]:
        return self.names

    def to_pandas(self, name: str) -> Any:
        """A value as a table: a row for each token, head and so on, a column for each last index.

        Raises:
            RequestError: pandas is not installed.
        """
        pd = import_pandas()
        value, (*rows, column) = self[name], self.axes[name]
        index = pd.MultiIndex.from_product([range(size) for size in value.shape[:-1]], names=rows)
        columns = pd.Index(range(value.shape[-1]), name=column)
        frame = pd.DataFrame(value.reshape(-1, value.shape[-1]), columns=columns)
        if rows:
            frame.index = index
        if rows == ["tokens"]:
            frame.index = pd.Index(self.tokens, name="tokens")
        return frame

    def __repr__(self) -> str:
        shown = [f"{name} {list(self._values[name].shape)}" for name in self.names[:_SHOWN]]
        shown += ["..."] if len(self) > _SHOWN else []
        return f"Trace({len(self.ids)} tokens: {', '.join(shown)})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(', '.join(self.axes[name]))}</td>"
            f"<td>{' × '.join(map(str, value.shape))}</td><td>{_deviation(value):.3g}</td></tr>"
            for name, value in self._values.items()
        )
        head = "<tr><th>name</th><th>axes</th><th>shape</th><th>root mean square</th></tr>"
        text = escape("".join(self.tokens))[:2000]
        title = f"{len(self.ids)} tokens, {len(self)} values, {self.nbytes / 2**20:.1f} MiB"
        table = f'<table style="text-align:left">{head}{rows}</table>'
        words = f'<div style="white-space:pre-wrap;opacity:.7">{text}</div>'
        return f"<details><summary>{title}</summary>{words}{table}</details>"


def _deviation(value: np.ndarray) -> float:
    finite = value[np.isfinite(value)]
    return float(np.sqrt(np.mean(np.square(finite, dtype=np.float64)))) if finite.size else 0.0


type Generate = Callable[..., Sequence[Completion]]

_ENCODER = "encoder."  # prefix of the names of an encoder-decoder's encoder


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
    return activation_names(session.engine.runner.model.activations, pattern)


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
    if session.engine.runner.programs.pipeline is not None:
        raise RequestError(
            "trace: the model is divided among devices or processes; open it without [partition]"
        )
    shapes = _chosen(session.engine.runner.model.activations, capture)
    edited = SamplingParams.from_names({"edits": edits, "steer": steer})
    use = None if adapter is None else session.adapters.find(adapter)
    inputs = _inputs(session, given, encoder_given, token_type_ids)
    if max_tokens:
        changes = {"max_tokens": max_tokens, "edits": edited.edits, "steer": edited.steer}
        answer = partial(generate, adapter=adapter)
        answers = _answers(session, answer, inputs, params, changes)
        inputs = [
            _with_answer(session, item, ids) for item, ids in zip(inputs, answers, strict=True)
        ]
    elif params is not None:
        raise RequestError("trace: params are for answers; give max_tokens too")
    scored = edited_keys(edited, session.engine.runner.model.activations)
    plans = [_plans(session, shapes, scored, item) for item in inputs]
    _check_memory([plan for item in plans for plan in item.values()])
    traces = [
        _trace(session, item, plan, shapes, edited, use)
        for item, plan in zip(inputs, plans, strict=True)
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
    patterns = [
        pattern.name if isinstance(pattern, ActivationName) else pattern for pattern in patterns
    ]
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
    spec, crossed = session.opened.spec, session.engine.runner.model.has_cross_attention
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
    rows = zip(texts, encoders, types, strict=True)
    return [TraceInputs(ids, len(ids), encoder, kinds) for ids, encoder, kinds in rows]


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
            raise RequestError(f"trace: params has {name}; give it to trace itself")
    sampling = session.sampling(params, changes)
    if sampling.n != 1 or sampling.best_of not in (None, 1):
        raise RequestError("trace: a prompt has one answer; leave n and best_of out")
    if not session.engine.runner.model.has_cross_attention:
        found = generate([item.ids for item in inputs], sampling)
    else:
        found = [generate([item.encoder], sampling, decoder_prefix=item.ids)[0] for item in inputs]
    return [list(answer.token_ids) for answer in found]


def _with_answer(session: Session, item: TraceInputs, answer: list[int]) -> TraceInputs:
    ids = [*item.ids, *answer][: session.opened.context]
    return TraceInputs(ids, item.prompt, item.encoder, [0] * len(ids))


def _plans(
    session: Session,
    shapes: Mapping[str, ActivationShape],
    scored: Sequence[str],
    item: TraceInputs,
) -> dict[str, TracePlan]:
    """The plan of each stack that has captured values.

    Args:
        scored: the scores and patterns that are edited.
    """
    found = dict[str, TracePlan]()
    has_encoder = bool(item.encoder)
    for stack in session.opened.spec.stacks:
        inside = has_encoder and stack.name == "encoder"
        own = {
            name: shape
            for name, shape in shapes.items()
            if not has_encoder or name.startswith(_ENCODER) == inside
        }
        tokens = len(item.encoder if inside else item.ids)
        caches = session.engine.runner.model.caches
        known = session.engine.runner.model.activations
        names = [*own, *(n for n in scored if n.startswith(f"{stack.name}."))]
        keys = {
            name: len(item.encoder) if _reads_encoder(caches, name) else tokens
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
    item: TraceInputs,
    plans: Mapping[str, TracePlan],
    shapes: Mapping[str, ActivationShape],
    edited: SamplingParams,
    adapter: AdapterUse | None,
) -> Trace:
    values: Values = {}
    known = session.engine.runner.model.activations
    # The encoder of an encoder-decoder is computed without edits.
    changed = "decoder" if item.encoder else session.opened.spec.stacks[0].name
    of_stack = {n: s for n, s in known.items() if not (item.encoder and n.startswith(_ENCODER))}
    for stack, plan in plans.items():
        edits = None
        if stack == changed:
            width = key_width(session.engine.runner, stack, plan)
            edits = traced_edits(edited, of_stack, item.prompt, len(item.ids), width, plan.keys)
        try:
            values |= session.thread.run(partial(_pass, stack, item, plan, edits, adapter))
        except TapError as error:
            raise RequestError(f"edits: {error}") from error
    tokenizer = session.opened.tokenizer
    tokens = [str(id) if tokenizer is None else tokenizer.token_text(id) for id in item.ids]
    ordered = {name: values[name] for name in shapes}
    axes = {name: shape.axes for name, shape in shapes.items()}
    return Trace(ordered, axes, item.ids, tokens, item.prompt)


def _pass(
    stack: str,
    item: TraceInputs,
    plan: TracePlan,
    edits: ActivationUse | None,
    adapter: AdapterUse | None,
    engine: Engine,
) -> Any:
    if stack == "decoder":
        runner, scheduler = engine.runner, engine.scheduler
        return trace_decoder(runner, scheduler, item.ids, plan, item.encoder, adapter, edits)
    text = item.encoder or item.ids
    types = [0] * len(text) if item.encoder else item.types
    return trace_encoder(engine.runner, text, types, plan, edits)


def _is_one(given: object) -> bool:
    """Whether a single prompt is given, and not a list of them."""
    if isinstance(given, str):
        return True
    listed = np.asarray(given) if hasattr(given, "__array__") else given
    if isinstance(listed, np.ndarray):
        return listed.ndim == 1
    first = listed[0] if isinstance(listed, Sequence) and len(listed) else None
    return not isinstance(first, str | Sequence | np.ndarray)


_OF_KEYS = ("heads", "tokens", "keys")


def edited_keys(sampling: SamplingParams, known: Mapping[str, ActivationShape]) -> list[str]:
    """The scores and patterns that are edited."""
    names = {edit.name for edit in all_edits(sampling)} & known.keys()
    return [name for name in names if known[name].axes == _OF_KEYS]


def traced_edits(
    sampling: SamplingParams,
    known: Mapping[str, ActivationShape],
    prompt: int,
    tokens: int,
    keys: int,
    seen: Mapping[str, int],
) -> ActivationUse | None:
    """The edits of a trace; None: none.

    Args:
        sampling: has `edits` and `steer`.
        known: the values of the stack that is computed.
        prompt, tokens: of the prompt, and of prompt and answer together.
        keys: width of scores and patterns in the program.
        seen: how many keys there are of each score and pattern.

    Raises:
        RequestError: a name or a shape that the model has not.
    """
    edits, shapes = list[Edit](), dict[str, tuple[int, ...]]()
    for edit in all_edits(sampling):
        _check_range(edit, prompt, tokens)
        shape = known.get(edit.name)
        no_encoder = not any(name.startswith("encoder.") for name in known)
        if shape is None and no_encoder and edit.name.startswith("encoder."):
            raise RequestError(
                f"{edit.field}: {edit.name} is computed once for all requests with the same text, "
                "and cannot be edited"
            )
        if shape is None and "*" in edit.name:
            edited_shapes([edit], known)  # which says what is wrong
        if shape is None:
            raise RequestError(
                f"{edit.field}: no value {show_value(edit.name)} is computed here"
                f"{nearest(edit.name, known)}"
            )
        if shape.axes == _OF_KEYS:
            heads = shape.sizes[0]
            assert isinstance(heads, int), "tokens and keys alone are free"
            begin, end = token_range(edit.tokens, prompt)
            whole = slice(begin, tokens if end == OPEN else end)
            _check_keys(edit, heads, max(0, whole.stop - begin), seen[edit.name])
            edits.append(_by_token(edit, whole, keys))
            shapes[edit.name] = heads, keys
        elif shape.of_token is not None:
            edits.append(edit)
            shapes[edit.name] = shape.of_token
        else:
            shapes |= edited_shapes([edit], known)  # which says what is wrong
    return ActivationUse.of((), place_edits(edits, shapes, prompt)) if edits else None


def _check_range(edit: Edit, prompt: int, tokens: int) -> None:
    """Raises `RequestError` if an edit concerns none of the tokens."""
    begin, _ = token_range(edit.tokens, prompt)
    if begin < tokens:
        return
    if edit.tokens == "answer":
        raise RequestError(
            f'{edit.field}: {edit.name}: tokens="answer", and there is no answer to the '
            f"{tokens} tokens here; give 'all' or a slice, or have it generated: max_tokens"
        )
    raise RequestError(
        f"{edit.field}: {edit.name}: tokens is {show_value(edit.tokens)}, and there are "
        f"{tokens} tokens"
    )


def _check_keys(edit: Edit, heads: int, tokens: int, keys: int) -> None:
    """Raises `RequestError` if an edit has not the shape of some tokens' scores."""
    lead = [heads] if edit.head is None else []
    allowed = [[*lead, tokens, keys], [*lead, keys]]
    shape = list(edit.value.shape)
    if shape and not any(shape[:-1] == a[:-1] and 0 < shape[-1] <= keys for a in allowed):
        raise RequestError(
            f"{edit.field}: {edit.name}: the value has shape {shape}; give a number, or "
            f"{allowed[0]}: {'heads, ' if lead else ''}tokens, keys"
        )


def _by_token(edit: Edit, whole: slice, keys: int) -> Edit:
    """An edit of [heads, tokens, keys], or of a head's [tokens, keys], with tokens first.

    What lies beyond the keys of a trace is seen by no token.
    """
    value = edit.value
    if value.ndim == 0:
        return edit
    value = value.swapaxes(0, 1) if value.ndim == 3 else value
    missing = [(0, 0)] * (value.ndim - 1) + [(0, keys - value.shape[-1])]
    return replace(edit, value=np.pad(value, missing), tokens=whole)
