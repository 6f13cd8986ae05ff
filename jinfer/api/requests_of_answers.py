"""Several answers to a prompt (n, best_of): a request for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jinfer.engine.requests import Request, RequestError


def requests_of_answers(request: Request, ids: Iterator[int]) -> list[Request]:
    """A request for each answer: with other seeds, and log-probabilities to rank them by.

    Where nothing is drawn the answers are equal.

    Args:
        request: the first one.
        ids: gives the others their ids.

    Raises:
        RequestError: a beam search has not as many.
    """
    sampling = request.sampling
    count = sampling.best_of or sampling.n
    if count == 1:
        return [request]
    beam = sampling.strategy == "beam"
    if beam and count > min(sampling.n, sampling.beams):
        raise RequestError(
            f"a beam search of {sampling.beams} beams gives as many answers at most, its best; "
            f"set n, not best_of"
        )
    requests = []
    for index in range(count):
        seed = None if sampling.seed is None else (sampling.seed + index) % 2**64
        logprobs = sampling.logprobs
        if count > sampling.n:
            logprobs = logprobs or 0
        one = replace(sampling, seed=seed, logprobs=logprobs, n=1, best_of=None)
        id = request.id if index == 0 else next(ids)
        requests.append(replace(request, id=id, sampling=one))
    return requests
