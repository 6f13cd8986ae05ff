"""The rendezvous of a job: who belongs to it, and the errors of those who do not."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jinfer.loader.sources import SourceError
from jinfer.modelspec.spec_errors import SpecError
from jinfer.parallel.distributed import collective_address, rendezvous
from jinfer.parallel.distributed.build_programs import check_stages
from jinfer.parallel.distributed.job_certificates import mutual_tls
from jinfer.parallel.distributed.job_config import JobConfig, find_job
from jinfer.parallel.distributed.rendezvous import Joined
from tests.parallel.distributed.jobs import free_port


def test_flags_and_environment() -> None:
    named = {"coordinator": "10.0.0.1:99", "processes": "4", "process": "3"}
    assert find_job(named, {}) == JobConfig("10.0.0.1", 99, 4, 3)
    variables = {"JINFER_COORDINATOR": "[::1]:99", "JINFER_PROCESSES": "2", "JINFER_PROCESS": "0"}
    assert find_job({}, variables) == JobConfig("::1", 99, 2, 0)
    assert find_job({"process": "1"}, variables) == JobConfig("::1", 99, 2, 1)
    assert find_job({"coordinator": "host", **{k: named[k] for k in ("processes", "process")}}, {})
    assert find_job({}, {}) is None
    alone = {"coordinator": "host:1", "processes": "1", "process": "0"}
    assert find_job(alone, {}) is None


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"processes": "3"}, "--coordinator is missing"),
        ({"coordinator": "a:1", "processes": "2", "process": "2"}, "numbered from 0 to 1"),
        ({"coordinator": "a:1", "processes": "two", "process": "0"}, "--processes two"),
        ({"coordinator": "a:port", "processes": "2", "process": "0"}, "write HOST:PORT"),
        ({"coordinator": ":70", "processes": "2", "process": "0"}, "write HOST:PORT"),
    ],
)
def test_flags_that_cannot_be(given: dict[str, Any], wrong: str) -> None:
    with pytest.raises(SourceError, match=wrong):
        find_job(given, {})


def test_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Slurm and Open MPI set, JAX reads; what a LeaderWorkerSet sets, we."""
    slurm = {
        "SLURM_JOB_ID": "4100",
        "SLURM_STEP_NODELIST": "node[03-04]",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    with monkeypatch.context() as patched:
        for name, value in slurm.items():
            patched.setenv(name, value)
        found = find_job({}, slurm)
        assert found is not None
        assert (found.host, found.size, found.rank, found.devices) == ("node03", 2, 1, None)
        several = {**slurm, "SLURM_STEP_TASKS_PER_NODE": "2"}
        found = find_job({}, several)
        assert found is not None
        assert found.devices == (0,)
    mpi = {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    for name, value in mpi.items():
        monkeypatch.setenv(name, value)
    found = find_job({}, mpi)
    assert found is not None
    assert (found.host, found.size, found.rank, found.devices) == ("10.96.0.1", 4, 2, (1,))
    leader = {"LWS_LEADER_ADDRESS": "a-0.a.b", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    assert find_job({}, leader) == JobConfig("a-0.a.b", 8476, 2, 1)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nobody waits long."""
    monkeypatch.setenv("JINFER_JOIN_SECONDS", "1.5")
    monkeypatch.delenv("JINFER_JOB_KEY", raising=False)
    return monkeypatch


@pytest.fixture
def opened() -> Iterator[list[Joined]]:
    """Rendezvous whose connections are closed after the test."""
    found = list[Joined]()
    yield found
    for each in found:
        for connection in each.connections.values():
            connection.close()


def results(jobs: list[JobConfig], opened: list[Joined]) -> list[Joined | str]:
    """The results of processes that are threads here: a rendezvous, or an error."""
    found: list[Joined | str] = [""] * len(jobs)

    def run(index: int, job: JobConfig) -> None:
        try:
            joined = rendezvous.rendezvous(job)
            opened.append(joined)
            found[index] = joined
        except SourceError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_know_the_service_and_each_other(
    patience: pytest.MonkeyPatch, opened: list[Joined]
) -> None:
    patience.setenv("JINFER_JOIN_SECONDS", "30")
    port = free_port()
    found = results([JobConfig("127.0.0.1", port, 4, rank) for rank in (2, 0, 3, 1)], opened)
    assert all(isinstance(each, Joined) for each in found)
    assert len({each.service for each in opened}) == 1
    assert {each.addresses for each in opened} == {("127.0.0.1",) * 4}
    assert sorted(len(each.connections) for each in opened) == [1, 1, 1, 3]


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ([(2, 1)], "process 0 at 127.0.0.1"),
        ([(3, 0), (3, 2)], "process 1 of 3 did not join in time"),
        ([(3, 0), (3, 1), (3, 1)], "two processes have the number 1"),
        ([(2, 0), (3, 1)], "process 1 was started with --processes 3, and process 0 with 2"),
    ],
)
def test_a_job_that_cannot_begin(
    patience: pytest.MonkeyPatch, opened: list[Joined], members: list[tuple[int, int]], error: str
) -> None:
    patience.setenv("JINFER_JOB_KEY", "known")
    port = free_port()
    jobs = [JobConfig("127.0.0.1", port, size, rank) for size, rank in members]
    found = results(jobs, opened)
    assert any(isinstance(each, str) and error in each for each in found), found
    assert not any(isinstance(each, Joined) for each in found)


def test_another_version(patience: pytest.MonkeyPatch, opened: list[Joined]) -> None:
    versions = iter([{"jinfer": "0.9", "jax": "1"}, *[{"jinfer": "1.0", "jax": "1"}] * 9])
    patience.setenv("JINFER_JOB_KEY", "known")
    patience.setattr(rendezvous, "_versions", lambda: next(versions))
    port = free_port()
    found = results([JobConfig("127.0.0.1", port, 2, rank) for rank in (1, 0)], opened)
    assert found == ["process 1 has jinfer 0.9, and process 0 has 1.0"] * 2


def test_another_key(patience: pytest.MonkeyPatch, opened: list[Joined]) -> None:
    """The process that calls reports it; process 0 goes on waiting, and reports the caller."""
    port = free_port()
    keys = {"MainThread": b"main"}
    name = threading.current_thread
    patience.setattr(rendezvous, "job_key", lambda: keys.get(name().name, name().name.encode()))
    found = results([JobConfig("127.0.0.1", port, 2, rank) for rank in (1, 0)], opened)
    assert "another JINFER_JOB_KEY" in str(found[0])
    assert "did not join in time" in str(found[1])
    assert "a caller at 127.0.0.1 has another JINFER_JOB_KEY" in str(found[1])


def test_an_address_that_is_taken(patience: pytest.MonkeyPatch, opened: list[Joined]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        (error,) = results([JobConfig("127.0.0.1", port, 2, 0)], opened)
    assert "cannot listen at 127.0.0.1" in str(error)


def test_pages_name_the_variables() -> None:
    """Recipes set what the code reads."""
    page = (Path(__file__).parents[3] / "docs" / "deploy.md").read_text()
    for name in ("JINFER_COORDINATOR", "JINFER_PROCESSES", "JINFER_PROCESS", "JINFER_JOB_KEY"):
        assert name in page


def stranger(port: int, *messages: Any) -> socket.socket:
    """A caller without a key."""
    deadline = time.monotonic() + 20
    while True:
        try:
            caller = socket.create_connection(("127.0.0.1", port))
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    if messages:
        with Connection(os.dup(caller.fileno())) as connection:
            answer_challenge(connection, rendezvous.job_key())
            deliver_challenge(connection, rendezvous.job_key())
            for message in messages:
                connection.send_bytes(message)
    return caller


MALFORMED = [b"", b"{", b"[]", b'{"process": 1}', b'{"process": "1", "processes": 2}', bytes(5000)]
OTHERS = [
    json.dumps({"process": 1, "processes": 5, "jinfer": "1", "jax": "1"}).encode(),
    json.dumps({"process": 1, "processes": 2, "jinfer": "9", "jax": "1"}).encode(),
]


def test_strangers_keep_nobody_out(patience: pytest.MonkeyPatch, opened: list[Joined]) -> None:
    """Idle, slow and malformed callers, more than are kept: the others join meanwhile."""
    patience.setenv("JINFER_JOIN_SECONDS", "60")
    patience.setattr(rendezvous, "_CALLERS", 8)
    port, found = free_port(), list[Joined | str]()
    leading = threading.Thread(
        target=lambda: found.extend(results([JobConfig("127.0.0.1", port, 2, 0)], opened))
    )
    leading.start()
    strangers = [stranger(port) for _ in range(20)]
    strangers += [stranger(port, message) for message in MALFORMED + OTHERS]
    for caller in strangers[:4]:
        with suppress(OSError):
            caller.sendall(b"GET / HTTP/1.0")
    (other,) = results([JobConfig("127.0.0.1", port, 2, 1)], opened)
    leading.join()
    assert all(isinstance(each, Joined) for each in (other, *found)), (other, found)
    for caller in strangers[:12]:  # those that had waited longest are disconnected
        caller.settimeout(10)
        with suppress(ConnectionError):
            while caller.recv(4096):
                pass
    for caller in strangers:
        caller.close()


def test_certificates_come_from_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same key gives the same authority and key pair; another one gives others."""
    pytest.importorskip("cryptography")
    monkeypatch.delenv("JINFER_JOB_KEY", raising=False)
    with mutual_tls() as files:
        assert files == {}
    found = []
    for key in ("one", "one", "other"):
        monkeypatch.setenv("JINFER_JOB_KEY", key)
        with mutual_tls() as files:
            private = Path(files["mtls_key_file"])
            assert private.parent.stat().st_mode & 0o077 == 0
            found.append(private.read_bytes())
        assert not private.exists()
    assert found[0] == found[1] != found[2]


def test_addresses_of_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo listens where the others look for it; else the line says what to do."""
    if sys.platform == "linux":
        assert collective_address.interface_of("127.0.0.1") == "lo"
    assert collective_address.interface_of("203.0.113.7") == ""
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    assert collective_address.hostname_problem("127.0.1.1") == ""
    said = collective_address.hostname_problem("10.0.0.2")
    assert "the hostname here leads to (127.0.1.1)" in said
    assert "write 10.0.0.2 before here in /etc/hosts" in said


def test_a_stage_of_hosts_that_gloo_would_not_connect() -> None:
    """It is refused before anything is loaded, and only where gloo is needed."""
    devices = [SimpleNamespace(process_index=rank, platform="cpu") for rank in range(2)]
    group: Any = SimpleNamespace(
        size=2, no_collectives=collective_address.hostname_problem("203.0.113.7")
    )
    one, two, both = [
        SimpleNamespace(device_group=SimpleNamespace(devices=each))
        for each in (devices[:1], devices[1:], devices)
    ]
    layers: Any = (one, two)
    tensors: Any = (both,)
    check_stages(group, layers, "spec.toml")
    with pytest.raises(SpecError, match=r"divides a stage among hosts, and gloo would listen"):
        check_stages(group, tensors, "spec.toml")
    group.no_collectives = ""
    check_stages(group, tensors, "spec.toml")
