"""Job configuration: coordinator address, world size and rank, from flags, environment or cluster.

JAX recognizes Slurm, Open MPI and indexed jobs of Kubernetes; a LeaderWorkerSet is recognized by
its environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinfer.loader.config.source_errors import SourceError

PORT = 8476  # rank 0's default
FLAGS = {
    "coordinator": "HOST:PORT at which process 0 waits for the others",
    "processes": "of the job, one on each host",
    "process": "number of this one, from 0 on",
}
# Variables that cluster launchers set for each process: without them JAX need not be asked.
_STARTED = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
_NEIGHBOURS = ("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class JobConfig:
    """A process of a distributed job.

    Attributes:
        host, port: where rank 0 listens.
        size: how many processes there are.
        rank: this process's rank.
        devices: the local devices that this process uses, by number; None: all.
    """

    host: str
    port: int
    size: int
    rank: int
    devices: tuple[int, ...] | None = None


def find_job(flags: Mapping[str, Any], environment: Mapping[str, str]) -> JobConfig | None:
    """The job that this process belongs to; None for a single process.

    Args:
        flags: values of the flags in `FLAGS`; None for a flag that was not passed.
        environment: the environment variables.

    Raises:
        SourceError: the settings are incomplete, or contradict each other.
    """
    named = {
        name: flags.get(name) if flags.get(name) is not None else environment.get(_variable(name))
        for name in FLAGS
    }
    if any(value is not None for value in named.values()):
        return _named(named)
    if "LWS_LEADER_ADDRESS" in environment:
        names = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
        values = dict(zip(FLAGS, (environment.get(name) for name in names), strict=True))
        return None if values["processes"] == "1" else _named(values)
    if any(name in environment for name in _STARTED):
        return _detected(environment)
    return None


def _variable(name: str) -> str:
    return f"JINFER_{name.upper()}"


def _named(values: Mapping[str, Any]) -> JobConfig | None:
    if missing := [name for name, value in values.items() if value is None]:
        one = missing[0]
        raise SourceError(
            f"a job of several processes needs --coordinator, --processes and --process, "
            f"and --{one} is missing; give it, or set {_variable(one)}"
        )
    size, rank = (_count(name, values[name]) for name in ("processes", "process"))
    if not 0 <= rank < size:
        raise SourceError(
            f"--process {rank} of --processes {size}: they are numbered from 0 to {size - 1}"
        )
    return _job(str(values["coordinator"]), size, rank, None)


def _job(where: str, size: int, rank: int, devices: tuple[int, ...] | None) -> JobConfig | None:
    host, port = where, str(PORT)
    if where.startswith("[") or where.count(":") == 1:
        host, _, port = where.rpartition(":") if not where.endswith("]") else (where, "", port)
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise SourceError(f"--coordinator {where}: write HOST:PORT, such as 10.0.0.1:{PORT}")
    return JobConfig(host.strip("[]"), int(port), size, rank, devices) if size > 1 else None


def _count(name: str, value: Any) -> int:
    if not str(value).isdecimal():
        raise SourceError(f"--{name} {value}: write a number")
    return int(value)


def _detected(environment: Mapping[str, str]) -> JobConfig | None:
    """The job that JAX detects from the cluster and its own environment variables."""
    try:
        from jax._src.clusters import ClusterEnv
    except ImportError:  # a private module
        return None
    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS")
    detect = ClusterEnv.auto_detect_unset_distributed_params
    try:
        where, size, rank, devices = detect(coordinator, None, None, None, None, 300)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise SourceError(f"the cluster's job cannot be found: {reason}") from None
    if where is None or size is None or rank is None:
        return None
    # JAX gives each process one device; the only process of a machine should have them all.
    alone = any(environment.get(name, "").partition("(")[0] == "1" for name in _NEIGHBOURS)
    return _job(where, size, rank, None if alone or devices is None else tuple(devices))
