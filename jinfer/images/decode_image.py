"""Image decoding: untrusted bytes to an RGB image, within limits.

Only five formats are tried, and width x height is checked from the header, before a pixel is
decoded. Orientation follows EXIF; of an animation the first frame is used.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.sandbox.sanitize import sanitized

if TYPE_CHECKING:
    from PIL.Image import Image

type ImageSource = bytes | np.ndarray | Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_INSTALL = 'images need Pillow: pip install "jinfer[images]"'
_JPEG, _SCAN, _MAX_SCANS = b"\xff\xd8", b"\xff\xda", 128
_TURNED = range(2, 9)  # EXIF orientations other than the usual one


class ImageError(ValueError):
    """An image that cannot be used, in one line."""

    def __init__(self, text: str) -> None:
        """Shortens the text, which may contain parts of the file."""
        super().__init__(sanitized(" ".join(text.split()), 600))


@dataclass(frozen=True)
class ImageLimits:
    """Limits of one image.

    Attributes:
        max_bytes: of an encoded image.
        max_pixels: width x height; None: as the specification says.
    """

    max_bytes: int = 32 << 20
    max_pixels: int | None = None


def pillow() -> Any:
    """Return the module `PIL.Image`. Raises `ImageError` if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise ImageError(_INSTALL) from None
    return Image


def decode_image(source: ImageSource, limits: ImageLimits, alpha: str = "white") -> Image:
    """Decode an image to mode RGB.

    Args:
        source: an encoded image, an image of Pillow's, or UInt8[height, width], [..., 3] or
            [..., 4] (RGBA).
        limits: `max_pixels` is not None.
        alpha: "white" composes transparent pixels over white, "drop" takes their colours.

    Raises:
        ImageError: another format, too large, or damaged.
    """
    module = pillow()
    if isinstance(source, np.ndarray):
        image = _of_array(module, source)
    elif isinstance(source, bytes | bytearray | memoryview):
        image = _open(module, bytes(source), limits.max_bytes)
    elif isinstance(source, module.Image):
        image = source
    else:
        raise ImageError(f"a {type(source).__name__} is not an image: give bytes, PIL or NumPy")
    width, height = image.size
    if min(width, height) < 1:
        raise ImageError("the image has no pixels")
    if limits.max_pixels is not None and width * height > limits.max_pixels:
        most = f"at most {limits.max_pixels} are allowed"
        raise ImageError(f"the image has {width} x {height} pixels; {most}; send a smaller one")
    try:
        image.load()
        return _upright(module, _rgb(module, image, alpha), _orientation(image))
    except Exception as error:  # decoders raise many types on damaged files
        raise ImageError(f"the image is damaged: {error or type(error).__name__}") from None


def _open(module: Any, data: bytes, max_bytes: int) -> Image:
    """Read the header of an encoded image."""
    if not data:
        raise ImageError("the image is empty")
    if len(data) > max_bytes:
        raise ImageError(f"the image has {len(data)} bytes; at most {max_bytes} are allowed")
    if data[:2] == _JPEG and data.count(_SCAN) > _MAX_SCANS:  # each scan passes over all pixels
        raise ImageError(f"the JPEG image has more than {_MAX_SCANS} scans; save it anew")
    try:
        return module.open(io.BytesIO(data), formats=FORMATS)
    except module.UnidentifiedImageError:
        raise ImageError(f"the file is not one of {', '.join(FORMATS)}, or damaged") from None
    except (module.DecompressionBombError, module.DecompressionBombWarning):
        raise ImageError("the image has too many pixels; send a smaller one") from None
    except Exception as error:
        raise ImageError(f"the image is damaged: {error or type(error).__name__}") from None


def _of_array(module: Any, array: np.ndarray) -> Image:
    """Make an image of an array."""
    whole = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not whole:
        shape = "x".join(map(str, array.shape))
        expected = "give uint8 of height x width, with 3 or 4 channels last if any"
        raise ImageError(f"an array of {array.dtype} {shape} is not an image: {expected}")
    if not array.size:
        raise ImageError("the image has no pixels")
    return module.fromarray(np.ascontiguousarray(array))


def _rgb(module: Any, image: Image, alpha: str) -> Image:
    """Convert any mode to RGB."""
    if image.mode.startswith("I"):  # 16 bits of grey
        values = np.clip(np.asarray(image).astype(np.int64), 0, 0xFFFF)
        return module.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data and (alpha == "white" or image.mode == "P"):
        image = image.convert("RGBA")
    if alpha == "white" and image.mode == "RGBA":
        white = module.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def _orientation(image: Image) -> int:
    """Read the EXIF orientation; 1 if it is missing or damaged."""
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:
        return 1


def _upright(module: Any, image: Image, orientation: int) -> Image:
    """Turn and mirror an image by its EXIF orientation."""
    if orientation not in _TURNED:
        return image
    turn = module.Transpose
    mirrored = [turn.FLIP_LEFT_RIGHT, turn.ROTATE_180, turn.FLIP_TOP_BOTTOM]
    sideways = [turn.TRANSPOSE, turn.ROTATE_270, turn.TRANSVERSE, turn.ROTATE_90]
    return image.transpose([*mirrored, *sideways][orientation - 2])
