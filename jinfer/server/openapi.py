"""OpenAPI: the description of the routes, generated from the request schemas, and an HTML page."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jinfer.server.core.endpoint import EmptyBody, Endpoint
from jinfer.server.http.query_params import QUERY_PARAMETERS
from jinfer.version import __version__

DESCRIPTIONS: Mapping[str, str] = {
    # conversations
    "messages": "the conversation; contents are texts or lists of text parts",
    "system": "the system message",
    "system_prompt": "the system message",
    "instructions": "the system message of this request",
    "tools": "functions that the model may call; other tools are ignored",
    "tool_choice": "auto, none, required, or the function to call",
    "parallel_tool_calls": "false: at most one call",
    "add_generation_prompt": "false: the prompt ends with the last message",
    "continue_final_message": "the answer continues the last message, the assistant's",
    "chat_template_kwargs": "variables of the chat template",
    "documents": "ranked texts; on chat routes, documents for a template that reads them",
    "reasoning": "effort, max_tokens, enabled, exclude",
    "thinking": "type and budget_tokens",
    "think": "true, false, or an effort",
    "output_config": "effort, and a format with a JSON schema",
    # models and streams
    "model": "a model's name or alias, or an adapter's; the first model if not given",
    "stream": "sends the answer as server-sent events",
    "stream_options": "include_usage, continuous_usage_stats",
    "keep_alive": "how long the model stays in memory: seconds, or a duration such as 5m",
    "options": "sampling parameters under Ollama's names",
    # prompts and answers
    "prompt": "a text or token ids; a list of either on routes that answer several",
    "text": "the prompt; on /v1/responses the format of the answer's text",
    "input": "a text or a list of texts; embeddings also take token ids",
    "input_prefix": "the text before the gap",
    "input_suffix": "the text after the gap",
    "input_extra": "other files as context: filename and text",
    "echo": "the answer begins with the prompt",
    "logprobs": "adds the log-probability of each token",
    "top_k": "number of tokens for each mask",
    "top_logprobs": "number of alternatives with their log-probabilities",
    "prompt_logprobs": "number of alternatives for each token of the prompt",
    "max_output_tokens": "limit of new tokens",
    "stop_sequences": "texts that end the answer",
    "response_format": "text, json_object, or json_schema with a schema",
    "structured_outputs": "one of json, json_object, regex, choice, grammar",
    "use_beam_search": "the answer is the best of a beam search",
    "return_token_ids": "adds prompt_token_ids and token_ids to the response",
    "return_tokens": "adds the token ids to the response",
    "timings_per_token": "adds timings to every event of a stream",
    "return_progress": "adds events with the progress of long prompts",
    "modalities": "only text",
    "safety_identifier": "is logged",
    "prompt_cache_retention": "prefixes are always cached as long as there is room",
    "add_special_tokens": "false: no special tokens are added around the text",
    # vectors
    "encoding_format": "float or base64",
    "embedding_types": "float, base64, binary, ubinary",
    "pooling": "overrides the checkpoint's pooling",
    "normalize": "scales vectors to length 1",
    "dimensions": "length of the vectors, which are truncated and normalized again",
    "truncate_prompt_tokens": "longer texts are cut to this number of tokens; -1: to the limit",
    "truncate": "false: a text that is too long is an error",
    "query": "the text that documents are compared with",
    "texts": "a list of texts",
    "top_n": "number of results",
    "return_documents": "adds the documents to the results",
    "text_1": "one text, or one for each second text",
    "text_2": "the texts that are compared with the first",
    # tokens
    "content": "a text",
    "tokens": "token ids",
    "with_pieces": "adds the text of each token",
    "return_token_strs": "adds the text of each token",
    # files, adapters, vectors by name
    "file": "the file, at most --max-file bytes",
    "purpose": "batch, or another of OpenAI's purposes",
    "expires_after": "anchor and seconds until the file is deleted",
    "input_file_id": "a file of requests, one JSON object per line",
    "endpoint": "the route of all requests of the batch",
    "output_expires_after": "anchor and seconds until result files are deleted",
    "lora_name": "the adapter's name, which requests use as their model",
    "name": "the name that requests use",
    "vectors": "vectors in place of a file",
    "metadata": "is stored and returned",
}


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
