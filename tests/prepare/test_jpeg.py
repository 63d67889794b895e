"""Images of other formats as JPEG files."""

import io

import pytest
from PIL import Image

from gmlp_scale.prepare.image_sources import BadImageError, as_jpeg

GREY, CLEAR = (100, 100, 100), (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("I;16", (8, 8), 100 * 256), 100),
        (Image.new("I;16B", (8, 8), 100 * 256), 100),
        (Image.new("L", (8, 8), 100), 100),
        (Image.new("RGBA", (8, 8), CLEAR), (255, 255, 255)),
        (Image.new("RGBA", (8, 8), (*GREY, 255)), GREY),
        (Image.new("LA", (8, 8), (0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (8, 8), CLEAR).quantize(), (255, 255, 255)),
    ],
    ids=["16 bits", "16 bits, big-endian", "grey", "clear", "opaque", "clear grey", "palette"],
)
def test_an_image_keeps_its_grey_and_what_is_transparent_becomes_white(image, expected):
    file = io.BytesIO()
    image.save(file, "TIFF" if image.mode == "I;16B" else "PNG")
    with Image.open(io.BytesIO(as_jpeg(file.getvalue()))) as jpeg:
        assert jpeg.getpixel((3, 3)) == expected


@pytest.mark.parametrize("mode", ["I", "F"])
def test_an_image_whose_white_is_unknown_is_a_bad_one(mode):
    file = io.BytesIO()
    Image.new(mode, (8, 8), 1).save(file, "TIFF")
    with pytest.raises(BadImageError, match=f"mode {mode}"):
        as_jpeg(file.getvalue())
