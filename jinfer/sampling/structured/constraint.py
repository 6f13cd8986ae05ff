"""Compiles a constraint for a vocabulary, once, and begins answers in it."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock, RLock
from time import monotonic
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from jinfer.progress import task
from jinfer.sampling.request_errors import ConstraintError
from jinfer.sampling.structured.grammar_source import Kind, Source, source_of
from jinfer.sampling.structured.llguidance_errors import failure, too_much_forced
from jinfer.sampling.structured.matcher import MAX_FORCED, Matcher
from jinfer.sampling.structured.sandboxed_compile import UnfinishedError, try_apart
from jinfer.sampling.structured.token_trie import Vocabulary, vocabulary
from jinfer.sampling.structured.vocab_coverage import find_answer
from jinfer.tokenizer import Tokenizer

MAX_KEPT = 64  # compiled constraints, those used last

# llguidance's limits on the work of compiling and of a mask, which takes at most some 0.1 s.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 200_000,  # also what the first state may force, by some bytes a unit
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # 1 to 2 kB each
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
# Of constraints that are too great for those, which are compiled one after the other.
GREAT = LIMITS | {"initial_lexer_fuel": 1_000_000}

_COMPILES_GREAT = Lock()
_TOO_GREAT = re.compile("initial lexer configuration|initial_lexer_fuel|fuel exhausted|expressions")

_SEARCH_SECONDS = 1.0  # to find the part of a schema that is wrong


class Constraint:
    """A compiled constraint; any thread may use it."""

    def __init__(self, source: Source, vocabulary: Vocabulary, *, leading_space: bool) -> None:
        """Compiles; see `compile_constraint`."""
        self.kind: Kind = source.kind
        self._vocabulary = vocabulary
        can_write = vocabulary.can_write(source.written)
        self._grammar = source.grammar(forcing=can_write, leading_space=leading_space)
        self._lock, self._turns = Lock(), RLock()
        self._limits = LIMITS
        message = self._first_error(source)
        if message:
            raise failure(source, message, self._apart if source.risky else self._errors_of)
        if not can_write and not find_answer(self.start(), vocabulary):
            raise ConstraintError(
                f"{self.kind}: the tokenizer has no tokens to write an answer with; it lacks"
                f" single bytes such as {_example(vocabulary)}"
            )

    def start(self) -> Matcher:
        """Begins an answer."""
        with self._lock:
            state = self._compiled.deep_copy()
        return Matcher(self.kind, self._vocabulary, state, self._renew, self._turns)

    def _first_error(self, source: Source) -> str:
        """Compiles and makes the first mask; llguidance's message, or nothing."""
        if source.risky:
            try:
                (message,) = try_apart([self._grammar], GREAT)
            except UnfinishedError as error:
                raise UnfinishedError(f"{self.kind}: {error}") from None
            if message:
                return message
        message = self._first_of(LIMITS)
        if _TOO_GREAT.search(message):
            with _COMPILES_GREAT:
                message = self._first_of(GREAT)
        return message

    def _first_of(self, limits: dict[str, Any]) -> str:
        self._limits = limits
        self._compiled = self._compile(self._grammar)
        return _error_of(self._compiled.deep_copy())

    def _compile(self, grammar: str) -> LLMatcher:
        limits = LLParserLimits(**self._limits)
        return LLMatcher(self._vocabulary.trie, grammar, log_level=0, limits=limits)

    def _errors_of(self, grammars: list[str]) -> list[str]:
        end = monotonic() + _SEARCH_SECONDS
        return [_error_of(self._compile(g)) for g in grammars if monotonic() < end]

    def _apart(self, grammars: list[str]) -> list[str]:
        try:
            return try_apart(grammars, self._limits)
        except UnfinishedError:
            return []

    def _renew(self) -> LLMatcher:
        """A matcher at the beginning, with an automaton of its own that later answers share."""
        fresh = self._compile(self._grammar)
        with self._lock:
            self._compiled = fresh
            return fresh.deep_copy()


def _error_of(matcher: LLMatcher) -> str:
    """What is wrong at the beginning already; llguidance's message, or nothing.

    The beginning goes on to where there is a choice: what is forced up to there costs as much as a
    mask may, for each answer again.
    """
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return str(matcher.get_error())
    if len(matcher.compute_ff_bytes()) > MAX_FORCED:
        return too_much_forced(MAX_FORCED)
    forced = matcher.compute_ff_tokens()
    if forced and matcher.consume_tokens(forced) and not matcher.is_stopped():
        matcher.compute_bitmask()
    error = str(matcher.get_error())
    # That the vocabulary cannot go on after what is forced shows where an answer comes to it.
    return "" if "NoExtension" in error else error


def _example(vocabulary: Vocabulary) -> str:
    return ", ".join(repr(chr(byte)) for byte in sorted(vocabulary.missing) if 0x20 < byte < 0x7F)[
        :40
    ]


class _Kept:
    """The constraints used last, for all tokenizers, and why others cannot be compiled."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._constraints: OrderedDict[Any, Future[Constraint | str]] = OrderedDict()

    def get(self, key: Any, make: Callable[[], Constraint]) -> Constraint:
        """The one of this key; who asks for it while somebody makes it waits for that one."""
        with self._lock:
            found = self._constraints.get(key)
            makes = found is None
            if found is None:
                found = self._constraints[key] = Future()
            self._constraints.move_to_end(key)
            while len(self._constraints) > MAX_KEPT:
                self._constraints.popitem(last=False)
        if makes:
            self._make(key, found, make)
        made = found.result()
        if isinstance(made, str):
            raise ConstraintError(made)
        return made

    def _make(
        self, key: Any, kept: Future[Constraint | str], make: Callable[[], Constraint]
    ) -> None:
        forgotten = True
        try:
            kept.set_result(make())
            forgotten = False
        except ConstraintError as error:
            # Whether time was enough may be otherwise the next time.
            forgotten = isinstance(error, UnfinishedError)
            kept.set_result(str(error))
        except BaseException as error:
            kept.set_exception(error)
        if forgotten:
            with self._lock:
                self._constraints.pop(key, None)


_KEPT = _Kept()


def compile_constraint(
    tokenizer: Tokenizer,
    *,
    json_schema: Any = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    at_text_start: bool = False,
) -> Constraint:
    """A constraint on the answers of a model with this tokenizer; exactly one must be given.

    Compiled constraints are kept, the last `MAX_KEPT` of them. Any thread may call it; most take a
    millisecond, the first for a tokenizer some tenths of a second, at worst ten seconds, in which
    other threads run Python.

    Args:
        json_schema: a JSON schema as a dict or a JSON text; True for any JSON object.
        regex: what the whole answer must match, in the syntax of Rust's `regex`.
        choice: texts, one of which is the answer.
        grammar: a Lark grammar as llguidance reads it, or llama.cpp's GBNF.
        at_text_start: no text stands before the answer (an encoder-decoder's, or an empty
            prompt), so that a tokenizer that begins texts with a space may.

    Raises:
        ConstraintError: in one line what cannot be kept, and where.
    """
    given: dict[Kind, Any] = {
        "json_schema": json_schema,
        "regex": regex,
        "choice": choice,
        "grammar": grammar,
    }
    source = source_of(given)
    leading_space = at_text_start and tokenizer.strip_space
    with task("compiling the grammar", level=logging.DEBUG):
        words = vocabulary(tokenizer)
        key = (words, source, leading_space)
        return _KEPT.get(key, lambda: Constraint(source, words, leading_space=leading_space))
