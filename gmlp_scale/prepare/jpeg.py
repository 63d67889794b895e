"""Turns an image of any format that Pillow opens into a JPEG file, as the shards of images hold them."""

import io

import numpy as np
from PIL import Image

from gmlp_scale.errors import InputError

_QUALITY = 95


class BadImageError(InputError):
    """An image that cannot be decoded."""


def as_jpeg(content: bytes) -> bytes:
    """A JPEG file as it is; an image of another format as a JPEG file.

    Transparent parts become white, and 16 bits of grey become 8. Raises BadImageError if the image cannot be decoded,
    or if nothing in its pixels says which number is white.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            if image.format == "JPEG":
                return content
            file = io.BytesIO()
            _grey_or_rgb(image).save(file, "JPEG", quality=_QUALITY, subsampling=0)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadImageError(str(error)) from error
    return file.getvalue()


def _grey_or_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F"):
        raise BadImageError(f"its pixels are numbers of 32 bits (mode {image.mode}); needed: 8 or 16 bits")
    if image.mode.startswith("I;16"):  # convert would make all above 255 white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:  # convert would show the colours below it, which are often black
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "L" else image.convert("RGB")
