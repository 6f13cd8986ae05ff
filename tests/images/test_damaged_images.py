"""Damaged image files: a line or an image, soon, in little memory."""

import random
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from jinfer.images import ImageError, ImageLimits, prepare_image
from tests.hostile import endures
from tests.images.image_goldens import image_spec
from tests.images.test_decode_image import picture, saved

LIMITS = ImageLimits(max_pixels=1 << 22)
COUNTS = [300, pytest.param(10_000, marks=pytest.mark.soak)]


def _files() -> list[bytes]:
    """A file of each format and of each way of storing pixels."""
    image = picture()
    frames = [picture(), picture().rotate(180)]
    return [
        *(saved(picture(mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        saved(image, "JPEG"),
        saved(image, "JPEG", progressive=True),
        saved(picture("CMYK"), "JPEG"),
        saved(image, "WEBP"),
        saved(picture("RGBA"), "WEBP", lossless=True),
        saved(frames[0], "WEBP", save_all=True, append_images=frames),
        saved(frames[0], "GIF", save_all=True, append_images=frames),
        saved(frames[0], "PNG", save_all=True, append_images=frames),
        *(saved(picture(mode), "BMP") for mode in ("1", "P", "RGB")),
        saved(image, exif=Image.Exif().tobytes() + bytes(range(64))),
    ]


def _damaged(file: bytes, files: list[bytes], chance: random.Random) -> bytes:
    """A file with bytes changed, cut out, repeated, or taken from another file."""
    data = bytearray(file)
    for _ in range(chance.randint(1, 6)):
        # Headers are at the beginning, and most of what can go wrong.
        place = min(int(chance.expovariate(1 / 40)), len(data))
        end = min(len(data), place + chance.choice((1, 2, 4, 16, 200)))
        match chance.randint(0, 5):
            case 0:
                data[place:end] = chance.randbytes(end - place)
            case 1:
                data[place:end] = bytes([chance.choice((0, 1, 127, 128, 255))]) * (end - place)
            case 2:
                del data[place:end]
            case 3:
                data[place:place] = data[place:end] * chance.randint(1, 50)
            case 4:
                other = chance.choice(files)
                data[place:] = other[min(place, len(other)) :]
            case 5:
                del data[chance.randint(0, len(data)) :]
    return bytes(data)


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_files(count: int, tmp_path: Path) -> None:
    chance, files, path = random.Random(count), _files(), tmp_path / "image"
    specs = [image_spec(name) for name in ("smolvlm", "qwen2_vl", "llava_next")]
    refused = 0

    def prepare(data: bytes, number: int) -> None:
        nonlocal refused
        try:
            prepare_image(data, specs[number % len(specs)], LIMITS)
        except ImageError:
            refused += 1
            raise

    for number in range(count):
        data = _damaged(chance.choice(files), files, chance)
        path.write_bytes(data)
        endures(partial(prepare, data, number), (ImageError,), path)
    assert 0.3 < refused / count < 1
