"""Grammar sources: a request's constraint as the text that llguidance compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llguidance.gbnf_to_lark import gbnf_to_lark

from jinfer.sampling.request_errors import ConstraintError, short
from jinfer.sampling.structured.json_schema import prepare_schema, subschemas

MAX_CHARACTERS = 1 << 20

Kind = Literal["json_schema", "regex", "choice", "grammar"]

_SMALL = 1 << 16  # characters of any content that compile in well under a second
_SMALL_REGEX = 1 << 12
_SMALL_MULTIPLE = 1_000
_IN_SLASHES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


@dataclass(frozen=True)
class GrammarSource:
    """A constraint that is not compiled yet.

    Attributes:
        kind: the request's parameter.
        body: a JSON schema's text, or a Lark grammar, for llguidance.
        risky: whether its compilation might take too long.
        written: characters that an answer may need.
    """

    kind: Kind
    body: str
    risky: bool
    written: str

    def grammar(self, *, forcing: bool = True, leading_space: bool = False) -> str:
        """Returns llguidance's list of grammars.

        Args:
            forcing: whether forced text may be tokenized at once.
            leading_space: whether a space may precede the answer.
        """
        inner: dict[str, Any] = {"name": "answer"}
        if self.kind == "json_schema":
            inner["json_schema"] = json.loads(self.body)
        else:
            inner["lark_grammar"] = self.body
        if forcing and not leading_space:
            return json.dumps({"grammars": [inner]})
        outer = (
            f"%llguidance {json.dumps({'no_forcing': not forcing})}\n"
            f"start: {'" "? ' if leading_space else ''}@answer"
        )
        return json.dumps({"grammars": [{"lark_grammar": outer}, inner]})


def source_of(sources: Mapping[Kind, Any]) -> GrammarSource:
    """Returns the only constraint among the parameters of a request.

    Args:
        sources: parameter -> value; None: not set.

    Raises:
        ConstraintError: no constraint or several, a wrong type, too long, or an unsupported schema.
    """
    requested = [(kind, value) for kind, value in sources.items() if value is not None]
    if len(requested) != 1:
        names = ", ".join(kind for kind, _ in requested) or "none"
        raise ConstraintError(
            f"one of json_schema, regex, choice and grammar must be given, not {names}"
        )
    ((kind, value),) = requested
    if kind == "choice":
        _check_choice(value)
    elif kind != "json_schema":
        _check_text(kind, value)
    if kind == "json_schema":
        return _schema_source(value)
    if kind == "regex":
        return GrammarSource(kind, _regex_grammar(value), len(value) > _SMALL_REGEX, value)
    if kind == "choice":
        return GrammarSource(
            kind, _regex_grammar("|".join(map(_escaped, value))), False, "".join(value)
        )
    lark = _lark(value)
    return GrammarSource(
        kind, lark, len(lark) > _SMALL or any(sign in lark for sign in "&~%"), lark
    )


def _check_choice(value: Any) -> None:
    right = isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)
    if not right or not value:
        raise ConstraintError(
            f"choice must be a list of one text or more, not {short(repr(value))}"
        )
    for text in value:
        _check_text("choice", text)
    if sum(map(len, value)) > MAX_CHARACTERS:
        raise _too_long("choice")


def _check_text(kind: Kind, value: Any) -> None:
    if not isinstance(value, str):
        raise ConstraintError(f"{kind} must be a text, not {short(repr(value))}")
    if len(value) > MAX_CHARACTERS:
        raise _too_long(kind)
    if re.search("[\ud800-\udfff]", value):
        raise ConstraintError(f"{kind} has half a surrogate pair, which is no character")


def _too_long(kind: Kind) -> ConstraintError:
    return ConstraintError(f"{kind} is longer than {MAX_CHARACTERS} characters")


def _schema_source(value: Any) -> GrammarSource:
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        raise _too_long("json_schema")
    schema = prepare_schema(value)
    body = json.dumps(schema)
    if len(body) > MAX_CHARACTERS:
        raise _too_long("json_schema")
    return GrammarSource("json_schema", body, len(body) > _SMALL or _has_risky_keyword(schema), "")


def _has_risky_keyword(schema: Any) -> bool:
    """Whether patterns may have to be intersected, or an automaton may have very many states."""
    return any(
        isinstance(part, dict)
        and (
            "pattern" in part
            or "patternProperties" in part
            or part.get("multipleOf", 0) > _SMALL_MULTIPLE
        )
        for _, part in subschemas(schema)
    )


def _regex_grammar(regex: str) -> str:
    """Returns a Lark grammar of one terminal, in which slashes and line breaks are escaped."""
    if not re.fullmatch(r"(?:\\.|[^\\])*", regex, re.DOTALL):
        raise ConstraintError(f"regex {short(regex)!r}: ends in a backslash that escapes nothing")
    if "\n" in regex and re.search(r"\(\?[a-zA-Z]*x", regex):
        raise ConstraintError("regex: the flag x (comments) is supported in one line only")
    inside = re.sub(r"\\.|/|\n", lambda m: _IN_SLASHES.get(m[0], m[0]), regex, flags=re.DOTALL)
    return f"start: ANSWER\nANSWER: /{inside}/"


def _escaped(text: str) -> str:
    """Returns a regex of one text."""
    return re.sub(r"[^\w ]", lambda m: rf"\x{{{ord(m[0]):x}}}", text)


def _lark(grammar: str) -> str:
    """Returns the grammar, translated if it is in llama.cpp's notation (GBNF, `root ::= …`)."""
    if not grammar.strip():
        raise ConstraintError("grammar is empty")
    if "::=" not in grammar:
        return _with_schemas(grammar)
    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise ConstraintError("grammar is nested too deeply") from None
    except Exception as error:  # the translator raises various exceptions
        raise ConstraintError(f"grammar (GBNF): {short(str(error), 200)}") from None


def _with_schemas(lark: str) -> str:
    """Prepares the JSON schemas in a grammar like those of requests."""
    done, end = "", 0
    for found in re.finditer(r"%json\s*(?={)", lark):
        if found.start() < end:
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(lark, found.end())
        except ValueError:
            continue  # as llguidance will say
        done += lark[end : found.end()] + json.dumps(prepare_schema(schema))
        end = after
    return done + lark[end:]
