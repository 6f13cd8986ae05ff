"""The tensors that a process of several reads; some devices count as another process's."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.loader.checkpoint import Checkpoint, Tensor
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.parallel.device_groups import DeviceGroup
from jinfer.parallel.placement import ModelToPlace, make_stages, partition_plan
from jinfer.parallel.sharded_loading import load_stages, local_rows
from tests.parallel.eight.models import GOLDENS


def planned(golden: str, change: Callable[[Checkpoint], Checkpoint], **keys: Any) -> Any:
    """The plan of a golden's weights, and the stages that they are for.

    Args:
        change: of the checkpoint.
    """
    opened = open_model(GOLDENS / golden, {"dtype": "float32", **keys})
    dtype = jnp.dtype(opened.dtype)
    model = build_abstract_model(opened.spec, dtype)
    checkpoint = change(opened.checkpoint)
    found = plan_weights(model, opened.spec, checkpoint, opened.activations)
    given = ModelToPlace(opened.spec, found.model, opened.context, dtype, opened.kv_cache)
    return found, make_stages(partition_plan(given), given)


@pytest.mark.parametrize("weights", ["auto", "q8"])
@pytest.mark.parametrize(("own", "stage"), [((0, 1), 0), ((2, 3), 1)])
def test_tensors_of_other_stages_are_not_read(
    monkeypatch: pytest.MonkeyPatch, weights: str, own: tuple[int, ...], stage: int
) -> None:
    read, sizes = dict[str, int](), dict[str, int]()

    def noted(tensor: Tensor, given: Callable[[], np.ndarray]) -> np.ndarray:
        read[tensor.name] = tensor.nbytes
        return given()

    def watched(checkpoint: Checkpoint) -> Checkpoint:
        sizes.update({name: tensor.nbytes for name, tensor in checkpoint.tensors.items()})
        tensors = {
            name: replace(
                each, read=partial(noted, each, each.read), raw=partial(noted, each, each.raw)
            )
            for name, each in checkpoint.tensors.items()
        }
        return replace(checkpoint, tensors=tensors)

    keys = {"partition.devices": "0&1;2&3", "quantization.weights": weights}
    found, stages = planned("llama2", watched, **keys)
    read.clear()
    here = property(lambda site: tuple(i for i, d in enumerate(site.devices) if d.id in own))
    monkeypatch.setattr(DeviceGroup, "local", here)
    leaves = load_stages(found, stages)
    layers = {f".{layer}." for layer in stages[stage].model.slice.layers["decoder"]}
    ends = {0: "embed_tokens", 1: "lm_head"}
    assert read
    for name in read:
        assert any(part in name for part in (*layers, ends[stage], "model.norm")), name
    assert sum(read.values()) < 0.7 * sum(sizes.values())
    for number, each in enumerate(stages):
        for leaf in leaves[each.leaves]:
            assert isinstance(leaf, jax.Array) == (number == stage)


@pytest.mark.parametrize(
    ("golden", "weights"),
    [
        ("llama2", "auto"),
        ("llama2", "q3.5"),
        ("gguf_llama_mixed", "auto"),
        ("mixtral", "q8"),
        ("gguf_mixtral", "auto"),
        ("chatglm2", "q8"),
        ("gpt2", "auto"),
    ],
)
@pytest.mark.parametrize("own", [0, 1])
def test_rows_of_other_devices_change_nothing(
    monkeypatch: pytest.MonkeyPatch, golden: str, weights: str, own: int
) -> None:
    """A device has the same bytes whether or not the rows of the other one are read too."""
    keys = {"partition.devices": "0&1", "quantization.weights": weights}
    found, stages = planned(golden, lambda checkpoint: checkpoint, **keys)
    whole = [leaf.addressable_shards[own].data for leaf in load_stages(found, stages)]
    monkeypatch.setattr(DeviceGroup, "local", property(lambda site: (own,)))
    monkeypatch.setattr(
        DeviceGroup, "join_shards", lambda site, parts, *_: jax.device_put(parts[0])
    )
    alone = load_stages(found, stages)
    windows = [local_rows([(stages[0], source)]) for source in stages[0].model.sources]
    assert any(window is not None for window in windows)
    for one, other in zip(whole, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
