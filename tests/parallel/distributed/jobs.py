"""Jobs of several processes on this machine, each with devices of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SECONDS = 240.0


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def started(
    arguments: Sequence[str], *, devices: int = 1, before: Sequence[str] = (), **variables: str
) -> subprocess.Popen[str]:
    """A process of Python with so many virtual devices.

    Args:
        before: of the command.
    """
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        **variables,
    }
    # What tells xdist's workers who they are is not for a process of its own.
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    return subprocess.Popen(
        [*before, sys.executable, *arguments],
        cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def flags(port: int, processes: int, rank: int) -> list[str]:
    """What tells a process who it is."""
    where = f"127.0.0.1:{port}"
    return ["--coordinator", where, "--processes", str(processes), "--process", str(rank)]


def started_job(
    arguments: Sequence[str], processes: int, *, devices: int = 1, **variables: str
) -> list[subprocess.Popen[str]]:
    """The processes of a job, all with the same arguments."""
    port = free_port()
    return [
        started([*arguments, *flags(port, processes, rank)], devices=devices, **variables)
        for rank in range(processes)
    ]


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it printed."""

    status: int
    out: str
    err: str


def ended(process: subprocess.Popen[str], seconds: float = SECONDS) -> Ended:
    """Waits for a process."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"it did not end: {out[-2000:]}{err[-4000:]}") from None
    return Ended(process.returncode, out, err)


def ran(processes: Sequence[subprocess.Popen[str]], seconds: float = SECONDS) -> list[Ended]:
    """Waits for all processes of a job; none of them is left over."""
    try:
        return [ended(process, seconds) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def answered(cases: Sequence[Mapping[str, Any]], processes: int, *, devices: int = 1) -> list[Any]:
    """What a job gives for each case, see `tests.parallel.distributed.answering`."""
    arguments = ["-m", "tests.parallel.distributed.answering", json.dumps(cases)]
    found = ran(started_job(arguments, processes, devices=devices))
    assert [each.status for each in found] == [0] * processes, "\n".join(e.err for e in found)
    return list(json.loads(found[0].out))
