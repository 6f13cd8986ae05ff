"""Files and batches: over HTTP with openai-python, and a runner that is killed in between."""

import asyncio
import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from jinfer.loader.config.source_errors import SourceError
from jinfer.server.app import open_stores
from jinfer.server.core.service import Service
from jinfer.server.http.http_errors import RunsElsewhereError
from jinfer.server.http.server_settings import ServerSettings
from jinfer.server.openai.batches import (
    PRIORITY,
    BatchErrors,
    BatchLine,
    BatchRunner,
    answer_line,
    read_lines,
)
from jinfer.server.stores.batch_store import BatchStore
from jinfer.server.stores.file_store import FileStore
from tests.server.running import Running

CHAT = "/v1/chat/completions"


def line(id: str, body: Any, url: str = CHAT, method: str = "POST") -> bytes:
    return json.dumps({"custom_id": id, "method": method, "url": url, "body": body}).encode()


def hello(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": 4, **more}


def uploaded(client: openai.OpenAI, lines: list[bytes]) -> str:
    data = b"\n".join(lines) + b"\n"
    return client.files.create(file=("requests.jsonl", data), purpose="batch").id


def run(client: openai.OpenAI, lines: list[bytes], endpoint: Any = CHAT) -> Any:
    """A batch that has ended."""
    file = uploaded(client, lines)
    given: Any = {"completion_window": "24h", "metadata": {"a": "b"}}
    batch = client.batches.create(input_file_id=file, endpoint=endpoint, **given)
    return ended(client, batch.id)


def ended(client: openai.OpenAI, id: str) -> Any:
    end = time.monotonic() + 60
    while not (found := client.batches.retrieve(id)).status.endswith(("ed",)):
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


def results(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    """The lines of a file by custom id."""
    assert file is not None
    lines = map(json.loads, client.files.content(file).text.splitlines())
    return {item["custom_id"]: item for item in lines}


def test_a_batch(client: openai.OpenAI) -> None:
    alone = client.chat.completions.create(**hello())
    lines = [
        *(line(f"a{i}", hello()) for i in range(5)),
        line("stream", hello(stream=True)),
        line("field", hello(no_field=1)),
    ]
    batch = run(client, lines)
    assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
    assert batch.request_counts.to_dict() == {"total": 7, "completed": 5, "failed": 2}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers = results(client, batch.output_file_id)
    assert sorted(answers) == [f"a{i}" for i in range(5)]
    for answer in answers.values():
        assert answer["response"]["status_code"] == 200
        found = answer["response"]["body"]["choices"][0]["message"]["content"]
        assert found == alone.choices[0].message.content
    errors = results(client, batch.error_file_id)
    params = {id: error["response"]["body"]["error"]["param"] for id, error in errors.items()}
    assert params == {"stream": "stream", "field": "no_field"}
    assert batch.id in [item.id for item in client.batches.list()]
    assert client.batches.cancel(batch.id).status == "completed"
    about = client.files.retrieve(batch.output_file_id)
    assert (about.purpose, about.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert batch.output_file_id in [item.id for item in client.files.list(purpose="batch_output")]
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.output_file_id)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
    ],
)
def test_endpoints(client: openai.OpenAI, endpoint: str, body: dict[str, Any]) -> None:
    batch = run(client, [line("a", body, endpoint)], endpoint)
    (result,) = results(client, batch.output_file_id).values()
    assert result["response"]["body"]["usage"]


def test_a_file_that_is_no_batch(client: openai.OpenAI, smol: Running) -> None:
    batch = run(client, [line("a", hello()), b"{", line("a", hello())])
    assert batch.status == "failed"
    codes = [(one.line, one.code) for one in batch.errors.data]
    assert codes == [(2, "invalid_json_line"), (3, "duplicate_custom_id")]
    given: Any = {"endpoint": CHAT, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError, match="there is no file"):
        client.batches.create(input_file_id="file-1", **given)
    other = client.files.create(file=io.BytesIO(b"a"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="purpose of the file is not batch"):
        client.batches.create(input_file_id=other.id, **given)
    with pytest.raises(openai.BadRequestError) as found:
        client.files.create(file=b"a", purpose="other")  # type: ignore[arg-type]
    assert found.value.param == "purpose"
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_1")
    with smol.client() as http:
        assert http.post("/v1/files", json={"purpose": "batch"}).status_code == 415
        answer = http.post("/v1/files", data={"purpose": "batch"}, files={"other": b"a"})
        assert answer.json()["error"]["param"] == "file"
        assert http.get("/v1/files?limit=0").json()["error"]["param"] == "limit"
        assert http.get("/v1/batches?after=x").json()["error"]["param"] == "after"
        assert http.get("/v1/files?order=x").json()["error"]["param"] == "order"


def test_a_batch_that_is_cancelled(client: openai.OpenAI) -> None:
    file = uploaded(
        client, [line(str(i), hello(max_tokens=400, ignore_eos=True)) for i in range(9)]
    )
    given: Any = {"endpoint": CHAT, "completion_window": "24h"}
    batch = client.batches.create(input_file_id=file, **given)
    with pytest.raises(openai.BadRequestError, match="reads it"):
        client.files.delete(file)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    assert ended(client, batch.id).status == "cancelled"
    assert client.files.delete(file).deleted


class Models:
    """Models that are there."""

    ready, waiting, workers = True, 0, None

    @contextlib.asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Any]:
        scheduler = SimpleNamespace(slots=2)
        yield SimpleNamespace(session=SimpleNamespace(engine=SimpleNamespace(scheduler=scheduler)))


class Folder:
    """A folder of files and batches, reused by later servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open()

    def open(self) -> None:
        self.files = FileStore(self.folder, 1 << 20)
        self.batches = BatchStore(self.files)

    def restart(self) -> None:
        """What is in memory is gone."""
        self.files.close()
        self.open()

    def create(self, count: int, seconds: int = 100) -> str:
        path = self.files.half()
        path.write_bytes(b"\n".join(line(str(i), {}) for i in range(count)))
        file = self.files.add(path, "a", "batch", None)
        more = {"completion_window": "24h", "_output_seconds": None}
        fields = {"input_file_id": file.id, "endpoint": CHAT, **more}
        return self.batches.create(fields, seconds)["id"]

    async def run(self, answer: Callable[[BatchLine], Any]) -> None:
        """Run batches until all have ended, or an answer kills the server.

        Args:
            answer: a line's answer; None: it is killed; "late": it does not come.
        """

        async def answered(service: Any, endpoint: str, path: Path, line: BatchLine) -> Any:
            found = answer(line)
            if found in (None, "late"):
                if found is None:
                    killed.set()
                await asyncio.Event().wait()
            return found

        killed = asyncio.Event()
        service = Service(ServerSettings(), Models(), None)  # type: ignore[arg-type]
        runner = asyncio.ensure_future(BatchRunner(service, self.batches, answered).run())
        stop = asyncio.ensure_future(killed.wait())
        while self.batches.next() and not killed.is_set():
            assert not runner.done()
            await asyncio.sleep(0.001)
        runner.cancel()
        stop.cancel()
        await asyncio.gather(runner, stop, return_exceptions=True)

    def output(self, id: str, name: str = "output_file_id") -> list[str]:
        """The custom ids of a batch's answers."""
        data = self.files.path(self.batches.batches[id][name]).read_bytes()
        return [json.loads(line)["custom_id"] for line in data.splitlines()]


def answers(line: BatchLine) -> tuple[int, Any, str]:
    return 200, {"id": line.custom_id}, "r"


def test_a_server_that_is_killed(tmp_path: Path) -> None:
    """What was answered stays; what was in flight, or was half written, is answered again."""
    folder = Folder(tmp_path)
    id = folder.create(20)
    seen: list[str] = []

    def some(line: BatchLine) -> tuple[int, Any, str] | None:
        seen.append(line.custom_id)
        return None if len(seen) > 7 else answers(line)

    asyncio.run(folder.run(some))
    output, errors = folder.batches.result_paths(folder.batches.batches[id])
    known = [json.loads(line)["custom_id"] for line in output.read_bytes().splitlines()]
    assert len(known) >= 6
    with output.open("ab") as file:
        file.write(b'{"custom_id": "19", "resp')
    folder.restart()
    again: list[str] = []

    def rest(line: BatchLine) -> tuple[int, Any, str]:
        again.append(line.custom_id)
        return (400, {"error": {"code": None}}, "r") if line.custom_id == "19" else answers(line)

    asyncio.run(folder.run(rest))
    assert sorted([*known, *again], key=int) == [str(i) for i in range(20)]
    batch = folder.batches.batches[id]
    assert batch["request_counts"] == {"total": 20, "completed": 19, "failed": 1}
    assert sorted(folder.output(id), key=int) == [str(i) for i in range(19)]
    assert folder.output(id, "error_file_id") == ["19"]
    assert not output.exists()
    assert not errors.exists()


def test_a_server_that_is_killed_while_files_are_made(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    id = folder.create(3)
    asyncio.run(folder.run(answers))
    batch = folder.batches.batches[id]
    # The file has its new name, but the batch does not know yet.
    batch.update(status="finalizing", _outcome="completed")
    folder.batches.save(batch)
    folder.restart()
    asyncio.run(folder.run(answers))
    assert folder.batches.batches[id]["status"] == "completed"
    assert sorted(folder.output(id)) == ["0", "1", "2"]
    # Its old name still, and what is said of it is written.
    output, _ = folder.batches.result_paths(batch)
    folder.files.path(batch["output_file_id"]).rename(output)
    folder.batches.save(folder.batches.batches[id] | {"status": "finalizing"})
    folder.restart()
    asyncio.run(folder.run(answers))
    assert sorted(folder.output(id)) == ["0", "1", "2"]


def test_a_batch_that_expires(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    id = folder.create(3, seconds=1)
    asyncio.run(folder.run(lambda line: answers(line) if line.custom_id == "0" else "late"))
    batch = folder.batches.batches[id]
    assert batch["status"] == "expired"
    assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    data = folder.files.path(batch["error_file_id"]).read_bytes()
    assert {json.loads(line)["error"]["code"] for line in data.splitlines()} == {"batch_expired"}


def test_what_passes_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jinfer.server.openai.batches._PAUSE", 0.001)
    folder, seen = Folder(tmp_path), []

    def busy(line: BatchLine) -> tuple[int, Any, str]:
        seen.append(line)
        full = 429, {"error": {"code": "queue_full"}}, "r"
        return full if len(seen) < 3 else answers(line)

    id = folder.create(1)
    asyncio.run(folder.run(busy))
    assert folder.output(id) == ["0"]
    assert len(seen) == 3


def test_a_model_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Its requests go there, with the batch's priority."""
    (tmp_path / "a").write_bytes(line("a", hello()))
    socket, seen = str(tmp_path / "s"), []

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        seen.append((head.split(b"\r\n")[0], json.loads(await reader.readexactly(length))))
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n{"a":1}')
        writer.close()

    class Elsewhere(Models):
        item = SimpleNamespace(name="m", worker=SimpleNamespace(socket=socket))

        @contextlib.asynccontextmanager
        async def use(self, *given: Any, **more: Any) -> AsyncIterator[Any]:
            if self.item.name:
                raise RunsElsewhereError(self.item)
            yield

        @contextlib.asynccontextmanager
        async def keep_loaded(self, item: Any, *, awake: bool) -> AsyncIterator[Any]:
            yield item

    async def ask() -> Any:
        service = Service(ServerSettings(), Elsewhere(), None)  # type: ignore[arg-type]
        async with await asyncio.start_unix_server(answered, socket):
            (item,) = read_lines(tmp_path / "a", CHAT, 500)
            return await answer_line(service, CHAT, tmp_path / "a", item)

    status, body, _ = asyncio.run(ask())
    assert (status, body) == (200, {"a": 1})
    assert seen == [(b"POST /v1/chat/completions HTTP/1.1", hello(priority=PRIORITY))]


def test_one_server_has_a_folder(tmp_path: Path) -> None:
    settings = ServerSettings(files_dir=str(tmp_path))
    files = open_stores(settings)["files"]
    with pytest.raises(SourceError, match=r"--files-dir .*: another server uses it"):
        open_stores(settings)
    files.close()
    (tmp_path / "file").write_bytes(b"")
    for name in ("files_dir", "responses_dir"):
        with pytest.raises(SourceError, match=f"--{name.replace('_', '-')} "):
            open_stores(ServerSettings(**{name: str(tmp_path / "file")}))  # type: ignore[arg-type]


def test_files_expire_and_are_bounded(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 10)
    for name in ("a", "b"):
        store.half().write_bytes(b"left over")
        (half := store.half()).write_bytes(name.encode() * 4)
        store.add(half, name, "batch", -1 if name == "a" else None)
    assert [item.filename for item in store.listed()] == ["b"]
    assert store.room() == 6
    store.close()
    again = FileStore(tmp_path, 10)
    assert [item.bytes for item in again.listed()] == [4]
    assert len(list(again.files.iterdir())) == 2


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"[]", "invalid_json_line"),
        (line("", {}), "missing_required_parameter"),
        (line("a", []), "missing_required_parameter"),
        (line("a", {}, "/v1/embeddings"), "mismatched_endpoint"),
        (line("a", {}, method="GET"), "invalid_method"),
        (line("a", {"a": "b" * 999}), "line_too_long"),
        (b"\n \n", "empty_file"),
    ],
)
def test_lines_that_are_no_requests(tmp_path: Path, text: bytes, code: str) -> None:
    (tmp_path / "a").write_bytes(text)
    with pytest.raises(BatchErrors) as found:
        read_lines(tmp_path / "a", CHAT, 500)
    assert [error["code"] for error in found.value.errors] == [code]
