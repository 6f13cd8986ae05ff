"""Cores that may be used: affinity, and the quotas of control groups."""

import math
import os
from pathlib import Path

import pytest

from jinfer.cpu.cores import cpu_quota, usable_cores


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (  # the least of a group and those around it
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            2.0,
        ),
        (  # of a container that does not see where its group stands
            {"proc/self/cgroup": "0::/far/away\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/x/cpu.max": "1 100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            math.inf,
        ),
        ({"proc/self/cgroup": "nonsense\n", "sys/fs/cgroup/cpu.max": "a b c\n"}, math.inf),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    write(tmp_path, files)
    assert cpu_quota(tmp_path) == quota


def test_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert usable_cores(tmp_path) == 3
    for quota, cores in ((10000, 1), (150000, 2), (900000, 3)):
        name = "sys/fs/cgroup/cpu.max"
        write(tmp_path, {"proc/self/cgroup": "0::/\n", name: f"{quota} 100000\n"})
        assert usable_cores(tmp_path) == cores
