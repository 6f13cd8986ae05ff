"""Image parts: the images of a request, from URLs to bytes, within the server's limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from jinfer.api.image_inputs import MAX_IMAGE_BYTES, decode_data_url
from jinfer.engine.requests import RequestError
from jinfer.server.http.fetch_image import fetch_image, read_image_file
from jinfer.server.http.http_errors import as_api_error, invalid_request, unsupported_field
from jinfer.server.http.server_settings import ServerSettings
from jinfer.template.message_content import NO_IMAGES


@dataclass
class ImageParts:
    """Collects the images of a prompt.

    Attributes:
        settings: limits, and where images may come from.
        supported: whether the model sees images.
        images: the files, in order.
    """

    settings: ServerSettings
    supported: bool
    images: list[bytes] = field(default_factory=list)

    def add(self, url: str, param: str) -> None:
        """Read an image from a data URL, an allowed host or folder.

        Args:
            param: the request field, for errors.

        Raises:
            ApiError: the model sees no images, there are too many, or one cannot be read.
        """
        settings = self.settings
        if not self.supported:
            raise unsupported_field(NO_IMAGES, param)
        if len(self.images) >= settings.limit_images:
            raise invalid_request(
                f"a prompt may have {settings.limit_images} images; serve with a larger "
                "--limit-images",
                param,
            )
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            try:
                self.images.append(decode_data_url(url))
            except RequestError as error:
                raise as_api_error(error, param=param) from None
        elif scheme == "file":
            folder = settings.image_folder
            self.images.append(read_image_file(url, folder, MAX_IMAGE_BYTES, param))
        else:
            hosts = settings.image_hosts
            self.images.append(fetch_image(url, hosts, MAX_IMAGE_BYTES, param))
