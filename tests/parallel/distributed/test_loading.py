"""How much memory the processes of a job take while they load a model of 1.1B weights."""

import time
from pathlib import Path

import pytest

from jinfer.loader.open_model import open_files
from tests.parallel.distributed.jobs import free_port, ran, started_job
from tests.parallel.distributed.test_ending import answering
from tools.bench_models import LlamaShape, make_up

SMALL = LlamaShape(22, 64, 32, 4, 128, context=512)  # as many programs, of as many layers
LARGE = LlamaShape(22, 2048, 32, 4, 5632, context=512)


def peaks(model: Path, plan: str) -> list[float]:
    """The most memory that each process of four had, in MiB."""
    port = free_port()
    keys = [f"partition.devices={plan}", "engine.slots=1", "engine.kv_tokens=512"]
    named = [word for key in keys for word in ("--set", key)]
    arguments = ["-m", "jinfer.serve", str(model), *named, "--port", str(port), "--warm-up", "off"]
    job = started_job(arguments, 4)
    try:
        answering(port, job)
        time.sleep(1)
        return [_peak(process.pid) for process in job]
    finally:
        job[0].terminate()
        ran(job, 120)


def _peak(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["0;1;2;3", "0&1;2&3", "0&1&2&3"])
def test_each_has_little_more_than_its_share(tmp_path: Path, plan: str) -> None:
    words = open_files("smollm2_135m_instruct", {}).weights
    for name, shape in (("small", SMALL), ("large", LARGE)):
        make_up(shape, words, tmp_path / f"{name}.gguf", "Q8_0")
    runtime = peaks(tmp_path / "small.gguf", plan)
    whole = (tmp_path / "large.gguf").stat().st_size / 2**20
    for own, without in zip(peaks(tmp_path / "large.gguf", plan), runtime, strict=True):
        print(f"{plan}: {own:.0f} MiB, {without:.0f} without weights; a quarter is {whole / 4:.0f}")
        assert own < 1.25 * whole / 4 + without
