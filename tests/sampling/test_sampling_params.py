"""The parameters of a request: their rules, their other names, the samplers that they ask for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer.sampling.param_field import ALIASES
from jinfer.sampling.param_types import MAX_END_IDS, MAX_LOGPROBS, MAX_STOP_IDS
from jinfer.sampling.request_errors import RequestError
from jinfer.sampling.sampler import FUNCTIONS
from jinfer.sampling.sampler_chain import chain
from jinfer.sampling.samplers import SAMPLER_NAMES
from jinfer.sampling.sampling_metadata import COUNTS, NUMBERS, allowed_mask, metadata_row
from jinfer.sampling.sampling_params import PARAMETERS, SamplingParams, canonical_names
from tests.sampling.batches import VOCAB, encode, params


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "best"}, "strategy must be one of the allowed words, not 'best'; .* greedy,"),
        ({"beams": 0}, "beams must be a whole number from 1 to 64, not 0"),
        ({"temperature": -0.1}, "temperature must be a number from 0 to 1000000 or none, not -0.1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        (
            {"temperature": "hot"},
            "temperature must be a number from 0 to 1000000 or none, not 'hot'",
        ),
        ({"temperature": True}, "temperature must be"),
        ({"top_k": -1}, r"top_k must be a whole number from 0 \(all\) to 2\^31 - 1, not -1"),
        ({"top_k": 2.5}, "top_k must be"),
        ({"top_k": 2**31}, "top_k must be"),
        ({"top_p": -1}, "top_p must be a number from 0 to 1, not -1"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"top_p": None}, "top_p must be"),
        ({"min_p": -0.1}, "min_p must be a number from 0 to 1, not -0.1"),
        ({"min_p": 1.1}, "min_p must be"),
        ({"seed": -1}, r"seed must be a whole number from 0 to 2\^64 - 1 or none, not -1"),
        ({"seed": 2**64}, "seed must be"),
        ({"seed": 0.5}, "seed must be"),
        (
            {"max_tokens": 0},
            r"max_tokens must be a whole number from 1 to 2\^31 - 1 or none, not 0",
        ),
        ({"max_tokens": 2**31}, "max_tokens must be"),
        ({"min_tokens": -1}, r"min_tokens must be a whole number from 0 to 2\^31 - 1, not -1"),
        ({"min_tokens": 2**31}, "min_tokens must be"),
        ({"min_tokens": "a"}, "min_tokens must be a whole number"),
        ({"min_tokens": 6, "max_tokens": 5}, r"min_tokens must be at most max_tokens \(5\), not 6"),
        (
            {
                "allowed_token_ids": [5, 6],
                "banned_token_ids": [5],
                "logit_bias": {6: float("-inf")},
            },
            "allowed_token_ids must be ids of which not all are banned",
        ),
        ({"stop": 5}, "stop must be a list, not 5"),
        ({"stop": None}, "stop must be a list, not None"),
        ({"choice": 5}, "choice must be a list, not 5"),
        ({"logit_bias": 5}, "logit_bias must be id -> number, not 5"),
        ({"logit_bias": [5]}, r"logit_bias must be id -> number, not \[5\]"),
        ({"bad_words_ids": 5}, "bad_words_ids must be lists of token ids, not 5"),
        ({"bad_words_ids": [5]}, "bad_words_ids must be lists of token ids"),
        ({"stop": ""}, r"stop must be at most 1024 texts, none empty, not \(''"),
        ({"stop": ["x"] * 1025}, "stop must be at most 1024 texts, none empty"),
        ({"stop": ["a", ""]}, "stop must be"),
        ({"stop": [5]}, "stop must be"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids must be at most 16 token ids, not \(-1,\)"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids must be"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids must be"),
        ({"stop_token_ids": range(MAX_STOP_IDS + 1)}, "stop_token_ids must be"),
        ({"logprobs": -1}, "logprobs must be a whole number from 0 to 20 or none, not -1"),
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs must be"),
        ({"logprobs": True}, "logprobs must be"),
        ({"typical_p": 1.5}, "typical_p must be a number from 0 to 1, not 1.5"),
        ({"tfs_z": 2}, "tfs_z must be a number from 0 to 1, not 2"),
        ({"top_a": -1}, "top_a must be a number from 0 to 1, not -1"),
        ({"top_n_sigma": "1"}, "top_n_sigma must be a number from -1 to 1000000, not '1'"),
        ({"xtc_probability": 1.5}, "xtc_probability must be a number from 0 to 1, not 1.5"),
        ({"mirostat": 3}, r"mirostat must be a whole number from 0 \(off\) to 2, not 3"),
        ({"mirostat": 2, "strategy": "fsd"}, 'mirostat must be 0 with the strategy "fsd", not 2'),
        (
            {"repetition_penalty": 0},
            "repetition_penalty must be a number above 0, and at most 100, not 0",
        ),
        ({"penalty_last_n": -2}, r"penalty_last_n must be a whole number from -1 \(all\) to"),
        ({"dry_base": 0.5}, "dry_base must be a number from 1 to 100, not 0.5"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers must be at most 64 texts or ids"),
        ({"dry_sequence_breakers": range(65)}, "dry_sequence_breakers must be at most 64"),
        ({"logit_bias": {1: 101}}, "logit_bias must be token id -> -inf, or from -100 to 100, not"),
        ({"logit_bias": {"a": 1}}, "logit_bias must be token id -> -inf"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias must be token id -> -inf"),
        ({"logit_bias": dict.fromkeys(range(513), 1)}, "logit_bias must be at most 512 ids"),
        ({"banned_token_ids": range(513)}, "logit_bias must be at most 512 ids, with the banned"),
        ({"banned_token_ids": ["x"]}, "banned_token_ids must be token ids"),
        ({"allowed_token_ids": []}, r"allowed_token_ids must be token ids, not \(\)"),
        ({"bad_words": [" "]}, "bad_words must be texts, none empty"),
        ({"bad_words_ids": [[]]}, "bad_words_ids must be sequences of at most 16 ids"),
        ({"bad_words_ids": [range(17)]}, "bad_words_ids must be sequences of at most 16 ids"),
        ({"bad_words_ids": [[1]] * 129}, "bad_words_ids must be at most 128"),
        ({"samplers": ["top_k", "best"]}, r"samplers must be some of \('penalties', .*, each once"),
        ({"samplers": ["top_k", "top-k"]}, "samplers must be some of"),
        ({"samplers": []}, "samplers must be some of"),
        ({"samplers": "top_k"}, "samplers must be some of"),
        ({"fsd_k": 0}, "fsd_k must be a whole number from 1 to 64, not 0"),
        ({"fsd_n": 9}, "fsd_n must be a whole number from 1 to 8, not 9"),
        ({"early_stopping": "now"}, "early_stopping must be true or false or \"never\", not 'now'"),
        ({"n": 0}, "n must be a whole number from 1 to 128, not 0"),
        ({"n": 3, "best_of": 2}, r"best_of must be at least n \(3\), not 2"),
        ({"choice": []}, r"choice must be texts, none empty, not \(\)"),
        ({"regex": ""}, "regex must be a text, not ''"),
        ({"grammar": 5}, "grammar must be a text, not 5"),
        ({"json_schema": 5}, "json_schema must be a schema, not 5"),
        (
            {"json_schema": True, "regex": "a"},
            "regex must be left out: json_schema is given",
        ),
        ({"choice": ["a"], "grammar": "b"}, "grammar must be left out: choice is given, not 'b'"),
    ],
    ids=str,
)
def test_a_value_outside_its_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1_000_000, "top_k": 2**31 - 1, "top_p": 1, "min_p": 1},
        {"seed": 2**64 - 1, "max_tokens": None, "min_tokens": 2**31 - 1},
        {"stop_token_ids": range(MAX_STOP_IDS), "logprobs": MAX_LOGPROBS},
        {"strategy": "top_k", "top_k": 1},
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_reach_the_device(fields: dict[str, Any]) -> None:
    row = metadata_row(params(**fields), range(MAX_END_IDS), VOCAB)
    assert all(part.shape[0] == 1 and np.isfinite(part).all() for part in row)


def test_numpys_numbers_are_pythons() -> None:
    numbers: dict[str, Any] = {"temperature": np.float32(0.5), "max_tokens": np.int64(3)}
    given = SamplingParams(**numbers, seed=5)
    assert given == SamplingParams(temperature=0.5, max_tokens=3, seed=5)
    assert type(given.max_tokens) is int
    with pytest.raises(ValueError, match="temperature must be"):
        SamplingParams(**{**numbers, "temperature": np.float32("nan")})


def test_stop_is_a_tuple_however_it_is_given() -> None:
    assert params(stop="END").stop == ("END",)
    assert params(stop=["a", "b"]).stop == ("a", "b")
    assert params(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert params(stop=["a"]) == params(stop=("a",))


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"min_p": 0.1}, 1.0),
        ({"top_k": 5, "temperature": 0}, 0.0),
        ({"strategy": "greedy", "temperature": 0.7, "top_k": 5}, 0.0),
        ({"strategy": "sample"}, 1.0),
        ({"strategy": "sample", "temperature": 0.3}, 0.3),
        ({"strategy": "sample", "temperature": 0}, 0.0),
        ({"strategy": "top_p", "top_p": 0.5}, 1.0),
        ({"mirostat": 2}, 1.0),
        ({"typical_p": 0.5}, 1.0),
        ({"xtc_probability": 0.5}, 1.0),
        ({"top_n_sigma": 0.5}, 1.0),
        ({"repetition_penalty": 1.5}, 0.0),
        ({"strategy": "fsd", "temperature": 0.7}, 0.0),
        ({"strategy": "random_fsd"}, 1.0),
        ({"strategy": "random_fsd", "temperature": 0}, 1e-3),
        ({"strategy": "contrastive", "temperature": 0.7}, 0.0),
    ],
    ids=str,
)
def test_drawing_temperature(fields: dict[str, Any], temperature: float) -> None:
    assert params(**fields).drawing_temperature == temperature


def test_every_number_has_a_range() -> None:
    assert all(row.bounds for row in PARAMETERS.values() if row.kind in (int, float))


@pytest.mark.parametrize("name", sorted({*NUMBERS, *COUNTS} - {"temperature"}))
def test_every_column_is_a_parameter(name: str) -> None:
    assert isinstance(getattr(params(), name), int | float)


def test_every_sampler_has_a_function() -> None:
    assert tuple(FUNCTIONS) == SAMPLER_NAMES


@pytest.mark.parametrize(
    ("fields", "set_"),
    [
        ({"strategy": "sample.std"}, {"strategy": "sample", "top_p": 0.9, "top_k": 8}),
        ({"strategy": ""}, {"strategy": "sample", "top_p": 0.9, "top_k": 8}),
        (
            {"strategy": "sample.top_p", "top_p": 0.5},
            {"strategy": "top_p", "top_p": 0.5, "top_k": 8},
        ),
        ({"strategy": "sample.top_k"}, {"strategy": "top_k", "top_k": 8}),
        ({"strategy": "sample.greedy"}, {"strategy": "greedy", "top_k": 0}),
        ({"strategy": "min_p"}, {"min_p": 0.05}),
        ({"strategy": "tfs"}, {"tfs_z": 0.95}),
        ({"strategy": "typical"}, {"typical_p": 0.95}),
        ({"strategy": "mirostat"}, {"mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.1}),
        ({"strategy": "mirostat", "mirostat": 1}, {"mirostat": 1}),
        ({"strategy": "sample.fsd"}, {"strategy": "fsd", "fsd_k": 6, "fsd_alpha": 0.5}),
        ({"strategy": "sample.random_fsd"}, {"strategy": "random_fsd", "top_p": 0.93, "top_k": 8}),
        ({"strategy": "contrastive"}, {"top_k": 4, "penalty_alpha": 0.6}),
    ],
    ids=str,
)
def test_strategy_sets_defaults(fields: dict[str, Any], set_: dict[str, Any]) -> None:
    made = params(**fields)
    assert {name: getattr(made, name) for name in set_} == set_
    whole = {name: getattr(made, name) for name in (*set_, "strategy")}
    assert params(**whole) == made  # and nothing is set twice


def test_names_of_other_engines() -> None:
    """llama.cpp's, transformers' and Inferflow's, some within Inferflow's object."""
    assert set(ALIASES.values()) <= SamplingParams.__dataclass_fields__.keys()
    ours = params(repetition_penalty=1.1, penalty_last_n=64, max_tokens=5, typical_p=0.5)
    theirs = {"repeat_penalty": 1.1, "repeat_last_n": 64, "n_predict": 5, "typ_p": 0.5, "seed": 0}
    assert SamplingParams.from_names(theirs) == ours
    object_ = {"name": "sample.top_k", "max_k": 3}
    inferflow = {"decoding_alg": object_, "random_seed": 7, "max_output_len": 9}
    expected = SamplingParams(strategy="top_k", top_k=3, seed=7, max_tokens=9)
    assert SamplingParams.from_names(inferflow) == expected
    with pytest.raises(ValueError, match=r"^max_new_tokens: max_tokens is given twice"):
        canonical_names({"max_tokens": 4, "max_new_tokens": 5})
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        SamplingParams.from_names({"temprature": 1})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("temprature", "there is no parameter 'temprature'; did you mean 'temperature'?"),
        ("max_new_tokens", "there is no parameter 'max_new_tokens'; here it is max_tokens: Sampli"),
        (
            "logits_processor",
            "there is no parameter 'logits_processor': logits_processors=[func",
        ),
        ("lora_request", "there is no parameter 'lora_request': LoRA adapters are loaded by"),
        ("guided_json", "there is no parameter 'guided_json': json_schema, regex, choice or"),
    ],
)
def test_a_wrong_name_is_a_line(name: str, message: str) -> None:
    given: dict[str, Any] = {name: 1}
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_parameters_go_by_name() -> None:
    with pytest.raises(RequestError, match="give parameters by name: SamplingParams"):
        SamplingParams("greedy")  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="temperature must be a number from 0"):
        SamplingParams(temperature=-1)


def test_lists_and_mappings_are_kept_as_tuples() -> None:
    made: Any = params(
        logit_bias={"5": 1.5, 3: -2}, bad_words="x", choice=["a", "b"], samplers=["temp"]
    )
    assert made.logit_bias == ((5, 1.5), (3, -2))
    assert made.bad_words == ("x",)
    assert made.choice == ("a", "b")
    assert made.samplers == ("temperature",)
    assert params(bad_words_ids=[[1, 2]]).bad_words_ids == ((1, 2),)
    assert hash(made) == hash(params(**{name: getattr(made, name) for name in ("logit_bias",
        "bad_words", "choice", "samplers")}))  # fmt: skip


# The samplers that a request asks for.


@pytest.mark.parametrize(
    ("fields", "samplers"),
    [
        ({}, ()),
        ({"temperature": 0.0, "top_k": 5, "xtc_probability": 0.5}, ()),
        ({"temperature": 1.0}, ("temperature",)),
        ({"min_p": 0.1, "top_k": 5}, ("temperature", "top_k", "min_p")),
        ({"repetition_penalty": 1.1, "penalty_last_n": 0}, ()),
        ({"repetition_penalty": 1.1}, ("penalties",)),
        ({"dry_multiplier": 0.8, "temperature": 1.0}, ("dry", "temperature")),
        (
            {"samplers": ["min_p", "top-k", "temp"], "top_k": 5, "min_p": 0.1, "top_p": 0.5},
            ("min_p", "top_k", "temperature"),
        ),
        ({"samplers": ["top_k"], "top_k": 5, "min_tokens": 3}, ("rules", "top_k")),
        ({"mirostat": 2, "top_k": 5, "dry_multiplier": 1}, ("dry", "temperature", "mirostat")),
        (
            {"mirostat": 1, "top_k": 5, "samplers": ["top_k", "temperature"]},
            ("top_k", "temperature", "mirostat"),
        ),
        ({"strategy": "fsd", "top_k": 5}, ("temperature", "fsd")),
        ({"strategy": "random_fsd"}, ("temperature", "fsd", "top_k", "top_p")),
        (
            {"samplers": ["temperature", "min_p"], "dynatemp_range": 0.2, "min_p": 0.1},
            ("dynatemp", "min_p"),
        ),
        ({"logit_bias": {3: 1}}, ("rules",)),
        ({"bad_words_ids": [[3]]}, ("rules",)),
        ({"min_tokens": 1}, ("rules",)),
        ({"banned_token_ids": [3]}, ("rules",)),
    ],
    ids=str,
)
def test_chain(fields: dict[str, Any], samplers: tuple[str, ...]) -> None:
    assert chain(params(**fields)) == samplers


def test_samplers_run_in_the_order_of_the_request() -> None:
    order = (
        "xtc", "top_a", "min_p", "top_p", "typical_p", "tfs_z", "top_k", "top_n_sigma",
        "temperature", "dry", "penalties",
    )  # fmt: skip
    everything = params(
        repetition_penalty=1.1, dry_multiplier=1, top_n_sigma=1, top_k=3, tfs_z=0.9, top_p=0.9,
        typical_p=0.9, min_p=0.1, top_a=0.1, xtc_probability=0.1, samplers=order,
    )  # fmt: skip
    assert chain(everything) == order


# Rows.


def test_texts_become_ids() -> None:
    """A bad word at the beginning and after a space; a breaker is its text's last token."""
    made = params(bad_words=["ab"], dry_multiplier=1, dry_sequence_breakers=["x", "yz", 9])
    row = metadata_row(made, (), VOCAB, encode)
    words = [ids[ids >= 0].tolist() for ids in np.asarray(row.bad_words)[0]]
    assert [word for word in words if word] == [[97, 98], [32, 97, 98]]
    assert row.breakers[0][row.breakers[0] >= 0].tolist() == [9, ord("x"), ord("z")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": ["ab"]}, "bad_words: the checkpoint has no tokenizer for texts; give"),
        ({"dry_multiplier": 1}, "dry_sequence_breakers: the checkpoint has no tokenizer"),
        ({"logit_bias": {VOCAB: 1}}, f"logit_bias: token {VOCAB} is outside the vocabulary of"),
        ({"banned_token_ids": [VOCAB]}, "logit_bias: token"),
        ({"bad_words_ids": [[1, VOCAB]]}, "bad_words: token"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": [VOCAB]}, "dry_sequence_breakers: token"),
    ],
    ids=str,
)
def test_rows_refuse(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        metadata_row(params(**fields), (), VOCAB)


def test_rows_have_room_for_so_many_bad_words() -> None:
    with pytest.raises(ValueError, match=r"^bad_words: 200 sequences of tokens; at most 128"):
        metadata_row(params(bad_words=[chr(i) for i in range(300, 400)]), (), VOCAB, encode)
    with pytest.raises(ValueError, match=r"^bad_words: a word has 20 tokens; at most 16"):
        metadata_row(params(bad_words=["a" * 20]), (), VOCAB, encode)


def test_allowed_mask() -> None:
    assert allowed_mask(params(), 70) is None
    mask = allowed_mask(params(allowed_token_ids=[0, 31, 32, 69]), 70)
    assert mask is not None
    assert mask.tolist() == [1 | 1 << 31, 1, 1 << 5]
    with pytest.raises(ValueError, match=r"^allowed_token_ids: token 70 is outside the vocabulary"):
        allowed_mask(params(allowed_token_ids=[70]), 70)


def test_the_page_has_every_sampler() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text(encoding="utf-8")
    assert [name for name in SAMPLER_NAMES if name not in page] == []
