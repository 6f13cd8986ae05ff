"""Which strategies are driven by something of their own."""

from __future__ import annotations

from functools import partial

from jinfer.engine.requests import Request
from jinfer.engine.search.beam_search import BeamSearch
from jinfer.engine.search.contrastive_search import Contrastive
from jinfer.engine.search.search_driver import Driver
from jinfer.sampling.beam_hypotheses import Beams


def driver_of(request: Request, rank: int) -> Driver | None:
    """Who drives the strategies that are not a choice of one token after the other.

    Args:
        rank: which of a prompt's answers it is: a search finds several, best first.
    """
    sampling = request.sampling
    if sampling.strategy == "contrastive":
        return Contrastive(max(1, sampling.top_k), sampling.penalty_alpha)
    if sampling.strategy == "beam":
        ends = frozenset() if sampling.ignore_eos else frozenset(request.end_ids)
        every = ends | set(sampling.stop_token_ids)
        most = request.limit - len(request.prompt)
        early = sampling.early_stopping
        start = partial(Beams, sampling.beams, sampling.length_penalty, every, early, most)
        return BeamSearch(start, rank)
    return None
