"""Two hosts, each a network namespace with an address of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import httpx
import jax
import pytest

from jinfer import LLM, SamplingParams
from jinfer.parallel.distributed.rendezvous import job_key
from jinfer.version import __version__
from tests.parallel.distributed.hosts import ADDRESSES, Hosts, missing, two_hosts
from tests.parallel.distributed.jobs import ended, started

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there can be two hosts")

GOLDEN = "tests/goldens/llama2"
WHERE = (ADDRESSES[0], 8476)
ASKED: dict[str, Any] = {"prompt": [5, 6, 7], "ignore_eos": True, "return_token_ids": True}
WAYS: list[dict[str, Any]] = [
    {"max_tokens": 6, "temperature": 0},
    {"max_tokens": 6, "temperature": 0.8, "seed": 3},
]
SECONDS = 180.0
# A stranger that speaks the protocol of JAX's service.
STRANGER = """
import sys
from jaxlib import _jax
make = _jax.get_distributed_runtime_client
client = make(sys.argv[1], 1, init_timeout=3, use_compression=True, heartbeat_timeout=100)
client.connect()
print("joined")
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        with two_hosts() as found:
            yield found
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of one process."""
    with LLM(GOLDEN, dtype="float32") as llm:
        asked = [SamplingParams(**way, ignore_eos=True) for way in WAYS]
        return [list(llm.generate([[5, 6, 7]], one)[0].token_ids) for one in asked]


@dataclass
class Service:
    """A service on two hosts.

    Attributes:
        job: its processes.
        path: the file through which it is asked.
        http: asks it.
    """

    job: list[subprocess.Popen[str]]
    path: Path
    http: httpx.Client
    events: list[str] = field(default_factory=list)

    def tokens(self) -> list[list[int]]:
        """What it answers."""
        found = []
        for way in WAYS:
            answer = self.http.post("/v1/completions", json={**ASKED, **way})
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["choices"][0]["token_ids"])
        return found

    def stream(self) -> threading.Thread:
        """Asks for more than there is time for; the events are kept."""

        def ask() -> None:
            body = {**ASKED, "max_tokens": 200, "stream": True, "n": 1}
            with suppress(httpx.HTTPError):
                while not any('"error"' in line for line in self.events[-4:]):
                    with self.http.stream("POST", "/v1/completions", json=body) as answer:
                        self.events.extend(answer.iter_lines())

        thread = threading.Thread(target=ask)
        thread.start()
        self.until(lambda: len(self.events) > 4)
        return thread

    def health(self) -> tuple[int, str]:
        """Whether it says that it answers."""
        answer = self.http.get("/health", timeout=5)
        return answer.status_code, answer.text

    def until(self, true: Callable[[], bool], seconds: float = SECONDS) -> float:
        """Waits for something; how long it took."""
        begun = time.monotonic()
        while not true():
            assert time.monotonic() - begun < seconds, "it took too long"
            time.sleep(0.05)
        return time.monotonic() - begun


@contextmanager
def serving(
    hosts: Hosts,
    folder: Path,
    plan: str,
    *more: str,
    between: Callable[[], None] = lambda: None,
    key: str = "",
) -> Iterator[Service]:
    """A service that has answered; its processes are gone afterwards.

    Args:
        between: is called once process 0 waits, before process 1 is started.
    """
    where = ["--coordinator", f"{WHERE[0]}:{WHERE[1]}", "--processes", "2", "--process"]
    keys = ["--set", "dtype=float32", "--set", f"partition.devices={plan}"]
    own = ["--uds", str(folder / "http"), "--warm-up", "off"]
    arguments = ["-m", "jinfer.serve", GOLDEN, *keys, *own, *more, *where]

    def start(rank: int) -> subprocess.Popen[str]:
        return started([*arguments, str(rank)], before=hosts.before(rank), JINFER_JOB_KEY=key)

    transport = httpx.HTTPTransport(uds=str(folder / "http"))
    job = [start(0)]
    try:
        with httpx.Client(base_url="http://jinfer", transport=transport, timeout=300) as http:
            service = Service(job, folder / "http", http)
            service.until(lambda: WHERE in hosts.listeners(0) or job[0].poll() is not None)
            between()
            job.append(start(1))
            service.until(lambda: answers(service))
            yield service
    finally:
        hosts.cable("up")
        for process in job:
            process.kill()
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()


def answers(service: Service) -> bool:
    """Whether a service has begun; fails where it has ended."""
    over = [process.communicate() for process in service.job if process.poll() is not None]
    assert not over, over
    if not service.path.exists():
        return False
    with suppress(httpx.HTTPError):
        return service.health()[0] == 200
    return False


def lines(text: str) -> list[str]:
    """What is said of an error."""
    return [line for line in text.splitlines() if line.startswith("error")]


def lost(service: Service, who: int, within: float) -> None:
    """The other process ends in time, with one line; nobody dumps anything."""
    begun = time.monotonic()
    other = ended(service.job[1 - who], 60)
    assert time.monotonic() - begun < within
    if who == 0 and other.status == -signal.SIGABRT:
        # JAX's coordination service is in process 0, and JAX ends those who lose it.
        assert "coordination service" in other.err
        return
    assert other.status == 3, other
    (line,) = lines(other.err)
    assert f"error: process {who} of 2 at {ADDRESSES[who]}" in line
    assert "was lost; the job ends" in line
    assert "***" not in other.err, other.err  # of C++


def told_of_the_end(events: Sequence[str]) -> bool:
    """Whether a stream's last event says that a process was lost."""
    last = [line for line in events if line.startswith("data: ")][-1]
    return "process_lost" in last and "was lost; the job ends" in last


def idle(hosts: Hosts, strangers: ExitStack) -> None:
    """Strangers call who waits to be joined, and say nothing of use."""
    for content in (b"", b"", b"", b"GET / HTTP/1.0\r\n\r\n", b"jinfer 1" + bytes(64)):
        strangers.enter_context(hosts.call(1, WHERE, content))


def greeting(hosts: Hosts, strangers: ExitStack) -> None:
    """Strangers who speak as processes do, where there is no key: none of them is this job's."""
    idle(hosts, strangers)
    for hello in (
        {"process": 1},
        {"process": 1, "processes": 5, "jinfer": __version__, "jax": jax.__version__},
        {"process": 1, "processes": 2, "jinfer": "0.0.1", "jax": jax.__version__},
    ):
        caller = hosts.call(1, WHERE)
        caller.settimeout(None)
        strangers.enter_context(caller)
        connection = strangers.enter_context(Connection(os.dup(caller.fileno())))
        answer_challenge(connection, job_key())
        deliver_challenge(connection, job_key())
        connection.send_bytes(json.dumps(hello).encode())


def test_by_tensors_with_strangers(hosts: Hosts, tmp_path: Path, expected: list[list[int]]) -> None:
    """Whoever does not know the key keeps nobody out, and ends nothing."""
    with (
        ExitStack() as strangers,
        serving(
            hosts, tmp_path, "0&1", between=lambda: idle(hosts, strangers), key="known"
        ) as service,
    ):
        assert service.tokens() == expected
        for host in range(2):
            found = hosts.listeners(host)
            assert {address for address, _ in found} == {ADDRESSES[host]}, found
        for where in hosts.listeners(0):
            for content in (b"", b"\0" * 999, b"{}"):
                strangers.enter_context(hosts.call(1, where, content))
        speaks = [*hosts.before(1), sys.executable, "-c", STRANGER]
        named = [f"{address}:{port}" for address, port in hosts.listeners(0)]
        for speaking in [subprocess.Popen([*speaks, one], stdout=subprocess.PIPE) for one in named]:
            assert b"joined" not in speaking.communicate()[0]
        assert service.tokens() == expected
        busy = service.stream()
        service.job[1].kill()
        lost(service, 1, 10)
        busy.join()
        assert told_of_the_end(service.events), service.events[-4:]


@pytest.mark.soak
def test_by_layers_with_a_pause(hosts: Hosts, tmp_path: Path, expected: list[list[int]]) -> None:
    """A pause that is shorter than the heartbeat loses nothing; a longer one ends the job."""
    with (
        ExitStack() as strangers,
        serving(hosts, tmp_path, "0;1", between=lambda: greeting(hosts, strangers)) as service,
    ):
        assert service.tokens() == expected
        hosts.cable("down")
        time.sleep(3)
        hosts.cable("up")
        assert service.tokens() == expected
        service.job[1].send_signal(signal.SIGSTOP)
        time.sleep(3)
        service.job[1].send_signal(signal.SIGCONT)
        assert service.tokens() == expected
        busy = service.stream()
        service.job[1].send_signal(signal.SIGSTOP)
        lost(service, 1, 40)
        busy.join()
        assert told_of_the_end(service.events), service.events[-4:]


@pytest.mark.soak
def test_a_cable_that_stays_cut(hosts: Hosts, tmp_path: Path) -> None:
    with serving(hosts, tmp_path, "0;1") as service:
        busy = service.stream()
        hosts.cable("down")
        begun = time.monotonic()
        lost(service, 1, 40)
        assert ended(service.job[1], 60).status != 0
        assert time.monotonic() - begun < 60
        busy.join()
        assert told_of_the_end(service.events), service.events[-4:]


@pytest.mark.soak
def test_process_0_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    with serving(hosts, tmp_path, "0;1") as service:
        service.job[0].kill()
        lost(service, 0, 10)


@pytest.mark.soak
def test_another_key(hosts: Hosts) -> None:
    """The caller is told; process 0 waits on, and says so."""
    plan = ["--set", "dtype=float32", "--set", "partition.devices=0;1", "--port", "0"]
    arguments = ["-m", "jinfer.serve", GOLDEN, *plan, "--coordinator", f"{WHERE[0]}:{WHERE[1]}"]
    job = [
        started(
            [*arguments, "--processes", "2", "--process", str(rank)],
            before=hosts.before(rank), JINFER_JOB_KEY=f"key {rank}", JINFER_JOIN_SECONDS="30",
        )
        for rank in range(2)
    ]  # fmt: skip
    one, other = ended(job[0], 90), ended(job[1], 90)
    assert (one.status, other.status) == (2, 2)
    assert "has another JINFER_JOB_KEY" in lines(other.err)[0]
    assert "did not join in time" in lines(one.err)[0]
    assert f"a caller at {ADDRESSES[1]}" in one.err
