"""Chat templates (Jinja): render messages to the text of a prompt.

A template comes with a checkpoint, so it is an untrusted program. It runs in a child process with
limits on processor time and memory (`render_child`), which all templates share.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinfer.sandbox.safe_files import FileRefusedError, path_exists, read_downloaded
from jinfer.sandbox.sandboxed_process import SandboxedProcess, SandboxError
from jinfer.template.template_errors import MAX_CHARACTERS, TemplateError

_MAX_SOURCE = 1_000_000  # characters
_MAX_FILE = 16 << 20  # bytes; tokenizer_config.json lists added tokens too
_DEFAULT = "default"
_MEMORY = 448 << 20  # bytes of address space, including 40 MB of the interpreter
_COMPILE_SECONDS = 4.0  # processor time
_RENDER_SECONDS = 1.0  # processor time
_CHARACTERS_PER_SECOND = 50_000  # compiled at least

_child = SandboxedProcess(
    "jinfer.template.render_child", memory=_MEMORY, answer_bytes=12 * MAX_CHARACTERS
)


class ChatTemplate:
    """A compiled chat template; thread-safe."""

    def __init__(self, source: str, *, variables: Mapping[str, str] | None = None) -> None:
        """Compile a template; templates are cached by source.

        Args:
            source: Jinja, at most a million characters.
            variables: variables of every rendering, such as bos_token and eos_token.

        Raises:
            TemplateError: a syntax error, with its line.
        """
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"chat template: longer than {_MAX_SOURCE} characters")
        self.source = source
        self.variables = dict(variables or {})
        _check(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Render the prompt of a conversation. Values have JSON's types.

        Args:
            messages: mappings with "role", "content" and other keys that the template reads.
            tools: JSON schemas of functions.
            documents: documents for retrieval (RAG) templates.
            add_generation_prompt: end with the beginning of the assistant's turn.
            extra: further variables, which override those of the constructor.

        Raises:
            TemplateError: the template rejects the conversation, fails, or exceeds its limits: a
                second of processor time, 448 MiB, 16 million characters.
        """
        names = {
            **self.variables,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            **extra,
        }
        # A new process has to compile the template first.
        compiling = min(_COMPILE_SECONDS, len(self.source) / _CHARACTERS_PER_SECOND)
        question = {"source": self.source, "names": names}
        return _ask(question, _RENDER_SECONDS + compiling, "rendering")


@lru_cache(maxsize=32)  # conversations create their template again for each answer
def _check(source: str) -> None:
    """Compile a template. Raises `TemplateError`."""
    _ask({"source": source}, _COMPILE_SECONDS, "compiling")


def _ask(question: Mapping[str, Any], seconds: float, action: str) -> str:
    try:
        plain = _plain(question)
    except RecursionError:
        raise TemplateError("chat template: the messages are nested too deeply") from None
    try:
        answer = _child.ask(plain, seconds)
    except SandboxError as error:
        raise TemplateError(f"chat template: {action} {error}") from None
    if "refused" in answer:
        raise TemplateError(answer["refused"])
    return str(answer["text"])


def _plain(value: Any) -> Any:
    """A value of JSON's types."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [_plain(item) for item in value]
    raise TemplateError(
        f"chat template: it runs in a process of its own, which cannot be given a "
        f"{type(value).__name__}"
    )


def find_chat_template(source: Path | Mapping[str, Any], name: str | None = None) -> str | None:
    """Find the source of a checkpoint's chat template; None if it has none.

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
