"""Chat template: how messages become the tokens of a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinfer.modelspec.model_spec import ModelSpec, PromptSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.template import ChatTemplate, PromptTemplate, TemplateError, find_chat_template
from jinfer.template.inferflow_template import Placeholder
from jinfer.template.message_content import Render, render_complete
from jinfer.tokenizer import Tokenizer
from jinfer.tokenizer.tokenizer_base import MARK

Message = Mapping[str, Any]
CONTINUE = "continue_final_message"
# That all templates are told of; others are known to the template that names them.
_ROLES = ("system", "developer", "user", "assistant", "tool")
_STRANGERS = ("tools", "documents")  # variables whose words may be a stranger's, as messages' are
_GOES_ON = MARK[::-1]  # where an answer goes on
_LOST = "what the user says would be lost"
_SPLIT_ROLE = re.compile(r"\brole['\"\]]*\s*\.\s*split\(")  # "document 1", by the first word


@dataclass(frozen=True)
class Conversation:
    """The prompt format of a model: the specification's template, or the checkpoint's own.

    Attributes:
        prompt: the specification's `[prompt]`.
        jinja: the Jinja template that counts; None where there is none, or `prompt.template` does.
        tool_use: the checkpoint's own for conversations with tools, where it has two.
    """

    prompt: PromptSpec
    jinja: str | None
    tool_use: str | None = None

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
        own, tool_use = (
            find_chat_template(config if is_gguf else source, name) for name in (None, "tool_use")
        )
        return cls(prompt, own or prompt.fallback, tool_use)

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
            **variables: for a Jinja template, such as `tools`; and `continue_final_message=True`:
                the answer goes on with the last message instead of beginning one.

        Raises:
            TemplateError: there is no template, it refuses the conversation, or it leaves out what
                the user says.
        """
        own = self._chosen(variables)
        messages = own._checked(messages)
        if own.prompt.template:
            return PromptTemplate.parse(own.prompt.template).encode_chat(
                tokenizer, messages, special=special
            )
        messages, text = own._rendered(tokenizer, messages, variables)
        given = {"messages": messages} | {k: variables[k] for k in _STRANGERS if k in variables}
        if not special and (hidden := _hidden(given, tokenizer)) != given:
            told = {**variables, **{k: v for k, v in hidden.items() if k != "messages"}}
            marked = own._renderer(tokenizer, told)(hidden["messages"])
            # A template that looks at such words, or cuts them, would say something else of them.
            if marked.replace(MARK, "") == text.replace(MARK, ""):
                return tokenizer.encode_marked(marked)
        return tokenizer.encode(text, special=False, parse_special=True)

    def text(self, tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt that a conversation becomes, as a text. Raises as `encode`."""
        own = self._chosen(variables)
        if own.prompt.template:
            ids = own.encode(tokenizer, messages, **variables)
            return tokenizer.decode(ids, skip_special=False)
        return own._rendered(tokenizer, own._checked(messages), variables)[1]

    def for_tools(self) -> Conversation:
        """With the template for conversations with tools, where that is another."""
        return replace(self, jinja=self.tool_use, tool_use=None) if self.tool_use else self

    def _chosen(self, variables: Mapping[str, Any]) -> Conversation:
        """The format for a conversation with these variables.

        Raises:
            TemplateError: tools or documents that it has no place for.
        """
        own = self.for_tools() if variables.get("tools") else self
        for name in _STRANGERS:
            if variables.get(name) and (own.prompt.template or not own.reads(name)):
                raise TemplateError(f"the model's chat template has no place for {name}")
        return own

    def _checked(self, messages: Sequence[Message]) -> Sequence[Message]:
        """With the system message. Templates write any role into a prompt, a misspelled one too.

        A developer's message is a system message where the template does not know the role.
        """
        for number, message in enumerate(messages):
            role = message.get("role")
            if role not in _ROLES and not self.has_role(role):
                raise TemplateError(
                    f"message {number} has the role {role!r}, which is none of "
                    f"{', '.join(_ROLES)}, nor named by the chat template"
                )
        if not self.reads("developer"):
            messages = [
                {**each, "role": "system"} if each["role"] == "developer" else each
                for each in messages
            ]
        system = self.prompt.system
        if system is not None and not (messages and messages[0].get("role") == "system"):
            return [{"role": "system", "content": system}, *messages]
        return messages

    def has_role(self, role: Any) -> bool:
        """Whether the template names it: "document 1" too, where it looks at the first word."""
        if not isinstance(role, str) or not role.strip():
            return False
        first = role.split(" ")[0]
        return self.reads(role) or (
            bool(_SPLIT_ROLE.search(self.jinja or "")) and self.reads(first)
        )

    def _rendered(
        self, tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> tuple[Sequence[Message], str]:
        render = self._renderer(tokenizer, variables)
        answered = bool(messages) and messages[-1].get("role") == "assistant"
        answered = answered and not variables.get(CONTINUE, False)
        return render_complete(render, messages, self.jinja or "", answered=answered)

    def _renderer(self, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> Render:
        """What the Jinja template makes of messages."""
        if not self.jinja:
            raise TemplateError(
                "the model has no chat template; set prompt.template or prompt.chat_template"
            )
        specials = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
        named = {name: tokenizer.token(id) for name, id in specials.items() if id is not None}
        template = ChatTemplate(self.jinja, variables=named)
        given = dict(variables)
        if not given.pop(CONTINUE, False):
            return lambda messages: template.render(messages, **given)
        given["add_generation_prompt"] = False

        def begun(messages: Sequence[Message]) -> str:
            text = template.render([*messages[:-1], _going_on(messages[-1])], **given)
            before, mark, _ = text.rpartition(_GOES_ON)
            if not mark:
                raise TemplateError("the chat template does not show the last message as it is")
            return before

        return begun


def _going_on(message: Message) -> Message:
    """A message with a mark where its answer goes on: a template may trim, but not beyond that."""
    content = message.get("content")
    if isinstance(content, list | tuple) and content:
        *parts, last = content
        if isinstance(last, Mapping) and isinstance(last.get("text"), str):
            return {**message, "content": [*parts, {**last, "text": last["text"] + _GOES_ON}]}
        return {**message, "content": [*content, {"type": "text", "text": _GOES_ON}]}
    return {**message, "content": (content or "") + _GOES_ON}


def _asks(template: PromptTemplate) -> bool:
    """Whether a template has a place for what the user says, in each turn."""
    return any(Placeholder(name) in template.parts for name in ("query", "_query"))


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
