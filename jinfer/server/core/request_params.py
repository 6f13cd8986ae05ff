"""Request parameters: a request's fields to `SamplingParams` and other options, for all routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinfer.api.session import Session
from jinfer.engine.requests import AdapterUse, RequestError
from jinfer.sampling.param_field import Parameter
from jinfer.sampling.sampling_keywords import over_defaults
from jinfer.sampling.sampling_params import (
    ACTIVATIONS,
    CONSTRAINTS,
    PARAMETERS,
    SamplingParams,
    canonical_names,
)
from jinfer.server.core.request_activations import activation_params
from jinfer.server.core.sampling_fields import (
    FOREIGN_FIELDS,
    ResponseFormat,
    SamplingFields,
    StructuredOutputs,
    parameter_of,
)
from jinfer.server.http.http_errors import as_api_error, invalid_request


def adapter_of(body: SamplingFields, session: Session) -> AdapterUse | None:
    """Return the adapter that a request names as its `model`, or by number in `lora`.

    Raises:
        ApiError: no adapter has that number, or several are named.
    """
    adapters = session.adapters
    adapters_used = [adapter for adapter in body.lora or () if adapter.scale]
    if not adapters_used:
        named = getattr(body, "model", None)
        return adapters.find(named) if named in adapters.loaded else None
    if len(adapters_used) > 1:
        raise invalid_request("at most a single adapter may have a scale other than 0", "lora")
    names = list(adapters.loaded)
    if not 0 <= adapters_used[0].id < len(names):
        raise invalid_request(
            f"there is no adapter {adapters_used[0].id}; there are {len(names)}", "lora"
        )
    try:
        return adapters.find(names[adapters_used[0].id], adapters_used[0].scale)
    except RequestError as error:
        raise as_api_error(error, param="lora") from error


# Fields that are not sampling parameters.
_ELSEWHERE = frozenset(
    {
        *("truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "priority"),
        *("return_token_ids", "cache_prompt", "timings_per_token", "return_progress", "verbose"),
        *("logprobs", "lora", "t_max_predict_ms", "id_slot", "capture_format", *ACTIVATIONS),
        *FOREIGN_FIELDS,
    }
)

# Defaults of routes, below the model's: OpenAI's, Inferflow's, llama.cpp's and Ollama's.
_ALL = {"max_tokens": None}
CHAT: Mapping[str, Any] = {**_ALL, "temperature": 1.0}
COMPLETIONS: Mapping[str, Any] = {"max_tokens": 16, "temperature": 1.0}
INFERFLOW: Mapping[str, Any] = {"max_tokens": 1024, "temperature": 1.0, "strategy": "std"}
LLAMA_CPP: Mapping[str, Any] = {
    **_ALL,
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
}
OLLAMA: Mapping[str, Any] = {
    **_ALL,
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "penalty_last_n": 64,
}


@dataclass(frozen=True)
class RequestOptions:
    """Sampling parameters and other options of a request.

    Attributes:
        params: its sampling parameters.
        nothing: whether `max_tokens` is 0, so that only the prompt is computed.
        truncate: number of prompt tokens to keep; -1: as many as fit.
        first: whether to keep the first tokens rather than the last.
        seconds: time limit of the answer; None: the server's limit.
        priority: lower values are scheduled first.
        reuse: whether the prefix cache may be used.
        token_ids: whether the answer has token ids as well as text.
        timings, progress: whether chunks have timings; whether progress of a prompt is reported.
        names: parameter of the engine -> the request's field that set it.
        adapter: the LoRA adapter.
        slot: the number that `/slots/{id}` uses.
    """

    params: SamplingParams
    nothing: bool = False
    truncate: int | None = None
    first: bool = False
    seconds: float | None = None
    priority: int = 0
    reuse: bool = True
    token_ids: bool = False
    timings: bool = False
    progress: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    adapter: AdapterUse | None = None
    slot: int | None = None


def _minus_one(parameter: Parameter) -> Callable[[Any], dict[str, Any]]:
    """Return a reader of -1 as None, or as 0 where the parameter cannot be None."""
    instead = None if parameter.optional else 0
    return lambda value: {parameter.name: instead if value == -1 else value}


def _response_format(value: ResponseFormat) -> dict[str, Any]:
    if value.type == "text":
        return {}
    schema = value.schema_
    if value.json_schema is not None:
        schema = value.json_schema.schema_
    if schema is None and value.type == "json_schema":
        raise invalid_request("a json_schema needs a schema", "response_format.json_schema.schema")
    return {"json_schema": True if schema is None else schema}


def _structured_outputs(value: StructuredOutputs) -> dict[str, Any]:
    constraints = {
        "json_schema": True if value.json_ is None and value.json_object else value.json_,
        "regex": value.regex,
        "choice": value.choice,
        "grammar": value.grammar,
    }
    return {name: value for name, value in constraints.items() if value is not None}


# Fields whose values need conversion.
_READERS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    **{field: _minus_one(p) for p in PARAMETERS.values() if p.minus_one for field in p.fields},
    "n_probs": lambda value: {"logprobs": value} if value else {},
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "n_cmpl": lambda value: {"n": value},
    "use_beam_search": lambda value: {"strategy": "beam"} if value else {},
}


def request_options(
    body: SamplingFields,
    session: Session,
    base: Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    elsewhere: frozenset[str] = frozenset(),
) -> RequestOptions:
    """Read the sampling parameters and other options of a request.

    Args:
        base: the route's defaults, below the model's.
        changes: parameters that the route sets; a request must not set them.
        elsewhere: fields that only the route reads.

    Raises:
        ApiError: an invalid value; the error names the field.
    """
    values, names = _values(body, elsewhere, session)
    activations = activation_params(body, session)
    values, names = values | activations, names | {name: name for name in activations}
    for name, value in (changes or {}).items():
        same = CONSTRAINTS if name in CONSTRAINTS else (name,)
        other = next((other for other in same if other in values), None)
        if other is not None:
            raise invalid_request("it cannot be used where tools have to be called", names[other])
        values[name] = value
    nothing = values.get("max_tokens", 1) == 0
    if nothing:
        values["max_tokens"] = 1
    defaults = canonical_names(session.opened.defaults)
    below = dict(base)
    if "strategy" in {**defaults, **values}:
        # A strategy's own defaults replace the route's.
        below = {"max_tokens": base.get("max_tokens")}
    try:
        params = SamplingParams(**over_defaults({**below, **defaults}, values))
    except (TypeError, ValueError) as error:
        name = str(error).split(" ", 1)[0]
        raise invalid_request(str(error), names.get(name, name)) from error
    if params.strategy == "beam" and params.logprobs is not None:
        raise invalid_request(
            "beam search has no log-probabilities", names.get("strategy", "strategy")
        )
    return RequestOptions(
        params,
        nothing,
        body.truncate_prompt_tokens,
        body.truncation_side == "right",
        (body.t_max_predict_ms or 0) / 1000 or None,
        body.priority or 0,
        body.cache_prompt is not False,
        bool(body.return_token_ids),
        bool(body.timings_per_token),
        bool(body.return_progress),
        names,
        adapter_of(body, session),
        _slot(body, session),
    )


def _slot(body: SamplingFields, session: Session) -> int | None:
    if (slot := body.id_slot) is None or slot == -1:
        return None
    slots = session.engine.scheduler.slots
    if not 0 <= slot < slots:
        raise invalid_request(f"there is no slot {slot}; slots are 0 to {slots - 1}", "id_slot")
    return slot


def _values(
    body: SamplingFields, elsewhere: frozenset[str], session: Session
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sampling parameters of a request, and the field that set each."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for field_name, value in body.given_fields().items():
        if field_name in _ELSEWHERE or field_name in elsewhere:
            continue
        if field_name == "logit_bias":
            parameters = {field_name: _biases(value, session)}
        elif field_name == "decoding_alg":
            parameters = _wrapped(field_name, canonical_names, {field_name: value})
        else:
            read = _READERS.get(field_name)
            parameters = {parameter_of(field_name): value} if read is None else read(value)
        for name, item in parameters.items():
            if name in values and values[name] != item:
                raise invalid_request(
                    f"{names[name]} and {field_name} contradict each other", field_name
                )
            values[name], names[name] = item, field_name
    return values, names


def _id(key: str) -> int | str:
    """Convert a JSON key to a token id, if it is a number."""
    return int(key) if key.isascii() and key.isdecimal() else key


def _wrapped[T](name: str, read: Callable[[Any], T], value: Any) -> T:
    """Call a function with a field's value; convert its error to an `ApiError`."""
    try:
        return read(value)
    except (TypeError, ValueError) as error:
        raise invalid_request(str(error), name) from error


def _biases(
    value: Mapping[str, float | bool] | list[list[Any]], session: Session
) -> tuple[tuple[Any, Any], ...]:
    """Return pairs of token and bias; llama.cpp allows lists, texts, and false for a ban."""
    biases: list[tuple[Any, Any]] = []
    pairs = (
        [(_id(key), item) for key, item in value.items()] if isinstance(value, Mapping) else value
    )
    for pair in pairs:
        if len(pair) != 2 or isinstance(pair[0], bool) or isinstance(pair[1], str):
            raise invalid_request(
                "logit_bias has pairs of a token and a number, or false", "logit_bias"
            )
        if pair[1] is True:
            raise invalid_request("a bias is a number, or false", "logit_bias")
        bias = float("-inf") if pair[1] is False else pair[1]
        ids: list[Any] = [pair[0]]
        if isinstance(pair[0], str):
            ids = session.tokenizer.encode(pair[0], special=False, parse_special=True)
        biases += [(id, bias) for id in ids]
    return tuple(biases)
