"""Which layers of a stage become stages of their own."""

from jinfer.parallel.sharding_rules import ModelSlice
from jinfer.parallel.substages import SubStage, split_stage, spread_evenly

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
