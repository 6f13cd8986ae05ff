"""Images: decoding, resizing and patches, and the placeholder tokens of a prompt."""

from jinfer.images.decode_image import ImageError, ImageLimits, ImageSource
from jinfer.images.placeholders import (
    ImageRuns,
    expand_placeholders,
    hide_marker,
    image_marker,
    placeholder_id,
)
from jinfer.images.prepared_image import PreparedImage, prepare_image

__all__ = [
    "ImageError",
    "ImageLimits",
    "ImageRuns",
    "ImageSource",
    "PreparedImage",
    "expand_placeholders",
    "hide_marker",
    "image_marker",
    "placeholder_id",
    "prepare_image",
]
