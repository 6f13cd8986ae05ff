"""Which of JAX's devices the stages of a plan are on."""

import jax
import pytest

from jinfer.modelspec.spec_errors import SpecError
from jinfer.parallel.layer_plan import ModelSlice, PartitionPlan, PlannedStage
from jinfer.parallel.placement import stage_devices


def plan(*groups: tuple[str, ...]) -> PartitionPlan:
    return PartitionPlan(tuple(PlannedStage(group, ModelSlice({})) for group in groups), 1)


def test_the_host_is_another_device_where_there_is_one() -> None:
    first = jax.devices()[0]
    ((host,), (device,)) = stage_devices(plan(("cpu",), ("0",)), "spec.toml")
    assert device == first
    assert host.platform == "cpu"
    assert (host != first) == (len(jax.devices("cpu")) > 1)


def test_no_cpu_is_asked_for_unless_a_stage_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with JAX_PLATFORMS=cuda."""
    known = jax.devices()

    def devices(platform: str | None = None) -> list[jax.Device]:
        if platform is not None:
            raise RuntimeError("Unknown backend cpu")
        return known

    monkeypatch.setattr(jax, "devices", devices)
    assert stage_devices(plan(("0",)), "spec.toml") == ((known[0],),)
    with pytest.raises(SpecError, match="partition: a stage on the host needs JAX to"):
        stage_devices(plan(("cpu",), ("0",)), "spec.toml")
