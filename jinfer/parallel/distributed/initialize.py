"""Joining a job: the rendezvous, then `jax.distributed.initialize`."""

from __future__ import annotations

import os
import sys
from typing import Any

import jax

from jinfer.loader.config.source_errors import SourceError
from jinfer.parallel.distributed.collective_address import listen_at
from jinfer.parallel.distributed.current_group import set_current_group
from jinfer.parallel.distributed.job_certificates import mutual_tls
from jinfer.parallel.distributed.job_config import JobConfig
from jinfer.parallel.distributed.process_group import HEARTBEAT, ProcessGroup
from jinfer.parallel.distributed.rendezvous import rendezvous


def join_job(job: JobConfig) -> ProcessGroup:
    """Joins a job; to be called before JAX initializes its devices.

    Raises:
        SourceError: a process cannot be reached, or does not belong to this job.
    """
    with mutual_tls() as certificates:
        joined = rendezvous(job)
        _redirect_stdout()
        problem = listen_at(joined.addresses[job.rank])
        group = ProcessGroup(job.rank, joined.addresses, joined.connections, problem)
        group.watch_connections()
        _initialize(job, joined.service, certificates)
    group.watch_heartbeats()
    set_current_group(group)
    return group


def _redirect_stdout() -> None:
    """Redirects file descriptor 1 to stderr, since gloo prints to it; Python's stdout stays."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
    os.dup2(2, 1)


def _initialize(job: JobConfig, service: str, certificates: dict[str, Any]) -> None:
    """Starts JAX's distributed runtime. Raises `SourceError`."""
    # The preemption service would handle SIGTERM, which the server handles.
    jax.config.update("jax_enable_preemption_service", False)
    # Otherwise JAX aborts every process when one is lost, with a stack dump.
    jax.config.update("jax_enable_recoverability", True)
    try:
        jax.distributed.initialize(
            service,
            job.size,
            job.rank,
            local_device_ids=job.devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=service,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=10,
            **certificates,
        )
    except RuntimeError as error:
        raise SourceError(f"JAX cannot join the job: {' '.join(str(error).split())}") from None
