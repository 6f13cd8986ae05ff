"""Who belongs to a job, and what is said to those who do not."""

import select
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jinfer.distributed import collective_address, incoming_connections, initialize
from jinfer.distributed import connection as link
from jinfer.distributed.initialize import join_job
from jinfer.distributed.job_config import JobConfig, find_job
from jinfer.distributed.process_group import ProcessGroup
from jinfer.distributed.unsupported import check_stages
from jinfer.distributed.wire_format import serialize
from jinfer.loader.config.source_errors import SourceError
from jinfer.modelspec.spec_errors import SpecError
from tests.distributed.jobs import free_port


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
    """Nobody waits long; nobody gets as far as telling JAX."""
    monkeypatch.setenv("JINFER_JOIN_SECONDS", "1.5")
    monkeypatch.delenv("JINFER_JOB_KEY", raising=False)
    monkeypatch.setattr(initialize, "_initialize", lambda *_: None)
    monkeypatch.setattr(initialize, "listen_at", lambda _: "")
    monkeypatch.setattr(initialize, "_redirect_stdout", lambda: None)
    monkeypatch.setattr(initialize, "cache_on_every_rank", lambda: None)
    monkeypatch.setattr(initialize, "set_current_group", lambda _: None)
    return monkeypatch


def joined(jobs: list[JobConfig]) -> list[ProcessGroup | str]:
    """What comes of processes that are threads here: a group, or what is wrong."""
    found: list[ProcessGroup | str] = [""] * len(jobs)

    def one(index: int, job: JobConfig) -> None:
        try:
            found[index] = join_job(job)
        except SourceError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=one, args=each) for each in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_are_linked_with_all(patience: pytest.MonkeyPatch) -> None:
    patience.setenv("JINFER_JOIN_SECONDS", "30")
    port = free_port()
    groups = joined([JobConfig("127.0.0.1", port, 4, rank) for rank in (2, 0, 3, 1)])
    for group in groups:
        assert isinstance(group, ProcessGroup)
        assert sorted(group.links) == [n for n in range(4) if n != group.rank]
        group.send_to_all(value=group.rank)
    for group in groups:
        assert isinstance(group, ProcessGroup)
        assert [group.receive_from(other) for other in sorted(group.links)] == [
            {"value": other} for other in sorted(group.links)
        ]
        group.abandon()  # so that nobody is lost when the test lets go of them


@pytest.mark.parametrize(
    ("members", "wrong"),
    [
        ([(2, 1)], "process 0 cannot be reached at 127.0.0.1"),
        ([(3, 0), (3, 2)], "process 1 of 3 did not join in time"),
        ([(3, 0), (3, 1), (3, 1)], "two processes have the number 1"),
        ([(2, 0), (3, 1)], "process 1 was told of 3 processes, and process 0 of 2"),
    ],
)
def test_a_job_that_cannot_begin(
    patience: pytest.MonkeyPatch, members: list[tuple[int, int]], wrong: str
) -> None:
    port = free_port()
    for said in joined([JobConfig("127.0.0.1", port, size, rank) for size, rank in members]):
        assert isinstance(said, str)
        assert wrong in said


def test_another_version(patience: pytest.MonkeyPatch) -> None:
    versions = iter([{"jinfer": "0.9", "jax": "1"}, *[{"jinfer": "1.0", "jax": "1"}] * 9])
    patience.setenv("JINFER_JOB_KEY", "known")
    patience.setattr(initialize, "_versions", lambda: next(versions))
    port = free_port()
    said = joined([JobConfig("127.0.0.1", port, 2, rank) for rank in (1, 0)])
    assert said == ["process 1 has jinfer 0.9, and process 0 has 1.0"] * 2


def test_another_key(patience: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever does not know it learns nothing, and the others go on waiting."""
    patience.setattr(link, "_key", lambda: threading.current_thread().name.encode())
    port = free_port()
    said = joined([JobConfig("127.0.0.1", port, 2, rank) for rank in (1, 0)])
    assert "another JINFER_JOB_KEY" in str(said[0])
    assert "did not join in time" in str(said[1])
    assert "was turned away" in capsys.readouterr().err


def test_an_address_that_is_taken(patience: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        (said,) = joined([JobConfig("127.0.0.1", port, 2, 0)])
    assert "cannot wait at 127.0.0.1" in str(said)


def test_pages_name_the_variables() -> None:
    """Recipes set what the code reads."""
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    for name in ("JINFER_COORDINATOR", "JINFER_PROCESSES", "JINFER_PROCESS", "JINFER_JOB_KEY"):
        assert name in page


def test_a_stranger_s_first_message_is_bounded() -> None:
    """What nobody has vouched for yet may not fill memory."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        answered, _ = server.accept()
        with caller, answered:
            caller.sendall(serialize({"process": 1, "more": "x" * (1 << 17)})[: 1 << 16])
            own = link.Link(answered)
            own.wait(10)
            with pytest.raises(link.LinkError, match=r"a message of \d+ bytes"):
                link.receive_hello(own)


def stranger(port: int, *messages: Any) -> socket.socket:
    """Somebody who calls, without a key, and says something."""
    deadline = time.monotonic() + 20
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    if messages:
        own = link.authenticate(connection, called=True, seconds=20)
        for message in messages:
            own.send(message)
    return connection


MALFORMED: list[Any] = [
    {"process": 1},
    {"process": 1, "processes": 2, "jinfer": 1, "jax": 2, "at": ""},
    [],
    "hello",
]
OTHERS = [
    {"process": 1, "processes": 5, "jinfer": "1", "jax": "1", "at": "a:1"},
    {"process": 1, "processes": 2, "jinfer": "9\n", "jax": "1", "at": "a:1"},
    {"process": 1, "processes": 2, "jinfer": "9", "jax": "1", "at": "a:1"},
]


def test_strangers_keep_nobody_out(
    patience: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Idle, slow, wrong: each is a line, and the others join meanwhile."""
    patience.setenv("JINFER_JOIN_SECONDS", "60")
    patience.setattr(incoming_connections, "HELLO_SECONDS", 30.0)
    port, found = free_port(), list[ProcessGroup | str]()
    leading = threading.Thread(
        target=lambda: found.extend(joined([JobConfig("127.0.0.1", port, 2, 0)]))
    )
    leading.start()
    strangers = [stranger(port) for _ in range(5)]
    strangers += [stranger(port, message) for message in MALFORMED + OTHERS]
    strangers[0].sendall(b"j")
    begun = time.monotonic()
    (group,) = joined([JobConfig("127.0.0.1", port, 2, 1)])
    assert time.monotonic() - begun < 25, "it waits for nobody"
    leading.join()
    for each in (group, *found):
        assert isinstance(each, ProcessGroup)
        each.abandon()
    for connection in strangers:
        connection.close()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(MALFORMED + OTHERS)
    assert all("was turned away: " in line for line in said)
    assert sum("process 1 was told of 5 processes" in line for line in said) == 1


def test_a_caller_has_so_long_in_all(
    patience: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever sends a byte now and then is turned away as well."""
    patience.setattr(incoming_connections, "HELLO_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        calling = socket.create_connection(server.getsockname())
        heard = incoming_connections.IncomingConnections(server)
        ended = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                while not ended.wait(0.1):
                    calling.sendall(b"j")

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(TimeoutError):
            heard.next(time.monotonic() + 2)
        said, end = "", time.monotonic() + 20
        while not said and time.monotonic() < end:  # by another thread
            time.sleep(0.01)
            said = capsys.readouterr().err
        ended.set()
        dripping.join()
        heard.close()
        calling.close()
    assert "was turned away: timed out" in said


def test_many_callers(patience: pytest.MonkeyPatch) -> None:
    """Those who have said nothing for longest have to go."""
    patience.setattr(incoming_connections, "_MOST", 3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard = incoming_connections.IncomingConnections(server)
        calling = [socket.create_connection(server.getsockname()) for _ in range(5)]
        end = time.monotonic() + 20
        while len(select.select(calling, [], [], 0)[0]) < len(calling):
            assert time.monotonic() < end
            with pytest.raises(TimeoutError):
                heard.next(time.monotonic() + 0.1)
        for each in calling:
            each.settimeout(5)
        size = len(link._MAGIC) + link._NONCE
        assert [len(each.recv(size)) for each in calling[2:]] == [size] * 3
        assert all(not each.recv(1 << 10)[size:] for each in calling[:2])
        assert [each.recv(1) for each in calling[:2]] == [b"", b""]
        heard.close()
        for each in calling:
            each.close()


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
