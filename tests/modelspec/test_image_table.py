"""The table `[image]` and its errors."""

from typing import Any

import pytest

from jinfer.modelspec.config_lookup import lookup_in
from jinfer.modelspec.image_table import FixedSizeSpec, PinpointTilesSpec, read_image
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_values import SpecValues

TABLE: dict[str, Any] = {
    "placeholder": 7,
    "patch": 14,
    "resize": {"kind": "fixed", "side": "$image_processor.size | 28"},
}


def read(table: dict[str, Any], config: dict[str, Any] | None = None) -> Any:
    """The table for a config.json."""
    return read_image(table, SpecValues("a.toml", {}, lookup_in(config or {}), lambda name: False))


@pytest.mark.parametrize(
    "size",
    [336, 336.0, [336, 336], {"height": 336, "width": 336}, {"shortest_edge": 336}],
)
def test_sides_in_every_form_of_a_processor(size: Any) -> None:
    spec = read(TABLE, {"image_processor": {"size": size}})
    assert spec.resize == FixedSizeSpec("fixed", 336)


def test_values_of_the_processor_come_before_defaults() -> None:
    table = {**TABLE, "mean": "$image_processor.image_mean | [0.5, 0.5, 0.5]"}
    assert read(table).mean == (0.5, 0.5, 0.5)
    assert read(table, {"image_processor": {"image_mean": [0, 1, 0.25]}}).mean == (0, 1, 0.25)


def test_sizes_of_tiles() -> None:
    rule = {"kind": "pinpoint_tiles", "tile": 336, "sizes": "$sizes"}
    spec = read({**TABLE, "resize": rule}, {"sizes": [[336, 672], [672, 336]]})
    assert spec.resize == PinpointTilesSpec("pinpoint_tiles", 336, ((336, 672), (672, 336)))


def test_no_table_and_a_false_condition_read_no_images() -> None:
    assert read({}) is None
    assert read({**TABLE, "when": "has('*.visual.*')"}) is None


def test_texts_of_the_layout_are_not_expressions() -> None:
    spec = read({**TABLE, "layout": {"marker": "<|a|>", "image": "<|b|>{features}$c"}})
    assert spec.layout.marker == "<|a|>"
    assert spec.layout.image == "<|b|>{features}$c"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"patch": 0}, "image.patch: 0 is not a side from 1 to 32768"),
        ({"patch": [14, 16]}, "image.patch: [14, 16] is not a side"),
        ({"patch": {"depth": 3}}, "image.patch"),
        ({"patch": "x"}, "image.patch: "),
        ({"mean": [0.5]}, "image.mean: [0.5] is not a number for each of 3 channels"),
        ({"std": [1, 1, 0]}, "image.std: 0.0 is not above 0"),
        ({"resample": 6}, "image.resample: 6 is not a whole number from 0 to 5"),
        ({"mask": "both"}, "image.mask: 'both' is not one of the allowed words"),
        ({"resize": {"side": 3}}, "image.resize.kind: is missing"),
        ({"resize": {"kind": "smarter"}}, "did you mean 'smart'"),
        ({"resize": {"kind": "pinpoint_tiles", "tile": 3, "sizes": [3]}}, "[height, width]"),
        (
            {"resize": {"kind": "aspect_tiles", "tile": 3, "min_tiles": 2, "max_tiles": 1}},
            "image.resize.max_tiles: 1 is not from min_tiles (2) to 256",
        ),
        ({"layout": {"image": "{tile}"}}, "image.layout.image: unknown place {tile}; did you mean"),
        ({"layout": {"tile": "{tiles}"}}, "image.layout.tile: unknown place {tiles}"),
        ({"layout": {"marker": "{features}"}}, "unknown place {features}; nothing is allowed"),
        ({"layout": {"images": ""}}, "image.layout.images: unknown key; did you mean 'image'"),
        ({"layout": {"image": 3}}, "image.layout.image: 3 is not a text"),
        ({"colour": "white"}, "image.colour: unknown key"),
    ],
)
def test_errors_name_the_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        read({**TABLE, **keys})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
