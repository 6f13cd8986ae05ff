"""Who belongs to a job, and what is said to those who do not."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from jinfer.distributed import joining, link
from jinfer.distributed.frames import packed
from jinfer.distributed.group import Group
from jinfer.distributed.job import Job, find_job
from jinfer.distributed.joining import join
from jinfer.opening.sources import SourceError
from tests.distributed.jobs import free_port


def test_flags_and_environment() -> None:
    named = {"coordinator": "10.0.0.1:99", "processes": "4", "process": "3"}
    assert find_job(named, {}) == Job("10.0.0.1", 99, 4, 3)
    variables = {"JINFER_COORDINATOR": "[::1]:99", "JINFER_PROCESSES": "2", "JINFER_PROCESS": "0"}
    assert find_job({}, variables) == Job("::1", 99, 2, 0)
    assert find_job({"process": "1"}, variables) == Job("::1", 99, 2, 1)
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
    assert find_job({}, leader) == Job("a-0.a.b", 8476, 2, 1)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nobody waits long; nobody gets as far as telling JAX."""
    monkeypatch.setenv("JINFER_JOIN_SECONDS", "1.5")
    monkeypatch.delenv("JINFER_JOB_KEY", raising=False)
    monkeypatch.setattr(joining, "_initialize", lambda *_: None)
    monkeypatch.setattr(joining, "listen_at", lambda _: "")
    monkeypatch.setattr(joining, "_aside", lambda: None)
    monkeypatch.setattr(joining, "keep_programs", lambda: None)
    monkeypatch.setattr(joining, "become", lambda _: None)
    return monkeypatch


def joined(jobs: list[Job]) -> list[Group | str]:
    """What comes of processes that are threads here: a group, or what is wrong."""
    found: list[Group | str] = [""] * len(jobs)

    def one(index: int, job: Job) -> None:
        try:
            found[index] = join(job)
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
    groups = joined([Job("127.0.0.1", port, 4, rank) for rank in (2, 0, 3, 1)])
    for group in groups:
        assert isinstance(group, Group)
        assert sorted(group.links) == [n for n in range(4) if n != group.rank]
        group.tell_all(value=group.rank)
    for group in groups:
        assert isinstance(group, Group)
        assert [group.hear(other) for other in sorted(group.links)] == [
            {"value": other} for other in sorted(group.links)
        ]
        group._ending = True  # so that nobody is lost when the test lets go of them


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
    for said in joined([Job("127.0.0.1", port, size, rank) for size, rank in members]):
        assert isinstance(said, str)
        assert wrong in said


def test_another_version(patience: pytest.MonkeyPatch) -> None:
    versions = iter([{"jinfer": "0.9", "jax": "1"}, *[{"jinfer": "1.0", "jax": "1"}] * 9])
    patience.setenv("JINFER_JOB_KEY", "known")
    patience.setattr(joining, "_versions", lambda: next(versions))
    port = free_port()
    said = joined([Job("127.0.0.1", port, 2, rank) for rank in (1, 0)])
    assert said == ["process 1 has jinfer 0.9, and process 0 has 1.0"] * 2


def test_another_key(patience: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever does not know it learns nothing, and the others go on waiting."""
    patience.setattr(link, "_key", lambda: threading.current_thread().name.encode())
    port = free_port()
    said = joined([Job("127.0.0.1", port, 2, rank) for rank in (1, 0)])
    assert "another JINFER_JOB_KEY" in str(said[0])
    assert "did not join in time" in str(said[1])
    assert "was turned away" in capsys.readouterr().err


def test_an_address_that_is_taken(patience: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        (said,) = joined([Job("127.0.0.1", port, 2, 0)])
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
            caller.sendall(packed({"process": 1, "more": "x" * (1 << 17)})[: 1 << 16])
            own = link.Link(answered)
            own.wait(10)
            with pytest.raises(link.LinkError, match=r"a message of \d+ bytes"):
                link.hello(own)
