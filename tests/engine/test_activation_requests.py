"""Requests that capture, steer and edit activations, in batches with others that do not."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from jinfer import LLM, Completion, Edit, RequestError, SamplingParams, Steer, read_control_vector
from jinfer.api.activation_checks import request_activations
from jinfer.api.activation_tracing import Trace
from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.runner.edit_tables import taps_of
from jinfer.engine.runner.step_key import StepKey
from jinfer.sampling.sampler_chain import sampler_sets
from tests.engine.tiny import PROMPTS, held, open_model
from tests.test_activations import reference

RNG = np.random.default_rng(1)
STREAM, HEADS = "decoder.1.x", "decoder.0.attn.heads"
SIZES = {"engine.slots": 8, "engine.prefill_chunk": 64}
KEYS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 3}


def vector(width: int = 64) -> np.ndarray:
    return RNG.normal(0, 3, width).astype(np.float32)


VECTOR = vector()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_model(**SIZES) as llm:
        yield llm


def answer(llm: LLM, prompt: list[int], **more: Any) -> Completion:
    return llm.generate([prompt], **(KEYS | more))[0]


def bits(one: Completion) -> tuple[list[int], bytes]:
    """Tokens, and the log-probabilities of the likeliest at each place."""
    assert one.logprobs is not None
    tops = [[top.logprob for top in each.top] for each in one.logprobs]
    return one.token_ids, np.array(tops).tobytes()


@pytest.mark.parametrize("name", ["gpt2", "llama2", "gemma2"])
def test_numpy(name: str) -> None:
    """A head ablated, a stream patched and steered: each changes what NumPy says that it does."""
    prompt, other = PROMPTS[3][:12], PROMPTS[5][:12]
    with LLM(Path(__file__).parents[1] / "goldens" / name, dtype="float32") as llm:
        trace = llm.trace(other, "decoder.0.x")
        assert isinstance(trace, Trace)
        patch = trace["decoder.0.x"][4:8]
        steered = vector(patch.shape[1]) / 3
        (found,) = llm.generate(
            [prompt],
            edits=[
                Edit("decoder.1.attn.heads", "set", 0, tokens=slice(2, None), head=1),
                Edit("decoder.0.x", "set", patch, tokens=slice(4, 8)),
            ],
            steer=Steer("decoder.1.x", steered, 0.5, tokens="answer"),
            capture="logits",
            max_tokens=4,
            ignore_eos=True,
        )

    def tap(left_out: str, value: str, x: np.ndarray) -> np.ndarray:
        new = x.copy()
        match value:
            case "decoder.1.attn.heads":
                new[2:, 1] = 0
            case "decoder.0.x":
                new[4:8] = patch
            case "decoder.1.x":
                new[12:] += 0.5 * steered
        return x if value == left_out else new

    ids = [*prompt, *found.token_ids[:3]]
    logits = reference(name)(ids, partial(tap, ""))
    np.testing.assert_allclose(found.captured["logits"], logits, rtol=0, atol=2e-4)
    for place in ("decoder.1.attn.heads", "decoder.0.x", "decoder.1.x"):
        assert np.abs(reference(name)(ids, partial(tap, place)) - logits).max() > 0.01


# Of three requests, all at the same places.
ASKED: dict[int, dict[str, Any]] = {
    1: {
        "steer": [Steer(STREAM, VECTOR, 1.5)],
        "edits": [Edit(HEADS, "project_out", VECTOR)],
    },
    4: {
        "steer": [Steer(STREAM, VECTOR, -1, tokens="answer")],
        "edits": [Edit(HEADS, "scale", 0.5), Edit(HEADS, "project_out", VECTOR[:16], head=3)],
    },
    6: {
        "steer": [Steer(STREAM, VECTOR, tokens=slice(3, None))],
        "edits": [Edit(HEADS, "project_out", VECTOR, "prompt"), Edit(HEADS, "set", 0, head=2)],
    },
}


def test_three_of_eight(llm: LLM) -> None:
    """The five others have their bits as without the three; these what they have alone."""
    plain = [bits(answer(llm, prompt)) for prompt in PROMPTS[:8]]
    params = [SamplingParams(**KEYS, **ASKED.get(i, {})) for i in range(8)]
    mixed = [*map(bits, llm.generate(PROMPTS[:8], params))]
    with ThreadPoolExecutor(8) as pool:  # not all of them in the same steps
        later = list(pool.map(lambda i: bits(llm.generate([PROMPTS[i]], params[i])[0]), range(8)))
    for i, (found, again) in enumerate(zip(mixed, later, strict=True)):
        assert found == again, i
        assert (found == plain[i]) == (i not in ASKED), i
    for i, edits in ASKED.items():
        assert bits(answer(llm, PROMPTS[i], **edits)) == mixed[i]
    assert not held(llm)


def test_the_programs_of_others_are_the_same(llm: LLM) -> None:
    """The lowered text of a plain step does not depend on what other requests do."""
    keys = [StepKey("logits", 16, 1), StepKey("decode", 1, stages=sampler_sets()[0])]

    def texts(llm: LLM) -> list[str]:
        made = [llm.session.engine.runner.programs.step_function(key) for key in keys]
        return [
            jax.jit(one.function, donate_argnums=one.donated).lower(*one.arguments).as_text()
            for one in made
        ]

    with open_model(**SIZES) as other:
        before = texts(other)
    answer(llm, PROMPTS[0], **ASKED[1])
    after = texts(llm)
    assert after == before
    # Where vectors are added, a call of fused layers goes on, in every layer.
    steer = SamplingParams(steer=[Steer(f"decoder.{i}.x", VECTOR) for i in range(3)])
    taps = taps_of([request_activations(llm.session.engine, steer, 10, 20)])
    keys = [replace(key, taps=taps) for key in keys]
    for plain, steered in zip(after, texts(llm), strict=True):
        assert steered != plain
        assert steered.count("custom_call @") == plain.count("custom_call @")


def test_another_vector_compiles_nothing(llm: LLM) -> None:
    events = list[str]()

    def hear(event: str, duration_secs: float, **_: str | int) -> None:
        events.append(event)

    first = answer(llm, PROMPTS[2], steer=[Steer(STREAM, VECTOR)])
    jax.monitoring.register_event_duration_secs_listener(hear)
    programs = llm.compilations
    for tokens in ("all", "prompt", slice(2, 9)):
        other = answer(llm, PROMPTS[2], steer=[Steer(STREAM, vector(), -2.0, tokens)])
        assert bits(other) != bits(first)
    assert (llm.compilations, events) == (programs, [])


def test_others_do_not_wait_for_programs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the program of an edited request compiles, a plain one is answered."""
    programs, seen = llm.session.engine.runner.programs, list[StepKey]()
    ready, get = programs.ready, programs.get
    steer: dict[str, Any] = {"steer": [Steer(STREAM, VECTOR)]}
    alone = [bits(answer(llm, PROMPTS[7])), bits(answer(llm, PROMPTS[7], **steer))]

    def note(key: StepKey) -> Any:
        seen.append(key)
        return get(key)

    monkeypatch.setattr(programs, "ready", lambda key: key.taps is None and ready(key))
    monkeypatch.setattr(programs, "get", note)
    params = [SamplingParams(**KEYS), SamplingParams(**KEYS, **steer)]
    assert [*map(bits, llm.generate([PROMPTS[7]] * 2, params))] == alone
    edited = [key.taps is not None for key in seen if key.kind in ("logits", "decode")]
    assert edited == sorted(edited)
    assert len({*edited}) == 2


def test_prefixes_are_their_own(llm: LLM) -> None:
    prompt = [(7 * i) % 300 + 3 for i in range(130)]

    def cached(**asked: Any) -> int:
        return answer(llm, prompt, **asked).usage.cached_tokens

    steered = {"steer": [Steer(STREAM, VECTOR)]}
    assert [cached(), cached(**steered), cached(steer=[Steer(STREAM, 2 * VECTOR)])] == [0, 0, 0]
    assert [cached(**steered), cached(), cached(capture=STREAM)] == [128, 128, 0]


def test_captured_values_are_those_of_a_trace(llm: LLM) -> None:
    """Of prompts in chunks, and answers in calls of several steps, edited and not."""
    names = ["embed", "decoder.*.x", HEADS, "logits"]
    long = [(11 * i) % 300 + 3 for i in range(200)]
    prompts = [long, PROMPTS[1], PROMPTS[4]]
    edited: dict[str, Any] = {"edits": Edit(HEADS, "set", 0, head=1), "steer": ASKED[4]["steer"]}
    params = [
        SamplingParams(**KEYS, capture=names),
        SamplingParams(**KEYS),
        SamplingParams(**KEYS, capture="decoder.*.x", **edited),
    ]
    found = llm.generate(prompts, params)
    assert bits(found[0]) == bits(answer(llm, long))
    assert found[1].captured == {}
    trace = llm.trace([*long, *found[0].token_ids[:-1]], names)
    keys: dict[str, Any] = {"max_tokens": 8, "params": {"ignore_eos": True}}
    other = llm.trace(PROMPTS[4], "decoder.*.x", **keys, **edited)
    assert isinstance(trace, Trace)
    assert isinstance(other, Trace)
    assert other.ids[len(PROMPTS[4]) :] == found[2].token_ids
    for one, traced in ((found[0], trace), (found[2], other)):
        assert set(one.captured) == set(traced)
        for name, values in one.captured.items():
            expected = traced[name][: len(values)]
            np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5, err_msg=name)
    assert found[0].captured[HEADS].shape == (207, 4, 16)
    assert found[0].captured[HEADS].dtype == np.float32
    assert not held(llm)


def test_speculation_beams_preemption_and_quantized_caches() -> None:
    asked: dict[str, Any] = {"steer": [Steer(STREAM, VECTOR, 0.5)], "ignore_eos": True}
    prompt, keys = PROMPTS[4] * 12, asked | {"max_tokens": 70}
    kinds: dict[str, Any] = {"quantization.kv_cache": "q8", "engine.kv_tokens": 256}
    drafts = {"speculation.draft": "ngram", "speculation.nodes": 4}
    with open_model(**kinds) as plain:
        alone = plain.generate([prompt], capture=STREAM, **keys)[0]
        assert plain.generate([prompt], **keys | {"steer": ()})[0].token_ids != alone.token_ids
        # More requests than the cache has room for: some are computed twice.
        several = plain.generate([prompt] * 4, capture=STREAM, **keys)
        assert plain.stats().preemptions
        for one in several:
            assert one.token_ids == alone.token_ids
            np.testing.assert_array_equal(one.captured[STREAM], alone.captured[STREAM])
        beam = plain.generate([prompt], strategy="beam", beams=1, max_tokens=8, **asked)[0]
        assert beam.token_ids == alone.token_ids[:8]
    with open_model(**kinds, **drafts) as drafting:
        assert drafting.generate([prompt], **keys)[0].token_ids == alone.token_ids
        assert drafting.stats().draft_tokens
        found = drafting.generate([prompt], capture=STREAM, **keys)[0]
        assert found.token_ids == alone.token_ids
        np.testing.assert_array_equal(found.captured[STREAM], alone.captured[STREAM])


def test_numbers_of_edits() -> None:
    """NumPy's whole numbers are numbers; what would be cast, or is no number, is told."""
    head: Any = np.int64(1)
    edit = Edit(HEADS, "set", 0, slice(np.int64(-2), np.int32(4)), head=head)
    assert (edit.tokens, edit.head, type(edit.head)) == (slice(-2, 4), 1, int)
    for wrong in (1j * VECTOR, "1", ["1"], 1e39, [np.inf], VECTOR * np.nan):
        with pytest.raises(RequestError, match=r"the value is .*; give a finite number") as caught:
            Edit(STREAM, "set", wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match=r"scale 1e\+30 times the vector is more than float32"):
        Steer(STREAM, np.full(64, 1e30), scale=1e30)
    for tokens in (3, "al", slice(0, 4, 2), slice(0.0, 2.0), slice(False, 2)):
        with pytest.raises(RequestError, match=r"tokens is .*; give 'all'"):
            Edit(STREAM, "set", 0, tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"capture": "decoder.1.xx"}, "no value 'decoder.1.xx'; did you mean 'decoder.1.x'"),
        ({"edits": [Edit("decoder.9.x", "set", 0)]}, "no value 'decoder.9.x'; did you mean"),
        ({"steer": [Steer(STREAM, VECTOR[:5])]}, r"has shape \[5\]; a token's is \[64\]"),
        ({"steer": Steer("decoder.*.x", VECTOR)}, r"'decoder.\*.x' is a pattern"),
        (
            {"edits": Edit(STREAM, "set", VECTOR[None], tokens=slice(-1, None))},
            r"vectors of 1 token, and its range has no end; give \[64\] .*, or tokens=slice\(",
        ),
        ({"capture": "decoder.0.attn.pattern"}, r"has axes \(heads, tokens, keys\), not a vector"),
        ({"edits": [{"name": STREAM}]}, "edits must be a list of at most 1024 Edit"),
        ({"capture": STREAM, "strategy": "beam"}, 'capture: strategy="beam" computes several'),
        ({"steer": [Steer(STREAM, VECTOR)], "strategy": "contrastive"}, 'steer: strategy="contr'),
    ],
)
def test_what_is_refused(llm: LLM, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        llm.generate([PROMPTS[0]], max_tokens=2, **asked)
    assert "\n" not in str(caught.value)


def test_not_in_parts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.session.engine.runner.programs, "pipeline", object())
    with pytest.raises(
        RequestError, match=r"capture: the model is divided .*without \[partition\]"
    ):
        llm.generate([PROMPTS[0]], capture=STREAM, max_tokens=1)


def write_control_vector(path: Path, directions: dict[str, np.ndarray], **metadata: Any) -> Path:
    """A file as llama.cpp's cvector-generator and repeng write it."""
    writer = gguf.GGUFWriter(path, metadata.get("architecture", "controlvector"))
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(directions))
    for name, vector in directions.items():
        writer.add_tensor(name, vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_control_vectors(llm: LLM, tmp_path: Path) -> None:
    """`direction.N` is added after layer N, counted from 0."""
    vectors = {"direction.1": vector()}
    read = read_control_vector(write_control_vector(tmp_path / "a.gguf", vectors), -0.25)
    by_hand = [Steer(STREAM, vectors["direction.1"], -0.25)]
    assert [one.name for one in read] == [STREAM]
    assert bits(answer(llm, PROMPTS[1], steer=read)) == bits(answer(llm, PROMPTS[1], steer=by_hand))
    many = {f"direction.{n}": vector() for n in (1, 2, 3)}
    read = read_control_vector(write_control_vector(tmp_path / "b.gguf", many), layers=(2, 3))
    assert [one.name for one in read] == ["decoder.2.x", "decoder.3.x"]
    with pytest.raises(RequestError, match=r"no value 'decoder.3.x'; did you mean"):
        answer(llm, PROMPTS[1], steer=read)


@pytest.mark.parametrize(
    ("directions", "metadata", "said"),
    [
        ({"direction.0": VECTOR}, {}, "direction.0 is no direction of a layer"),
        ({"direction.x": VECTOR}, {}, "direction.x is no direction of a layer"),
        ({"direction.1": VECTOR.astype(np.float16)}, {}, r"is F16 \[64\], not a vector of F32"),
        ({"direction.1": VECTOR.reshape(8, 8)}, {}, r"is F32 \[8, 8\], not a vector of F32"),
        ({"direction.1": VECTOR, "direction.2": VECTOR[:3]}, {}, r"have widths \[3, 64\]"),
        ({"direction.1": VECTOR * np.inf}, {}, "has numbers that are not finite"),
        ({"direction.1": VECTOR}, {"architecture": "llama"}, "is no control vector: general.arch"),
        ({}, {}, "has no direction.N: it is no control vector"),
    ],
)
def test_files_that_are_none(
    tmp_path: Path, directions: dict[str, np.ndarray], metadata: dict[str, Any], said: str
) -> None:
    path = write_control_vector(tmp_path / "a.gguf", directions, **metadata)
    with pytest.raises(USER_ERRORS, match=said) as caught:
        read_control_vector(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
