"""How much is drafted: the worthiest nodes, as many as pay, and none where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jinfer import LLM, SamplingParams
from jinfer.sampling.sampler_chain import sampler_sets
from jinfer.speculate.draft_length import Backoff, DraftLength, RunningMean
from jinfer.speculate.replay_drafter import ReplayDrafter
from jinfer.speculate.token_tree import TokenTree, merge_trees
from tests.engine.test_schedules import STORIES
from tests.speculate.drafts import alone, ids, known, same, speculating

SIZES = (4, 8, 16)


def control(rates: dict[int, float], **chances: float) -> DraftLength:
    """With calls that take so many times a plain step, and sources that are right so often."""
    made = DraftLength(
        costs={n: RunningMean(c, 9) for n, c in rates.items()}, plain={1: RunningMean(1.0, 9)}
    )
    for source, chance in chances.items():
        for depth in range(1, 9):
            made.acceptance[source, depth, 0] = RunningMean(chance, 1e6)
    return made


@pytest.mark.parametrize(
    ("rates", "chance", "nodes"),
    [
        ({4: 1.26, 8: 1.51, 16: 2.51}, 0.9, 7),  # 135M Q8_0: eight tokens below 0.9
        ({4: 1.26, 8: 1.51, 16: 2.51}, 0.6, 3),
        ({4: 2.66, 8: 3.56, 16: 6.83}, 0.6, 0),  # Q4_0 on a Xeon: not worth it
        ({4: 2.66, 8: 3.56, 16: 6.83}, 0.95, 7),
        ({4: 1.02, 8: 1.04, 16: 1.08}, 0.95, 15),
    ],
)
def test_as_many_nodes_as_pay(rates: dict[int, float], chance: float, nodes: int) -> None:
    tree = TokenTree.chain(list(range(15)), "a")
    (chosen,) = control(rates, a=chance).select([tree], 1, SIZES)
    assert len(chosen) == nodes


def test_the_worthiest_nodes_of_all_sequences() -> None:
    made = control({4: 1.0, 8: 1.0, 16: 9.0}, good=0.9, bad=0.3)
    made.plain[2] = RunningMean(1.0, 9)
    trees = [TokenTree.chain([1] * 8, "bad"), TokenTree.chain([1] * 8, "good")]
    first, second = made.select(trees, 2, SIZES)
    assert (len(first), len(second)) == (0, 6)


def test_likely_branch_comes_before_deep_unlikely_nodes() -> None:
    made = control({4: 1.0}, a=0.3)
    made.acceptance["b", 1, 1] = RunningMean(0.25, 1e6)
    tree = merge_trees([TokenTree.chain([1, 2, 3, 4], "a"), TokenTree.chain([9], "b")])
    (chosen,) = made.select([tree], 1, (4,))
    assert chosen.tokens == (1, 2, 9)
    assert chosen.parents == (-1, 0, -1)


def test_acceptance_rates_are_learned() -> None:
    made, tree = (
        DraftLength(),
        merge_trees([TokenTree.chain([1, 2, 3], "a"), TokenTree.chain([1, 5], "b")]),
    )
    for _ in range(30):
        made.record(tree, tree.follow([1, 5, 7]))
    assert made.acceptance_rate("a+b", 1, 0) > 0.9
    assert made.acceptance_rate("a", 2, 0) < 0.1
    assert made.acceptance_rate("b", 2, 1) > 0.9
    assert made.tried()["a", 2, 0] == (0, 30)
    assert ("a", 3, 0) not in made.tried()  # nobody came there


def test_a_draft_model_looks_ahead_as_far_as_pays() -> None:
    cheap = control({4: 1.1, 8: 1.2, 16: 1.4}, m=0.9)
    assert cheap.draft_depth("m", 0.05, 1, 1, SIZES, probing=False) >= 5
    assert cheap.draft_depth("m", 0.9, 1, 1, SIZES, probing=False) == 0
    assert cheap.draft_depth("m", 0.9, 1, 1, SIZES, probing=True) == 3


def test_pauses_grow_while_drafts_do_not_pay() -> None:
    pace, looks = Backoff(), 0
    for _ in range(400):
        if not pace.rest():
            looks += 1
            pace.useless()
    assert looks < 15
    pace.drafted()
    assert not pace.resting


def test_probing_after_a_pause_drafts_regardless_of_expected_gain() -> None:
    pace = Backoff()
    pace.useless()
    assert pace.rest()
    assert pace.probing
    pace.drafted()
    assert not pace.probing


def test_pauses_grow_while_no_source_drafts() -> None:
    pace, steps = Backoff(), []
    for _ in range(5):
        steps.append(pace.steps(8))
        pace.missed(rests=True)
    assert pace.resting
    assert steps == [1, 2, 4, 8, 8]


@pytest.fixture(scope="module")
def stories() -> Iterator[LLM]:
    keys: dict[str, Any] = {"engine.context": 256, "engine.slots": 1}
    with LLM(STORIES, **keys) as llm:
        yield llm


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_as_it_pays_on_a_model(stories: LLM, accuracy: float) -> None:
    prompts, engine = ids(512, 9, 40), stories.session.engine
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=1.0, seed=1)
    plain = alone(stories, prompts, params)
    replay = ReplayDrafter(known(prompts, plain), accuracy, 512)
    with speculating(stories, replay, nodes=None) as drafted:
        speculation: Any = engine.speculator
        # Calls that cost as much as a plain step, whatever this machine does meanwhile.
        for size in (4, 8, 16, 32):
            speculation.draft_length.costs[size] = _Fixed(1.0 + size / 8)
        speculation.draft_length.plain = {1: _Fixed(1.0, 9, 9)}
        speculation.branched = False
        # Those for answers under a grammar, or with rare stages, are for nobody here.
        keys = [
            key
            for key in speculation._step_keys()
            if not key.masked and key.stages == sampler_sets()[0]
        ]
        for future in engine.runner.programs.announce(keys):
            future.result()
        same(alone(stories, prompts, params), plain)
    assert drafted.accepted == (drafted.drafted if accuracy else 0)
    assert drafted.drafts < 12 if accuracy == 0 else drafted.accepted > 300


class _Fixed(RunningMean):
    """What takes the same time for ever."""

    def add(self, new: float) -> None:
        """As it is."""


def test_rests_grow_while_drafts_are_useless() -> None:
    """So that looking costs little; and are short again once drafts are right."""
    pace, looks, calls = Backoff(), 0, 0
    while calls < 1000:
        calls += 1
        if not pace.rest():
            looks += 1
            pace.useless()
    assert looks <= 8
    while pace.rest():
        pass
    pace.drafted()  # tried, no more
    pace.useless()
    assert sum(1 for _ in range(300) if pace.rest()) > 200
    pace.drafted()
    pace.drafted()
    pace.useless()
    assert sum(1 for _ in range(300) if pace.rest()) < 10


def test_rejected_sources_are_observed_rarely() -> None:
    pace, seen = Backoff(), 0
    for _ in range(100):
        if pace.watches(new=False):
            seen += 1
            pace.watched(right=False)
    assert seen < 20
    pace.watched(right=True)
    assert pace.watches(new=False)


def test_useless_source_is_tried_again_after_right_tokens() -> None:
    made, tree = control({4: 1.3, 8: 1.6}), TokenTree.chain(list(range(8)), "a")
    for _ in range(100):
        made.record(tree, [])
    assert made.best_size([tree], 1, SIZES) is None
    count = 0
    while made.best_size([tree], 1, SIZES) is None:
        made.record(tree.subtree([0]), [0])
        count += 1
    assert count <= 16
