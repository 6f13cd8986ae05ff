"""Every field of a request that generates becomes a parameter, or is read elsewhere."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from jinfer.api.session import Session
from jinfer.server.core import request_params
from jinfer.server.core.prompt_requests import truncate_prompt
from jinfer.server.core.request_params import (
    CHAT,
    COMPLETIONS,
    INFERFLOW,
    LLAMA_CPP,
    request_options,
)
from jinfer.server.core.sampling_fields import SamplingFields
from jinfer.server.http.http_errors import ApiError
from jinfer.server.inferflow.inferflow_api import InferflowRequest

# field, what is sent, parameter, what it is then
FIELDS: list[tuple[str, Any, str, Any]] = [
    ("temperature", 0.5, "temperature", 0.5),
    ("top_p", 0.5, "top_p", 0.5),
    ("n", 2, "n", 2),
    ("seed", 5, "seed", 5),
    ("seed", -1, "seed", None),
    ("stop", "a", "stop", ("a",)),
    ("stop", ["a", "b"], "stop", ("a", "b")),
    ("max_tokens", 5, "max_tokens", 5),
    ("max_tokens", -1, "max_tokens", None),
    ("max_tokens", 5.0, "max_tokens", 5),
    ("stop_token_ids", [5.0], "stop_token_ids", (5,)),
    ("top_p", 0, "top_p", 0),
    ("max_completion_tokens", 5, "max_tokens", 5),
    ("presence_penalty", 0.5, "presence_penalty", 0.5),
    ("frequency_penalty", 0.5, "frequency_penalty", 0.5),
    ("logit_bias", {"5": -100}, "logit_bias", ((5, -100),)),
    ("logit_bias", {"5": False}, "logit_bias", ((5, float("-inf")),)),
    ("logit_bias", [[5, -1.5], [6, False]], "logit_bias", ((5, -1.5), (6, float("-inf")))),
    ("response_format", {"type": "text"}, "json_schema", None),
    ("response_format", {"type": "json_object"}, "json_schema", True),
    ("response_format", {"type": "json_object", "schema": {"a": 1}}, "json_schema", {"a": 1}),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}},
        "json_schema",
        {"a": 1},
    ),
    ("top_k", 5, "top_k", 5),
    ("top_k", -1, "top_k", 0),
    ("min_p", 0.5, "min_p", 0.5),
    ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
    ("min_tokens", 5, "min_tokens", 5),
    ("ignore_eos", True, "ignore_eos", True),
    ("stop_token_ids", [5], "stop_token_ids", (5,)),
    ("bad_words", ["a"], "bad_words", ("a",)),
    ("allowed_token_ids", [5], "allowed_token_ids", (5,)),
    ("include_stop_str_in_output", True, "include_stop", True),
    ("skip_special_tokens", False, "skip_special", False),
    ("speculation", False, "speculation", False),
    ("use_beam_search", True, "strategy", "beam"),
    ("use_beam_search", False, "strategy", "auto"),
    ("length_penalty", 0.5, "length_penalty", 0.5),
    ("structured_outputs", {"json": {"a": 1}}, "json_schema", {"a": 1}),
    ("structured_outputs", {"json_object": True}, "json_schema", True),
    ("structured_outputs", {"regex": "a"}, "regex", "a"),
    ("structured_outputs", {"choice": ["a"]}, "choice", ("a",)),
    ("structured_outputs", {"grammar": "a"}, "grammar", "a"),
    ("n_predict", 5, "max_tokens", 5),
    ("n_predict", -1, "max_tokens", None),
    ("repeat_penalty", 1.5, "repetition_penalty", 1.5),
    ("repeat_last_n", 5, "penalty_last_n", 5),
    ("typical_p", 0.5, "typical_p", 0.5),
    ("mirostat", 2, "mirostat", 2),
    ("mirostat_tau", 3.0, "mirostat_tau", 3.0),
    ("mirostat_eta", 0.5, "mirostat_eta", 0.5),
    ("dynatemp_range", 0.5, "dynatemp_range", 0.5),
    ("dynatemp_exponent", 0.5, "dynatemp_exponent", 0.5),
    ("dry_multiplier", 0.5, "dry_multiplier", 0.5),
    ("dry_base", 1.5, "dry_base", 1.5),
    ("dry_allowed_length", 5, "dry_allowed_length", 5),
    ("dry_penalty_last_n", 5, "dry_penalty_last_n", 5),
    ("dry_sequence_breakers", ["a"], "dry_sequence_breakers", ("a",)),
    ("xtc_probability", 0.5, "xtc_probability", 0.5),
    ("xtc_threshold", 0.5, "xtc_threshold", 0.5),
    ("top_n_sigma", 1.5, "top_n_sigma", 1.5),
    ("samplers", ["top-k", "temp"], "samplers", ("top_k", "temperature")),
    ("grammar", "a", "grammar", "a"),
    ("json_schema", {"a": 1}, "json_schema", {"a": 1}),
    ("n_probs", 5, "logprobs", 5),
    ("n_probs", 0, "logprobs", None),
    ("strategy", "fsd", "strategy", "fsd"),
    ("regex", "a", "regex", "a"),
    ("choice", ["a"], "choice", ("a",)),
    ("tfs_z", 0.5, "tfs_z", 0.5),
    ("top_a", 0.5, "top_a", 0.5),
    ("penalty_last_n", 5, "penalty_last_n", 5),
    ("banned_token_ids", [5], "banned_token_ids", (5,)),
    ("bad_words_ids", [[5, 6]], "bad_words_ids", ((5, 6),)),
    ("fsd_alpha", 0.25, "fsd_alpha", 0.25),
    ("fsd_k", 5, "fsd_k", 5),
    ("fsd_n", 5, "fsd_n", 5),
    ("fsd_beta", 0.5, "fsd_beta", 0.5),
    ("fsd_pool", 5, "fsd_pool", 5),
    ("random_fsd_tokens", 5, "random_fsd_tokens", 5),
    ("random_fsd_probability", 0.25, "random_fsd_probability", 0.25),
    ("penalty_alpha", 0.5, "penalty_alpha", 0.5),
    ("beams", 5, "beams", 5),
    ("early_stopping", "never", "early_stopping", "never"),
    ("best_of", 5, "best_of", 5),
    ("thinking_token_budget", 5, "thinking_token_budget", 5),
    ("thinking_token_budget", -1, "thinking_token_budget", None),
    ("thinking_budget_tokens", 5, "thinking_token_budget", 5),
    ("reasoning_budget_tokens", 0, "thinking_token_budget", 0),
    ("thinking_budget_message", "a", "thinking_budget_message", "a"),
    ("reasoning_budget_message", "a", "thinking_budget_message", "a"),
    ("logits_processors", ["a"], "logits_processors", ("a",)),
    ("n_cmpl", 5, "n", 5),
    ("logprob_token_ids", [5], "logprob_token_ids", (5,)),
    ("post_sampling_probs", True, "post_sampling_probs", True),
]


def session(**defaults: Any) -> Session:
    """What `request_options` reads of a model."""
    opened, adapters = SimpleNamespace(defaults=defaults), SimpleNamespace(loaded={})
    return cast(Session, SimpleNamespace(opened=opened, adapters=adapters))


def sent(**fields: Any) -> SamplingFields:
    """A request with these fields."""
    return SamplingFields.model_validate(fields)


@pytest.mark.parametrize(("field", "given", "name", "value"), FIELDS)
def test_a_field_becomes_a_parameter(field: str, given: Any, name: str, value: Any) -> None:
    assert getattr(request_options(sent(**{field: given}), session(), CHAT).params, name) == value


def test_every_field_is_tried() -> None:
    elsewhere = request_params._ELSEWHERE - {"logprobs"}
    assert {field for field, *_ in FIELDS} | elsewhere == set(SamplingFields.model_fields)


def test_fields_that_are_no_parameters() -> None:
    how = request_options(
        sent(
            truncate_prompt_tokens=5,
            prompt_logprobs=2,
            priority=-1,
            return_token_ids=True,
            cache_prompt=False,
            timings_per_token=True,
            return_progress=True,
            max_tokens=0,
            truncation_side="right",
            t_max_predict_ms=500,
            id_slot=-1,
        ),
        session(),
        CHAT,
    )
    assert (how.truncate, how.priority, how.reuse) == (5, -1, False)
    assert (how.first, how.seconds) == (True, 0.5)
    assert truncate_prompt([1, 2, 3], 2, 9, first=True) == [1, 2]
    assert truncate_prompt([1, 2, 3], 2, 9) == [2, 3]
    assert how.token_ids
    assert how.timings
    assert how.progress
    assert how.nothing


def test_null_is_nothing() -> None:
    assert request_options(sent(temperature=None, n=None), session(), CHAT).params == (
        request_options(sent(), session(), CHAT).params
    )


def test_default_parameters() -> None:
    def usual(base: Any, **defaults: Any) -> Any:
        return request_options(sent(), session(**defaults), base).params

    assert (usual(CHAT).temperature, usual(CHAT).max_tokens) == (1.0, None)
    assert usual(COMPLETIONS).max_tokens == 16
    assert (usual(LLAMA_CPP).top_k, usual(LLAMA_CPP).temperature) == (40, 0.8)
    assert (usual(INFERFLOW).max_tokens, usual(INFERFLOW).top_k) == (1024, 8)
    # The model's own defaults come before those of a route.
    assert usual(CHAT, temperature=0.3).temperature == 0.3
    assert usual(COMPLETIONS, max_new_tokens=7).max_tokens == 7
    greedy = usual(LLAMA_CPP, strategy="greedy")
    assert (greedy.strategy, greedy.top_k) == ("greedy", 0)


@pytest.mark.parametrize(
    ("alg", "strategy"),
    [("sample.fsd", "fsd"), ("", "sample"), ({"name": "sample.top_k", "max_k": 3.0}, "top_k")],
)
def test_strategies_of_inferflow(alg: Any, strategy: str) -> None:
    given = {"text": "a", "decoding_alg": alg, "max_output_len": 5, "random_seed": 7}
    body = InferflowRequest.model_validate(given)
    route = frozenset(InferflowRequest.model_fields) - frozenset(SamplingFields.model_fields)
    route -= {"decoding_alg", "max_output_len", "random_seed", "max_new_tokens"}
    params = request_options(body, session(), INFERFLOW, None, route).params
    assert (params.strategy, params.max_tokens, params.seed) == (strategy, 5, 7)


def test_two_fields_that_differ() -> None:
    with pytest.raises(ApiError) as found:
        request_options(sent(max_tokens=5, n_predict=6), session(), CHAT)
    assert found.value.param == "n_predict"
    assert request_options(sent(max_tokens=5, n_predict=5), session(), CHAT).params.max_tokens == 5
