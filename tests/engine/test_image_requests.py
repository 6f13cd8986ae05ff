"""Requests with images: programs, prefix cache, kept features, sampling, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from jinfer.engine.output.completion import Usage
from jinfer.engine.requests import RequestError
from jinfer.engine.runner.step_key import StepKey
from jinfer.modelspec.spec_errors import SpecError
from jinfer.speculate.token_tree import TokenTree
from tests.engine.images import Drawn, laid, open_model, placeholder, span
from tests.engine.tiny import GOLDEN

TEXT = [int(n) for n in np.random.default_rng(3).integers(5, 200, 200)]
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_model("qwen3_vl", **{"engine.slots": 4, "engine.context": 512}) as llm:
        yield llm


def run(llm: LLM, prompt: tuple[list[int], Any], params: SamplingParams = GREEDY) -> list[Any]:
    """(tokens, usage) of each answer."""
    prepared = llm.session.prepare(prompt[0], params, images=prompt[1])
    found = []
    for each in prepared:
        pieces, tokens = SimpleQueue[Any](), list[int]()
        llm.session.submit(each, pieces.put)
        while not isinstance(piece := pieces.get(timeout=300), Usage):
            if isinstance(piece, BaseException):
                raise piece
            tokens += piece.token_ids
        found.append((tokens, piece))
    return found


def forget_prefixes(llm: LLM) -> None:
    llm.session.thread.run(lambda engine: engine.scheduler.blocks.clear())


def cached(llm: LLM, prompt: tuple[list[int], Any]) -> int:
    ((_, usage),) = run(llm, prompt)
    return usage.cached_tokens


def test_text_and_decoding_run_the_programs_of_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, keys = llm.session.engine.runner.programs, list[StepKey]()
    get = programs.get

    def noted(key: StepKey) -> Any:
        keys.append(key)
        return get(key)

    monkeypatch.setattr(programs, "get", noted)
    forget_prefixes(llm)
    run(llm, (TEXT[:40], ()))
    of_text = keys.copy()
    keys.clear()
    forget_prefixes(llm)
    run(llm, laid(llm, [TEXT[:20], (Drawn(1, 6), 3, 1), TEXT[20:34]]))
    assert all(key.images is None for key in of_text)
    assert [key for key in keys if key.images is not None] == keys[1:2]  # after "set_slot"
    assert {replace(key, images=None) for key in keys} == set(of_text)


def test_prefix_cache_knows_images_by_content(llm: LLM) -> None:
    forget_prefixes(llm)
    before, after = TEXT[:80], TEXT[80:100]
    first = laid(llm, [before, (Drawn(1, 60), 6, 1), after])
    other = laid(llm, [before, (Drawn(2, 60), 6, 1), after])
    assert cached(llm, first) == 0
    assert cached(llm, first) == len(first[0]) - 1
    assert cached(llm, other) == len(before)
    assert cached(llm, other) == len(first[0]) - 1
    # The same image elsewhere, of other features before it, or two in another order.
    assert cached(llm, laid(llm, [TEXT[100:180], (Drawn(1, 60), 6, 1), after])) == 0
    both: list[Any] = [before, (Drawn(1, 60), 6, 1), (Drawn(2, 60), 6, 1), after]
    assert cached(llm, laid(llm, both)) == 140
    assert cached(llm, laid(llm, [before, both[2], both[1], after])) == 140
    # A text of the same length as an image is none.
    assert cached(llm, (before + TEXT[100:160] + after, ())) == 80


def test_features_are_shared_and_kept_in_a_budget(llm: LLM) -> None:
    images = llm.session.engine.runner.images
    assert images is not None
    images.clear()
    limit, encoded = images.limit, images.encoded
    run(llm, laid(llm, [TEXT[:7], (Drawn(5, 12), 3, 1), TEXT[:9], (Drawn(5, 12), 3, 1), [7]]))
    run(llm, laid(llm, [TEXT[9:19], (Drawn(5, 12), 3, 1), [7]]))
    assert images.encoded - encoded == 1
    images.limit = 1
    run(llm, laid(llm, [TEXT[:17], (Drawn(6, 12), 3, 1), (Drawn(5, 12), 3, 1), [8]]))
    run(llm, laid(llm, [TEXT[:27], (Drawn(6, 12), 3, 1), [8]]))
    images.limit = limit
    assert images.encoded - encoded == 4


def test_a_prompt_that_ends_with_an_image(llm: LLM) -> None:
    prompt = laid(llm, [TEXT[:30], (Drawn(3, 1), 1, 1)])
    ((expected, _),) = run(llm, prompt)
    for _ in range(2):  # the prefix but the last token is cached
        ((tokens, usage),) = run(llm, prompt)
        assert (tokens, usage.cached_tokens) == (expected, 30)
    assert run(llm, laid(llm, [TEXT[:30], (Drawn(4, 1), 1, 1)]))[0][0] != expected


def test_placeholders_are_never_sampled_nor_drafted(llm: LLM) -> None:
    id = placeholder(llm)
    forced = SamplingParams(max_tokens=6, ignore_eos=True, logit_bias={id: 100.0})
    prompt = laid(llm, [TEXT[:20], (Drawn(1, 6), 3, 1), TEXT[20:34]])
    assert id not in run(llm, prompt, forced)[0][0]
    tree = TokenTree((1, id, 2, 3, 4), (-1, -1, 0, 1, 2), ("a",) * 5).without(frozenset([id]))
    assert (tree.tokens, tree.parents) == ((1, 2, 4), (-1, 0, 1))


def test_several_answers_and_beams(llm: LLM) -> None:
    prompt = laid(llm, [TEXT[:20], (Drawn(1, 6), 3, 1), TEXT[20:24]])
    several = SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.0, seed=3, n=3)
    assert len({tuple(tokens) for tokens, _ in run(llm, prompt, several)}) > 1
    beam = SamplingParams(max_tokens=5, ignore_eos=True, strategy="beam", beams=1)
    greedy = SamplingParams(max_tokens=5, ignore_eos=True)
    assert run(llm, prompt, beam)[0][0] == run(llm, prompt, greedy)[0][0]


def test_what_is_refused(llm: LLM) -> None:
    prompt = laid(llm, [TEXT[:20], (Drawn(1, 6), 3, 1), TEXT[20:24]])
    contrastive = SamplingParams(strategy="contrastive", top_k=3)
    for ids, spans, params, reason in (
        (prompt[0], (), GREEDY, f"token {placeholder(llm)} of the prompt, at 20, stands for"),
        (*prompt, contrastive, "strategy='contrastive' cannot be used"),
        (TEXT[:20], (span(18, Drawn(1, 6), 3),), GREEDY, "outside its prompt"),
    ):
        with pytest.raises(RequestError, match=reason):
            llm.session.prepare(ids, params, images=spans)
    with (
        LLM(GOLDEN, dtype="float32") as text,
        pytest.raises(RequestError, match="this model reads no images"),
    ):
        text.session.prepare(TEXT[:20], GREEDY, images=(span(2, Drawn(1, 6)),))


def test_an_image_that_attends_both_ways_fits_a_step() -> None:
    keys = {"engine.prefill_chunk": 64, "engine.mixed_chunk": 20, "engine.slots": 2}
    with open_model("gemma3", **keys) as llm:
        large = laid(llm, [TEXT[:5], (Drawn(1, 65), 1, 1), [9]])
        with pytest.raises(RequestError, match="prefill_chunk to 65 or more"):
            llm.session.prepare(large[0], GREEDY, images=large[1])
        # As large as a step, while another sequence decodes.
        whole = laid(llm, [TEXT[:5], (Drawn(1, 64), 1, 1), [9]])
        ((expected, _),) = run(llm, whole)
        pieces = SimpleQueue[Any]()
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        (other,) = llm.session.prepare(TEXT[:9], long)
        llm.session.submit(other, pieces.put)
        pieces.get(timeout=300)
        forget_prefixes(llm)
        assert run(llm, whole)[0][0] == expected


def test_positions_on_a_grid_need_sections() -> None:
    with pytest.raises(SpecError, match=r"image\.position: \"grid\" needs a rope whose three"):
        open_model("llava", **{"image.position": "grid"})
