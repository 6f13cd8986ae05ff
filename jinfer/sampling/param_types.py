"""Types of sampling parameters: bounds of numbers, and how lists and mappings are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from jinfer.modelspec.bounded_types import (
    MAX_INDEX,
    Bounds,
    Fraction,
    Reader,
    WrongValue,
    read_as,
)
from jinfer.sampling.activation_edits import Edit, Steer
from jinfer.sampling.samplers import SELECTABLE, sampler_name

MAX_STOP_IDS = 16  # ids that a request may name
MAX_STOPS = 1024  # stop texts: each new token is looked through for all of them
MAX_END_IDS = 64  # ids that end a request, the model's own included, for `min_tokens` to forbid
MAX_LOGPROBS = 20
MAX_BEAMS = 64
MAX_ANSWERS = 128  # of one request
MAX_BIASED = 512  # ids with a bias of their own, banned ones included
MAX_BAD_WORDS = 128  # sequences, of which a text may make two
MAX_BAD_LENGTH = 16  # tokens of each
MAX_BREAKERS = 64  # ids that DRY's matches do not cross
MAX_CANDIDATES = 64  # of FSD and contrastive search
MAX_NGRAM = 8
MAX_FUNCTIONS = 8  # logits processors of a request
MAX_EDITS = 1024  # of one request
MAX_CAPTURED = 4096  # names and patterns

type Processor = Callable[..., Any] | str  # of (logits, tokens, lengths), or a server's name

# Numbers. Above a temperature of a million every token is equally likely.
Share = Fraction
Signed = Annotated[float, Bounds(-100, 100)]
UpTo100 = Annotated[float, Bounds(0, 100)]
Temperature = Annotated[float, Bounds(0, 1_000_000)]
Deviations = Annotated[float, Bounds(-1, 1_000_000)]
Factor = Annotated[float, Bounds(math.ulp(0.0), 100, "above 0, and at most 100")]
DryBase = Annotated[float, Bounds(1, 100)]
Seed = Annotated[int, Bounds(0, 2**64 - 1, "from 0 to 2^64 - 1")]
CountOrAll = Annotated[int, Bounds(0, MAX_INDEX, "from 0 (all) to 2^31 - 1")]
MirostatVersion = Annotated[int, Bounds(0, 2, "from 0 (off) to 2")]
Window = Annotated[int, Bounds(-1, MAX_INDEX, "from -1 (all) to 2^31 - 1")]
Candidates = Annotated[int, Bounds(1, MAX_CANDIDATES)]
Pool = Annotated[
    int, Bounds(0, MAX_CANDIDATES, f"from 0 (the whole vocabulary) to {MAX_CANDIDATES}")
]
Ngram = Annotated[int, Bounds(1, MAX_NGRAM)]
Beams = Annotated[int, Bounds(1, MAX_BEAMS)]
Logprobs = Annotated[int, Bounds(0, MAX_LOGPROBS)]
Answers = Annotated[int, Bounds(1, MAX_ANSWERS)]


def _items(
    fits: Callable[[Any], bool],
    expected: str,
    limit: int = MAX_INDEX,
    *,
    empty: bool = True,
    single: bool = False,
    parse: Callable[[str], Any] | None = None,
) -> Reader:
    """Reads a list as a tuple.

    Args:
        fits: whether a value may be an item.
        limit: the greatest number of items.
        empty: whether there may be none.
        single: whether a text is a list of one item; otherwise its characters are the items.
        parse: reads all items from the text of a flag; None: each use of the flag adds one.
    """

    def read(value: Any) -> Any:
        if isinstance(value, str):
            value = (value,) if single else value
        elif isinstance(value, Iterable):
            value = tuple(value)
        else:
            raise WrongValue("a list", value)
        if not (empty or value) or len(value) > limit or not all(map(fits, value)):
            raise WrongValue(expected, value)
        return value

    return Reader(read, expected, parse, parse is None, "IDS" if parse else "TEXT")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INDEX


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _parse_ids(text: str) -> list[int]:
    return [int(word) for word in text.replace(",", " ").split()]


def _parse_bias(text: str) -> tuple[int, float]:
    id, equals, bias = text.partition("=")
    if not equals:
        raise WrongValue("ID=X, such as 15043=-5", text)
    return int(id), float(bias)


def _read_text(value: Any) -> str:
    if not _is_text(value):
        raise WrongValue("a text", value)
    return str(value)


def _read_schema(value: Any) -> Any:
    if not isinstance(value, str | Mapping | bool):
        raise WrongValue("a schema", value)
    return value


def _read_samplers(value: Any) -> tuple[str, ...]:
    expected = f"some of {SELECTABLE}, each once"
    if isinstance(value, str):
        raise WrongValue(expected, value)
    if not isinstance(value, Iterable):
        raise WrongValue("a list", value)
    read = tuple(map(sampler_name, value))
    if not read or len(set(read)) < len(read) or not set(read) <= set(SELECTABLE):
        raise WrongValue(expected, read)
    return read


def _read_id_sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    try:
        read = tuple(map(tuple, value))
    except TypeError:
        raise WrongValue("lists of token ids", value) from None
    if not all(0 < len(ids) <= MAX_BAD_LENGTH and all(map(_is_id, ids)) for ids in read):
        raise WrongValue(f"sequences of at most {MAX_BAD_LENGTH} ids", read)
    if len(read) > MAX_BAD_WORDS:
        raise WrongValue(f"at most {MAX_BAD_WORDS}", read)
    return read


def _read_biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Reads biases, as a mapping or as pairs, as a tuple of pairs; -inf bans a token."""
    if value is None:
        return ()
    try:
        pairs = value.items() if isinstance(value, Mapping) else value
        read = tuple((_bias_id(id), bias) for id, bias in pairs)
    except (TypeError, ValueError):
        raise WrongValue("id -> number", value) from None
    if not all(_is_id(id) and _is_bias(bias) for id, bias in read):
        raise WrongValue("token id -> -inf, or from -100 to 100", read)
    return read


def _bias_id(id: Any) -> Any:
    return int(id) if isinstance(id, str) and id.isdecimal() else id  # JSON has texts as keys


def _is_bias(value: Any) -> bool:
    try:
        return value == float("-inf") or read_as(Signed, value) is not None
    except WrongValue:
        return False


def _read_names(value: Any) -> tuple[str, ...]:
    """Reads names of activations, or objects that have one, as `LLM.names` lists them."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        value = [getattr(item, "name", item) for item in value]
    return tuple(_NAMES.read(value))


def _records(kind: type) -> Reader:
    """Reads objects of a class as a tuple; a single object is a list of one."""
    expected = f"a list of at most {MAX_EDITS} {kind.__name__}(...)"

    def read(value: Any) -> tuple[Any, ...]:
        items = (value,) if isinstance(value, kind) else value
        if not isinstance(items, list | tuple) or len(items) > MAX_EDITS:
            raise WrongValue(expected, value)
        for item in items:
            if not isinstance(item, kind):
                raise WrongValue(expected, item)
        return tuple(items)

    return Reader(read, expected)


_NAMES = _items(_is_text, f"at most {MAX_CAPTURED} names of values", MAX_CAPTURED, single=True)
_TEXTS = "texts, none empty"
_IDS = "token ids"

Ids = Annotated[tuple[int, ...] | list[int], _items(_is_id, _IDS, parse=_parse_ids)]
SomeIds = Annotated[
    tuple[int, ...] | list[int], _items(_is_id, _IDS, empty=False, parse=_parse_ids)
]
StopIds = Annotated[
    tuple[int, ...] | list[int],
    _items(_is_id, f"at most {MAX_STOP_IDS} token ids", MAX_STOP_IDS, parse=_parse_ids),
]
LogprobIds = Annotated[
    tuple[int, ...] | list[int],
    _items(_is_id, f"at most {MAX_LOGPROBS} token ids", MAX_LOGPROBS, parse=_parse_ids),
]
IdSequences = Annotated[
    tuple[tuple[int, ...], ...] | list[list[int]],
    Reader(_read_id_sequences, "lists of token ids", _parse_ids, True, "IDS"),
]
Breakers = Annotated[
    tuple[str | int, ...] | list[str | int],
    _items(
        lambda value: _is_text(value) or _is_id(value),
        f"at most {MAX_BREAKERS} texts or ids",
        MAX_BREAKERS,
    ),
]
Biases = Annotated[
    Mapping[int, float] | tuple[tuple[int, float], ...] | None,
    Reader(_read_biases, "id -> number", _parse_bias, True, "ID=X"),
]
Text = Annotated[str, Reader(_read_text, "a text")]
Schema = Annotated[str | Mapping[str, Any] | bool, Reader(_read_schema, "a schema")]
Stops = Annotated[
    str | tuple[str, ...] | list[str],
    _items(_is_text, f"at most {MAX_STOPS} {_TEXTS}", MAX_STOPS, single=True),
]
Words = Annotated[
    tuple[str, ...] | list[str],
    _items(lambda value: _is_text(value) and bool(value.strip()), _TEXTS, single=True),
]
SomeTexts = Annotated[tuple[str, ...] | list[str], _items(_is_text, _TEXTS, empty=False)]
Samplers = Annotated[tuple[str, ...] | list[str], Reader(_read_samplers, "", None, True)]
Processors = Annotated[
    tuple[Processor, ...] | list[Processor],
    _items(
        lambda value: callable(value) or isinstance(value, str),
        f"at most {MAX_FUNCTIONS} functions",
        MAX_FUNCTIONS,
    ),
]
Capture = Annotated[str | tuple[str, ...] | list[str], Reader(_read_names, "")]
Steers = Annotated[Steer | tuple[Steer, ...] | list[Steer], _records(Steer)]
Edits = Annotated[Edit | tuple[Edit, ...] | list[Edit], _records(Edit)]
