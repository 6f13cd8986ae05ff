"""Image files are decoded as they look, within limits; others are refused in a line."""

import io
import struct
import zlib
from functools import partial
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jinfer.images import ImageError, ImageLimits
from jinfer.images.decode_image import decode_image
from tests.hostile import endures
from tests.images.image_goldens import IMAGES

LIMITS = ImageLimits(max_pixels=1 << 22)


def decoded(source: Any, alpha: str = "white", limits: ImageLimits = LIMITS) -> np.ndarray:
    """The pixels of an image."""
    image = decode_image(source, limits, alpha)
    assert image.mode == "RGB"
    return np.asarray(image)


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def picture(mode: str = "RGB") -> Image.Image:
    """An image of 24 x 16 pixels, each different."""
    values = np.arange(16 * 24 * 3, dtype=np.uint32).reshape(16, 24, 3) * 37 % 251
    return Image.fromarray(values.astype(np.uint8)).convert(mode)


def png_of(width: int, height: int) -> bytes:
    """A PNG file that says that it has so many pixels, and has none."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")


def test_odd_images_are_what_transformers_loads() -> None:
    for name in ("exif_none", "exif_rotated"):
        file = (IMAGES / f"{name}.jpg").read_bytes()
        assert np.array_equal(decoded(file), np.load(IMAGES / f"{name}.rgb.npy"))
    file = (IMAGES / "rgba.png").read_bytes()
    assert np.array_equal(decoded(file, "drop"), np.load(IMAGES / "rgba.rgb.npy"))


def test_transparent_pixels_are_over_white() -> None:
    found = decoded((IMAGES / "rgba.png").read_bytes()).astype(int)
    expected = np.load(IMAGES / "rgba.over_white.npy").astype(int)
    assert np.abs(found - expected).max() <= 1


@pytest.mark.parametrize("format", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_formats(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    image = picture("P" if format == "GIF" else "RGB")
    difference = decoded(saved(image, format, **options)).astype(int) - image.convert("RGB")
    assert np.abs(difference).max() <= (0 if format != "JPEG" else 255)


@pytest.mark.parametrize("format", ["TIFF", "PPM", "ICO", "TGA", "PCX"])
def test_other_formats_are_refused(format: str) -> None:
    with pytest.raises(ImageError, match="is not one of PNG, JPEG, WEBP, GIF, BMP"):
        decoded(saved(picture(), format))


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"])
def test_modes_become_rgb(mode: str) -> None:
    image = picture("L" if mode in ("1", "LA") else "RGB").convert(mode)
    assert np.array_equal(decoded(image), np.asarray(image.convert("RGB")))


def test_cmyk_file() -> None:
    found = decoded(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert np.abs(found.astype(int) - (255, 0, 0)).max() < 8


def test_16_bits_keep_the_upper_8() -> None:
    values = np.arange(0, 65536, 128, dtype=np.uint16).reshape(16, 32)
    found = decoded(saved(Image.fromarray(values)))
    assert np.array_equal(found, np.repeat((values >> 8)[:, :, None], 3, axis=2))


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_a_transparent_colour_becomes_white(mode: str) -> None:
    image = Image.new("RGB", (4, 2), (10, 20, 30)).convert("L" if mode == "L" else "RGB")
    colour: Any = image.getpixel((0, 0))
    if mode == "P":
        image, colour = image.quantize(2), 0
    file = saved(image, transparency=colour)
    assert decoded(file).tolist() == [[[255] * 3] * 4] * 2
    assert decoded(file, "drop").max() < 255


@pytest.mark.parametrize("orientation", [*range(10), 65535])
def test_exif_orientation(orientation: int) -> None:
    image, exif = picture(), Image.Exif()
    exif[0x0112] = orientation
    pixels = np.asarray(image)
    turned = {
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: pixels[::-1].transpose(1, 0, 2),
        7: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: pixels[:, ::-1].transpose(1, 0, 2),
    }
    found = decoded(saved(image, exif=exif.tobytes()))
    assert np.array_equal(found, turned.get(orientation, pixels))


def test_damaged_exif_is_ignored() -> None:
    file = saved(picture(), exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert np.array_equal(decoded(file), np.asarray(picture()))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if format == "WEBP" else {}
    file = saved(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert np.unique(decoded(file).reshape(-1, 3), axis=0).tolist() == [[255, 0, 0]]


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_truncated_files_are_refused(format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    file = saved(Image.fromarray(noise), format)
    for length in (0, 1, 10, len(file) // 4, len(file) // 2):
        with pytest.raises(ImageError):
            decoded(file[:length])


def test_too_many_pixels_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(ImageError, match="20000 x 3 pixels; at most 50000 are allowed"):
        decoded(png_of(20000, 3), limits=ImageLimits(max_pixels=50000))
    with pytest.raises(ImageError, match="too many pixels"):
        decoded(png_of(2**31 - 1, 2**31 - 1))


@pytest.mark.parametrize("size", [(20000, 20000), (9000, 9000), (100_000, 5000)])
def test_bombs_take_no_memory(size: tuple[int, int], tmp_path: Any) -> None:
    for number, file in enumerate((png_of(*size), _empty_gif(*size), _empty_webp(*size))):
        path = tmp_path / str(number)
        path.write_bytes(file)
        with pytest.raises(ImageError):
            decoded(file, limits=ImageLimits(max_pixels=1 << 26))
        endures(partial(decoded, file), (ImageError,), path)


def _empty_gif(width: int, height: int) -> bytes:
    size = struct.pack("<HH", width % 65536, height % 65536)
    return b"GIF89a" + size + b"\x80\0\0" + bytes(6) + b",\0\0\0\0" + size + b"\0\x02\x02L\x01\0;"


def _empty_webp(width: int, height: int) -> bytes:
    """An extended WebP file without an image."""
    size = struct.pack("<I", min(width, 1 << 24) - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + size
    body += b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_too_many_bytes_are_refused() -> None:
    with pytest.raises(ImageError, match="has 1001 bytes; at most 1000 are allowed"):
        decoded(bytes(1001), limits=ImageLimits(max_bytes=1000))


def test_many_scans_are_refused() -> None:
    file = saved(Image.new("L", (64, 64)), "JPEG", progressive=True)
    start = file.index(b"\xff\xda")
    bomb = file[:-2] + file[start:-2] * 40 + file[-2:]
    with pytest.raises(ImageError, match="more than 128 scans"):
        decoded(bomb)


def test_arrays() -> None:
    pixels = np.asarray(picture())
    assert np.array_equal(decoded(pixels), pixels)
    assert np.array_equal(decoded(pixels[::-1, ::2]), pixels[::-1, ::2])
    assert np.array_equal(decoded(pixels[:, :, 0]), np.repeat(pixels[:, :, :1], 3, axis=2))
    alpha = np.zeros((16, 24, 1), np.uint8)
    assert decoded(np.concatenate([pixels, alpha], axis=2)).min() == 255


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), "array of float32 4x4x3 is not an image"),
        (np.zeros((3, 4, 5), np.uint8), "array of uint8 3x4x5 is not an image"),
        (np.zeros(4, np.uint8), "array of uint8 4 is not an image"),
        (np.zeros((0, 4, 3), np.uint8), "has no pixels"),
        (Image.new("RGB", (0, 4)), "has no pixels"),
        ("photo.png", "a str is not an image"),
        (None, "a NoneType is not an image"),
        (b"", "is empty"),
        (b"<html>\n<body>", "is not one of PNG"),
    ],
)
def test_what_is_no_image_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message) as error:
        decoded(source)
    assert "\n" not in str(error.value)


def test_pillow_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImageError, match=r'pip install "jinfer\[images\]"'):
        decoded(b"x")
