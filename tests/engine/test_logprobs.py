"""Log-probabilities of ids that a request names, and those after the samplers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jinfer import LLM, RequestError, SamplingParams
from tests.engine.test_schedules import STORIES

IDS = [[1, 40, 90, 7], [1, 300, 5]]
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def llm(shared_programs: None) -> Iterator[LLM]:
    keys: dict[str, Any] = {"engine.slots": 2, "engine.context": 128}
    with LLM(STORIES, **keys) as llm:
        yield llm


def log_softmax(logits: Any) -> np.ndarray:
    shifted = np.asarray(logits, np.float64) - np.max(logits)
    return shifted - np.log(np.exp(shifted).sum())


def test_of_some_ids(llm: LLM) -> None:
    plain = llm.generate(IDS, GREEDY)
    named = replace(GREEDY, logprob_token_ids=[7, 400, 3, 9, 11])
    one, two = llm.generate(IDS, [named, GREEDY])
    assert (one.token_ids, two.logprobs) == (plain[0].token_ids, plain[1].logprobs)
    for place, entry in enumerate(one.logprobs or ()):
        logits = llm.logits([[*IDS[0], *one.token_ids[:place]]])[0][-1]
        expected = log_softmax(logits)
        assert entry.logprob == (plain[0].logprobs or [])[place].logprob
        assert [top.id for top in entry.top] == [7, 400, 3, 9, 11]
        np.testing.assert_allclose(
            [top.logprob for top in entry.top], expected[[7, 400, 3, 9, 11]], atol=1e-4
        )
    with pytest.raises(RequestError, match="logprob_token_ids: token 512 is outside"):
        llm.generate(IDS, replace(GREEDY, logprob_token_ids=[512]))


def test_after_the_samplers(llm: LLM) -> None:
    drawn = replace(GREEDY, temperature=0.7, top_k=4, seed=5, post_sampling_probs=True)
    before = replace(drawn, post_sampling_probs=False)
    plain, other = llm.generate(IDS, [before, GREEDY])
    one, two = llm.generate(IDS, [drawn, GREEDY])
    assert (one.token_ids, two.logprobs) == (plain.token_ids, other.logprobs)
    for place, entry in enumerate(one.logprobs or ()):
        logits = np.asarray(llm.logits([[*IDS[0], *one.token_ids[:place]]])[0][-1], np.float64)
        left = np.sort(logits)[-4:] / 0.7
        expected = np.sort(log_softmax(left))[::-1][:3]
        np.testing.assert_allclose([top.logprob for top in entry.top], expected, atol=1e-4)
    # Where nothing is drawn, the token that is taken is all there is.
    greedy = llm.generate(IDS[:1], replace(GREEDY, post_sampling_probs=True))[0]
    assert greedy.token_ids == llm.generate(IDS[:1], GREEDY)[0].token_ids
    for entry in greedy.logprobs or ():
        assert (entry.logprob, entry.top[0].id) == (0.0, entry.id)
        assert entry.top[1].logprob == -np.inf
