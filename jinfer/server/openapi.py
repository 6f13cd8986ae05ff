"""OpenAPI: the description of the routes, generated from the request schemas, and an HTML page."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jinfer.server.core.endpoint import EmptyBody, Endpoint
from jinfer.server.http.field_descriptions import DESCRIPTIONS
from jinfer.server.http.query_params import QUERY_PARAMETERS
from jinfer.version import __version__

_REF = "#/components/schemas/{model}"
_ERRORS = {
    "400": "an invalid field",
    "401": "a key is required",
    "403": "not allowed here",
    "404": "not found",
    "405": "wrong method",
    "408": "the body did not arrive",
    "413": "the body is too long",
    "415": "the body is compressed",
    "429": "too many waiting requests",
    "500": "server error",
    "501": "not supported",
    "503": "the server is starting or shutting down",
}


@cache
def openapi_document(endpoints: tuple[Endpoint, ...]) -> dict[str, Any]:
    """Build the OpenAPI document: requests and responses of every route."""
    models = _models(endpoints)
    references, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REF
    )
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        if endpoint.request_model is not EmptyBody:
            _describe(schemas["$defs"][endpoint.request_model.__name__])
        for path in endpoint.paths:
            plain = path.replace(":path}", "}")
            operation = _operation(endpoint, path, lambda m: references[m, "validation"])
            paths.setdefault(plain, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "jinfer", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{}, {"key": []}, {"header": []}],
    }


def _describe(schema: dict[str, Any]) -> None:
    for name, field in schema["properties"].items():
        if name in DESCRIPTIONS:
            field.setdefault("description", DESCRIPTIONS[name])


def _models(endpoints: Sequence[Endpoint]) -> list[type[BaseModel]]:
    models = (
        model
        for endpoint in endpoints
        for model in (endpoint.request_model, endpoint.response_model)
    )
    used = [model for model in models if model is not None and model is not EmptyBody]
    return list(dict.fromkeys([*(endpoint.errors.schema for endpoint in endpoints), *used]))


def _operation(endpoint: Endpoint, path: str, reference: Any) -> dict[str, Any]:
    made = endpoint.response_model
    schema = {} if made is None else reference(made)
    content: dict[str, Any] = {endpoint.media_type: {"schema": schema}}
    if endpoint.stream:
        content.setdefault(endpoint.stream.partition(";")[0], {"schema": {}})
    error = {"application/json": {"schema": reference(endpoint.errors.schema)}}
    done = {"description": endpoint.summary, "content": content}
    responses: dict[str, Any] = {"200": done}
    if endpoint.success == 204:
        responses = {"204": {"description": endpoint.summary}}
    for status, text in (*_ERRORS.items(), *endpoint.errors.more):
        responses[status] = {"description": text, "content": error}
    operation: dict[str, Any] = {
        "operationId": f"{endpoint.method.lower()}{path.translate(_NO_SIGNS)}",
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "responses": responses,
    }
    if endpoint.public:
        operation["security"] = []
    if endpoint.request_model is not EmptyBody:
        body = {endpoint.body_media_type: {"schema": reference(endpoint.request_model)}}
        fields = endpoint.request_model.model_fields.values()
        needed = any(
            field.is_required() for field in fields
        )  # without required fields the body may be empty
        operation["requestBody"] = {"required": needed, "content": body}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)", path)
    ]
    for name in endpoint.query:
        parameters.append({"in": "query", "name": name, **QUERY_PARAMETERS[name]})
    if parameters:
        operation["parameters"] = parameters
    return operation


_NO_SIGNS = str.maketrans({"/": "_", "{": "", "}": "", ":": "_", "-": "_"})


@cache
def docs_page(endpoints: tuple[Endpoint, ...]) -> bytes:
    """Build the documentation as HTML, without scripts or external resources."""
    made = openapi_document(endpoints)
    schemas = made["components"]["schemas"]
    parts = [f"<h1>jinfer {html.escape(made['info']['version'])}</h1>"]
    parts.append('<p><a href="openapi.json">openapi.json</a></p>')
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            parts += _shown(path, method, operation, schemas)
    return (_HEAD + "".join(parts) + "</main></html>").encode()


def _shown(
    path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]
) -> Iterable[str]:
    escape = html.escape
    yield f"<details><summary><code>{method.upper()} {escape(path)}</code> "
    yield f"{escape(operation['summary'])}</summary>"
    body = operation.get("requestBody")
    if body is not None:
        (content,) = body["content"].values()
        name = content["schema"]["$ref"].rpartition("/")[2]
        yield "<table><tr><th>field<th>type<th></tr>"
        required = schemas[name].get("required", [])
        for field, schema in schemas[name]["properties"].items():
            star = "*" if field in required else ""
            about = escape(schema.get("description", ""))
            yield f"<tr><td><code>{escape(field)}</code>{star}"
            yield f"<td>{escape(_type(schema))}<td>{about}</tr>"
        yield "</table>"
    answer = operation["responses"].get("200", {}).get("content", ["nothing"])
    yield f"<p>answers: {escape(', '.join(answer))}</p></details>"


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        kinds = [_type(item) for item in schema["anyOf"] if item.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))


_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>jinfer</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>:root{color-scheme:light dark;font:16px/1.5 system-ui,sans-serif}
main{max-width:60rem;margin:2rem auto;padding:0 1rem}summary{cursor:pointer;padding:.3rem 0}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2rem .6rem;
border-top:1px solid #8884;vertical-align:top}</style><main>"""
