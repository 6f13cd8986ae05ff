"""Rules of a request as operations of XLA, where other tests have them by the custom call too."""

import numpy as np
import pytest

from jinfer.ops import sampler_calls
from tests.sampling.batches import VOCAB, batch, draw, params


def test_an_end_may_come_right_after_min_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_calls, "available", lambda: False)
    logits = np.full((2, VOCAB), -4.0)
    logits[:, 7] = 20.0
    rows = batch(params(min_tokens=3), params(min_tokens=0), end_ids=(7,))
    drawn = draw(logits, rows, steps=5)
    assert (drawn == 7).T.tolist() == [[False, False, False, True, True], [True] * 5]
