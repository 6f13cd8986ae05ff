"""Search registry: sampling strategies that have a search driver."""

from __future__ import annotations

from functools import partial

from jinfer.engine.requests import Request
from jinfer.engine.search.beam_search import BeamSearch
from jinfer.engine.search.contrastive_search import ContrastiveSearch
from jinfer.engine.search.search_driver import SearchDriver
from jinfer.sampling.beam_hypotheses import Beams


def make_driver(request: Request, rank: int) -> SearchDriver | None:
    """The search driver of a request; None if its tokens are sampled one after the other.

    Args:
        rank: index of the answer among those of a prompt: a search finds several, best first.
    """
    sampling = request.sampling
    if sampling.strategy == "contrastive":
        return ContrastiveSearch(max(1, sampling.top_k), sampling.penalty_alpha)
    if sampling.strategy == "beam":
        ends = frozenset() if sampling.ignore_eos else frozenset(request.end_ids)
        every = ends | set(sampling.stop_token_ids)
        most = request.limit - len(request.prompt)
        early = sampling.early_stopping
        start = partial(Beams, sampling.beams, sampling.length_penalty, every, early, most)
        return BeamSearch(start, rank)
    return None
