"""`jinfer client`: questions, pipes, a chat in a terminal, errors, against the service itself."""

import http.server
import io
import json
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import pytest

from jinfer.cli.terminal.chat_loop import TypedInput
from jinfer.cli.terminal.http_client import ServerConnection
from jinfer.cli.terminal.remote_chat import RemoteChat, sampling_fields
from jinfer.client import main
from jinfer.engine.requests import RequestError
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.server.core.chat_schemas import ChatRequest
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from tests.cli.terminal import Terminal
from tests.server.running import GOLDENS, ROOT, Running, serving

SHORT = ("--max-tokens", "8", "--greedy")


class Keyboard(io.StringIO):
    """A standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def ask(smol: Running, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs the command; gives status, output and errors."""
    monkeypatch.setenv("JINFER_URL", smol.url)

    def asked(*arguments: str, stdin: io.StringIO | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", stdin or Keyboard())
        status = main(list(arguments))
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return asked


def test_a_question(ask: Any, smol: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}
    with smol.client() as client:
        whole = client.post("/v1/chat/completions", json={**asked, "max_tokens": 8}).json()
    expected = whole["choices"][0]["message"]["content"]
    assert expected
    assert ask("Why is the sky blue?", *SHORT) == (0, expected + "\n", "")
    assert ask("Why", "is", "the", "sky", "blue?", *SHORT) == (0, expected + "\n", "")
    assert ask(*SHORT, "--url", f"{smol.url}/v1/", stdin=io.StringIO("Why is the sky blue?\n"))[
        :2
    ] == (0, expected + "\n")
    status, out, _ = ask("Why is the sky blue?", *SHORT, "--json")
    assert status == 0
    found = json.loads(out)
    assert found["choices"] == whole["choices"]
    assert found["usage"]["completion_tokens"] == 8


def test_a_pipe_follows_the_question(ask: Any) -> None:
    status, out, _ = ask("Sum up:", "--json", *SHORT, stdin=io.StringIO("one\ntwo\n"))
    joined = json.loads(out)["usage"]["prompt_tokens"]
    assert status == 0
    plain = json.loads(ask("Sum up:\n\none\ntwo", "--json", *SHORT)[1])
    assert plain["usage"]["prompt_tokens"] == joined


def test_flags(ask: Any) -> None:
    system = ("--system", "You are a pirate who says only arr.")
    free, held = (json.loads(ask("Hi", "--json", *SHORT, *more)[1]) for more in ((), system))
    assert free["usage"]["prompt_tokens"] != held["usage"]["prompt_tokens"]
    assert ask("Is ice cold?", "--choice", "yes")[:2] == (0, "yes\n")
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    status, out, _ = ask("A number", "--json-schema", json.dumps(schema))
    assert (status, json.loads(out)) == (0, {"a": 7})
    status, out, _ = ask("Hi", "-n", "2", "--max-tokens", "2", "--seed", "1")
    assert re.fullmatch(r"--- 1 of 2\n[^\0]+\n--- 2 of 2\n[^\0]+\n", out)
    found = json.loads(ask("Hi", "--json", *SHORT, "--logprobs", "2")[1])
    assert len(found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    biased = json.loads(ask("Hi", "--json", *SHORT, "--logit-bias", "30=100")[1])
    assert biased["choices"][0]["message"]["content"] == "." * 8


def test_a_text_without_a_template(ask: Any, smol: Running) -> None:
    llm = smol.model().llm
    expected = llm.generate("Once upon a time", max_tokens=8, strategy="greedy")[0].text
    assert ask("Once", "upon a time", "--raw", *SHORT)[:2] == (0, expected + "\n")
    found = json.loads(ask("Once upon a time", "--raw", "--json", "--logprobs", "2", *SHORT)[1])
    assert found["choices"][0]["text"] == expected
    assert len(found["choices"][0]["logprobs"]["top_logprobs"][0]) == 2
    status, out, _ = ask("Once", "--raw", "-n", "2", "--max-tokens", "2", "--seed", "1")
    assert (status, out.count("--- ")) == (0, 2)
    assert ask("Once", "--raw", "--system", "x")[::2] == (
        2,
        "error: --raw with --system: the system message is a part of the chat template\n",
    )
    assert ask("--raw")[::2] == (2, "error: --raw needs a text to continue\n")


def test_every_parameter_is_a_field_of_the_service() -> None:
    values = {item.name: item.default for item in fields_of(SamplingParams)}
    given = {**values, "json_schema": '{"type": "object"}', "logprobs": 2, "logit_bias": [(1, 2)]}
    for name, value in given.items():
        sent = sampling_fields({name: 1 if value is None else value})
        assert sent.keys() <= ChatRequest.model_fields.keys(), name
    assert sampling_fields({"strategy": "greedy", "top_p": None}) == {"temperature": 0}
    assert sampling_fields({"json_schema": True}) == {"response_format": {"type": "json_object"}}
    with pytest.raises(RequestError, match="json_schema: is no JSON: "):
        sampling_fields({"json_schema": "{"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Hi", "--top-p", "2"], "top_p must be a number from 0 to 1, not 2"),
        (["Hi", "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1: cannot be reached: "),
        (["Hi", "--url", "unix:/nowhere/s"], "unix:/nowhere/s: cannot be reached: No such file"),
        (["Hi", "--url", "ftp://x"], "ftp://x: write http://HOST:PORT"),
        (["Hi", "--url", "http://x:y"], "http://x:y: is no address: "),
        (["Hi", "--api-key", "a\nb"], "--api-key: a key has printable"),
        (["Hi", "--logprobs", "2"], "--logprobs needs --json"),
        (["--json"], "--json needs a question"),
        (["Hi", "--greedy", "--seed", "1"], "--greedy with --seed: "),
        (["Hi", "--json-schema", "{"], "json_schema: is no JSON: "),
    ],
)
def test_errors_are_one_line(ask: Any, arguments: list[str], message: str) -> None:
    status, out, told = ask(*arguments)
    assert (status, out) == (2, "")
    assert told.startswith(f"error: {message}")
    assert told.count("\n") == 1


def test_a_model_that_is_not_served(
    ask: Any, smol: Running, request: pytest.FixtureRequest
) -> None:
    asked = ("Hi", "--model", "other", "--max-tokens", "1")
    assert ask(*asked)[::2] == (0, "ignored by the server: model\n")
    request.getfixturevalue("strict")
    told = "error: there is no model 'other'; there is: smol\n"
    assert ask(*asked) == (2, "", told)


def test_no_question(ask: Any) -> None:
    assert ask(stdin=io.StringIO("\n")) == (
        2,
        "",
        "error: there is no question; write one, or pipe a text to the command\n",
    )
    binary = io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8")
    assert ask(stdin=binary)[2] == "error: standard input: is no text in UTF-8\n"


def test_a_key(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setenv("JINFER_API_KEY", "k1,k2")
    source = ModelSource("tiny", str(GOLDENS / "llama2"), {"dtype": "float32"})
    with serving([source], ServerSettings(warm_up=False, keys=("k1", "k2"))) as running:
        wrong = ["Hi", "--url", running.url, "--api-key", "no"]
        assert main(wrong) == 2
        assert "key" in capsys.readouterr().err
        # With the right one the model itself is asked, which has no chat template.
        assert main(["Hi", "--url", running.url]) == 2
        assert "chat template" in capsys.readouterr().err


class Scripted(http.server.BaseHTTPRequestHandler):
    """A server that answers every POST with what a test has put into `content`."""

    status, kind, content = 200, "text/event-stream", b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Type", self.kind)
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[tuple[str, type[Scripted]]]:
    class Own(Scripted):
        pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", Own
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "content", "told"),
    [
        (200, b'data: {"error": {"message": "no\\nmemory"}}\n\n', "no memory"),
        (
            200,
            b'data: {"choices": []}\n\n',
            "{url}: the connection closed in the middle of the answer",
        ),
        (200, b"data: 5\n\n", "the server's answer is no JSON object: b'5'"),
        (400, b'{"error": "plain"}', "plain"),
        (422, b'{"detail": "field required"}', "field required"),
        (502, b"bad gateway", "502 Bad Gateway: bad gateway"),
        (301, b"", "301 Moved Permanently"),
    ],
)
def test_servers_that_fail(
    scripted: tuple[str, type[Scripted]], ask: Any, status: int, content: bytes, told: str
) -> None:
    url, script = scripted
    script.status, script.content = status, content
    found = ask("Hi", "--url", url, "--model", "x")
    assert found == (2, "", f"error: {told.format(url=url)}\n")


def test_reasoning_stands_apart(scripted: tuple[str, type[Scripted]], ask: Any) -> None:
    url, script = scripted
    deltas = ({"reasoning_content": "Hm."}, {"content": "Yes"}, {"content": "."})
    events = [b"data: " + json.dumps({"choices": [{"delta": d}]}).encode() for d in deltas]
    script.content = b": ping\n\n" + b"\n\n".join([*events, b"data: [DONE]\n\n"])
    assert ask("Hi", "--url", url, "--model", "x") == (0, "Yes.\n", "Hm.\n")


def test_a_unix_socket(tmp_path: Path, ask: Any) -> None:
    class Local(Scripted):
        kind, content = "application/json", b'{"choices": [{"message": {"content": "Yes"}}]}'

        def address_string(self) -> str:  # a client of such a socket has none
            return "local"

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "first"}]}')

    path = str(tmp_path / "s")
    with socketserver.ThreadingUnixStreamServer(path, Local) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert ServerConnection(f"unix:{path}").models() == ["first"]
            assert ask("Hi", "-n", "2", "--url", f"unix:{path}") == (0, "Yes\n", "")
        finally:
            server.shutdown()
            thread.join()


def test_ctrl_c_stops_an_answer(smol: Running) -> None:
    asked = ["Write a very long story.", "--ignore-eos", "--max-tokens", "1500"]
    command = [sys.executable, "-m", "jinfer.client", *asked, "--url", smol.url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""
    end = time.monotonic() + 20
    while smol.model().llm.stats().running and time.monotonic() < end:
        time.sleep(0.02)


def test_a_chat(strict: Running, capsys: Any, tmp_path: Path) -> None:
    chat = RemoteChat(ServerConnection(strict.url), "smol")

    def take(line: str) -> str:
        chat.take(TypedInput(line))
        printed = capsys.readouterr()
        return printed.out + printed.err

    take("/set max_tokens=4")
    take("/set temperature=0")
    take("/system Be brief.")
    told = take("Hello")
    assert re.search(r"\[cut off: a limit of tokens\]\nprompt \d+ tokens.* answer 4 tokens", told)
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant"]
    before = list(chat.messages)
    assert "the same answer comes again" in take("/retry")
    assert chat.messages == before
    assert "3 messages with smol at http://" in take("/stats")
    assert "there is no /rset; did you mean '/reset'?" in take("/rset")
    assert "top_p must be a number from 0" in take("/set top_p=2")
    assert "one answer at a time" in take("/set n=2")
    take(f"/save {tmp_path / 'c.json'}")
    assert json.loads((tmp_path / "c.json").read_text()) == before
    chat.model = "other"
    assert take("Hello") == "error: there is no model 'other'; there is: smol\n"
    assert chat.messages == before


def test_old_turns_are_dropped(capsys: Any) -> None:
    path = str(ROOT / "specs" / "smollm2_135m_instruct.toml")
    source = ModelSource("small", path, {"dtype": "float32", "engine": {"context": 128}})
    with serving([source]) as running:
        chat = RemoteChat(ServerConnection(running.url), "small")
        chat.sampling = {"temperature": 0, "max_tokens": 8}
        for _ in range(4):
            chat.take(TypedInput("word " * 40))
        printed = capsys.readouterr()
        assert "(the 2 oldest messages were dropped: the context is full)" in printed.out
        assert "error" not in printed.err
        held = list(chat.messages)
        chat.take(TypedInput("word " * 400))
        assert capsys.readouterr().err.startswith("error: ")
        assert chat.messages == held


def test_in_a_terminal(smol: Running) -> None:
    command = (sys.executable, "-m", "jinfer", "client", "--max-tokens", "1500", "--ignore-eos")
    environment = {**os.environ, "JINFER_URL": smol.url, "JINFER_NO_HISTORY": "1", "TERM": "dumb"}
    terminal = Terminal(*command, env=environment)
    terminal.wait_for("smol at http://.*/help lists commands.*> ".replace(".*", r"[\s\S]*"))
    terminal.type("Tell me a very long story.\n")
    terminal.wait_for(r"story\.\s+\S+\s+\S+")
    terminal.program.send_signal(signal.SIGINT)
    terminal.wait_for(r"first after [\d.]+ s[\s\S]*> ")
    terminal.type("/exit\n")
    assert terminal.status() == 0


def test_without_jax() -> None:
    code = "import sys, jinfer.client; print({'jax', 'jaxlib', 'pydantic'} & sys.modules.keys())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
