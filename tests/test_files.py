import pytest

from gmlp_scale.files import is_local, open_filesystem


def test_a_url_that_nothing_opens_is_one_clear_error():
    with pytest.raises(OSError, match=r"nosuch://bucket/shards cannot be opened: .*nosuch"):
        open_filesystem("nosuch://bucket/shards")


def test_local_paths_are_told_from_stores():
    assert is_local("/a/b") and is_local("file:///a/b")
    assert not is_local("memory://a/b")
