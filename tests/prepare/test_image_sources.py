"""Sources of images that are damaged, or not quite what is expected; tests/data_prep/test_prepare_images.py has whole
ones."""

from pathlib import Path

import pytest

from gmlp_scale.errors import InputError
from gmlp_scale.prepare.image_sources import open_source
from tests.written_images import tar_of_folder, tar_of_tars, write_image_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("images") / "photos", num_per_class=3)


@pytest.mark.parametrize("pack", [tar_of_folder, tar_of_tars])
def test_a_tar_file_with_one_damaged_header_or_cut_at_one_is_refused(pack, folder, tmp_path):
    """tarfile takes either for the archive's end."""
    whole = pack(folder, tmp_path / "whole.tar").read_bytes()
    assert len(open_source(str(tmp_path / "whole.tar")).images) == 9
    path = tmp_path / "damaged.tar"
    headers = [start for start in range(512, len(whole), 512) if whole[start + 257 : start + 262] == b"ustar"]
    assert len(headers) >= 11
    for header in headers:
        damaged = bytearray(whole)
        damaged[header + 100] ^= 1
        for content in (damaged, whole[:header]):
            path.write_bytes(content)
            with pytest.raises(InputError, match=r"damaged\.tar is not a whole, uncompressed tar file"):
                open_source(str(path))
