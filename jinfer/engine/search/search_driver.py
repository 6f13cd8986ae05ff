"""Search drivers: protocol and table of the searches on the host: beam and contrastive search."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from jinfer.engine.requests import Failed, Request, Token
from jinfer.engine.runner.model_runner import ModelRunner
from jinfer.engine.scheduling.scheduler import Scheduler
from jinfer.engine.scheduling.sequence import RunningSequence


class SearchDriver(Protocol):
    """Computes the tokens of one host-driven sequence, step by step."""

    def advance(
        self, runner: ModelRunner, scheduler: Scheduler, sequence: RunningSequence
    ) -> list[Token | Failed]:
        """Compute the next tokens of the sequence, which is prefilled but for its last token.

        Raises:
            NoRoomError: too few blocks; it can be called again once there are more.
        """

    def release_blocks(self, scheduler: Scheduler) -> None:
        """Free the blocks of the search: its request has ended, or is preempted.

        After a preemption the search restarts from the known tokens.
        """


def make_driver(request: Request, rank: int) -> SearchDriver | None:
    """The search driver of a request; None if its tokens are sampled one after the other.

    Args:
        rank: index of the answer among those of a prompt: a search finds several, best first.
    """
    # Each search is imported where it is asked for, because a start needs none.
    sampling = request.sampling
    if sampling.strategy == "contrastive":
        from jinfer.engine.search.contrastive_search import ContrastiveSearch

        return ContrastiveSearch(max(1, sampling.top_k), sampling.penalty_alpha)
    if sampling.strategy == "beam":
        from jinfer.engine.search.beam_search import BeamSearch
        from jinfer.sampling.beam_hypotheses import Beams

        ends = frozenset() if sampling.ignore_eos else frozenset(request.end_ids)
        every = ends | set(sampling.stop_token_ids)
        max_tokens = request.limit - len(request.prompt)
        early = sampling.early_stopping
        start = partial(Beams, sampling.beams, sampling.length_penalty, every, early, max_tokens)
        return BeamSearch(start, rank)
    return None
