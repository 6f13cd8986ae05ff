"""Constraints: grammars compiled for a vocabulary (in a sandbox if risky), and their cache.

All rules of a Lark grammar must have an end, which llguidance only notices inside a dead end. An
alternative has no end if one of its terminals matches no text, or if it always needs itself.
Constructs that are not understood here count as having an end.
"""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock, RLock
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from jinfer.progress import task
from jinfer.sampling.request_errors import ConstraintError, short
from jinfer.sampling.structured.grammar_source import GrammarSource, Kind, source_of
from jinfer.sampling.structured.llguidance_errors import failure, too_much_forced
from jinfer.sampling.structured.matcher import MAX_FORCED, Matcher
from jinfer.sampling.structured.token_trie import Vocabulary, forget_vocabulary, vocabulary
from jinfer.sandbox.sandboxed_process import SandboxedProcess, SandboxError
from jinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxtyping import Int

_TOKEN = re.compile(
    r"""[^\S\n]+ | //[^\n]* | (?P<text>"(?:\\.|[^"\\\n])*"i?|<[^>\n]*>)
    | (?P<regex>/(?![/*])(?:\\.|[^/\\\n])+/[a-z]*)
    | ^(?P<head>[?!]?[A-Za-z_]\w*)(?:\.\d+)?(?:\[[^\]]*\])?\s*:(?!:)
    | (?P<nested>%(?:json|lark|regex|llguidance)\s*(?=\{)) | (?P<name>[A-Za-z_]\w*)
    | (?P<optional>[?*]|\{\s*(?:0\s*)?,[\s\d]*\}|\{\s*0\s*\}|~\s*0\b(?:\s*\.\.\s*\d+)?)
    | (?P<open>[(\[]) | (?P<close>[)\]]) | (?P<or>\|) | (?P<other>%\w+[^\n]*|.|\n)""",
    re.VERBOSE | re.MULTILINE,
)
_MAYBE_EMPTY = re.compile(r"\[\^|&|--|~|\\P")

# Alternatives, each a sequence of names of rules, regexes, other choices; None: anything else.
type Choice = list[list[str | Choice | None]]


@dataclass
class _Rules:
    """The rules of a grammar, and the text of its terminals."""

    rules: dict[str, Choice] = field(default_factory=dict)
    terminals: dict[str, str] = field(default_factory=dict)


def endless_rule(grammar: str, empty: Callable[[str], bool]) -> str | None:
    """Finds a rule with an alternative that has no end; None: all rules have ends.

    Args:
        grammar: a Lark grammar that compiles.
        empty: whether a grammar matches nothing.
    """
    read = _read(grammar)
    every = "\n".join(read.terminals.values())
    ends: dict[str, bool] = {}

    def leaf(atom: str) -> bool:
        if atom not in ends:
            named = atom in read.terminals
            text = read.terminals[atom] if named else atom
            trial = f"start: {atom}\n{every}" if named else f"start: ANY\nANY: {atom}"
            ends[atom] = not (_MAYBE_EMPTY.search(text) and empty(trial))
        return ends[atom]

    def has_end(item: str | Choice | None) -> bool:
        if item is None:
            return True
        if isinstance(item, str):
            return item in found if item in read.rules else leaf(item)
        return any(all(map(has_end, sequence)) for sequence in item)

    found: set[str] = set()
    while new := {name for name, choice in read.rules.items() if has_end(choice)} - found:
        found |= new
    bad = [
        name
        for name, choice in read.rules.items()
        if not all(all(map(has_end, sequence)) for sequence in _sequences(choice))
    ]
    # Prefer a rule without any end: other rules may only lead to it.
    return next((name for name in reversed(bad) if name not in found), bad[0] if bad else None)


def _sequences(choice: Choice) -> Iterator[list[str | Choice | None]]:
    for sequence in choice:
        yield sequence
        for item in sequence:
            if isinstance(item, list):
                yield from _sequences(item)


def _read(grammar: str) -> _Rules:
    read, position, begun = _Rules(), 0, ("", 0)
    open_choices: list[Choice] = [[[]]]
    while position < len(grammar):
        token = _TOKEN.match(grammar, position)
        assert token is not None, "anything is a token"
        kind, position = token.lastgroup, token.end()
        here = open_choices[-1]
        if kind == "head":
            _end(read, begun, grammar[begun[1] : token.start()])
            begun, open_choices = (token["head"].lstrip("?!"), token.start()), [[[]]]
            if not begun[0].isupper():
                read.rules[begun[0]] = open_choices[0]
        elif kind == "nested":
            position = json.JSONDecoder().raw_decode(grammar, position)[1]
            here[-1].append(None)
        elif kind == "or":
            here.append([])
        elif kind == "open":
            inner: Choice = [[]]
            here[-1].append(inner)
            open_choices.append(inner)
            if token[0] == "[":
                inner.append([])  # or nothing
                inner.append([])
        elif kind == "close" and len(open_choices) > 1:
            open_choices.pop()
        elif kind == "optional" and here[-1]:
            here[-1].append([[], [here[-1].pop()]])
        elif kind in ("name", "regex"):
            here[-1].append(token[0])
        elif kind == "text":
            here[-1].append(None)
    _end(read, begun, grammar[begun[1] :])
    return read


def _end(read: _Rules, begun: tuple[str, int], text: str) -> None:
    if begun[0].isupper():
        read.terminals[begun[0]] = text


TRIAL_SECONDS = 2  # CPU seconds
TRIAL_BYTES = 2 << 30

_MAX_ANSWER = 64 << 20  # maximum bytes of messages
_CHILD = "jinfer.sampling.structured.sandboxed_compile_child"


class UnfinishedError(ConstraintError):
    """A compilation was stopped; on a less busy machine it might have finished."""


def compile_sandboxed(grammars: list[str], limits: Mapping[str, Any]) -> list[str]:
    """Compiles grammars in a child process with limits on time and memory.

    Args:
        grammars: llguidance's grammars.
        limits: arguments of its `LLParserLimits`.

    Returns:
        llguidance's messages; empty: no error.

    Raises:
        UnfinishedError: the grammars need more than `TRIAL_SECONDS` or `TRIAL_BYTES`.
    """
    child = SandboxedProcess(_CHILD, memory=TRIAL_BYTES, answer_bytes=_MAX_ANSWER)
    try:
        messages: list[str] = child.ask([grammars, dict(limits)], TRIAL_SECONDS)
    except SandboxError:
        raise UnfinishedError(
            f"takes more than {TRIAL_SECONDS} s or {TRIAL_BYTES >> 30} GiB to compile; use fewer or"
            " simpler patterns and smaller counts"
        ) from None
    finally:
        child.close()
    return messages


MAX_STEPS = 500
_CLOSING = b'}]")>,:.0123456789'  # closing characters, the likeliest first
_ALIKE = 64  # candidates that are ordered by number of trials
_RANKED: WeakKeyDictionary[Vocabulary, np.ndarray] = WeakKeyDictionary()


def find_answer(matcher: Matcher, vocabulary: Vocabulary) -> bool:
    """Looks for one answer that the vocabulary can write.

    Depth first: short closing tokens first, often tried tokens last. It may miss an existing
    answer; if it finds none, the vocabulary can write hardly any answer.
    """
    rank = _ranked(vocabulary)
    words = np.zeros(-(-vocabulary.size // 32), np.uint32)
    seen: dict[int, int] = {}
    waiting: list[list[int]] = []  # per depth: tokens still to be tried
    for _ in range(MAX_STEPS):
        if matcher.may_end:
            return True
        try:
            matcher.mask(words)
        except ConstraintError:
            words[:] = 0
            matcher = matcher.fork()
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        first = rank[bits[rank] > 0][:_ALIKE].tolist()
        waiting.append(sorted(first, key=lambda id: seen.get(id, 0) // 4))
        while waiting and not waiting[-1]:
            waiting.pop()
            if waiting:
                matcher.rollback(1)
        if not waiting:
            return False
        token = waiting[-1].pop(0)
        seen[token] = seen.get(token, 0) + 1
        matcher.advance(token)
    return False


def _ranked(vocabulary: Vocabulary) -> Int[np.ndarray, " ids"]:
    """Returns the ids of text tokens, in the order of trials."""
    if (known := _RANKED.get(vocabulary)) is not None:
        return known

    def key(id: int) -> tuple[int, int]:
        data = vocabulary.tokens[id]
        closing = _CLOSING.find(data)
        return len(data), closing if closing >= 0 else len(_CLOSING)

    ids = (i for i, data in enumerate(vocabulary.tokens) if data)
    found = _RANKED[vocabulary] = np.array(sorted(ids, key=key))
    return found


MAX_CACHED = 64  # maximum cached constraints (LRU)

# llguidance's limits on the work of compiling, and of a mask.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 200_000,  # also what the first state may force, by some bytes a unit
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # 1 to 2 kB each
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
# For constraints that exceed these limits; they are compiled one after the other.
GREAT = LIMITS | {"initial_lexer_fuel": 1_000_000}

_COMPILES_GREAT = Lock()
_TOO_GREAT = re.compile("initial lexer configuration|initial_lexer_fuel|fuel exhausted|expressions")

_SEARCH_SECONDS = 1.0  # to find the invalid part of a schema


class Constraint:
    """A compiled constraint; thread-safe."""

    def __init__(
        self, source: GrammarSource, vocabulary: Vocabulary, *, leading_space: bool
    ) -> None:
        """Compiles; see `compile_constraint`."""
        self.kind: Kind = source.kind
        self._vocabulary = vocabulary
        self._can_write = can_write = vocabulary.can_write(source.written)
        self._grammar = source.grammar(forcing=can_write, leading_space=leading_space)
        self._lock, self._turns = Lock(), RLock()
        self._limits = LIMITS
        message = self._first_error(source)
        if message:
            raise failure(source, message, self._sandboxed if source.risky else self._errors_of)
        if source.kind == "grammar" and (rule := endless_rule(source.body, self._is_empty)):
            raise ConstraintError(
                f"grammar: an alternative of the rule {short(rule)} has no end: it always needs"
                " itself, or a terminal that matches no text"
            )
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

    def _first_error(self, source: GrammarSource) -> str:
        """Compiles and computes the first mask; returns llguidance's error message, or ""."""
        if source.risky:
            try:
                (message,) = compile_sandboxed([self._grammar], GREAT)
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
        return _error_of(self._compiled.deep_copy(), self._can_write)

    def _compile(self, grammar: str) -> LLMatcher:
        limits = LLParserLimits(**self._limits)
        return LLMatcher(self._vocabulary.trie, grammar, log_level=0, limits=limits)

    def _is_empty(self, lark: str) -> bool:
        grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
        return "NoExtension" in _error_of(self._compile(grammar))

    def _errors_of(self, grammars: list[str]) -> list[str]:
        end = monotonic() + _SEARCH_SECONDS
        return [_error_of(self._compile(g)) for g in grammars if monotonic() < end]

    def _sandboxed(self, grammars: list[str]) -> list[str]:
        try:
            return compile_sandboxed(grammars, self._limits)
        except UnfinishedError:
            return []

    def _renew(self) -> LLMatcher:
        """Makes a matcher at the start with a new automaton, which later answers share."""
        fresh = self._compile(self._grammar)
        with self._lock:
            self._compiled = fresh
            return fresh.deep_copy()


def _error_of(matcher: LLMatcher, can_write: bool = True) -> str:
    """Returns llguidance's error message at the start of an answer, or "".

    The start extends to the first token that is not forced: forced tokens may cost as much as a
    mask, in every answer.
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
    # If tokens are missing, other tokens may spell the forced text.
    return error if can_write or "NoExtension" not in error else ""


def _example(vocabulary: Vocabulary) -> str:
    printable = (byte for byte in sorted(vocabulary.missing) if 0x20 < byte < 0x7F)
    return ", ".join(repr(chr(byte)) for byte in printable)[:40]


class _Cache:
    """LRU cache of constraints, and of errors of constraints that do not compile."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._constraints: OrderedDict[Any, Future[Constraint | str]] = OrderedDict()

    def get(self, key: Any, make: Callable[[], Constraint]) -> Constraint:
        """Returns the constraint of a key; waits for another thread that is compiling it."""
        with self._lock:
            found = self._constraints.get(key)
            makes = found is None
            if found is None:
                found = self._constraints[key] = Future()
            self._constraints.move_to_end(key)
            while len(self._constraints) > MAX_CACHED:
                self._constraints.popitem(last=False)
        if makes:
            self._make(key, found, make)
        made = found.result()
        if isinstance(made, str):
            raise ConstraintError(made)
        return made

    def forget(self, tokenizer: Tokenizer) -> None:
        """Frees the constraints of a tokenizer."""
        with self._lock:
            for key in [key for key in self._constraints if key[0].tokenizer is tokenizer]:
                del self._constraints[key]

    def _make(
        self, key: Any, result: Future[Constraint | str], make: Callable[[], Constraint]
    ) -> None:
        forgotten = True
        try:
            result.set_result(make())
            forgotten = False
        except ConstraintError as error:
            # The next attempt may have enough time.
            forgotten = isinstance(error, UnfinishedError)
            result.set_result(str(error))
        except BaseException as error:
            result.set_exception(error)
        if forgotten:
            with self._lock:
                self._constraints.pop(key, None)


_CACHE = _Cache()


def forget_constraints(tokenizer: Tokenizer) -> None:
    """Frees the cached constraints and trie of a tokenizer, whose model was closed."""
    _CACHE.forget(tokenizer)
    forget_vocabulary(tokenizer)


def compile_constraint(
    tokenizer: Tokenizer,
    *,
    json_schema: Any = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    at_text_start: bool = False,
) -> Constraint:
    """Compiles a constraint on answers of a model with this tokenizer; one argument is required.

    The last `MAX_CACHED` are cached. Thread-safe; while it compiles, other threads run Python.

    Args:
        json_schema: a JSON schema as a dict or a JSON text; True for any JSON object.
        regex: what the whole answer must match, in the syntax of Rust's `regex`.
        choice: texts, one of which is the answer.
        grammar: a Lark grammar as llguidance reads it, or llama.cpp's GBNF.
        at_text_start: no text comes before the answer (an encoder-decoder's, or an empty
            prompt), so a tokenizer that begins texts with a space may do so.

    Raises:
        ConstraintError: one line with the unsupported or invalid part and its location.
    """
    sources: dict[Kind, Any] = {
        "json_schema": json_schema,
        "regex": regex,
        "choice": choice,
        "grammar": grammar,
    }
    source = source_of(sources)
    leading_space = at_text_start and tokenizer.strip_space
    with task("compiling the grammar", level=logging.DEBUG):
        words = vocabulary(tokenizer)
        key = (words, source, leading_space)
        return _CACHE.get(key, lambda: Constraint(source, words, leading_space=leading_space))
