"""Inferflow's prompt templates: text with placeholders and tokens in braces.

    {bos}[INST] {query} [/INST]          {<|im_start|>}user{\\n}{query}{<|im_end|>}

Braces contain

- `query` or `question`, `_query` or `_question` (with a space before it), `system_prompt`;
- `res_prefix` or `answer`: the answer. Without either, it comes at the end;
- `turn`: the text before it comes once, at the beginning; what follows is repeated per turn;
- `round`: the number of the turn, from 1;
- `bos`, `eos`, `user_token`, `assistant_token` (generation_config.json's user_token_id and
  assistant_token_id), `#` and an id, or the name of any token of the vocabulary;
- `\\n` or `\\t`: that character.

`{{` and `}}` are literal braces. The text between two tokens, including filled-in values, is
tokenized as one piece. Special tokens in the template's own text become their ids; in filled-in
values they stay text.

Without `{turn}` the whole template is a turn, nothing may follow its answer, and past turns end
with EOS. With `{turn}` nothing is added: what follows the answer ends past turns, and past answers
are stripped of white space. With both `{res_prefix}` and `{answer}`, the last turn ends at the
former, and past answers replace the latter.

    {bos}{turn}Question {round}: {query}\n\nAnswer: {answer}\n\n
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jinfer.template.template_errors import TemplateError
from jinfer.tokenizer import Tokenizer

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[^{}]+|[{}]")
_CHARACTERS = {"\\n": "\n", "\n": "\n", "\\t": "\t"}
_SLOTS = {
    "query": "query",
    "question": "query",
    "_query": "_query",
    "_question": "_query",
    "system_prompt": "system_prompt",
    "round": "round",
    "turn": "turn",
    "res_prefix": "res_prefix",
    "answer": "answer",
}
_NAMED_IDS = ("bos", "eos", "user_token", "assistant_token")
_SPACE_LETTERS = ("▁", "Ġ")  # how vocabularies write a leading space


@dataclass(frozen=True)
class LiteralText:
    """Literal text of the template."""

    text: str


@dataclass(frozen=True)
class Placeholder:
    """A placeholder or a marker: a value of `_SLOTS`."""

    name: str


@dataclass(frozen=True)
class TokenId:
    """A token given by its id."""

    id: int


@dataclass(frozen=True)
class TokenName:
    """A token given by its role (bos, eos, ...) or its name in the vocabulary."""

    name: str


TemplatePart = LiteralText | Placeholder | TokenId | TokenName
type _Filled = tuple[Sequence[TemplatePart], Mapping[str, str]]

_TURN, _PREFIX, _ANSWER = Placeholder("turn"), Placeholder("res_prefix"), Placeholder("answer")
_ANSWERS = (_PREFIX, _ANSWER)


@dataclass(frozen=True)
class PromptTemplate:
    """A parsed template.

    Attributes:
        source: its text, for errors.
        preamble: parts before the first turn.
        parts: parts of the last turn, up to its answer.
        past_parts: parts of an answered turn.
    """

    source: str
    preamble: tuple[TemplatePart, ...]
    parts: tuple[TemplatePart, ...]
    past: tuple[TemplatePart, ...]

    @classmethod
    def parse(cls, text: str) -> PromptTemplate:
        """Parses a template. Raises `TemplateError` for unbalanced braces or a bad id."""
        parts: list[TemplatePart] = []
        for match in _PIECE.finditer(text):
            piece, name = match[0], match[1]
            if name is None:
                parts.append(LiteralText(_literal(text, piece, match.start())))
            else:
                parts.append(_part(text, name))
        for mark in (_TURN, *_ANSWERS):
            if parts.count(mark) > 1:
                raise _error(text, f"has {{{mark.name}}} more than once")
        if _TURN not in parts:
            turn, after = _cut(parts, _ANSWERS)
            if after:
                raise _error(text, "without {turn}, nothing may follow the answer")
            return cls(text, (), turn, (*turn, _PREFIX, TokenName("eos")))
        once, whole = _cut(parts, (_TURN,))
        if any(mark in once for mark in _ANSWERS):
            raise _error(text, "the answer must follow {turn}")
        turn, after = _cut(whole, _ANSWERS)
        if _ANSWER in whole:
            past = tuple(part for part in whole if part != _PREFIX)
        else:
            past = (*turn, _ANSWER, *after)
        return cls(text, once, turn, past)

    @property
    def has_system_prompt(self) -> bool:
        """Whether there is a placeholder for a system prompt."""
        return Placeholder("system_prompt") in (*self.preamble, *self.parts)

    def encode(
        self,
        tokenizer: Tokenizer,
        *,
        query: str = "",
        system_prompt: str = "",
        res_prefix: str = "",
    ) -> list[int]:
        """The token ids of a prompt; no special tokens beyond the template's are added.

        Raises:
            TemplateError: a token that the vocabulary lacks.
        """
        values = _values(query, system_prompt, res_prefix, 1)
        return self._encode(tokenizer, [((*self.preamble, *self.parts, _PREFIX), values)])

    def encode_chat(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], *, special: bool = False
    ) -> list[int]:
        """The token ids of a conversation.

        A system message may come first: it fills `{system_prompt}` or, without that placeholder,
            precedes the first query with an empty line between. A trailing assistant message is the
            beginning of the answer.

        Args:
            messages: mappings of "role" (system, user, assistant) and "content".
            special: parse special tokens that are written in the messages.

        Raises:
            TemplateError: other roles, or roles that do not alternate.
        """
        system, turns = _turns(messages)
        if system and not self.has_system_prompt:
            (query, answer), *rest = turns
            system, turns = "", [(f"{system}\n\n{query}", answer), *rest]
        filled: list[_Filled] = [(self.preamble, _values("", system, "", 1))]
        for number, (query, answer) in enumerate(turns, 1):
            parts = self.past if number < len(turns) else (*self.parts, _PREFIX)
            filled.append((parts, _values(query, system if number == 1 else "", answer, number)))
        return self._encode(tokenizer, filled, special)

    def _encode(
        self, tokenizer: Tokenizer, filled: Iterable[_Filled], special: bool = False
    ) -> list[int]:
        """The ids of consecutive parts, each with the values of its slots."""
        sections: list[int | str] = []
        for parts, values in filled:
            for part in parts:
                match part:
                    case LiteralText(text):
                        found = tokenizer.split_special(text)
                    case Placeholder(name):
                        text = values[name]
                        found = tokenizer.split_special(text) if special else [text]
                    case TokenId(id):
                        found = [id]
                    case TokenName(name):
                        found = [self._id(tokenizer, name)]
                for piece in found:
                    _append(sections, piece)
        return tokenizer.encode_parts(sections)

    def _id(self, tokenizer: Tokenizer, name: str) -> int:
        roles = {
            "bos": tokenizer.bos_id,
            "eos": tokenizer.eos_ids[0] if tokenizer.eos_ids else None,
            "user_token": tokenizer.special.user,
            "assistant_token": tokenizer.special.assistant,
        }
        if name in roles:
            result = roles[name]
            if result is None:
                raise _error(self.source, f"the tokenizer has no {name}")
            return result
        spellings = (name, *(name.replace(" ", letter) for letter in _SPACE_LETTERS))
        ids = (tokenizer.id(spelling) for spelling in spellings)
        result = next((id for id in ids if id is not None), None)
        if result is None:
            words = [*_SLOTS, *_NAMED_IDS, *tokenizer.special.control]
            near = difflib.get_close_matches(name, words, 1, cutoff=0.4)
            hint = f"; did you mean {{{near[0]}}}?" if near else ""
            raise _error(self.source, f"the vocabulary has no token {name!r}{hint}")
        return result


def _error(source: str, reason: str) -> TemplateError:
    return TemplateError(f"prompt template {source[:100]!r}: {reason}")


def _literal(source: str, piece: str, place: int) -> str:
    if piece == "{":
        reason = f"the brace at character {place + 1} is not closed; a brace of the text is {{{{"
        raise _error(source, reason)
    return piece[0] if piece in ("{{", "}}") else piece


def _part(source: str, name: str) -> TemplatePart:
    if name in _CHARACTERS:
        return LiteralText(_CHARACTERS[name])
    if name in _SLOTS:
        return Placeholder(_SLOTS[name])
    if name == "":
        raise _error(source, "{} has no name in it; a brace of the text is {{")
    if name.startswith("#") and len(name) > 1:
        number = name[1:]
        if not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise _error(source, f"{{{name}}} must be # and an id")
        return TokenId(int(number))
    return TokenName(name)


def _cut(
    parts: Sequence[TemplatePart], marks: Sequence[Placeholder]
) -> tuple[tuple[TemplatePart, ...], tuple[TemplatePart, ...]]:
    """The parts before the first of some markers, and those after it."""
    place = next((place for place, part in enumerate(parts) if part in marks), len(parts))
    return tuple(parts[:place]), tuple(parts[place + 1 :])


def _values(query: str, system: str, answer: str, number: int) -> dict[str, str]:
    """The text for every slot."""
    return {
        "query": query,
        "_query": " " + query,
        "system_prompt": system,
        "res_prefix": answer,
        "answer": answer.strip(),
        "round": str(number),
    }


def _append(sections: list[int | str], piece: int | str) -> None:
    """Add a piece; adjacent texts are joined."""
    if isinstance(piece, str) and sections and isinstance(sections[-1], str):
        sections[-1] += piece
    elif piece != "":
        sections.append(piece)


def _turns(messages: Sequence[Mapping[str, str]]) -> tuple[str, list[tuple[str, str]]]:
    """The system prompt, and pairs of query and answer; the last answer may be empty."""
    system = ""
    turns: list[tuple[str, str]] = []
    expected: tuple[str, ...] = ("system", "user")
    for number, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if role not in expected or not isinstance(content, str):
            roles = " or ".join(expected)
            raise TemplateError(
                f"message {number} has role {role!r}; with a prompt template it must be {roles}, "
                "with a text as its content"
            )
        if role == "system":
            system, expected = content, ("user",)
        elif role == "user":
            turns.append((content, ""))
            expected = ("assistant",)
        else:
            turns[-1] = (turns[-1][0], content)
            expected = ("user",)
    if not turns:
        raise TemplateError("a conversation needs a message of the user")
    return system, turns
