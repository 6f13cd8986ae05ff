"""`[partition]`: Inferflow's grammar, layers of stages, and one line for each wrong plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jinfer import LLM
from jinfer.modelspec.partition_table import MeshSpec, PartitionSpec, device_groups
from jinfer.modelspec.spec_errors import SpecError
from jinfer.parallel.layer_plan import (
    ModelBytes,
    ModelSlice,
    PartitionPlan,
    SubStage,
    balance_layers,
    make_partition_plan,
    split_stage,
    spread_evenly,
)

WEIGHT = ModelBytes({"decoder": [10] * 8}, before=5, after=25)


def plan(there: int = 4, weight: ModelBytes = WEIGHT, **keys: Any) -> PartitionPlan:
    return make_partition_plan(
        PartitionSpec(**keys), weight, there, 8, "spec.toml", lambda: (("0",), ("1",))
    )


def shown(plan: PartitionPlan) -> list[tuple[str, int]]:
    return [("&".join(row.devices), len(row.slice.layers["decoder"])) for row in plan.stages]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("0", (("0",),)),
        ("0;1", (("0",), ("1",))),
        ("0,1", (("0",), ("1",))),
        ("0&1", (("0", "1"),)),
        ("0|1", (("0", "1"),)),
        (" 0 & 1 ; 2 & 03 ", (("0", "1"), ("2", "3"))),
        ("cpu;0&1", (("cpu",), ("0", "1"))),
        ("auto", ()),
    ],
)
def test_grammar(text: str, groups: tuple[tuple[str, ...], ...]) -> None:
    assert device_groups(text, "spec.toml") == groups


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0&x", "'x', which is neither the number of a device nor cpu"),
        ("0;;1", "'', which is neither"),
        ("0&1;1&2", "names device 1 twice"),
        ("0&1;2", "stages of different numbers of devices"),
        ("cpu&0", "cpu and other devices"),
    ],
)
def test_grammar_errors(text: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason) as caught:
        device_groups(text, "spec.toml")
    assert str(caught.value).startswith("spec.toml: partition.devices: ")


def test_layers_are_balanced_by_bytes() -> None:
    # The head weighs as much as two and a half layers.
    assert shown(plan(mesh=MeshSpec(pipe=2, tensor=2))) == [("0&1", 5), ("2&3", 3)]
    assert shown(plan(there=8, mesh=MeshSpec(pipe=4))) == [("0", 2), ("1", 2), ("2", 3), ("3", 1)]


@pytest.mark.parametrize(
    ("sizes", "before", "after", "stages", "counts"),
    [
        ([1] * 22, 0, 0, 4, [6, 6, 5, 5]),
        ([1, 1, 1, 9], 0, 0, 2, [3, 1]),
        ([4, 4, 4], 100, 0, 3, [1, 1, 1]),
        ([1, 1, 1, 1], 2, 0, 2, [1, 3]),
    ],
)
def test_balance(sizes: list[int], before: int, after: int, stages: int, counts: list[int]) -> None:
    found = balance_layers(sizes, before, after, stages, 1)
    assert sum(found) == len(sizes)
    loads = _loads(sizes, found, before, after)
    assert max(loads) == max(_loads(sizes, counts, before, after))


def _loads(sizes: list[int], counts: list[int], before: int, after: int) -> list[int]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    loads = [sum(sizes[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    loads[0] += before
    loads[-1] += after
    return loads


def test_given_layers_may_be_none() -> None:
    keys: Mapping[str, Any] = {"devices": "0;1;2", "layers": (0, 8, 0)}
    assert shown(plan(**keys)) == [("0", 0), ("1", 8), ("2", 0)]


def test_a_stage_on_the_host() -> None:
    assert shown(plan(cpu_layers=3)) == [("cpu", 3), ("0", 5)]
    assert shown(plan(host_embeddings=True, devices="0;1")) == [("cpu", 0), ("0", 5), ("1", 3)]
    assert shown(plan(cpu_layers=2, devices="0;1")) == [("cpu", 2), ("0", 4), ("1", 2)]


def test_an_encoder_follows_its_decoder() -> None:
    weight = ModelBytes({"encoder": [1, 1], "decoder": [1] * 6}, 0, 0)
    rows = plan(weight=weight, devices="0;1;2").stages
    assert sorted(len(row.slice.layers["encoder"]) for row in rows) == [0, 1, 1]
    assert [row.slice.layers["decoder"] for row in rows] == [range(2), range(2, 4), range(4, 6)]
    assert [(row.slice.first, row.slice.last) for row in rows] == [
        (True, False), (False, False), (False, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"devices": "0;4"}, "partition.devices: device 4 is not there: there are 4, from 0 on"),
        (
            {"mesh": MeshSpec(pipe=3, tensor=2)},
            "partition.mesh: needs 3 x 2 = 6 devices, but there are 4",
        ),
        (
            {"devices": "0;1", "layers": (4, 5)},
            "partition.layers: [4, 5] are 9 layers of 2 stages, but there are 8 layers and "
            "2 stages",
        ),
        ({"devices": "0", "layers": (4, 4)}, "partition.layers: [4, 4] are 8 layers of 2 stages"),
        ({"cpu_layers": 8}, "partition.cpu_layers: 2 stages are more than the decoder's 8 layers"),
        ({"cpu_layers": 1, "layers": (1, 7)}, "partition.layers: cannot be combined"),
        ({"host_embeddings": True, "devices": "cpu;0"}, "partition.host_embeddings: devices has"),
        ({"cpu_layers": 1, "devices": "cpu;0"}, "devices has a stage on the host already"),
        ({"devices": "0", "lanes": 9}, "partition.lanes: 9 is more than engine.slots = 8"),
    ],
)
def test_wrong_plans(keys: dict[str, Any], error: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan(**keys)
    assert error in str(caught.value)
    assert str(caught.value).startswith("spec.toml: partition.")
    assert "\n" not in str(caught.value)


def test_more_stages_than_layers() -> None:
    weight = ModelBytes({"decoder": [1, 1, 1]}, 0, 0)
    with pytest.raises(SpecError, match="4 stages are more than the decoder's 3 layers"):
        plan(weight=weight, devices="0;1;2;3")


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"partition.devices": "7"}, "device 7 is not there: there is one, number 0"),
        ({"partition.mesh": {"pipe": 2}}, "needs 2 x 1 = 2 devices, but there are 1"),
        ({"partition.devices": 3}, "device 3 is not there"),
        ({"partition.devices": [0]}, "partition.devices: [0] is not a text"),
        ({"partition.device": "0"}, "partition.device: unknown key; did you mean 'devices'?"),
        ({"partition.cpu_layers": -1}, "partition.cpu_layers: -1 is not a whole number"),
        (
            {"partition.devices": "0", "partition.mesh": {"pipe": 1}},
            "partition.mesh: and devices say the same thing; give one of them",
        ),
    ],
)
def test_a_model_is_not_opened(goldens: Path, keys: dict[str, Any], error: str) -> None:
    with pytest.raises(SpecError) as caught:
        LLM(goldens / "llama2", **keys)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


type Cut = list[tuple[range, bool, bool]]


def cut(found: list[SubStage]) -> Cut:
    return [(each.slice.layers["decoder"], each.streamed, each.hosted) for each in found]


def whole(layers: int, **others: range) -> ModelSlice:
    return ModelSlice({"decoder": range(layers), **others})


def test_nothing_is_cut_without_need() -> None:
    part = whole(3)
    assert split_stage(part, "decoder", (), ()) == [SubStage(part)]


def test_layers_between_streamed_ones_stay_together() -> None:
    found = split_stage(whole(6), "decoder", {2, 5}, ())
    assert cut(found) == [
        (range(2), False, False),
        (range(2, 3), True, False),
        (range(3, 5), False, False),
        (range(5, 6), True, False),
        (range(6, 6), False, False),  # the head, which stays
    ]
    assert [each.slice.first for each in found] == [True, False, False, False, False]
    assert [each.slice.last for each in found] == [False, False, False, False, True]


def test_each_layer_alone_where_its_cache_is_divided() -> None:
    part = ModelSlice({"decoder": range(4, 6)}, first=False, last=False)
    found = split_stage(part, "decoder", {5}, range(6))
    assert cut(found) == [(range(4, 5), False, True), (range(5, 6), True, True)]


def test_layers_without_keys_stay_together() -> None:
    assert cut(split_stage(whole(5), "decoder", (), {2, 3})) == [
        (range(2), False, False),
        (range(2, 3), False, True),
        (range(3, 4), False, True),
        (range(4, 5), False, False),
    ]


def test_an_encoder_stays_with_what_comes_first() -> None:
    part = whole(1, encoder=range(2))
    found = split_stage(part, "decoder", (), range(1))
    assert [each.slice.layers["encoder"] for each in found] == [range(2), range(2, 2), range(2, 2)]
    assert cut(found)[0] == (range(0), False, False)


def test_streamed_layers_are_spread_evenly() -> None:
    assert spread_evenly(range(6), 3) == {1, 3, 5}
    assert spread_evenly(range(4, 9), 5) == set(range(4, 9))
    assert len(spread_evenly(range(60), 7)) == 7
