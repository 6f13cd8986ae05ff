"""Prompt templates in Inferflow's language: text with tokens in braces.

    {bos}[INST] {query} [/INST]          {<|im_start|>}user{\\n}{query}{<|im_end|>}

In braces stands

- `query` or `question`, `_query` or `_question` (with a space before it), `system_prompt`;
- `res_prefix` or `answer`: the beginning of the answer. Nothing may follow it, and where a template
  does not have it the beginning of the answer comes at the end all the same;
- `bos`, `eos`, `user_token`, `assistant_token` (generation_config.json's user_token_id and
  assistant_token_id), `#` and an id, or the name of any token of the vocabulary;
- `\\n` or `\\t`: that character.

`{{` and `}}` are braces of the text. The text between two tokens, with what is filled in, is
tokenized as one; special tokens written in the template's own text become their ids, those in what
is filled in stay text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinfer.template.errors import TemplateError
from jinfer.tokenizer import Tokenizer

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[^{}]+|[{}]")
_CHARACTERS = {"\\n": "\n", "\n": "\n", "\\t": "\t"}
_SLOTS = {
    "query": "query",
    "question": "query",
    "_query": "_query",
    "_question": "_query",
    "system_prompt": "system_prompt",
}
_ANSWERS = ("res_prefix", "answer")
_NAMED_IDS = ("bos", "eos", "user_token", "assistant_token")
_SPACE_LETTERS = ("▁", "Ġ")  # how vocabularies write a space in a token's name


@dataclass(frozen=True)
class Literal:
    """Text of the template itself."""

    text: str


@dataclass(frozen=True)
class Slot:
    """A place for text: "query", "_query" or "system_prompt"."""

    name: str


@dataclass(frozen=True)
class TokenId:
    """A token by its number."""

    id: int


@dataclass(frozen=True)
class TokenName:
    """A token by its role (bos, eos, ...) or by its name in the vocabulary."""

    name: str


Part = Literal | Slot | TokenId | TokenName


@dataclass(frozen=True)
class PromptTemplate:
    """A template that has been read. `source` is for messages."""

    source: str
    parts: tuple[Part, ...]

    @classmethod
    def parse(cls, text: str) -> PromptTemplate:
        """Reads a template. Raises: TemplateError: braces that do not match, a bad id."""
        parts: list[Part] = []
        for match in _PIECE.finditer(text):
            piece, name = match[0], match[1]
            if name is None:
                parts.append(Literal(_literal(text, piece, match.start())))
            elif name in _ANSWERS:
                if match.end() != len(text):
                    raise _error(text, f"nothing may follow {piece}")
            else:
                parts.append(_part(text, name))
        return cls(text, tuple(parts))

    @property
    def has_system_prompt(self) -> bool:
        """Whether there is a place for a system prompt."""
        return Slot("system_prompt") in self.parts

    def encode(
        self,
        tokenizer: Tokenizer,
        *,
        query: str = "",
        system_prompt: str = "",
        res_prefix: str = "",
    ) -> list[int]:
        """Token ids of a prompt; nothing is added that the template does not say.

        Raises:
            TemplateError: a token that the vocabulary does not have.
        """
        values = {"query": query, "_query": " " + query, "system_prompt": system_prompt}
        sections: list[int | str] = []
        for part in (*self.parts, Slot("res_prefix")):
            match part:
                case Literal(text):
                    found = tokenizer.split_special(text)
                case Slot(name):
                    found = [res_prefix if name == "res_prefix" else values[name]]
                case TokenId(id):
                    found = [id]
                case TokenName(name):
                    found = [self._id(tokenizer, name)]
            for piece in found:
                _append(sections, piece)
        return tokenizer.encode_parts(sections)

    def encode_chat(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation.

        Each turn is the template with its answer at the end; past turns end with EOS. A system
        message may come first: it fills `{system_prompt}` of the first turn, or, where there is
        no such place, precedes the first query with an empty line between. A last message of the
        assistant is the beginning of the answer.

        Args:
            messages: mappings of "role" (system, user, assistant) and "content".

        Raises:
            TemplateError: other roles, or roles that do not alternate.
        """
        system, turns = _turns(messages)
        ids: list[int] = []
        for number, (query, answer) in enumerate(turns):
            first = system if number == 0 else ""
            if first and not self.has_system_prompt:
                query, first = f"{first}\n\n{query}", ""
            past = number < len(turns) - 1
            if past and not tokenizer.eos_ids:
                raise _error(self.source, "several turns need an EOS token; the tokenizer has none")
            ids += self.encode(tokenizer, query=query, system_prompt=first, res_prefix=answer)
            ids += tokenizer.eos_ids[:1] if past else ()
        return ids

    def _id(self, tokenizer: Tokenizer, name: str) -> int:
        roles = {
            "bos": tokenizer.bos_id,
            "eos": tokenizer.eos_ids[0] if tokenizer.eos_ids else None,
            "user_token": tokenizer.special.user,
            "assistant_token": tokenizer.special.assistant,
        }
        if name in roles:
            found = roles[name]
            if found is None:
                raise _error(self.source, f"the tokenizer has no {name}")
            return found
        spellings = (name, *(name.replace(" ", letter) for letter in _SPACE_LETTERS))
        ids = (tokenizer.id(spelling) for spelling in spellings)
        found = next((id for id in ids if id is not None), None)
        if found is None:
            words = [*_SLOTS, *_ANSWERS, *_NAMED_IDS, *tokenizer.special.control]
            near = difflib.get_close_matches(name, words, 1, cutoff=0.4)
            hint = f"; did you mean {{{near[0]}}}?" if near else ""
            raise _error(self.source, f"the vocabulary has no token {name!r}{hint}")
        return found


def _error(source: str, reason: str) -> TemplateError:
    return TemplateError(f"prompt template {source[:100]!r}: {reason}")


def _literal(source: str, piece: str, place: int) -> str:
    if piece == "{":
        reason = f"the brace at character {place + 1} is not closed; a brace of the text is {{{{"
        raise _error(source, reason)
    return piece[0] if piece in ("{{", "}}") else piece


def _part(source: str, name: str) -> Part:
    if name in _CHARACTERS:
        return Literal(_CHARACTERS[name])
    if name in _SLOTS:
        return Slot(_SLOTS[name])
    if name == "":
        raise _error(source, "{} has no name in it; a brace of the text is {{")
    if name.startswith("#") and len(name) > 1:
        number = name[1:]
        if not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise _error(source, f"{{{name}}} must be # and an id")
        return TokenId(int(number))
    return TokenName(name)


def _append(sections: list[int | str], piece: int | str) -> None:
    """Adds a piece; texts that meet become one."""
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
            wanted = " or ".join(expected)
            raise TemplateError(
                f"message {number} has role {role!r}; with a prompt template it must be {wanted}, "
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
