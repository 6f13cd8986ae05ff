"""Placeholders of images in a prompt, and users' texts that look like them."""

from typing import Any

import numpy as np
import pytest

from jinfer.images import (
    ImageError,
    PreparedImage,
    expand_placeholders,
    hide_marker,
    image_marker,
    placeholder_id,
    prepare_image,
)
from jinfer.tokenizer import Tokenizer, load_tokenizer
from tests.images.image_goldens import NAMES, golden, image_spec, prepared, read_spec, source

TABLE = {"placeholder": 290, "patch": 1, "resize": {"kind": "fixed", "side": 2}}


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of a golden."""
    tokenizer = load_tokenizer(golden(name))
    assert tokenizer is not None
    return tokenizer


def image_of(layout: dict[str, str], **keys: Any) -> tuple[str | int, ...]:
    """The layout of an image of 4 x 6 pixels."""
    spec = read_spec({**TABLE, **keys, "layout": layout}, {})
    return prepare_image(np.zeros((4, 6, 3), np.uint8), spec).layout


TILES = {
    "resize": {"kind": "pinpoint_tiles", "tile": 2, "sizes": [[4, 6]]},
}
CANVAS = {"resize": {"kind": "canvas_tiles", "tile": 2, "max_tiles": 6}}


@pytest.mark.parametrize(
    ("layout", "keys", "expected"),
    [
        ({}, {}, (4,)),
        ({"image": "<a>{features}<b>"}, {}, ("<a>", 4, "<b>")),
        ({"image": "x{tiles}y", "single": "{overview}z"}, {}, (4, "z")),
        ({"image": "{features}", "between_lines": "/"}, {}, (2, "/", 2)),
        ({"image": "<{number}>{overview}{tiles}"}, {}, ("<{number}>", 4)),
        ({"image": "{features}"}, TILES, (4 + 4 * 7,)),
        ({"image": "{overview}|{tiles}", "tile": "<{row}{column}>{features}"},
         CANVAS, (4, "|<11>", 4, "<12>", 4, "<13>", 4, "<21>", 4, "<22>", 4, "<23>", 4)),
        ({"image": "{tiles}", "tile": "T{tile}{features}"},
         {"resize": {"kind": "canvas_tiles", "tile": 4, "max_tiles": 2}}, ("T1", 16, "T2", 16)),
        ({"image": "{tiles}{overview}", "between_tiles": ",", "between_rows": ";"},
         CANVAS, (4, ",", 4, ",", 4, ";", 4, ",", 4, ",", 8)),
    ],
)  # fmt: skip
def test_layouts(
    layout: dict[str, str], keys: dict[str, Any], expected: tuple[str | int, ...]
) -> None:
    assert image_of(layout, **keys) == expected


def test_images_are_numbered_from_0() -> None:
    tokenizer, spec = tokenizer_of("minicpmv4_6"), image_spec("minicpmv4_6")
    marker = image_marker(tokenizer, spec)
    ids, runs = expand_placeholders(tokenizer, f"{marker} {marker}", prepared("minicpmv4_6"), spec)
    text = tokenizer.decode(ids, skip_special=False)
    assert "<image_id>0</image_id>" in text
    assert "<image_id>1</image_id>" in text
    assert len(runs) == 2


@pytest.mark.parametrize("name", NAMES)
def test_users_texts_are_never_images(name: str) -> None:
    tokenizer, spec, images = tokenizer_of(name), image_spec(name), prepared(name)[:1]
    marker, id = image_marker(tokenizer, spec), placeholder_id(tokenizer, spec)
    special = {marker, tokenizer.token(id), *tokenizer.special.control}
    said = "".join(f" {word} " for word in sorted(special))
    hidden = hide_marker(tokenizer.hide_control(said), marker)
    ids, _ = expand_placeholders(tokenizer, f"{hidden}{marker}{hidden}", images, spec)
    alone, _ = expand_placeholders(tokenizer, marker, images, spec)
    plain = tokenizer.encode(said, special=False, parse_special=False)
    assert ids == [*plain, *alone, *plain]
    none, runs = expand_placeholders(tokenizer, hidden, (), spec)
    assert (none, runs) == (plain, ())


def test_a_placeholder_that_is_no_marker_is_text() -> None:
    tokenizer, spec = tokenizer_of("gemma3"), image_spec("gemma3")
    placeholder = tokenizer.token(placeholder_id(tokenizer, spec))
    assert placeholder != image_marker(tokenizer, spec)
    ids, _ = expand_placeholders(tokenizer, f"a {placeholder} b", (), spec)
    assert placeholder_id(tokenizer, spec) not in ids


@pytest.mark.parametrize(("text", "count"), [("a", 1), ("<image>", 0), ("<image> <image>", 1)])
def test_as_many_markers_as_images(text: str, count: int) -> None:
    tokenizer, spec = tokenizer_of("smolvlm"), image_spec("smolvlm")
    with pytest.raises(ImageError, match=f"{count} images are given"):
        expand_placeholders(tokenizer, text, prepared("smolvlm")[:count], spec)


def test_special_tokens_of_the_text_are_added_once() -> None:
    tokenizer, spec = tokenizer_of("smolvlm"), image_spec("smolvlm")
    plain, runs = expand_placeholders(tokenizer, "<image>a", prepared("smolvlm")[:1], spec)
    whole, moved = expand_placeholders(
        tokenizer, "<image>a", prepared("smolvlm")[:1], spec, special=True
    )
    prefix, suffix = tokenizer.special.prefix, tokenizer.special.suffix
    assert whole == [*prefix, *plain, *suffix]
    assert moved[0][0][0] == runs[0][0][0] + len(prefix)


def test_the_placeholder_must_be_in_the_vocabulary() -> None:
    tokenizer = tokenizer_of("smolvlm")
    for placeholder in ("<nothing>", 10**6):
        spec = read_spec({**TABLE, "placeholder": placeholder}, {})
        with pytest.raises(ImageError, match="is not a token of the vocabulary"):
            placeholder_id(tokenizer, spec)
    assert placeholder_id(tokenizer, read_spec({**TABLE, "placeholder": "'<image>'"}, {})) == 290


def test_digests_tell_images_apart() -> None:
    def digest(image: Any, name: str = "smolvlm") -> bytes:
        found: PreparedImage = prepare_image(image, image_spec(name))
        return found.digest

    pixels = np.zeros((64, 64, 3), np.uint8)
    other = pixels.copy()
    other[5, 5, 0] = 255
    assert digest(pixels) == digest(pixels.copy())
    assert digest(pixels) != digest(other)
    assert digest(pixels) != digest(pixels[:32])
    assert digest(pixels) != digest(pixels, "llama4")
    assert digest(source("smolvlm", 0)) == prepared("smolvlm")[0].digest
