"""Images become what the processors of transformers make of them."""

import json

import numpy as np
import pytest

from jinfer.images import expand_placeholders, image_marker, placeholder_id
from jinfer.tokenizer import load_tokenizer
from tests.images.image_goldens import (
    NAMES,
    expected,
    expected_tiles,
    golden,
    image_spec,
    prepared,
    tiles,
)

PROMPTS = [(name, prompt, count) for name in NAMES for prompt, count in (("a", 1), ("b", 2))]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemma4"])
def test_old_and_new_configurations_give_the_same_table(name: str) -> None:
    assert image_spec(name, "config.v4.json") == image_spec(name)


@pytest.mark.parametrize(("name", "prompt", "count"), PROMPTS)
def test_pixels_are_within_one_of_255(name: str, prompt: str, count: int) -> None:
    spec, images = image_spec(name), prepared(name)[:count]
    values = expected(name)[f"pixel_values_{prompt}"]
    first = spec.channel == "first"
    shape, std = ((3, -1), np.array(spec.std)[:, None]) if first else ((-1, 3), np.array(spec.std))
    found, wanted = tiles(images), expected_tiles(values, images, spec.patch)
    differences = [
        np.abs((ours - theirs).reshape(len(ours), *shape) * std) * 255
        for ours, theirs in zip(found, wanted, strict=True)
    ]
    # The processor of one family computes in bfloat16, whose steps add up to a half.
    limit = 1.01 if spec.rounding == "float32" else 1.51
    assert max(np.max(each) for each in differences) <= limit
    assert max(np.mean(each) for each in differences) < 0.05


@pytest.mark.parametrize(("name", "prompt", "count"), PROMPTS)
def test_input_ids_are_equal(name: str, prompt: str, count: int) -> None:
    spec, images = image_spec(name), prepared(name)[:count]
    tokenizer = load_tokenizer(golden(name))
    assert tokenizer is not None
    text = json.loads((golden(name) / "meta.json").read_text())["prompts"][prompt]
    ids, runs = expand_placeholders(tokenizer, text, images, spec)
    values = expected(name)
    assert ids == values[f"input_ids_{prompt}"].tolist()
    covered = [index for of in runs for begin, count in of for index in range(begin, begin + count)]
    assert covered == [i for i, id in enumerate(ids) if id == placeholder_id(tokenizer, spec)]
    assert [sum(count for _, count in of) for of in runs] == [image.tokens for image in images]
    assert len(values[f"features_{prompt}"]) == len(covered)


@pytest.mark.parametrize("name", NAMES)
def test_text_alone_is_encoded_as_before(name: str) -> None:
    tokenizer = load_tokenizer(golden(name))
    assert tokenizer is not None
    text = json.loads((golden(name) / "meta.json").read_text())["prompts"]["c"]
    ids, runs = expand_placeholders(tokenizer, text, (), image_spec(name))
    assert ids == expected(name)["input_ids_c"].tolist()
    assert runs == ()


@pytest.mark.parametrize("name", NAMES)
def test_grids_are_equal(name: str) -> None:
    values, images = expected(name), prepared(name)
    grids = [grid for image in images for grid in image.grids]
    for key in ("spatial_shapes_b", "target_sizes_b"):
        if key in values:
            assert values[key].tolist() == [list(grid) for grid in grids]
    if "image_grid_thw_b" in values:
        assert values["image_grid_thw_b"].tolist() == [[1, *grid] for grid in grids]
    if "image_sizes_b" in values and image_spec(name).resize.kind == "longest":
        patch = image_spec(name).patch
        assert values["image_sizes_b"].tolist() == [[r * patch, c * patch] for r, c in grids]


@pytest.mark.parametrize("name", [n for n in NAMES if n in ("glm4v", "paddleocr_vl", "qwen2_vl")])
def test_token_grids_give_the_positions(name: str) -> None:
    values, image = expected(name), prepared(name)[0]
    positions = values["position_ids_a"][:, 0]
    first = int(np.argmax(positions[0, 1:] == positions[0, :-1]))
    rows, columns = image.token_grid
    assert rows * columns == image.tokens
    inside = positions[:, first : first + image.tokens] - first
    assert inside.tolist() == [
        [0] * image.tokens,
        [row for row in range(rows) for _ in range(columns)],
        [*range(columns)] * rows,
    ]


def test_markers_of_families() -> None:
    found = {}
    for name in NAMES:
        tokenizer = load_tokenizer(golden(name))
        assert tokenizer is not None
        found[name] = image_marker(tokenizer, image_spec(name))
    assert found["smolvlm"] == "<image>"
    assert found["gemma3"] == "<start_of_image>"
    assert found["llama4"] == "<|image|>"
    assert found["qwen2_vl"] == "<|image_pad|>"
