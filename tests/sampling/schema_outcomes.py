"""What becomes of a schema: followed to a valid end, refused at once, or worse."""

from __future__ import annotations

import json
import lzma
import re
from decimal import Decimal, getcontext
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from jinfer.sampling.structured import Constraint, ConstraintError, compile_constraint
from jinfer.tokenizer import Tokenizer

SUITE = Path(__file__).parents[1] / "goldens" / "json_schema_suite" / "tests.json.xz"
VALIDATORS = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
LONG = 40  # tokens, after which a walk prefers to close what it has opened
LONGEST = 1500
CLOSING = b'}]"@,:0123456789 tfn-.'
getcontext().prec = 3000  # of the longest number that a walk writes


class WalkError(AssertionError):
    """An answer that came to a dead end, does not end, or is not valid."""


@cache
def suite() -> dict[str, list[tuple[str, Any, list[Any], list[Any]]]]:
    """Draft -> (name, schema, valid and invalid instances) of the JSON Schema test suite."""
    return json.loads(lzma.decompress(SUITE.read_bytes()))


@cache
def lateness(found: Tokenizer) -> np.ndarray:
    """For each token how late it should come in a walk to the end."""
    late = np.empty(found.vocab_size, np.int64)
    for id in range(found.vocab_size):
        data = found.token_bytes(id)
        place = CLOSING.find(data) if data else -1
        late[id] = 100 * len(data) + (place if place >= 0 else 99)
    for id in found.eos_ids:
        late[id] = -1
    return late


def walk(constraint: Constraint, found: Tokenizer, seed: int) -> str:
    """An answer of tokens drawn evenly among those allowed; towards its end once it is long."""
    rng = np.random.default_rng(seed)
    matcher = constraint.start()
    words = np.zeros(-(-found.vocab_size // 32), np.uint32)
    long, written = int(rng.integers(LONG)), b""
    while not matcher.finished:
        try:
            matcher.mask(words)
        except ConstraintError as error:
            text = found.decode(list(matcher.tokens))
            raise WalkError(f"dead end after {text!r}: {error}") from None
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if len(matcher.tokens) > long:
            quoted = len(re.findall(rb'(?<!\\)(?:\\\\)*"', written)) % 2 > 0
            late = lateness(found)[ids]
            late[late == 100 + CLOSING.find(b'"')] -= 50 * quoted
            near = ids[np.argsort(late, kind="stable")]
            ids = near[:1] if near[0] in found.eos_ids else near[: rng.choice([1, 1, 6, 80])]
        matcher.advance(int(rng.choice(ids)))
        written += found.token_bytes(matcher.tokens[-1])
        if len(matcher.tokens) > LONGEST:
            raise WalkError(f"no end after {found.decode(list(matcher.tokens[:200]))!r}")
    tokens = [token for token in matcher.tokens if token not in found.eos_ids]
    return found.decode([*found.encode("x"), *tokens])[1:]


def validate(text: str, schema: Any, draft: str) -> None:
    """Parses strictly and validates; decimals as they are written, so that bounds are exact."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    try:
        value = json.loads(text, parse_float=_exact)
        VALIDATORS[draft](exact, format_checker=FORMATS).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        # Dates have a 29th of February in every year, and a year 0, which Python has not.
        if not (re.search("02-29|0000-", text) and "is not a 'date" in str(error)):
            raise WalkError(f"invalid: {text!r}: {str(error).splitlines()[0]}") from None


def _exact(number: str) -> Decimal:
    """A number as it is written, but for powers of ten that no sum could hold."""
    mantissa, _, power = number.lower().partition("e")
    return Decimal(mantissa).scaleb(max(-400, min(400, int(power[:6] or 0))))


def outcome(found: Tokenizer, schema: Any, draft: str, walks: int) -> str:
    """Follows a schema. Returns "followed", or why it is refused. Raises `WalkError`."""
    try:
        constraint = compile_constraint(found, json_schema=schema)
    except ConstraintError as error:
        return reason(str(error))
    for seed in range(walks):
        validate(walk(constraint, found, seed), schema, draft)
    return "followed"


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the text is an answer, for a vocabulary whose first ids are the single bytes."""
    matcher = constraint.start()
    try:
        for byte in text.encode():
            matcher.advance(byte)
    except ConstraintError:
        return False
    return matcher.may_end


def reason(message: str) -> str:
    """The keyword that a refusal names."""
    what = re.sub(r"^json_schema( at /.*?)?: ", "", message)
    if "no answer" in what:
        return "no answer"
    named = re.match(r"(\$?[A-Za-z]+)", what)
    return named[1] if named else what
