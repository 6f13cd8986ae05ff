"""Which of JAX's devices the stages of a plan are on."""

import jax
import pytest

from jinfer.modelspec.spec_errors import SpecError
from jinfer.parallel.layer_plan import Plan, Row
from jinfer.parallel.placement import devices_of
from jinfer.parallel.sharding_rules import Part


def plan(*groups: tuple[str, ...]) -> Plan:
    return Plan(tuple(Row(group, Part({})) for group in groups), 1)


def test_the_host_is_another_device_where_there_is_one() -> None:
    first = jax.devices()[0]
    ((host,), (device,)) = devices_of(plan(("cpu",), ("0",)), "spec.toml")
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
    assert devices_of(plan(("0",)), "spec.toml") == ((known[0],),)
    with pytest.raises(SpecError, match="partition: a stage on the host needs JAX to"):
        devices_of(plan(("cpu",), ("0",)), "spec.toml")
