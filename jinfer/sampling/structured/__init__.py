"""Structured output: answers constrained to a JSON schema, regex, choice or grammar (llguidance).

How an engine's step uses it, without jax:

1. In the thread that receives a request (it may take some time):
   `constraint = compile_constraint(tokenizer, json_schema=…)`; a `ConstraintError` is the request's
   answer. `matcher = constraint.start()` for each of its sequences.
2. A worker thread advances the grammar by the tokens of a step: `matcher.advance(token)` for each
chosen token; then `forced = matcher.forced()`, tokens that need no sampling and enter the next step
as a chunk of known tokens, and `advance` for each of them. 3. While the device computes a step's
logits, the same thread writes `matcher.mask(row)` into the row of a `uint32[batch, words]` array;
rows of unconstrained requests are all ones. 4. The sampler adds -inf where `mask[row, v // 32] >>
(v % 32) & 1` is 0, before anything else. A mask takes 0.1 ms to 0.1 s: a request whose mask is not
ready is left out of the step. 5. `matcher.finished`: the answer is complete, and the request ends
("stop") without waiting for an end of sequence, also where `ignore_eos` or `min_tokens` would go
on.

Forced tokens only change the speed: masks would allow only them. Both depend only on the tokens of
the answer. For drafts: `fork`, or `advance` and `rollback`.
"""

from jinfer.sampling.request_errors import ConstraintError
from jinfer.sampling.structured.constraint import (
    Constraint,
    compile_constraint,
    forget_constraints,
)
from jinfer.sampling.structured.matcher import Matcher
from jinfer.sampling.structured.schema_relaxation import relaxed, supported

__all__ = [
    "Constraint",
    "ConstraintError",
    "Matcher",
    "compile_constraint",
    "forget_constraints",
    "relaxed",
    "supported",
]
