"""Conversations: how messages become the tokens of a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinfer.records import dataclass
from jinfer.spec.errors import SpecError
from jinfer.spec.model import ModelSpec, PromptSpec
from jinfer.template import ChatTemplate, PromptTemplate, TemplateError, find_chat_template
from jinfer.template.prompt import Slot
from jinfer.tokenizer import Tokenizer
from jinfer.tokenizer.base import MARK

Message = Mapping[str, Any]
CONTINUE = "continue_final"
# That all templates are told of; others are known to the template that names them.
_ROLES = ("system", "developer", "user", "assistant", "tool")
_STRANGERS = ("tools", "documents")  # variables whose words may be a stranger's, as messages' are
_WORDS = "jinferasksforthis"  # what a user could say, and no template changes but to capitals
_LOST = "what the user says would be lost"


@dataclass(frozen=True)
class Conversation:
    """The prompt format of a model: the specification's template, or the checkpoint's own.

    Attributes:
        prompt: the specification's `[prompt]`.
        jinja: the Jinja template that counts; None where there is none, or `prompt.template` does.
    """

    prompt: PromptSpec
    jinja: str | None

    @classmethod
    def of(cls, spec: ModelSpec, source: Path, config: Mapping[str, Any]) -> Conversation:
        """Finds the template.

        Raises:
            TemplateError: it cannot be read.
            SpecError: it has no place for what the user says.
        """
        prompt = spec.prompt
        if prompt.template and not _asks(PromptTemplate.parse(prompt.template)):
            reason = f"has no {{query}}: {_LOST}; put it where that belongs"
            raise SpecError(spec.path, "prompt.template", reason)
        for key in ("chat_template", "fallback"):
            source_text = getattr(prompt, key)
            if source_text and "messages" not in source_text:
                raise SpecError(spec.path, f"prompt.{key}", f"never uses messages: {_LOST}")
        if prompt.template or prompt.chat_template:
            return cls(prompt, None if prompt.template else prompt.chat_template)
        is_gguf = "general.architecture" in config
        own = find_chat_template(config if is_gguf else source)
        return cls(prompt, own or prompt.fallback)

    @property
    def has_template(self) -> bool:
        """Whether messages can be encoded."""
        return bool(self.prompt.template or self.jinja)

    def reads(self, name: str) -> bool:
        """Whether the template knows a variable."""
        return re.search(rf"\b{re.escape(name)}\b", self.jinja or "") is not None

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        special: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        Args:
            special: special tokens that are written in the messages count as such; else they are
                text, as far as the template leaves the messages' words as they are.
            **variables: for a Jinja template, such as `tools`; and `continue_final=True`: the
                answer goes on with the last message instead of beginning one.

        Raises:
            TemplateError: there is no template, it refuses the conversation, or it leaves out what
                the user says.
        """
        messages = self._checked(messages)
        if self.prompt.template:
            return PromptTemplate.parse(self.prompt.template).encode_chat(
                tokenizer, messages, special=special
            )
        text = self._render(tokenizer, messages, variables)
        given = {"messages": messages} | {k: variables[k] for k in _STRANGERS if k in variables}
        if not special and (hidden := _hidden(given, tokenizer)) != given:
            rest = {k: v for k, v in variables.items() if k not in hidden}
            told = {k: v for k, v in hidden.items() if k != "messages"}
            marked = self._render(tokenizer, hidden["messages"], {**rest, **told})
            # A template that looks at such words, or cuts them, would say something else of them.
            if marked.replace(MARK, "") == text.replace(MARK, ""):
                return tokenizer.encode_marked(marked)
        return tokenizer.encode(text, special=False, parse_special=True)

    def text(self, tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt that a conversation becomes, as a text. Raises as `encode`."""
        if self.prompt.template:
            ids = self.encode(tokenizer, messages, **variables)
            return tokenizer.decode(ids, skip_special=False)
        return self._render(tokenizer, self._checked(messages), variables)

    def _checked(self, messages: Sequence[Message]) -> Sequence[Message]:
        """With the system message. Templates write any role into a prompt, a misspelled one too."""
        for number, message in enumerate(messages):
            role = message.get("role")
            if role not in _ROLES and not (isinstance(role, str) and self.reads(role)):
                raise TemplateError(
                    f"message {number} has the role {role!r}, which is none of "
                    f"{', '.join(_ROLES)}, nor named by the chat template"
                )
        system = self.prompt.system
        if system is not None and not (messages and messages[0].get("role") == "system"):
            return [{"role": "system", "content": system}, *messages]
        return messages

    def _render(
        self, tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> str:
        """What the Jinja template makes of it."""
        if not self.jinja:
            raise TemplateError(
                "the model has no chat template; set prompt.template or prompt.chat_template"
            )
        specials = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
        named = {name: tokenizer.token(id) for name, id in specials.items() if id is not None}
        template = ChatTemplate(self.jinja, variables=named)
        given = dict(variables)
        if not given.pop(CONTINUE, False):
            text = template.render(messages, **given)
            _check_said(template, messages, given, text)
            return text
        text = template.render(messages, **{**given, "add_generation_prompt": False})
        said = str(messages[-1]["content"]).strip()
        at = text.rfind(said)
        if not said or at < 0:
            raise TemplateError("the chat template does not show the last message as it is")
        return text[: at + len(said)]


def _asks(template: PromptTemplate) -> bool:
    """Whether a template has a place for what the user says, in each turn."""
    return any(Slot(name) in template.parts for name in ("query", "_query"))


def _check_said(
    template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any], text: str
) -> None:
    """Raises `TemplateError` if a template drops what the last user says.

    A template may trim, quote or cut words. So where they are not found as they are, another word
    in their place tells.
    """
    users = [place for place, each in enumerate(messages) if each.get("role") == "user"]
    if not users:
        return
    said = messages[users[-1]].get("content")
    words = _texts(said)
    if not words or any(each in text for each in words):
        return
    other = dict(messages[users[-1]]) | {"content": _saying(said)}
    try:
        probed = template.render(
            [*messages[: users[-1]], other, *messages[users[-1] + 1 :]], **variables
        )
    except TemplateError:  # it wants other words
        return
    if _WORDS not in probed.casefold():
        form = "a text" if isinstance(said, str) else "a list"
        raise TemplateError(
            f"the chat template leaves out a user's content that is {form}: {_LOST}; "
            f"set prompt.template or prompt.chat_template"
        )


def _texts(content: Any) -> list[str]:
    """What a message says, in one text or several parts."""
    if isinstance(content, str):
        return [content] if content.strip() else []
    if not isinstance(content, list | tuple):
        return []
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return [text for text in texts if isinstance(text, str) and text.strip()]


def _saying(content: Any) -> Any:
    """A content of the same form that says `_WORDS`."""
    if isinstance(content, str):
        return _WORDS
    return [
        {**part, "text": _WORDS} if isinstance(part, Mapping) and "text" in part else part
        for part in content
    ]


def _hidden(value: Any, tokenizer: Tokenizer) -> Any:
    """A value with the names of control tokens hidden in all its texts."""
    if isinstance(value, str):
        return tokenizer.hide_control(value)
    if isinstance(value, Mapping):
        return {key: _hidden(each, tokenizer) for key, each in value.items()}
    if isinstance(value, list | tuple):
        hidden = [_hidden(each, tokenizer) for each in value]
        return hidden if isinstance(value, list) else tuple(hidden)
    return value
