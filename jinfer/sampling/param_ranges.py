"""Ranges of sampling parameters: which values are valid, and how they are normalized.

Each range has `read`, which returns the normalized value (a tuple for a list, Python's numbers for
NumPy's) or raises `OutsideError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

MAX_STOP_IDS = 16  # ids that a request may name
MAX_STOPS = 1024  # stop texts: each new token is looked through for all of them
MAX_END_IDS = 64  # ids that end a request, the model's own included, for `min_tokens` to forbid
MAX_LOGPROBS = 20
MAX_BEAMS = 64
MAX_ANSWERS = 128  # of one request
MAX_TEMPERATURE = 1_000_000  # every token is as likely as the next long before
MAX_SEED = 2**64 - 1
MAX_INDEX = 2**31 - 1  # counts and token ids are 32-bit on the device
MAX_BIASED = 512  # ids with a bias of their own, banned ones included
MAX_BAD_WORDS = 128  # sequences, of which a text may make two
MAX_BAD_LENGTH = 16  # tokens of each
MAX_BREAKERS = 64  # ids that DRY's matches do not cross
MAX_CANDIDATES = 64  # of FSD and contrastive search
MAX_NGRAM = 8
MAX_FUNCTIONS = 8  # logits processors of a request
MAX_EDITS = 1024  # of one request
MAX_CAPTURED = 4096  # names and patterns


class OutsideError(ValueError):
    """A value outside its range.

    Attributes:
        expected: what it must be.
        value: what it is, to be shown.
    """

    def __init__(self, expected: str, value: Any) -> None:
        super().__init__(expected)
        self.expected, self.value = expected, value


class ParamRange(Protocol):
    """The valid values of a parameter.

    Attributes:
        none: what None becomes, for parameters that may be None.
    """

    none: ClassVar[Any] = None

    def read(self, value: Any) -> Any:
        """The normalized value. Raises `OutsideError`."""
        ...


@dataclass(frozen=True)
class Range(ParamRange):
    """Numbers.

    Attributes:
        least, most: both may be taken, `least` not where `above`.
        whole: only whole numbers.
        note: what `least` means, for errors.
    """

    least: float
    most: float
    whole: bool = False
    above: bool = False
    note: str = ""

    def holds(self, value: Any) -> bool:
        """Whether the value is a number in the range; neither a truth value nor NaN is one."""
        kinds = (int,) if self.whole else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def read(self, value: Any) -> Any:
        """A number in the range."""
        if not isinstance(value, int | float) and getattr(value, "ndim", None) == 0:
            value = value.item()
        if not self.holds(value):
            raise OutsideError(str(self), value)
        return value

    def __str__(self) -> str:
        if self.above:
            return f"above {self.least}, and at most {self.most}"
        least = f"{self.least} ({self.note})" if self.note else f"{self.least}"
        return f"{'a whole number ' if self.whole else ''}from {least} to {self.most}"


def count(least: int, most: int = MAX_INDEX, note: str = "") -> Range:
    """Whole numbers."""
    return Range(least, most, whole=True, note=note)


@dataclass(frozen=True)
class OneOf(ParamRange):
    """One of some values, each of its own type: 1 is not True.

    Attributes:
        expected: description for errors.
    """

    values: tuple[Any, ...]
    expected: str = ""

    def read(self, value: Any) -> Any:
        """A value among them."""
        if not any(type(value) is type(one) and value == one for one in self.values):
            raise OutsideError(self.expected or f"one of {self.values}", value)
        return value


@dataclass(frozen=True)
class Instance(ParamRange):
    """Anything of some types.

    Attributes:
        expected: description for errors.
        empty: whether it may be an empty text.
    """

    types: tuple[type, ...]
    expected: str
    empty: bool = True

    def read(self, value: Any) -> Any:
        """A value of one of the types."""
        if not isinstance(value, self.types) or not (self.empty or value):
            raise OutsideError(self.expected, value)
        return value


@dataclass(frozen=True)
class Items(ParamRange):
    """A list, stored as a tuple.

    Attributes:
        item: whether something may be in it.
        expected: description for errors.
        most: items that it may have.
        empty: whether it may have none.
        single: whether a text alone stands for a list of one.
    """

    item: Callable[[Any], bool]
    expected: str
    most: int = MAX_INDEX
    empty: bool = True
    single: bool = False

    def read(self, value: Any) -> Any:
        """A tuple; a text where `single` is false stays a text, whose characters are the items."""
        if isinstance(value, str):
            value = (value,) if self.single else value
        elif isinstance(value, Iterable):
            value = tuple(value)
        else:
            raise OutsideError("a list", value)
        right = (self.empty or value) and len(value) <= self.most and all(map(self.item, value))
        if not right:
            raise OutsideError(self.expected, value)
        return value


class ActivationNames(Items):
    """Names, or what has one, as `LLM.names` lists them."""

    def read(self, value: Any) -> Any:
        if isinstance(value, Iterable) and not isinstance(value, str):
            value = [getattr(one, "name", one) for one in value]
        return super().read(value)


@dataclass(frozen=True)
class Records(ParamRange):
    """Objects of a class, as a tuple; one alone stands for a list of one.

    Attributes:
        kind: the class.
        most: how many there may be.
    """

    kind: type
    most: int

    def read(self, value: Any) -> Any:
        """A tuple of them."""
        expected = f"a list of at most {self.most} {self.kind.__name__}(...)"
        read = (value,) if isinstance(value, self.kind) else value
        if not isinstance(read, list | tuple) or len(read) > self.most:
            raise OutsideError(expected, value)
        wrong = [one for one in read if not isinstance(one, self.kind)]
        if wrong:
            raise OutsideError(expected, wrong[0])
        return tuple(read)


@dataclass(frozen=True)
class Names(ParamRange):
    """Some of these names in any order, each once.

    Attributes:
        plain: normalizes a name.
    """

    names: tuple[str, ...]
    plain: Callable[[str], str]

    def read(self, value: Any) -> Any:
        """A tuple of names."""
        expected = f"some of {self.names}, each once"
        if isinstance(value, str):
            raise OutsideError(expected, value)
        if not isinstance(value, Iterable):
            raise OutsideError("a list", value)
        read = tuple(map(self.plain, value))
        if not read or len(set(read)) < len(read) or not set(read) <= set(self.names):
            raise OutsideError(expected, read)
        return read


@dataclass(frozen=True)
class IdSequences(ParamRange):
    """Sequences of token ids."""

    most: int
    longest: int

    def read(self, value: Any) -> Any:
        """A tuple of tuples."""
        try:
            read = tuple(map(tuple, value))
        except TypeError:
            raise OutsideError("lists of token ids", value) from None
        if not all(0 < len(ids) <= self.longest and all(map(is_id, ids)) for ids in read):
            raise OutsideError(f"sequences of at most {self.longest} ids", read)
        if len(read) > self.most:
            raise OutsideError(f"at most {self.most}", read)
        return read


@dataclass(frozen=True)
class Biases(ParamRange):
    """Numbers for token ids, as a mapping or as pairs; -inf bans a token."""

    numbers: Range
    none: ClassVar[Any] = ()

    def read(self, value: Any) -> Any:
        """A tuple of pairs."""
        try:
            pairs = value.items() if isinstance(value, Mapping) else value
            read = tuple(map(_pair, pairs))
        except (TypeError, ValueError):
            raise OutsideError("id -> number", value) from None
        low = float("-inf")
        if not all(is_id(id) and (v == low or self.numbers.holds(v)) for id, v in read):
            least, most = self.numbers.least, self.numbers.most
            raise OutsideError(f"token id -> -inf, or from {least} to {most}", read)
        return read


def _pair(pair: Any) -> tuple[Any, Any]:
    """An id and its bias; JSON has texts as keys."""
    id, value = pair
    return int(id) if isinstance(id, str) and id.isdecimal() else id, value


_ID = count(0)


def is_processor(value: Any) -> bool:
    """Whether it is a function, or the name of one that a server's owner has given."""
    return callable(value) or isinstance(value, str)


def is_id(value: Any) -> bool:
    """Whether a value can be a token's id."""
    return _ID.holds(value)


def is_text(value: Any) -> bool:
    """Whether a value is a text that is not empty."""
    return isinstance(value, str) and bool(value)


def is_word(value: Any) -> bool:
    """Whether a value is a text of more than white space."""
    return isinstance(value, str) and bool(value.strip())


def is_breaker(value: Any) -> bool:
    """Whether a value can break DRY's repetitions: a text, or a token's id."""
    return is_text(value) or is_id(value)


# Numbers.
SHARE = Range(0, 1)
ANY = Range(-100, 100)
TEMPERATURE = Range(0, MAX_TEMPERATURE)
WINDOW = count(-1, note="all")
# One of a few.
SWITCH = OneOf((True, False), "true or false")
EARLY = OneOf((True, False, "never"), 'true, false or "never"')
# Token ids.
IDS = Items(is_id, "token ids")
SOME_IDS = Items(is_id, "token ids", empty=False)
LOGPROB_IDS = Items(is_id, f"at most {MAX_LOGPROBS} token ids", most=MAX_LOGPROBS)
STOP_IDS = Items(is_id, f"at most {MAX_STOP_IDS} token ids", most=MAX_STOP_IDS)
ID_SEQUENCES = IdSequences(MAX_BAD_WORDS, MAX_BAD_LENGTH)
BREAKERS = Items(is_breaker, f"at most {MAX_BREAKERS} texts or ids", most=MAX_BREAKERS)
BIASES = Biases(ANY)
# Texts.
TEXT = Instance((str,), "a text", empty=False)
STOPS = Items(is_text, f"at most {MAX_STOPS} texts, none empty", most=MAX_STOPS, single=True)
WORDS = Items(is_word, "texts, none empty", single=True)
SOME_TEXTS = Items(is_text, "texts, none empty", empty=False)
PROCESSORS = Items(is_processor, f"at most {MAX_FUNCTIONS} functions", most=MAX_FUNCTIONS)
CAPTURED = ActivationNames(
    is_text, f"at most {MAX_CAPTURED} names of values", most=MAX_CAPTURED, single=True
)
SCHEMA = Instance((str, Mapping, bool), "a schema")
