"""The page at /: its files, their headers, who may have them, and what it learns of parameters."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest

from jinfer.sampling.sampling_params import ACTIVATIONS, PARAMETERS, SamplingParams
from jinfer.server.core.sampling_fields import GROUPS, parameter_of
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.openapi import openapi_document
from jinfer.server.page import static_files
from jinfer.server.page.static_files import files
from jinfer.server.routes import ENDPOINTS
from jinfer.server.serve_flags import parse_options, server_settings_of
from tests.server.running import GOLDENS, Running, serving

LLAMA = ModelSource("llama", str(GOLDENS / "llama2"), {"dtype": "float32"})
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
# What is drawn with is called by these names, which no browser asks for.
NAMESPACES = re.compile(r"http://www\.w3\.org/(2000/svg|1999/xhtml|1998/Math/MathML)")
# Of the packages that jinfer/server/page/vendor/README.md names.
VENDORED = {
    "highlight.min.js": "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
    "temml.min.js": "1ab19148afe0dbc836b7a74f344071b3f3a70a7a8259ae4049e76894fcdf8d95",
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with serving([LLAMA], ServerSettings(keys=("secret",), warm_up=False)) as running:
        yield running


def test_the_page(smol: Running) -> None:
    answer = httpx.get(smol.url)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == TYPES["html"]
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    policy = dict(
        item.split(" ", 1) for item in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "colour-worker"  # whose rule names one file
    assert "unsafe" not in str(policy)
    text = answer.text
    named = re.findall(r'(?:src|href)="([^#"]*)"', text)
    assert {f"page/{name}" for name in ("main.js", "theme.js", "style.css", "icon.svg")} == set(
        named
    )
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", text)


def test_its_files(smol: Running) -> None:
    with smol.client() as http:
        for name, file in files().items():
            answer = http.get(f"/page/{name}")
            assert answer.status_code == 200
            assert answer.content == file.content
            assert answer.headers["content-type"] == TYPES[name.rpartition(".")[2]]
            assert "script-src 'self'" in answer.headers["content-security-policy"]
            assert http.head(f"/page/{name}").headers["content-length"] == str(len(file.content))
            tag = {"if-none-match": answer.headers["etag"]}
            again = http.get(f"/page/{name}", headers=tag)
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == answer.headers["etag"]
            assert http.get(f"/page/{name}", headers={"if-none-match": '"x"'}).status_code == 200
        for wrong in ("nothing.js", "..%2Ffiles.py", "%2E%2E%2F__init__.py", "a/b.js", ""):
            answer = http.get(f"/page/{wrong}")
            assert answer.status_code == 404, wrong
            assert answer.json()["error"]["type"] == "not_found_error"


def own() -> dict[str, str]:
    """The page's own files."""
    texts = {name: file for name, file in files().items() if name.rpartition(".")[2] != "woff2"}
    return {n: f.content.decode() for n, f in texts.items() if n not in VENDORED}


def test_no_file_names_another_host() -> None:
    for name, whole in own().items():
        text = NAMESPACES.sub("", whole)
        assert not re.search(r"https?://\w", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", text)


def test_libraries_are_as_they_were_published() -> None:
    """Besides an export; with their licences, and small."""
    folder = Path(static_files.__file__).with_name("vendor")
    for name, digest in VENDORED.items():
        content = files()[name].content
        published = content.removesuffix(b"export default temml;\n")
        assert hashlib.sha256(published).hexdigest() == digest, name
    licences = {path.name for path in folder.glob("*.LICENSE")}
    assert licences == {"highlight.LICENSE", "temml.LICENSE", "stix-two-math.LICENSE"}
    assert sum(path.stat().st_size for path in folder.iterdir()) < 430_000


def test_modules_are_small_and_say_what_they_are() -> None:
    modules = {name: text for name, text in own().items() if ".js" in name}
    for name, text in modules.items():
        assert text.startswith("/** "), name
        assert len(text.splitlines()) <= 250, name
        for other in re.findall(r'from "\./([\w.]+)"', text):
            assert other in {*modules, *VENDORED}, (name, other)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("HEAD", "/", 200),
        ("GET", "/page/main.js", 200),
        ("GET", "/page/none.js", 404),
        ("GET", "/health", 200),
        ("POST", "/", 401),
        ("PUT", "/", 401),
        ("OPTIONS", "/", 401),
        ("POST", "/page/main.js", 401),
        ("GET", "/page/main.js/more", 401),
        ("GET", "/page/", 401),
        ("POST", "/health", 401),
        ("GET", "/v1/models", 401),
        ("GET", "/metrics", 401),
        ("GET", "/openapi.json", 401),
        ("GET", "/props", 401),
    ],
)
def test_the_page_is_public_and_nothing_else(
    guarded: Running, method: str, path: str, status: int
) -> None:
    assert httpx.request(method, guarded.url + path).status_code == status
    key = {"authorization": "Bearer secret"}
    assert httpx.request(method, guarded.url + path, headers=key).status_code != 401


def test_without_the_page() -> None:
    assert server_settings_of(parse_options(["m"], {})).page
    assert not server_settings_of(parse_options(["m", "--no-page"], {})).page
    assert not server_settings_of(parse_options(["m"], {"JINFER_PAGE": "false"})).page
    assert server_settings_of(parse_options(["m", "--page"], {"JINFER_PAGE": "false"})).page
    with serving([LLAMA], ServerSettings(page=False, warm_up=False)) as running:
        answer = httpx.get(running.url)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert httpx.get(f"{running.url}/page/main.js").status_code == 404
        assert httpx.post(running.url, json={}).json()["error"]["param"] == "text"


def asked() -> dict[str, Any]:
    """The schemas of a chat request's fields."""
    schemas = openapi_document(ENDPOINTS)["components"]["schemas"]
    properties: dict[str, Any] = schemas["ChatRequest"]["properties"]
    return properties


def test_every_parameter_is_described() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    several = {"n", "best_of", *ACTIVATIONS}  # several answers, and what no page shows
    several |= {"logprobs", "logprob_token_ids", "post_sampling_probs"}
    assert {parameter_of(name) for name in grouped} == {
        f.name for f in fields(SamplingParams)
    } - several
    properties = asked()
    assert [name for name in properties if "x-group" in properties[name]] == grouped
    for name in grouped:
        assert properties[name]["description"], name
    assert "greedy" in properties["strategy"]["examples"]
    assert (
        properties["repeat_penalty"]["description"]
        == (properties["repetition_penalty"]["description"])
    )


def bounds(schema: dict[str, Any]) -> Iterator[int | float]:
    """The nearest numbers that a schema forbids."""
    for item in schema.get("anyOf", ()):
        if "exclusiveMinimum" in item:
            yield item["exclusiveMinimum"]
        elif "minimum" in item:
            yield item["minimum"] - 1
        if "maximum" in item:
            yield item["maximum"] + 1


def test_ranges_are_true(smol: Running) -> None:
    """What is outside is refused by name, and what is at the edge is not."""
    properties = asked()
    rows = {name: PARAMETERS.get(parameter_of(name)) for name in properties}
    ranged = {name for name, row in rows.items() if row is not None and row.bounds is not None}
    assert {"temperature", "top_k", "repeat_penalty", "seed", "beams"} <= ranged
    with smol.client() as http:
        for name in sorted(ranged - {"logprobs"}):
            found = list(bounds(properties[name]))
            assert len(found) == 2, name
            for value in found:
                messages = [{"role": "user", "content": "a"}]
                body = {"messages": messages, "max_tokens": 1, name: value}
                error = http.post("/v1/chat/completions", json=body)
                assert error.status_code == 400, (name, value)
        for name in ("temperature", "top_k", "top_p", "seed", "repetition_penalty"):
            (item,) = (item for item in properties[name]["anyOf"] if "maximum" in item)
            body = {"messages": messages, "max_tokens": 1, name: item["maximum"]}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
            if "minimum" in item:
                body[name] = item["minimum"]
                assert http.post("/v1/chat/completions", json=body).status_code == 200
