"""Chat prompt: messages become the tokens of a prompt, by the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinfer.modelspec.model_spec import ModelSpec, PromptSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.template import ChatTemplate, PromptTemplate, TemplateError, find_chat_template
from jinfer.template.inferflow_template import Placeholder
from jinfer.template.message_content import IMAGE, NO_IMAGES, Render, render_complete
from jinfer.tokenizer import Tokenizer
from jinfer.tokenizer.tokenizer_base import MARK

if TYPE_CHECKING:
    from jinfer.modelspec.image_table import ImageSpec

Message = Mapping[str, Any]
CONTINUE = "continue_final_message"
# Roles of all templates; a template may name others.
_ROLES = ("system", "developer", "user", "assistant", "tool")
_UNTRUSTED = ("tools", "documents")  # variables whose text is not trusted, as that of messages
_CONTINUES = MARK[::-1]  # marks the place where an answer continues
_LOST = "what the user says would be lost"
_SPLIT_ROLE = re.compile(r"\brole['\"\]]*\s*\.\s*split\(")  # "document 1", by the first word


@dataclass(frozen=True)
class Conversation:
    """The prompt format of a model: the specification's template, or the checkpoint's own.

    Attributes:
        prompt: the specification's `[prompt]`.
        jinja: the Jinja template; None if there is none, or `prompt.template` is used.
        tool_use: the checkpoint's template for conversations with tools, if it has two.
        image: how the model reads images; None: it reads none.
    """

    prompt: PromptSpec
    jinja: str | None
    tool_use: str | None = None
    image: ImageSpec | None = None

    @classmethod
    def of(cls, spec: ModelSpec, path: Path, config: Mapping[str, Any]) -> Conversation:
        """Find the template.

        Args:
            path: the folder or file of the tokenizer.
            config: config.json, or the metadata of a GGUF file, which has its template.

        Raises:
            TemplateError: it cannot be read.
            SpecError: it has no place for the text of the user.
        """
        prompt = spec.prompt
        if prompt.template and not _has_query(PromptTemplate.parse(prompt.template)):
            reason = f"has no {{query}}: {_LOST}; put it where that belongs"
            raise SpecError(spec.path, "prompt.template", reason)
        for key in ("chat_template", "fallback"):
            source_text = getattr(prompt, key)
            if source_text and "messages" not in source_text:
                raise SpecError(spec.path, f"prompt.{key}", f"never uses messages: {_LOST}")
        if prompt.template or prompt.chat_template:
            own = None if prompt.template else prompt.chat_template
            return cls(prompt, own, image=spec.image)
        is_gguf = "general.architecture" in config
        own, tool_use = (
            find_chat_template(config if is_gguf else path, name) for name in (None, "tool_use")
        )
        return cls(prompt, own or prompt.fallback, tool_use, spec.image)

    @property
    def has_template(self) -> bool:
        """Whether messages can be encoded."""
        return bool(self.prompt.template or self.jinja)

    def reads(self, name: str) -> bool:
        """Whether the template uses a variable."""
        return re.search(rf"\b{re.escape(name)}\b", self.jinja or "") is not None

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        special: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Encode a conversation, ready for the model's answer.

        Args:
            special: encode the names of special tokens in messages as these tokens; else as text,
                if
                the template does not change the messages' text.
            **variables: for a Jinja template, such as `tools`; and `continue_final_message=True`:
                the answer continues the last message.

        Raises:
            TemplateError: there is no template, it refuses the conversation, or it leaves out text
            of
                the user.
        """
        own = self._chosen(variables)
        if own.prompt.template:
            return PromptTemplate.parse(own.prompt.template).encode_chat(
                tokenizer, own._checked(messages), special=special
            )
        text = self.marked_text(tokenizer, messages, special=special, **variables)
        if MARK in text:
            return tokenizer.encode_marked(text)
        return tokenizer.encode(text, special=False, parse_special=True)

    def marked_text(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        special: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation to a text for `Tokenizer.encode_marked`; arguments as `encode`.

        An image is a part `{"type": "image"}`, and the model's marker of images in the result;
        markers that are written in messages are hidden.

        Raises:
            TemplateError: as `encode`; or the template leaves out an image.
        """
        own = self._chosen(variables)
        if own.prompt.template:
            fix = "prompt.template has no place for images; set prompt.chat_template"
            raise TemplateError(fix if self.image else NO_IMAGES)
        messages, text = own._rendered(tokenizer, own._checked(messages), variables)
        texts = {"messages": messages} | {k: variables[k] for k in _UNTRUSTED if k in variables}
        marker = own.image_marker(tokenizer)
        hide = partial(_hide_names, tokenizer, marker)
        if not special and (hidden := _hidden(texts, hide)) != texts:
            replaced = {**variables, **{k: v for k, v in hidden.items() if k != "messages"}}
            marked = own._renderer(tokenizer, replaced)(hidden["messages"])
            # A template that inspects or cuts such names would render something else.
            if marked.replace(MARK, "") == text.replace(MARK, ""):
                text = marked
        return text.replace(IMAGE, marker)

    def text(self, tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any) -> str:
        """Return the prompt of a conversation as text. Raises as `encode`."""
        own = self._chosen(variables)
        if own.prompt.template:
            ids = own.encode(tokenizer, messages, **variables)
            return tokenizer.decode(ids, skip_special=False)
        text = own._rendered(tokenizer, own._checked(messages), variables)[1]
        return text.replace(IMAGE, self.image_marker(tokenizer))

    def image_marker(self, tokenizer: Tokenizer) -> str:
        """What the template writes for an image; "": the model reads none."""
        if self.image is None:
            return ""
        # Imported here, because text alone does not need it.
        from jinfer.images import image_marker

        return image_marker(tokenizer, self.image)

    def for_tools(self) -> Conversation:
        """Use the template for conversations with tools, if the checkpoint has such a template."""
        return replace(self, jinja=self.tool_use, tool_use=None) if self.tool_use else self

    def _chosen(self, variables: Mapping[str, Any]) -> Conversation:
        """Return the format for a conversation with these variables.

        Raises:
            TemplateError: the template has no place for tools or documents.
        """
        own = self.for_tools() if variables.get("tools") else self
        for name in _UNTRUSTED:
            if variables.get(name) and (own.prompt.template or not own.reads(name)):
                raise TemplateError(f"the model's chat template has no place for {name}")
        return own

    def _checked(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Check the roles, as templates write any role into a prompt, and add the system message.

        A developer's message becomes a system message if the template does not use the role.
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
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        system = self.prompt.system
        if system is not None and not (messages and messages[0].get("role") == "system"):
            return [{"role": "system", "content": system}, *messages]
        return messages

    def has_role(self, role: Any) -> bool:
        """Whether the template names a role, or its first word if it splits ("document 1")."""
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
        marker, template = self.image_marker(tokenizer), self.jinja or ""
        return render_complete(render, messages, template, answered=answered, image_marker=marker)

    def _renderer(self, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> Render:
        """Return a function that renders messages by the Jinja template."""
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
            text = template.render([*messages[:-1], _marked(messages[-1])], **given)
            before, mark, _ = text.rpartition(_CONTINUES)
            if not mark:
                raise TemplateError("the chat template does not show the last message as it is")
            return before

        return begun


def _marked(message: Message) -> Message:
    """Add a mark to a message where its answer continues: a template may trim, but not the mark."""
    content = message.get("content")
    if isinstance(content, list | tuple) and content:
        *parts, last = content
        if isinstance(last, Mapping) and isinstance(last.get("text"), str):
            return {**message, "content": [*parts, {**last, "text": last["text"] + _CONTINUES}]}
        return {**message, "content": [*content, {"type": "text", "text": _CONTINUES}]}
    return {**message, "content": (content or "") + _CONTINUES}


def _has_query(template: PromptTemplate) -> bool:
    """Whether a template has a place for the text of the user in each turn."""
    return any(Placeholder(name) in template.parts for name in ("query", "_query"))


def _hide_names(tokenizer: Tokenizer, marker: str, text: str) -> str:
    """Hide the names of control tokens, and the marker of images."""
    hidden = tokenizer.hide_control(text)
    if not marker:
        return hidden
    from jinfer.images import hide_marker

    return hide_marker(hidden, marker)


def _hidden(value: Any, hide: Callable[[str], str]) -> Any:
    """Change all texts of a value."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {key: _hidden(item, hide) for key, item in value.items()}
    if isinstance(value, list | tuple):
        hidden = [_hidden(item, hide) for item in value]
        return hidden if isinstance(value, list) else tuple(hidden)
    return value
