"""A user's functions of the logits: for the rows that want them, in every kind of step."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jinfer import LLM, RequestError, SamplingParams
from tests.engine.test_schedules import STORIES
from tests.speculate.drafts import RandomTrees, speculating

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
ASKED, OTHER = "Once upon a time", "The cat"


def even(logits: Array, tokens: Array, lengths: Array) -> Array:
    """Only even ids."""
    return jnp.where(jnp.arange(logits.shape[1]) % 2 == 0, logits, -jnp.inf)


def new(logits: Array, tokens: Array, lengths: Array) -> Array:
    """No token that there was."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, jnp.where(tokens >= 0, tokens, logits.shape[1])].set(-jnp.inf)


def all_alike(logits: Array, tokens: Array, lengths: Array) -> Array:
    """Also what was forbidden, and what is no number."""
    return jnp.zeros_like(logits).at[:, 7].set(jnp.nan)


@pytest.fixture(scope="module")
def llm(shared_programs: None) -> Iterator[LLM]:
    words = str(STORIES.parent / "tok_llama2c" / "tokenizer.bin")
    keys: dict[str, Any] = {"engine.slots": 3, "engine.context": 256, "tokenizer": words}
    with LLM(STORIES, **keys) as llm:
        yield llm


def with_functions(*functions: Any, **more: Any) -> SamplingParams:
    return replace(GREEDY, logits_processors=functions, **more)


def test_rows_that_want_them(llm: LLM) -> None:
    vocab = llm.spec.dims["vocab"]
    plain, other = llm.generate([ASKED, OTHER], GREEDY)
    allowed = replace(GREEDY, allowed_token_ids=tuple(range(0, vocab, 2)))
    expected = llm.generate([ASKED], allowed)[0].token_ids
    assert expected != plain.token_ids
    # In company, whose tokens stay, with drafts, and with log-probabilities.
    one, two = llm.generate([ASKED, OTHER], [with_functions(even), GREEDY])
    assert (one.token_ids, two.token_ids) == (expected, other.token_ids)
    drafts = RandomTrees({tuple(llm.encode(ASKED)): expected}, vocab, 7, 7)
    with speculating(llm, drafts) as drafted:
        assert llm.generate([ASKED], with_functions(even))[0].token_ids == expected
    assert drafted.accepted
    scored = llm.generate([ASKED], with_functions(even, logprobs=0))[0]
    assert scored.token_ids == expected
    drawn = llm.generate([ASKED], with_functions(even, temperature=1.0, seed=3))[0].token_ids
    assert drawn == llm.generate([ASKED], replace(allowed, temperature=1.0, seed=3))[0].token_ids
    # Compiled once, and not for those without.
    before = llm.stats().compilations
    llm.generate([ASKED, OTHER], [with_functions(even), GREEDY])
    assert llm.stats().compilations == before


def test_the_tokens_so_far(llm: LLM) -> None:
    ids = llm.encode(ASKED)
    expected = list(ids)
    for _ in range(16):
        logits = np.array(llm.logits([expected])[0][-1])
        logits[expected] = -np.inf
        expected.append(int(np.argmax(logits)))
    both = [with_functions(new), with_functions(new, even), with_functions(even)]
    answers = [one.token_ids for one in llm.generate([ids] * 3, both)]
    assert answers[0] == expected[len(ids) :]
    assert not any(id % 2 for answer in answers[1:] for id in answer)
    assert len({*ids, *answers[1]}) == len({*ids}) + 16


def test_what_is_forbidden_stays_so(llm: LLM) -> None:
    choice = with_functions(all_alike, choice=("yes", "no"), max_tokens=8, ignore_eos=False)
    assert llm.generate([ASKED], choice)[0].text in ("yes", "no")
    banned = with_functions(all_alike, banned_token_ids=(0, 1, 2))
    # Of equal logits the first that is allowed.
    assert set(llm.generate([ASKED], banned)[0].token_ids) == {3}


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            lambda logits, tokens, lengths: logits[:1],
            r"gives float32\[1, 512\] for float32\[2, 512",
        ),
        (lambda logits: logits, "is no JAX function of .logits, tokens, lengths.: TypeError"),
        (
            lambda logits, tokens, lengths: -logits if lengths[0] > 1 else logits,
            "is no JAX function",
        ),
        (lambda logits, tokens, lengths: None, "gives NoneType"),
    ],
)
def test_functions_that_cannot_be(llm: LLM, function: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate([ASKED], with_functions(function))


def test_what_cannot_be(llm: LLM) -> None:
    with pytest.raises(RequestError, match="cannot be kept with strategy='beam'"):
        llm.generate([ASKED], with_functions(even, strategy="beam"))
    with pytest.raises(RequestError, match="logits_processors must be at most 8 functions"):
        with_functions(5)
    with pytest.raises(RequestError, match="logits_processors: there is no 'even'"):
        llm.generate([ASKED], with_functions("even"))


def test_not_too_many() -> None:
    from jinfer.sampling.logits_processors import MAX_PROCESSORS, LogitsProcessors, bits

    known = LogitsProcessors(8, 4)
    functions = [lambda logits, tokens, lengths, i=i: logits + i for i in range(MAX_PROCESSORS + 1)]
    made = known.resolve(functions[:-1])
    assert known.resolve(functions[:-1]) == made
    assert bits(made) == 2**MAX_PROCESSORS - 1
    with pytest.raises(RequestError, match="give the same function again"):
        known.resolve(functions[-1:])
