"""Beam search on a cache of its own."""

from __future__ import annotations

import numpy as np

from jinfer.engine.engine import Engine, padded
from jinfer.engine.programs import Shape
from jinfer.engine.requests import Request
from jinfer.engine.steps import empty_row, empty_state
from jinfer.ops import cache as kv_cache
from jinfer.sampling.beam import Beams, Hypothesis


def beam_search(engine: Engine, request: Request) -> Hypothesis:
    """The likeliest continuation that a search with `sampling.beams` beams finds.

    The sequences are rows of a cache of their own; a step first brings the rows into the order
    of the sequences they belong to, then computes all of them.
    """
    sampling, prompt = request.sampling, request.prompt
    count = sampling.beams
    length, encoded = engine.padded_length(request.limit), engine.padded_encoder(request.encoder)
    programs, leaves = engine.programs, engine.leaves
    cache = kv_cache.empty(programs.model.caches, count, length, encoded, programs.kv_cache)
    if encoded:
        fill = programs.get(Shape("fill", count, length, encoded, encoded))
        texts, lengths = padded([request.encoder], encoded)
        cache = fill(leaves, cache, texts, lengths, np.int32(0))
    vocab = programs.model.vocab
    state = empty_state(count, length, vocab)
    state = state._replace(encoded=state.encoded.at[0].set(len(request.encoder)))
    # The last token of the prompt is the first step's: it takes part in the search.
    for start, tokens, size in engine.chunks(0, len(prompt) - 1, length):
        prefill = programs.get(Shape("prefill", count, length, encoded, size))
        chunk, _ = padded([prompt[start : start + tokens]], size)
        at = (np.int32(start), np.int32(tokens), np.int32(len(prompt)), np.int32(0))
        cache, state, _ = prefill(leaves, cache, state, chunk[0], *at, empty_row(vocab))
    step = programs.get(Shape("beam", count, length, encoded))
    ends = frozenset() if sampling.ignore_eos else frozenset(request.end_ids)
    beams = Beams(
        count,
        sampling.length_penalty,
        ends | set(sampling.stop_token_ids),
        sampling.early_stopping,
        request.limit - len(prompt),
    )
    parents, last = [0] * count, [prompt[-1]] * count
    seen = np.full(count, len(request.encoder), np.int32)
    for position in range(len(prompt) - 1, request.limit - 1):
        cache, rows, tokens_, scores = step(
            leaves,
            cache,
            np.array(parents, np.int32),
            np.array(last, np.int32),
            np.int32(position),
            seen,
            np.array(beams.scores, np.float32),
        )
        found = (np.asarray(part).tolist() for part in (rows, tokens_, scores))
        parents = beams.advance(*found)
        if beams.done:
            break
        last = [sequence[-1] for sequence in beams.sequences]
    return beams.best()
