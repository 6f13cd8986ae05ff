"""Who drafts: lookups, models, the model itself with less of it; tokens stay those of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from jinfer import LLM, SamplingParams
from jinfer.modelspec.spec_errors import SpecError
from jinfer.speculate.prompt_lookup import PromptLookup
from jinfer.speculate.suffix_tree import SuffixDrafter
from jinfer.speculate.token_tree import TokenTree, merge_trees
from jinfer.speculate.tree_batch import first_path
from tests.engine.test_schedules import GOLDENS, SMOLLM2, STORIES
from tests.speculate.drafts import alone, ids, same

SHORT: dict[str, Any] = {"engine.context": 256, "engine.slots": 2}
DRAWN = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=5)
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


@dataclass
class _Request:
    prompt: tuple[int, ...]
    id: int = 0


@dataclass
class _Sequence:
    """As much of a sequence as lookups look at."""

    tokens: list[int]
    request: _Request = field(default_factory=lambda: _Request(()))


def sequence(tokens: list[int], prompt: int = 0, id: int = 0) -> Any:
    return _Sequence(tokens, _Request(tuple(tokens[:prompt]), id))


def drafted(drafter: Any, one: Any, largest: int = 4) -> TokenTree:
    return drafter.draft([(one, largest)])[0]


def test_a_lookup_goes_on_as_the_text_did() -> None:
    one = sequence([1, 2, 3, 4, 5, 6, 7, 2, 3])
    assert drafted(PromptLookup(), one).tokens == (4, 5, 6, 7)


def test_a_lookup_prefers_the_longest_and_then_the_newest() -> None:
    assert drafted(PromptLookup(), sequence([9, 1, 2, 7, 5, 1, 2, 8, 5, 1, 2])).tokens[:1] == (8,)
    assert drafted(PromptLookup(), sequence([3, 1, 2, 7, 5, 1, 2, 8, 3, 1, 2])).tokens[:1] == (7,)


def test_a_lookup_branches_where_the_text_went_on_differently() -> None:
    tree = drafted(PromptLookup(branches=2), sequence([0, 1, 2, 7, 5, 1, 2, 8, 6, 1, 2]), 2)
    assert [tree.tokens[node] for node in range(len(tree)) if tree.parents[node] == -1] == [8, 7]


def test_prompt_lookup_repeats_a_repetition() -> None:
    assert drafted(PromptLookup(), sequence([4, 5, 6, 5, 6]), 5).tokens == (5, 6, 5, 6, 5)


def test_prompt_lookup_drafts_no_new_text() -> None:
    assert not len(drafted(PromptLookup(), sequence([1, 2, 3, 4])))


def test_a_suffix_is_known_from_other_answers() -> None:
    drafter = SuffixDrafter()
    first = sequence([1, 2, 3, 4, 5, 6])
    drafted(drafter, first)
    drafter.forget(first)
    tree = drafted(drafter, sequence([9, 9, 3, 4], id=1))
    assert tree.tokens == (5, 6)


def test_a_suffix_tree_has_the_more_frequent_first() -> None:
    drafter = SuffixDrafter()
    for id, answer in enumerate(([1, 2, 3], [1, 2, 4], [1, 2, 4], [7, 1, 2, 3, 9], [1, 2, 4])):
        drafted(drafter, one := sequence(answer, id=id))
        drafter.forget(one)
    tree = drafted(drafter, sequence([1, 2], id=9))
    assert tree.tokens[:2] == (4, 3)
    assert tree.parents == (-1, -1, 1)


def test_merged_trees_have_each_path_once() -> None:
    first, second = TokenTree.chain([1, 2, 3], "a"), TokenTree.chain([1, 2, 4], "b")
    tree = merge_trees([first, second, first])
    assert tree.tokens == (1, 2, 3, 4)
    assert tree.parents == (-1, 0, 1, 1)
    assert tree.sources == ("a+b", "a+b", "a", "b")
    assert tree.paths() == [[0, 1, 2], [0, 1, 3]]
    assert tree.follow([1, 2, 4, 5]) == [0, 1, 3]
    assert tree.subtree([0, 1, 3]).tokens == (1, 2, 4)
    assert tree.ranks() == [0, 0, 0, 1]
    assert tree.subtree([0, 1, 3]).ranks() == [0, 0, 1]


def test_the_first_path_is_that_of_first_children() -> None:
    """Also if draft models, level by level, add a leaf next to it before its end."""
    tree = TokenTree((5, 6, 7, 8), (-1, -1, 0, 2), ("m",) * 4)
    assert first_path(tree).tokens == (5, 7, 8)
    assert first_path(TokenTree()).tokens == ()


def check(source: Any, plain: Any, prompts: list[list[int]], **settings: Any) -> float:
    """The answers are the same; the share of drafted tokens that were right."""
    with LLM(source, **SHORT, **settings) as llm:
        for params, answers in plain.items():
            same(alone(llm, prompts, params), answers)
            same(llm.generate(prompts, params), answers)
        stats = llm.stats()
        assert stats.blocks_held == 0
        assert stats.drafts
        used = llm.generate(prompts[:1], DRAWN)[0].usage
        assert 0 <= used.accepted_tokens <= used.drafted_tokens
        return stats.accepted_tokens / stats.draft_tokens


@pytest.fixture(scope="module")
def stories() -> Any:
    with LLM(STORIES, **SHORT) as llm:
        prompts = ids(512, 9, 70)
        yield prompts, {params: alone(llm, prompts, params) for params in (DRAWN, GREEDY)}


@pytest.mark.parametrize(
    ("draft", "least"),
    [
        (str(STORIES / "model.bin"), 0.4),  # half of each level are siblings
        pytest.param([{"weights": "q4"}], 0.05, marks=pytest.mark.soak),
        pytest.param([{"weights": "q3"}], 0.02, marks=pytest.mark.soak),
        pytest.param([{"skip": [3]}], 0.02, marks=pytest.mark.soak),
        (["ngram", "suffix", {"weights": "q6"}], 0.05),
    ],
    ids=str,
)
def test_models_draft(stories: Any, draft: Any, least: float) -> None:
    prompts, plain = stories
    settings = {"speculation.draft": draft, "speculation.nodes": 8}
    if isinstance(draft, list):
        settings["quantization.threshold"] = 0
    assert check(STORIES, plain, prompts, **settings) > least


def test_an_expansion(stories: Any) -> None:
    prompts, plain = stories
    settings: dict[str, Any] = {"speculation.expansion": [1, 2, 2], "speculation.nodes": 16}
    settings |= {"speculation.draft": str(STORIES / "model.bin")}
    assert check(STORIES, plain, prompts, **settings) > 0.2


@pytest.mark.soak
def test_two_drafts_merged_accept_at_least_as_much(stories: Any) -> None:
    prompts, plain = stories
    steps = []
    for draft in ([{"weights": "q4"}], [{"skip": [3]}], [{"weights": "q4"}, {"skip": [3]}]):
        settings: dict[str, Any] = {"speculation.draft": draft, "speculation.nodes": 40}
        settings |= {"quantization.threshold": 0, **SHORT}
        with LLM(STORIES, **settings) as llm:
            answers = alone(llm, prompts, GREEDY)
            same(answers, plain[GREEDY])
            # Each call gives one token more than were accepted in it.
            steps.append(sum(40 - one.usage.accepted_tokens for one in answers))
    assert steps[2] <= min(steps[:2])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"speculation.draft": 3}, "speculation.draft: 3 is not"),
        ({"speculation.draft": [{"source": 3}]}, "speculation.draft[0].source: 3 is not the name"),
        ({"speculation.draft": [{}]}, "speculation.draft[0].source: is missing"),
        ({"speculation.draft": [{"skip": [9]}]}, "skip has layer 9; there are 0 to 4"),
        ({"speculation.draft": [{"skip": [0, 1, 2, 3, 4]}]}, "skip leaves no layer"),
        ({"speculation.draft": [{"source": "ngram", "weights": "q4"}]}, "has no weights"),
        ({"speculation.draft": "ngram", "speculation.nodes": 1}, "speculation.nodes: 1 is not"),
        ({"speculation.draft": "ngram", "speculation.depth": 1}, "speculation.depth: unknown key"),
        ({"speculation.expansion": [5]}, "speculation.expansion: 5 tokens cannot follow one"),
        ({"speculation.expansion": [4, 4, 4]}, "is a tree of 85 tokens"),
        ({"speculation.draft": str(GOLDENS / "llama2")}, "tokens, and the model 512"),
        ({"speculation.draft": str(GOLDENS / "bert")}, "is encoder-only"),
    ],
    ids=str,
)
def test_invalid_settings_are_one_line_errors(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        LLM(STORIES, **keys)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_another_tokenizer_is_refused_with_the_first_difference() -> None:
    keys: dict[str, Any] = {
        "tokenizer": str(GOLDENS / "tok_llama2c"),
        "speculation.draft": str(SMOLLM2),
    }
    with pytest.raises(SpecError, match=r"the tokenizer of .* is another one: token \d+ is "):
        LLM(STORIES, **keys)
