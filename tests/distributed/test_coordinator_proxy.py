"""JAX's service is reached by processes of the job alone."""

import os
import shutil
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from jinfer.distributed import coordinator_proxy as passages
from jinfer.distributed.coordinator_proxy import CoordinatorProxy
from jinfer.distributed.message_schemas import Hello

MINE = Hello(1, 2, "1", "1")


def test_who_belongs_to_the_job_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stranger's words never come to the service; its end is not heard at once."""
    monkeypatch.setattr(passages, "_HELD", 0.5)
    monkeypatch.setenv("JINFER_JOB_KEY", "known")
    leading, other = CoordinatorProxy(), CoordinatorProxy()
    heard: list[bytes] = []

    def serve(service: socket.socket) -> None:
        for _ in range(2):
            connection, _ = service.accept()
            with connection:
                heard.append(connection.recv(100))
                connection.sendall(heard[-1][::-1])

    way = socket.create_server(("127.0.0.1", 0))
    leading.lead(way, 2)
    with socket.create_connection(way.getsockname()) as stranger, suppress(OSError):
        stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(99))
        assert b"HTTP" not in stranger.recv(100)
        assert stranger.recv(100) == b""
    other.call(way.getsockname()[:2], MINE)
    with socket.socket(socket.AF_UNIX) as early:  # JAX's service is not there yet
        early.connect(other.path)
        early.sendall(b"first")
        with socket.socket(socket.AF_UNIX) as service:
            service.bind(leading.path)
            service.listen()
            serving = threading.Thread(target=serve, args=(service,))
            serving.start()
            assert early.recv(100) == b"tsrif"
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(other.path)
                client.sendall(b"second")
                assert client.recv(100) == b"dnoces"
                client.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                client.settimeout(30)
                assert client.recv(1) == b""
            serving.join()
    assert heard == [b"first", b"second"]
    assert "something else than jinfer answers there" in capsys.readouterr().err
    folders = [Path(each.path).parent for each in (leading, other)]
    assert all(folder.stat().st_mode & 0o77 == 0 for folder in folders)
    leading.close()
    other.close()
    assert not any(folder.exists() for folder in folders)


def test_a_long_name_of_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A Unix socket's path has few bytes."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = CoordinatorProxy()
    assert len(made.path) < 108
    made.close()
    shutil.rmtree(long)


def test_folders_of_processes_that_were_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next one removes them, and none of a process that lives."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lives, new = CoordinatorProxy(), tmp_path / "jinfer-job-new"
    killed, other = tmp_path / "jinfer-job-old", tmp_path / "other"
    for folder in (new, killed, other):
        folder.mkdir()
        (folder / "lock").touch()
    for folder in (killed, other, Path(lives.path).parent):
        os.utime(folder, (1, 1))
    if len(str(tmp_path)) < 70:
        CoordinatorProxy().close()
        assert not killed.exists()
        assert all(folder.exists() for folder in (new, other, Path(lives.path).parent))
    lives.close()
