"""The command: signals, sockets, certificates, logs."""

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest

from jinfer import serve
from jinfer.loader.config.source_errors import SourceError
from jinfer.server import run_server
from jinfer.server.http import request_log
from tests.server.running import GOLDENS, ROOT

LLAMA = str(GOLDENS / "llama2")
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def command(
    *arguments: str, without: tuple[str, ...] = (), **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The command, running; `without`: variables that its environment does not have."""
    found = {name: value for name, value in os.environ.items() if name not in without}
    process = subprocess.Popen(
        [sys.executable, "-m", "jinfer.serve", *arguments],
        cwd=ROOT,
        env={**found, **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    """Waits until the service answers requests."""
    end = time.monotonic() + 120
    while True:
        assert process.poll() is None, "it has ended"
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        assert time.monotonic() < end, "it is not ready"
        time.sleep(0.05)


def test_sigterm_lets_answers_come_to_their_end() -> None:
    port = free_port()
    given = ("tiny=" + LLAMA, "--set", "dtype=float32", "--warm-up", "off")
    with command(*given, JINFER_PORT=str(port)) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            ready(client, process)
            whole = client.post("/v1/completions", json={**LONG, "return_token_ids": True}).json()
            body = {**LONG, "stream": True, "return_token_ids": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                process.send_signal(signal.SIGTERM)
                events = [first, *(line for line in lines if line)]
            assert events[-1] == "data: [DONE]"
            ids = [
                id
                for line in events[:-1]
                for choice in orjson.loads(line.removeprefix("data: "))["choices"]
                for id in choice["token_ids"]
            ]
            assert ids == whole["choices"][0]["token_ids"]
            assert process.wait(30) == 0
            with pytest.raises(httpx.TransportError):
                client.get("/health")
        assert process.stderr is not None
        log = [orjson.loads(line) for line in process.stderr.read().splitlines()]
    assert log[0]["event"] == "listening"
    assert log[-1]["event"] == "ended"


@pytest.mark.parametrize("seconds", ["1", "0"])
def test_streams_end_with_an_error_after_stop_timeout(seconds: str) -> None:
    """A stream has an event, a whole answer a status; so has what comes after the signal.

    Where there is any time to end, a second signal ends it.
    """
    port = free_port()
    flags = ("--set", "dtype=float32", "--warm-up", "off", "--stop-timeout", seconds)
    # Long enough for the signal, short enough for a test that fails: the model is tiny.
    body = {"prompt": [5], "max_tokens": 250, "ignore_eos": True, "n": 128, "temperature": 1}
    with (
        command(f"tiny={LLAMA}", "--port", str(port), *flags) as process,
        ThreadPoolExecutor(6) as pool,
    ):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            ready(client, process)
            whole = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(6)]
            streamed = {**body, "stream": True}
            with client.stream("POST", "/v1/completions", json=streamed) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                if seconds == "0":
                    time.sleep(0.5)
                    process.send_signal(signal.SIGTERM)
                *_, last = [line for line in lines if line]
            assert orjson.loads(last.removeprefix("data: "))["error"]["code"] == "closing"
            for item in whole:
                assert item.result().status_code == 503
                assert item.result().headers["retry-after"] == "1"
                assert item.result().json()["error"]["code"] == "closing"
        assert process.wait(60) == 0


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "nothing"), "--port", str(free_port()), "--log-level", "error")
    with command(*arguments) as process:
        _, told = process.communicate(timeout=120)
    lines = told.decode().splitlines()
    assert process.returncode == 2
    assert lines[-1].startswith("error: ")
    assert "there is no such file or folder" in lines[-1]
    assert "Traceback" not in told.decode()


def test_a_port_that_is_taken(capsys: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve.main([LLAMA, "--port", str(port)]) == 2
    assert f"error: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def listens(path: Path) -> bool:
    """Whether somebody does; httpx leaves a socket open where nobody does yet."""
    with socket.socket(socket.AF_UNIX) as trial:
        return trial.connect_ex(str(path)) == 0


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "jinfer.sock"
    with command(LLAMA, "--uds", str(path), "--warm-up", "off", JINFER_API_KEY="k1,k2") as process:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(base_url="http://jinfer", transport=transport, timeout=60) as client:
            while not listens(path):
                time.sleep(0.05)
            ready(client, process)
            assert path.stat().st_mode & 0o777 == 0o660
            assert client.get("/v1/models").status_code == 401
            headers = {"authorization": "Bearer k2"}
            (model,) = client.get("/v1/models", headers=headers).json()["data"]
            assert model["id"] == "llama2"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert not path.exists()


def test_a_unix_socket_at_which_somebody_listens(tmp_path: Path) -> None:
    """It is theirs; what is left of a process that is gone is replaced."""
    path = tmp_path / "jinfer.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with run_server._listeners({"uds": str(path)}):
        assert listens(path)
        with pytest.raises(SourceError, match="Address already in use"):
            run_server._listeners({"uds": str(path)}).__enter__()
        assert listens(path)
    assert not path.exists()


def test_only_its_own_unix_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "jinfer.sock"
    with run_server._listeners({"uds": str(path)}):
        path.unlink()
        other = socket.socket(socket.AF_UNIX)
        other.bind(str(path))
        other.listen()
    with other:
        assert listens(path)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--ssl-certfile", "/nope"], "--ssl-certfile /nope: there is no such file"),
        (["--ssl-keyfile", "/nope"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-ca-certs", "/nope"], "--ssl-ca-certs needs --ssl-certfile"),
    ],
)
def test_invalid_tls_flags(flags: list[str], told: str, capsys: Any) -> None:
    assert serve.main([LLAMA, "--port", str(free_port()), *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {told}"


def test_tls(tmp_path: Path) -> None:
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    files = {name: str(tmp_path / name) for name in ("key.pem", "cert.pem")}
    asked = [*make.split(), "-keyout", files["key.pem"], "-out", files["cert.pem"]]
    try:
        subprocess.run(asked, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl")
    port = free_port()
    tls = ("--ssl-certfile", files["cert.pem"], "--ssl-keyfile", files["key.pem"])
    with (
        command(LLAMA, "--port", str(port), "--warm-up", "off", *tls) as process,
        httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=False) as client,
    ):
        ready(client, process)
        assert client.get("/version").status_code == 200


def test_a_certificate_that_is_none(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "cert.pem").write_text("nothing")
    tls = ["--ssl-certfile", str(tmp_path / "cert.pem")]
    assert serve.main([LLAMA, "--port", str(free_port()), *tls]) == 2
    assert "cert.pem" in capsys.readouterr().err


def test_several_addresses() -> None:
    flags = {"uds": None, "host": "127.0.0.1, 127.0.0.2", "port": 0}
    with run_server._listeners(flags) as listeners:
        names = [listener.getsockname() for listener in listeners]
        assert [host for host, _ in names] == ["127.0.0.1", "127.0.0.2"]
        assert names[0][1] == names[1][1] != 0
    with pytest.raises(SourceError, match=r"cannot listen on 300\.1\.1\.1:"):
        run_server._listeners({**flags, "host": "127.0.0.1,300.1.1.1", "port": 0}).__enter__()


def test_without_its_packages(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "jinfer.server.run_server", None)
    assert serve.main([LLAMA]) == 2
    assert "pip install 'jinfer[serve]'" in capsys.readouterr().err


def test_logs_for_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal they are, with an address that a browser opens."""
    record = logging.makeLogRecord(
        {
            "msg": "model loaded",
            "levelno": 20,
            "model": "m",
            "seconds": 1.23456,
            "names": ["a", "b"],
        }
    )
    line = request_log.PlainLines().format(record)
    assert re.fullmatch(r"\d\d:\d\d:\d\d model loaded: model m, seconds 1\.23, names a b", line)
    record.levelno, record.levelname = 30, "WARNING"
    assert " warning: model loaded" in request_log.PlainLines().format(record)
    assert run_server._local("http://0.0.0.0:8080") == "http://127.0.0.1:8080"
    assert run_server._local("http://[::]:8080") == "http://[::1]:8080"
    for terminal, form, plain in (
        (True, "auto", True),
        (False, "auto", False),
        (True, "json", False),
    ):
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda shown=terminal: shown))
        assert run_server._is_plain(form) == plain


def test_missing_files_are_reported_before_loading(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "own.toml").write_text('weights = "package://no_such_package/x.gguf"\n')
    assert serve.main([LLAMA, str(tmp_path / "own.toml"), "--port", "0"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(
        "error: package://no_such_package/x.gguf: the package no_such_package"
    )
    assert printed.count("\n") == 1
