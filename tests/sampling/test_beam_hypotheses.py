"""Beam search's bookkeeping against a plain search over a made-up model."""

from typing import Literal

import numpy as np
import pytest

from jinfer.sampling.beam_hypotheses import Beams

VOCAB, END, LENGTH = 5, 4, 6


def logprobs(sequence: tuple[int, ...], seed: int) -> np.ndarray:
    """Of the token after a sequence: a model that is a table."""
    x = np.random.default_rng([seed, len(sequence), *sequence]).normal(0, 1.5, VOCAB)
    return x - np.log(np.exp(x).sum())


def plain_search(
    seed: int, count: int, penalty: float, stop: bool | Literal["never"]
) -> tuple[tuple[int, ...], float]:
    """As transformers' documentation of beam search and `early_stopping` says it."""
    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[tuple[int, ...], float]] = []
    for length in range(1, LENGTH + 1):
        found = [
            ((*sequence, token), total + value)
            for sequence, total in running
            for token, value in enumerate(logprobs(sequence, seed))
        ]
        found.sort(key=lambda one: -one[1])
        for sequence, total in found[:count]:
            if sequence[-1] == END:
                ended.append((sequence, total / length**penalty))
        ended = sorted(ended, key=lambda one: -one[1])[:count]
        running = [one for one in found if one[0][-1] != END][:count]
        if len(ended) == count:
            largest = LENGTH if stop == "never" and penalty > 0 else length
            if stop is True or ended[-1][1] >= running[0][1] / largest**penalty:
                break
    left = [(sequence, total / length**penalty) for sequence, total in running]
    return max([*ended, *left], key=lambda one: one[1])


def search(
    seed: int, count: int, penalty: float, stop: bool | Literal["never"]
) -> tuple[tuple[int, ...], float]:
    beams = Beams(count, penalty, frozenset({END}), stop, LENGTH)
    for _ in range(LENGTH):
        sums = np.stack([logprobs(s, seed) for s in beams.sequences])
        sums += np.array(beams.scores)[:, None]
        best = np.argsort(-sums.ravel(), kind="stable")[: 2 * count]
        parents = beams.advance(
            (best // VOCAB).tolist(), (best % VOCAB).tolist(), sums.ravel()[best].tolist()
        )
        assert len(parents) == count
        if beams.done:
            break
    hypothesis, *others = beams.ranked()
    assert [one.score for one in others] == sorted((one.score for one in others), reverse=True)
    return hypothesis.tokens, hypothesis.score


@pytest.mark.parametrize("stop", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_beams(count: int, penalty: float, stop: bool | Literal["never"]) -> None:
    for seed in range(40):
        tokens, score = search(seed, count, penalty, stop)
        expected, best = plain_search(seed, count, penalty, stop)
        assert tokens == expected
        assert score == pytest.approx(best, rel=1e-9)


def test_early_stopping_changes_the_result() -> None:
    """Else the test above would not tell the three apart."""
    results = {
        stop: [search(seed, 2, 1.0, stop) for seed in range(200)] for stop in (True, False, "never")
    }
    assert results[True] != results[False]
    assert results[False] != results["never"]
    scores = [np.mean([score for _, score in results[stop]]) for stop in (True, False, "never")]
    assert scores[0] < scores[1] < scores[2]
