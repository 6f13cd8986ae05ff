"""Chat templates (Jinja), as checkpoints bring them: messages to the text of a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinfer.sandbox.download_check import read_downloaded
from jinfer.sandbox.safe_files import FileRefusedError, path_exists
from jinfer.template.template_errors import TemplateError

_MAX_SOURCE = 1_000_000  # characters
_MAX_FILE = 16 << 20  # bytes; tokenizer_config.json lists added tokens too
_DEFAULT = "default"


class ChatTemplate:
    """A compiled chat template; thread-safe."""

    def __init__(self, source: str, *, variables: Mapping[str, str] | None = None) -> None:
        """Compiles a template; templates are cached by source.

        Args:
            source: Jinja; `jinfer.template.jinja_sandbox` has its limits.
            variables: variables of every rendering, such as bos_token and eos_token.

        Raises:
            TemplateError: a syntax error, with its line.
        """
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"chat template: longer than {_MAX_SOURCE} characters")
        self.source = source
        self.variables = dict(variables or {})
        # Imported here, because a start without a conversation needs no Jinja.
        from jinfer.template.compiled_template import compiled

        self._ready = compiled(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Renders the prompt of a conversation.

        Args:
            messages: mappings with "role", "content" and whatever else the template reads.
            tools: JSON schemas of functions.
            documents: documents for retrieval (RAG) templates.
            add_generation_prompt: end with the beginning of the assistant's turn.
            extra: further variables, which override those of the constructor.

        Raises:
            TemplateError: the template rejects the conversation, fails, or exceeds the limits of
                `jinfer.template.template_limits` (a second, 16 million characters).
        """
        names = {
            **self.variables,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            **extra,
        }
        return self._ready.render(names)


def find_chat_template(source: Path | Mapping[str, Any], name: str | None = None) -> str | None:
    """The source of a checkpoint's chat template; None if it has none.

    Args:
        source: a folder (chat_template.jinja, chat_template.json, tokenizer_config.json and
            additional_chat_templates/*.jinja, in this order) or a GGUF file's metadata.
        name: one of several named templates ("tool_use", "rag"); None: the default one.

    Raises:
        TemplateError: a file that cannot be read.
    """
    found = _in_folder(source) if isinstance(source, Path) else _in_gguf(source)
    return found.get(name or _DEFAULT)


def _in_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {k.removeprefix(key + "."): v for k, v in metadata.items() if k.startswith(key + ".")}
    found = {**named, _DEFAULT: metadata.get(key, named.get(_DEFAULT))}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _in_folder(folder: Path) -> dict[str, str]:
    result: dict[str, str] = {}
    for file in ("tokenizer_config.json", "chat_template.json"):
        path = folder / file
        if path_exists(path):
            result.update(_named(path, _object(path).get("chat_template")))
    if path_exists(folder / "chat_template.jinja"):
        result[_DEFAULT] = _text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        result[path.stem] = _text(path)
    return result


def _named(path: Path, value: Any) -> Iterable[tuple[str, str]]:
    if value is None:
        return []
    if isinstance(value, str):
        return [(_DEFAULT, value)]
    try:
        pairs = [(entry["name"], entry["template"]) for entry in value]
    except (TypeError, KeyError):
        pairs = [(None, None)]
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in pairs):
        raise TemplateError(
            f"{path}: chat_template must be a string or a list of objects with name and template"
        )
    return pairs


def _object(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{path}: not readable as JSON: {error}"[:300]) from None
    if not isinstance(value, dict):
        raise TemplateError(f"{path}: must be a JSON object")
    return value


def _text(path: Path) -> str:
    try:
        return read_downloaded(path, _MAX_FILE).decode("utf-8-sig")
    except (FileRefusedError, ValueError) as error:
        raise TemplateError(f"{path}: {error}"[:300]) from None
