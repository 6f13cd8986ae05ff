"""Image inputs: images of a conversation, from files, bytes, arrays, Pillow and data URLs."""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.modelspec.spec_errors import show_value
from jinfer.sampling.request_errors import RequestError
from jinfer.sandbox.safe_files import FileRefusedError, read_regular_file
from jinfer.template.chat_prompt import Conversation, Message
from jinfer.template.message_content import NO_IMAGES
from jinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinfer.engine.requests import ImageSpan
    from jinfer.images import ImageSource
    from jinfer.modelspec.image_table import ImageSpec

MAX_IMAGE_BYTES = 32 << 20  # of a file; the number of pixels has its own limit
_KINDS = ("image", "image_url")
_GIVE = "give {'type': 'image', 'image': a path, bytes, an array or a Pillow image}"


@dataclass(frozen=True)
class EncodedPrompt:
    """A tokenized prompt.

    Attributes:
        ids: its tokens; an image is a run of placeholders, or several.
        images: its images, in order.
    """

    ids: list[int]
    images: tuple[ImageSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def after(self, before: Sequence[int], skip: int = 0) -> EncodedPrompt:
        """The prompt behind other tokens, without its own first `skip` tokens."""
        shift = len(before) - skip
        moved = (
            replace(image, runs=tuple((begin + shift, count) for begin, count in image.runs))
            for image in self.images
        )
        return EncodedPrompt([*before, *self.ids[skip:]], tuple(moved))


def is_image(part: object) -> bool:
    """Whether a part of a message is an image."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def take_images(messages: Sequence[Message]) -> tuple[list[Message], list[ImageSource]]:
    """Take the images out of messages, where `{"type": "image"}` is left.

    Raises:
        RequestError: an image that cannot be read.
    """
    taken: list[Message] = []
    images: list[ImageSource] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple) and any(map(is_image, content)):
            images += [read_image(_given(part)) for part in content if is_image(part)]
            parts = [{"type": "image"} if is_image(part) else part for part in content]
            message = {**message, "content": parts}
        taken.append(message)
    return taken, images


def _given(part: Mapping[str, Any]) -> object:
    given = part.get(part["type"])
    return given.get("url") if isinstance(given, Mapping) else given


def read_image(given: object) -> ImageSource:
    """Read an image; arrays and Pillow images stay as they are.

    Args:
        given: a path or data URL, the bytes of a file, an array [rows, columns, channels], or a
            Pillow image.

    Raises:
        RequestError: it is none of these, or the file cannot be read.
    """
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, str) and given.startswith("data:"):
        return decode_data_url(given)
    if isinstance(given, str) and given.startswith(("http:", "https:")):
        raise RequestError("images are not downloaded here; give a file's path or its bytes")
    if isinstance(given, str | Path):
        return read_image_file(Path(given))
    if isinstance(given, np.ndarray) or type(given).__module__.startswith("PIL."):
        return given  # type: ignore[return-value]
    if hasattr(given, "__array__"):
        return np.asarray(given)
    raise RequestError(f"an image is {show_value(given)}; {_GIVE}")


def read_image_file(path: Path) -> bytes:
    """Read a file of an image. Raises `RequestError`."""
    try:
        return read_regular_file(path.expanduser(), MAX_IMAGE_BYTES)
    except (FileRefusedError, RuntimeError) as error:  # a home folder that is not known
        raise RequestError(f"image {str(path)[:200]}: {error}") from None


def decode_data_url(url: str) -> bytes:
    """Decode `data:image/png;base64,...`; the media type is not trusted. Raises `RequestError`."""
    head, comma, text = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RequestError("a data URL of an image is written data:image/png;base64,...")
    return decode_base64(text)


def decode_base64(text: str) -> bytes:
    """Decode an image in base64, whose size is checked first. Raises `RequestError`."""
    if len(text) // 4 * 3 > MAX_IMAGE_BYTES:
        raise RequestError(f"an image is larger than {MAX_IMAGE_BYTES} bytes")
    try:
        if len(text) % 4 or text.endswith("==="):  # the library ignores excess padding
            raise ValueError
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise RequestError("an image is not valid base64") from None


def encode_conversation(
    conversation: Conversation,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    images: Sequence[ImageSource],
    **variables: Any,
) -> EncodedPrompt:
    """Encode messages with their images, as `take_images` gives both.

    Args:
        **variables: as of `Conversation.encode`.

    Raises:
        TemplateError: as `Conversation.encode`; or the model sees no images.
        RequestError: one cannot be decoded.
    """
    if not images:
        return EncodedPrompt(conversation.encode(tokenizer, messages, **variables))
    text = conversation.marked_text(tokenizer, messages, **variables)
    return encode_images(tokenizer, text, images, conversation.image)


def encode_images(
    tokenizer: Tokenizer,
    text: str,
    images: Sequence[ImageSource],
    spec: ImageSpec | None,
    *,
    special: bool = False,
) -> EncodedPrompt:
    """Encode a text in which each image is the model's marker.

    Args:
        special: whether to add special tokens (BOS, EOS).

    Raises:
        RequestError: the model sees no images, one cannot be decoded, or the text has more or fewer
            markers.
    """
    if spec is None:
        raise RequestError(NO_IMAGES)
    # Imported here, because text alone does not need it.
    from jinfer.engine.requests import ImageSpan
    from jinfer.images import ImageError, expand_placeholders, prepare_image

    prepared = []
    try:
        for image in images:
            prepared.append(prepare_image(image, spec))
        ids, runs = expand_placeholders(tokenizer, text, prepared, spec, special=special)
    except ImageError as error:
        bad = len(images) > 1 and len(prepared) < len(images)
        which = f"image {len(prepared) + 1} of {len(images)}: " if bad else ""
        raise RequestError(f"{which}{error}") from None
    spans = (
        ImageSpan(each, image.token_grid, image) for each, image in zip(runs, prepared, strict=True)
    )
    return EncodedPrompt(ids, tuple(spans))
