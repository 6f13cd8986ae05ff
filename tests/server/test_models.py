"""Loading and unloading over every interface: a folder with small models, and damaged models."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from jinfer import LLM
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models.model_registry import ModelRegistry
from jinfer.server.models.model_residency import open_beside
from tests.server.running import GOLDENS, Running, serving
from tests.server.test_operation import until

TINY: dict[str, Any] = {"dtype": "float32", "engine": {"slots": 2, "queue": 3}}
ASKED: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        (made / name).symlink_to(GOLDENS / "llama2")
    (made / "three.toml").write_text('weights = "one"\n')
    (made / "damaged.gguf").write_bytes(b"GGUF" + bytes(40))
    (made / "empty").mkdir()
    (made / "empty" / "config.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    """Two of them fit into memory."""
    file = folder / "settings.txt"  # not of the folder's models
    file.write_text('[three]\naliases = ["gpt"]\n')
    settings = ServerSettings(warm_up=False, max_loaded=2, ping=0.05, model_wait=0.2)
    with serving(ModelRegistry((), folder, file, TINY), settings) as running:
        yield running


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with running.client() as http:
        yield http


def listed(http: httpx.Client, **query: Any) -> dict[str, Any]:
    """The models by name, with their status."""
    answer = http.get("/v1/models", params=query)
    assert answer.status_code == 200, answer.text
    return {item["id"]: item["status"] for item in answer.json()["data"]}


def state(http: httpx.Client, name: str) -> str:
    return listed(http)[name]["value"]


def answered(http: httpx.Client, model: str, **more: Any) -> Any:
    answer = http.post("/v1/completions", json={**ASKED, "model": model, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def done(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def test_models_are_listed_and_loaded(running: Running, http: httpx.Client) -> None:
    until(lambda: listed(http)["empty"].get("failed"), 30)
    found = listed(http)
    assert list(found) == ["three", "damaged", "empty", "one", "two"]
    assert {one["value"] for one in found.values()} == {"unloaded"}
    assert found["damaged"]["failed"]
    assert str(running.service.models.registry.folder) in found["damaged"]["error"]
    assert "error" not in found["one"]
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        assert [one.id for one in client.models.list().data] == list(found)
        with pytest.raises(
            openai.InternalServerError, match=r"damaged could not be loaded: .*\.gguf"
        ):
            client.completions.create(model="damaged", prompt="a")
    first = answered(http, "one")
    assert (first["model"], state(http, "one")) == ("one", "loaded")
    assert answered(http, "gpt")["model"] == "three"  # an alias
    assert answered(http, "two", stream=False)["choices"] == first["choices"]
    assert state(http, "one") == "unloaded"  # the least recently used
    shown = http.get("/v1/models/one").json()
    assert shown["meta"]["n_params"] > 0  # what is known of it stays known
    error = http.post("/v1/completions", json={**ASKED, "model": "four"}).json()["error"]
    assert error["code"] == "model_not_found"


def test_models_are_loaded_and_unloaded_by_name(running: Running, http: httpx.Client) -> None:
    assert done(http, "/models/load", model="one").json() == {"success": True}
    assert done(http, "/models/load", model="one").json() == {"success": True}
    assert state(http, "one") == "loaded"
    llm = running.model("one").llm
    assert done(http, "/models/unload", model="one").json() == {"success": True}
    assert state(http, "one") == "unloaded"
    assert llm.session.closed
    assert not llm.session.engine.runner.leaves
    assert http.post("/models/load", json={"model": "four"}).status_code == 404
    assert http.post("/models/load", json={}).status_code == 400
    refused = http.post("/models/load", json={"model": "empty"})
    assert refused.status_code == 503
    assert "empty could not be loaded: " in refused.json()["error"]["message"]
    body = {"model": "damaged", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
    other = http.post("/v1/messages", json=body)
    assert other.json()["type"] == "error"
    assert "damaged could not be loaded: " in other.json()["error"]["message"]


def test_a_model_sleeps_and_wakes(http: httpx.Client) -> None:
    before = answered(http, "one")["choices"]
    for level in ("1", "2"):
        assert http.get("/is_sleeping", params={"model": "one"}).json() == {"is_sleeping": False}
        answer = http.post("/sleep", params={"model": "one", "level": level})
        assert (answer.status_code, answer.content) == (200, b"")
        assert state(http, "one") == "sleeping"
        assert http.get("/is_sleeping", params={"model": "one"}).json() == {"is_sleeping": True}
        assert http.get("/props", params={"model": "one"}).json()["is_sleeping"]
        assert state(http, "one") == "sleeping"
        assert answered(http, "one")["choices"] == before  # a request wakes it
        assert state(http, "one") == "loaded"
    assert http.post("/sleep").status_code == 200
    assert "loaded" not in {item["value"] for item in listed(http).values()}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/wake_up").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    for path in ("/sleep?level=3", "/sleep?mode=abort", "/wake_up?tags=weights", "/sleep?model=no"):
        assert http.post(path).status_code in (400, 404), path


def test_ollama_sees_all_models(running: Running, http: httpx.Client) -> None:
    with ollama.Client(running.url, timeout=60) as client:
        names = [model.model for model in client.list().models]
        assert names == ["three", "damaged", "empty", "one", "two"]
        done(http, "/models/unload", model="one")
        shown = client.show("one")  # which does not load it
        assert shown.details is not None
        assert (shown.details.format, state(http, "one")) == ("safetensors", "unloaded")
        assert client.generate("one").done_reason == "load"
        assert "one" in {model.name for model in client.ps().models}
        kept = next(model for model in client.ps().models if model.name == "one")
        assert kept.expires_at is not None
        assert kept.expires_at.year == 9999
        client.generate("one", keep_alive="5m")
        kept = next(model for model in client.ps().models if model.name == "one")
        assert kept.expires_at is not None
        assert 200 < kept.expires_at.timestamp() - time.time() < 301
        assert client.generate("one", keep_alive=0).done_reason == "unload"
        assert state(http, "one") == "unloaded"
        with pytest.raises(ollama.ResponseError, match="keep_alive: 'soon' is not a number"):
            client.generate("one", keep_alive="soon")
        with pytest.raises(ollama.ResponseError, match="damaged could not be loaded"):
            client.generate("damaged")


def test_models_that_come_to_the_folder_and_go(folder: Path, http: httpx.Client) -> None:
    (folder / "late").symlink_to(GOLDENS / "llama2")
    assert answered(http, "late")["model"] == "late"
    (folder / "late").unlink()
    assert "late" not in listed(http, reload="1")
    assert http.post("/v1/completions", json={**ASKED, "model": "late"}).status_code == 404
    (folder / "settings.txt").write_text("[three")
    error = http.get("/v1/models?reload=1").json()["error"]
    assert "is not TOML" in error["message"]
    assert "three" in listed(http)
    (folder / "settings.txt").write_text('[three]\naliases = ["gpt"]\n')


def test_a_stream_that_waits_for_its_model(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has comments meanwhile, and the error as an event if the model does not come."""
    done(http, "/models/unload", model="one")
    release = threading.Event()

    def slow(source: ModelSource, settings: ServerSettings) -> Any:
        release.wait(30)
        return open_beside(source, settings)

    monkeypatch.setattr("jinfer.server.models.model_residency.open_beside", slow)
    for model in ("one", "damaged"):
        release.clear()
        body = {**ASKED, "model": model, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            assert next(lines) == ": ping"
            release.set()
            events = [line for line in lines if line.startswith("data: ")]
        if model == "one":
            assert events[-1] == "data: [DONE]"
        else:
            error = json.loads(events[-1].removeprefix("data: "))["error"]
            assert error["code"] == "load_failed"


def test_no_room_while_models_are_in_use(running: Running, http: httpx.Client) -> None:
    """A streaming model is not unloaded; a request for another model gets a 503 after some time."""
    release = threading.Event()
    threads = []
    for name in ("one", "two"):
        done(http, "/models/load", model=name)
        engine = running.model(name).llm.session.thread
        threads.append(threading.Thread(target=engine.run, args=(lambda e: release.wait(60),)))
        threads[-1].start()
    bodies = [{**ASKED, "model": name, "stream": True} for name in ("one", "two")]
    with (
        http.stream("POST", "/v1/completions", json=bodies[0]) as first,
        http.stream("POST", "/v1/completions", json=bodies[1]) as second,
    ):
        refused = http.post("/v1/completions", json={**ASKED, "model": "three"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "no_room"
        release.set()
        assert [one.read().endswith(b"data: [DONE]\n\n") for one in (first, second)] == [True] * 2
    for thread in threads:
        thread.join()
    assert answered(http, "three")["model"] == "three"


def nices(pid: int) -> set[tuple[str, int]]:
    """The names of a process's threads, and how nice each is."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    pairs = [stat.partition("(")[2].rpartition(")") for stat in stats]
    return {(name, int(rest.split()[16])) for name, _, rest in pairs}


def test_a_model_in_a_process_of_its_own(folder: Path) -> None:
    """Every interface answers as if it were in the server's."""
    settings = ServerSettings(warm_up=False, model_processes=True, ping=0.3, keys=("secret",))
    key = {"authorization": "Bearer secret"}
    with (
        serving(ModelRegistry((), folder, None, TINY), settings) as running,
        running.client(headers=key) as http,
        LLM(str(folder / "one"), **TINY) as llm,
    ):
        expected = llm.generate(ASKED["prompt"], max_tokens=3, temperature=0, ignore_eos=True)
        ids = list(expected[0].token_ids)
        body = {**ASKED, "model": "one", "return_token_ids": True}
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[0] == ": ping"  # while it was loaded
        assert lines[-1] == "data: [DONE]"
        pieces = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
        assert [id for (item,) in pieces for id in item.get("token_ids") or ()] == ids
        worker = running.model("one").worker
        assert worker is not None
        # What loads leaves the processors to the models that answer; what computes does not.
        if sys.platform == "linux":
            usual = os.getpriority(os.PRIO_PROCESS, 0)
            priorities = nices(worker._process.pid)
            assert {n for name, n in priorities if name.startswith("tf_XLA")} == {usual}
            assert {n - usual for _, n in priorities} == {0, min(7, 19 - usual)}
        told = done(http, "/v1/completions", **{**body, "n_cache_reuse": 1})
        assert told.json()["choices"][0]["token_ids"] == ids
        assert told.headers["x-jinfer-ignored"] == "n_cache_reuse"
        assert len(told.headers.get_list("x-request-id")) == 1
        wrong = http.post("/v1/completions", json={**body, "temperature": -1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
        assert http.get("/props", params={"model": "one"}).json()["total_slots"] == 2
        assert http.head("/props", params={"model": "one"}).status_code == 200
        assert http.get("/api/ps").json()["models"][0]["context_length"] == 256
        text = http.get("/metrics").text
        assert 'jinfer:generation_tokens_total{model_name="one"} 6.0' in text
        named = {"X-Conversation-Id": "a::one"}  # a stream that its process keeps
        kept = http.post("/v1/completions", json={**body, "stream": True}, headers=named)
        again = http.get("/v1/stream", params={"conv_id": "a::one"})
        assert (again.text, again.text[-14:]) == (kept.text, "data: [DONE]\n\n")
        assert http.delete("/v1/stream", params={"conv_id": "a::one"}).status_code == 204
        assert http.get("/v1/stream", params={"conv_id": "a::one"}).status_code == 404
        for level in ("1", "2"):
            assert http.post("/sleep", params={"model": "one", "level": level}).status_code == 200
            assert http.get("/props", params={"model": "one"}).json()["is_sleeping"]
            assert state(http, "one") == "sleeping"
            told = done(http, "/v1/completions", **body)
            assert told.json()["choices"][0]["token_ids"] == ids
        worker._process.kill()  # as by the system, where memory runs out
        worker._process.wait()
        assert done(http, "/v1/completions", **body).json()["choices"][0]["token_ids"] == ids
        next_one = running.model("one").worker
        assert next_one is not None
        assert next_one is not worker
        done(http, "/models/unload", model="one")
        assert next_one.has_ended
        assert state(http, "one") == "unloaded"
        assert 'jinfer:generation_tokens_total{model_name="one"} ' in http.get("/metrics").text
