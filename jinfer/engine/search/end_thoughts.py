"""Thinking budget, in the engine: thoughts that are at their budget get their end.

Its tokens are appended like prompt tokens and computed together. Where log-probabilities are wanted
they are sampled one by one, each as the only token that is allowed. A guided sequence's grammar has
to take them too, so that its turn appends them (`jinfer.engine.search.grammar_turns`).
"""

from __future__ import annotations

from jinfer.engine.requests import Token
from jinfer.engine.runner.model_runner import ModelRunner
from jinfer.engine.scheduling.sequence import RunningSequence


def end_thought(runner: ModelRunner, sequence: RunningSequence) -> list[Token]:
    """Force the end of a thought that is at its budget, and limit how far the device may go.

    Returns:
        The forced tokens.
    """
    thought = sequence.thought
    if thought is None or sequence.in_flight or sequence.waits_for_grammar or sequence.ended:
        return []
    forced: list[int] = []
    samples = sequence.request.sampling.logprobs is not None
    while thought.due and not samples and not sequence.guided and sequence.room:
        forced.append(thought.due[0])
        sequence.append(forced[-1])
    must = thought.due[0] if thought.due and not sequence.guided else None
    allowed = max(1, thought.allowed) if thought.allowed is not None else sequence.room
    limit = len(sequence.tokens) + min(allowed, sequence.room)
    changed = bool(forced) or (must, limit) != (sequence.must, sequence.limit)
    sequence.must, sequence.limit = must, limit
    if changed and sequence.block_tables is not None:
        runner.set_slot(sequence)
    return [Token(sequence.request.id, id) for id in forced]
