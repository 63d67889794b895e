import logging
import os
import ssl

import pytest

from gmlp_scale.storage.files import (
    PlaceError,
    is_local,
    open_filesystem,
    print_error,
    redacted,
    with_retries,
    write_file,
)


def test_a_url_that_nothing_opens_is_one_clear_error():
    with pytest.raises(OSError, match=r"nosuch://bucket/shards cannot be opened: .*nosuch"):
        open_filesystem("nosuch://bucket/shards")


def test_which_places_are_local():
    assert is_local("/a/b") and is_local("file:///a/b")
    assert not is_local("memory://a/b")


def test_a_pipe_is_written_to_and_a_link_leads_to_its_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", b"page")
    assert os.read(reader, 9) == b"page" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    (tmp_path / "link").symlink_to("folder/file")
    for content in (b"one", b"two"):
        write_file(tmp_path / "link", content)
        assert (tmp_path / "folder/file").read_bytes() == content and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("https://user:canary@host:80/a b", "https://***@host:80/a b"),
        ("sftp://user:can@ary@host/a", "sftp://***@host/a"),
        ("simplecache::https://canary@host/a", "simplecache::https://***@host/a"),
        ("https://host/a.gz?X-Amz-Date=1&X-Amz-Signature=canary&x=1", "https://host/a.gz?***"),
        ("'https://host/a?token=canary', and", "'https://host/a?***', and"),
        ("az://box/a?sv=1&SIG=canary%3D", "az://box/a?***"),
        ("https://host:80/a@b?page=2 user:x@y", "https://host:80/a@b?page=2 user:x@y"),
        ("abfs://container@account/a", "abfs://container@account/a"),
        ("s3://bucket/what?.tar hf://datasets/a/b@main/c", "s3://bucket/what?.tar hf://datasets/a/b@main/c"),
    ],
)
def test_passwords_and_signatures_of_urls_are_redacted(text, wanted):
    assert redacted(text) == redacted(redacted(text)) == wanted
    if text != wanted and " " not in text:
        with pytest.raises(OSError, match="a signature was, which no file keeps: give the whole URL again"):
            open_filesystem(wanted)
    assert redacted({"a": [text, 1, None], text: (text,)}) == {"a": [wanted, 1, None], wanted: (wanted,)}


def test_a_store_s_failures_are_reported_without_secrets(monkeypatch, caplog, capsys):
    monkeypatch.setattr("gmlp_scale.storage.files._WAIT_SECONDS", (0.0,))
    caplog.set_level(logging.INFO)
    url = "https://user:canary@host/a?token=canary"
    for failure in (ConnectionResetError(f"{url} reset"), FileNotFoundError(url)):

        def fail(failure=failure):
            raise failure

        with pytest.raises(OSError, match="reading") as error:
            with_retries(fail, f"reading {url}")
        assert "canary" not in str(error.value)
    print_error(ValueError(url))
    assert capsys.readouterr().err == "https://***@host/a?***\n"
    assert "trying again" in caplog.text and "canary" not in caplog.text


class RefusedCertificateError(ssl.SSLCertVerificationError):
    """Needs two arguments, as aiohttp's does."""

    def __init__(self, host: str, reason: str):
        self.words = f"{host}: {reason}"

    def __str__(self):
        return self.words


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (RefusedCertificateError("host", "self-signed certificate"), PlaceError, "host: self-signed certificate"),
        (FileNotFoundError(), FileNotFoundError, "FileNotFoundError"),
    ],
)
def test_what_a_store_refuses_is_said_in_words(error, raised, words):
    def fail():
        raise error

    with pytest.raises(raised, match=f"^reading https://host/a: {words}$"):
        with_retries(fail, "reading https://host/a")
