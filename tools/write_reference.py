"""Reference pages: `python -m tools.write_reference` writes docs/reference from the code.

A test compares the pages with the code.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import jinfer
from jinfer import client
from jinfer.cli.entry_point import COMMANDS
from jinfer.cli.terminal import generate_flags
from jinfer.modelspec.bounded_types import Bounds, describe, details, documentation, union
from jinfer.sampling.param_field import ALIASES, Group
from jinfer.sampling.sampling_params import PARAMETERS, SamplingParams
from jinfer.server import serve_flags
from jinfer.server.core.endpoint import EmptyBody
from jinfer.server.core.sampling_fields import SamplingFields, parameter_of
from jinfer.server.http.query_params import QUERY_PARAMETERS
from jinfer.server.openapi import openapi_document
from jinfer.server.routes import ENDPOINTS
from tools import architectures_reference, peer_fields_reference, spec_reference

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Generated: python -m tools.write_reference -->\n\n"


def pages() -> dict[str, str]:
    """The text of every generated page, by file name."""
    makers: dict[str, Callable[[], str]] = {
        "architectures.md": architectures_reference.page,
        "commands.md": commands_page,
        "http_api.md": http_page,
        "peer_fields.md": peer_fields_reference.page,
        "python_api.md": python_page,
        "sampling_parameters.md": sampling_page,
        "spec_keys.md": spec_reference.page,
    }
    return {name: NOTE + make() for name, make in makers.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = (" ".join(cell.split()).replace("|", "\\|") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _page(*parts: str) -> str:
    return "\n\n".join(parts) + "\n"


def commands_page() -> str:
    """Commands and flags."""
    commands = [(f"`jinfer {command.name}`", command.about) for command in COMMANDS]
    return _page(
        "# Commands and flags",
        "`jinfer COMMAND --help` shows the flags of every command.",
        table(("command", "purpose"), commands),
        "## jinfer serve",
        "Every flag can come from the environment: `--port` from `JINFER_PORT`, lists with commas, "
        "sources from `JINFER_SOURCE`. The command line wins.",
        _parser_table(serve_flags.make_parser(), serve_flags.parse_options([], {})),
        "## jinfer generate, jinfer chat",
        _parser_table(generate_flags.make_parser("jinfer generate")),
        "## jinfer client",
        _parser_table(client.make_parser("jinfer client")),
    )


def _parser_table(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Any] | None = None
) -> str:
    defaults = defaults or {}
    names: dict[str, list[str]] = {}  # destination -> names; other engines' names have no help
    helps: dict[str, str] = {}
    for action in parser._actions:  # argparse has no public list
        is_help = any(name.startswith("--help") for name in action.option_strings)
        if action.option_strings and action.dest not in PARAMETERS and not is_help:
            names.setdefault(action.dest, []).extend(f"`{name}`" for name in action.option_strings)
            if action.help not in (None, argparse.SUPPRESS):
                form = f"{action.metavar}: " if "=" in str(action.metavar) else ""
                helps[action.dest] = form + str(action.help).replace("%%", "%")
    rows = [
        (", ".join(names[key]), _default(defaults.get(key)), text) for key, text in helps.items()
    ]
    if defaults:
        return table(("flag", "default", "meaning"), rows)
    also = "Every [sampling parameter](sampling_parameters.md) is also a flag, such as `--top-p`."
    return f"{table(('flag', 'meaning'), [(row[0], row[2]) for row in rows])}\n\n{also}"


def _default(value: Any) -> str:
    if value is None or value is False or value in ((), [], {}):
        return ""
    return f"`{'on' if value is True else value}`"


def sampling_page() -> str:
    """Sampling parameters, by group."""
    texts = {name: text for names, text in documentation(SamplingParams).items() for name in names}
    others: dict[str, list[str]] = {name: [] for name in PARAMETERS}
    for alias, own in ALIASES.items():
        others[own].append(alias)
    parts = []
    for group in get_args(Group):
        rows = [
            (
                f"`{row.name}`",
                "none" if row.default is None else f"`{row.default!r}`",
                _values(row.type),
                ", ".join(
                    f"`{name}`" for name in dict.fromkeys((*others[row.name], *row.fields[1:]))
                ),
                texts[row.name],
            )
            for row in PARAMETERS.values()
            if row.group == group
        ]
        if rows:
            head = ("parameter", "default", "values", "other names", "meaning")
            parts += [f"## {group or 'Other'}", table(head, rows)]
    return _page(
        "# Sampling parameters",
        "The fields of `SamplingParams` are also keyword arguments of `LLM.generate`, fields of "
        "HTTP requests, flags of `jinfer generate` and keys of `[generation]`. "
        "[sampling.md](../sampling.md) explains how they work together.",
        *parts,
    )


def _values(hint: Any) -> str:
    """The words and the bounds of a type; its other values have no short description."""
    parts = []
    for option in union(hint):
        inner, note = details(option)
        if get_origin(inner) is Literal:
            parts.append(", ".join(f"`{word}`" for word in get_args(inner)))
        elif inner is bool or isinstance(note, Bounds):
            parts.append(describe(option))
    return " or ".join(parts)


def http_page() -> str:
    """Routes and request fields."""
    document = openapi_document(ENDPOINTS)
    schemas = document["components"]["schemas"]
    routes = [
        (endpoint.tag, endpoint.method, " ".join(f"`{_plain(path)}`" for path in endpoint.paths),
         endpoint.summary)
        for endpoint in ENDPOINTS
    ]  # fmt: skip
    shared = schemas["ChatRequest"]["properties"] | schemas["CompletionRequest"]["properties"]
    texts = {name: text for names, text in documentation(SamplingParams).items() for name in names}
    own_fields = [
        name
        for name in SamplingFields.model_fields
        if shared[name].get("description", "") != texts.get(parameter_of(name))
    ]
    parts: list[str] = []
    printed: dict[str, dict[str, Any]] = {}  # path -> properties
    for model, paths in _bodies().items():
        properties = schemas[model.__name__]["properties"]
        if issubclass(model, SamplingFields):
            properties = {
                k: v for k, v in properties.items() if k not in SamplingFields.model_fields
            }
        parts += _body(model, paths, schemas[model.__name__], properties, printed)
        printed[paths[0]] = properties
    queries = [
        (f"`{row.get('name', name)}`", _type(row["schema"]), row["description"])
        for name, row in QUERY_PARAMETERS.items()
    ]
    return _page(
        "# HTTP routes and fields",
        "[serving.md](../serving.md) explains the interfaces. A running server describes itself at "
        "`/docs` and `/openapi.json`, with the schemas of nested objects and of responses.",
        "## Routes",
        table(("interface", "method", "path", "purpose"), routes),
        "## Query parameters",
        table(("parameter", "type", "meaning"), queries),
        "## Sampling fields",
        "All routes that generate text take the [sampling parameters](sampling_parameters.md) and "
        "these fields.",
        _fields(SamplingFields, {"properties": shared}, own_fields),
        "## Request bodies",
        "A star marks required fields. Fields of other services that have no effect are in "
        "[peer_fields.md](peer_fields.md).",
        *parts,
    )


def _equal(properties: dict[str, Any], known: dict[str, Any]) -> list[str]:
    return [name for name, schema in properties.items() if known.get(name) == schema]


def _plain(path: str) -> str:
    return path.replace(":path}", "}")


def _bodies() -> dict[Any, list[str]]:
    """The paths of each request schema."""
    models: dict[Any, list[str]] = {}
    for endpoint in ENDPOINTS:
        if endpoint.request_model is not EmptyBody:
            models.setdefault(endpoint.request_model, []).extend(map(_plain, endpoint.paths))
    return models


def _body(
    model: Any,
    paths: Sequence[str],
    schema: dict[str, Any],
    properties: dict[str, Any],
    printed: dict[str, dict[str, Any]],
) -> list[str]:
    """The section of a request schema; what an earlier one has is not repeated."""
    shared = {path: _equal(properties, known) for path, known in printed.items()}
    best = max(shared, key=lambda path: len(shared[path]), default="")
    repeated = shared.get(best, [])
    if len(repeated) < max(5, len(properties) // 2):
        repeated = []
    own = [name for name in properties if name not in repeated]
    intro = ["the [sampling fields](#sampling-fields)"] if issubclass(model, SamplingFields) else []
    missing = ", ".join(f"`{name}`" for name in printed.get(best, ()) if name not in repeated)
    if repeated and len(repeated) >= len(printed[best]) - 3:
        intro.append(f"the fields of `{best}`" + (f" except {missing}" if missing else ""))
    elif repeated:
        intro.append(f"of `{best}` the fields " + ", ".join(f"`{name}`" for name in repeated))
    parts = ["### " + ", ".join(f"`{path}`" for path in paths)]
    if intro:
        parts.append(f"It takes {' and '.join(intro)}{', and:' if own else '.'}")
    return [*parts, _fields(model, schema, own)] if own else parts


def _fields(model: Any, schema: dict[str, Any], names: Sequence[str]) -> str:
    required, listed = schema.get("required", []), peer_fields_reference.names()
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    rows = []
    for name in names:
        field = schema["properties"].get(name, {})
        mark = peer_fields_reference.mark_of(fields[name]) if name in fields else ""
        if name in listed and (mark or name in peer_fields_reference.HANDLED):
            continue
        meaning = "; ".join(text for text in (field.get("description", ""), mark) if text)
        rows.append((f"`{name}`{'*' if name in required else ''}", _type(field), meaning))
    return table(("field", "type", "meaning"), rows)


def _type(schema: dict[str, Any]) -> str:
    """The type of a JSON schema in words."""
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = [_type(option) for option in schema[key] if option.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds)) or "null"
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def python_page() -> str:
    """The public Python API: signatures and first sentences, then the docstrings on the site."""
    parts = [
        "# Python API",
        "The names that `jinfer` exports; [python.md](../python.md) is the tutorial. On the web "
        "site, full docstrings follow each summary; in Python, `help(jinfer.LLM)` shows them.",
    ]
    for name in jinfer.__all__:
        if name != "__version__":
            parts += _documented(name, getattr(jinfer, name))
    return _page(*parts)


def _documented(name: str, value: Any) -> list[str]:
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return [
            f"## `{name}`",
            "A tuple of exception classes: every error that a user can correct.",
        ]
    parts = [f"## `{name}`", _first_sentence(value)]
    members = []
    if inspect.isclass(value) and not issubclass(value, Exception):
        for member, kind in sorted(_members(value)):
            signature = f"({_signature(kind)})" if callable(kind) else ""
            members.append((f"`{member}{signature}`", _first_sentence(kind)))
    if members:
        parts.append(table(("member", "purpose"), members))
    return [*parts, f"::: {value.__module__}.{value.__qualname__}"]


def _members(owner: type) -> Iterable[tuple[str, Any]]:
    for name in dir(owner):
        value = inspect.getattr_static(owner, name)
        value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        is_own = (getattr(value, "__module__", None) or "jinfer").startswith("jinfer")
        is_member = inspect.isroutine(value) or isinstance(value, property)
        if is_own and is_member and not name.startswith("_"):
            yield name, value


_STARS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def _signature(function: Any) -> str:
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls") or parameter.default is ...:
            continue
        stars = _STARS.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        names.append(f"{stars}{parameter.name}{default}")
    text = ", ".join(names)
    return text.replace("**keywords", "**sampling")


def _first_sentence(value: Any) -> str:
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.)\s(?=[A-Z`])", text)[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the pages; returns the exit status."""
    argparse.ArgumentParser(description="Writes docs/reference.").parse_args(arguments)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
