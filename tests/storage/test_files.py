import errno
import json
import logging
import os
import socket
import ssl

import pytest
from botocore.exceptions import NoCredentialsError

from gmlp_scale.errors import InputError
from gmlp_scale.storage.files import (
    PlaceError,
    StoreError,
    is_local,
    open_filesystem,
    parse_json,
    plain_place,
    print_error,
    read_file,
    read_json,
    redacted,
    with_retries,
    write_file,
)


def test_a_url_that_nothing_opens_is_one_clear_error():
    with pytest.raises(OSError, match=r"nosuch://bucket/shards cannot be opened: .*nosuch"):
        open_filesystem("nosuch://bucket/shards")


@pytest.mark.parametrize(
    ("place", "plain"),
    [
        ("s3://bucket/a/", "s3://bucket/a"), ("s3://bucket//a//b", "s3://bucket//a//b"), ("s3://", "s3://"),
        ("./a//b/", "a/b"), ("~/a", "/home/x/a"), ("", ""), (None, None),
    ],
)  # fmt: skip
def test_a_place_has_one_plain_form(monkeypatch, place, plain):
    monkeypatch.setenv("HOME", "/home/x")
    assert plain_place(place) == plain


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
    ("text", "found"),
    [
        ("[" * 100_000, "maximum recursion depth"),
        ("[" * 101 + "]" * 101, "it has more than 100 levels"),
        ('{"a": [1' + "0" * 400 + "]}", "int too large"),
        ("1" * 5000, "Exceeds the limit"),
        (r'{"\ud83d": 1}', "surrogates not allowed"),
        (b'"\xff"', "can't decode byte 0xff"),
        ("", "Expecting value"),
    ],
)
def test_json_that_would_fail_later_is_refused_where_it_is_read(text, found, tmp_path):
    with pytest.raises(InputError, match=rf"^a.json is damaged \(.*{found}.*\): mend or remove it$"):
        parse_json(text, "a.json")


def test_json_that_can_be_used_is_read(tmp_path):
    text = r'{"a": [null, true, -1.5, 1e999, 170], "\ud83d\ude00": ' + "[" * 99 + "]" * 99 + "}"
    (tmp_path / "a.json").write_text(text)
    assert read_json(tmp_path / "a.json") == json.loads(text)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_what_may_never_end_is_not_read(make, tmp_path):
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(PlaceError, match=r"metrics.jsonl is a pipe or a device; needed: an ordinary file"):
        read_file(tmp_path / "metrics.jsonl")


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


@pytest.fixture
def ask(monkeypatch):
    """ask(answers, num_waits): what with_retries makes of an operation with these answers; some may be errors."""
    monkeypatch.setattr("gmlp_scale.storage.files._store_has_answered", False)

    def ask(answers: list, num_waits: int):
        monkeypatch.setattr("gmlp_scale.storage.files._WAIT_SECONDS", (0.0,) * num_waits)

        def operation():
            if isinstance(answer := answers.pop(0), Exception):
                raise answer
            return answer

        return with_retries(operation, "reading s3://b/x")

    return ask


def caused_by(cause: Exception) -> Exception:
    """As botocore's errors stand before aiohttp's."""
    error = RuntimeError(str(cause))
    error.__cause__ = cause
    return error


REFUSED = caused_by(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
CHECK = "check that this machine has a network"


def test_retries_end_in_one_error_that_names_the_object(ask):
    answers = [caused_by(ConnectionResetError("reset")) for _ in range(4)]
    with pytest.raises(OSError, match="reading s3://b/x failed 3 times, at last with RuntimeError"):
        ask(answers, num_waits=2)
    assert len(answers) == 1


def test_a_store_that_answered_may_be_out_of_reach_for_a_moment(ask):
    assert ask([1], num_waits=1) == 1
    assert ask([REFUSED, 2], num_waits=1) == 2


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (caused_by(NoCredentialsError()), PlaceError, "Unable to locate credentials; give the store's key in the env"),
        (REFUSED, StoreError, f".*refused; {CHECK}"),
        (caused_by(socket.gaierror(socket.EAI_AGAIN, "no such name")), StoreError, f".*no such name; {CHECK}"),
        (RefusedCertificateError("host", "self-signed certificate"), PlaceError, "host: self-signed certificate$"),
        (FileNotFoundError(), FileNotFoundError, "FileNotFoundError$"),
    ],
)
def test_what_no_waiting_mends_is_reported_at_once(error, raised, words, ask):
    with pytest.raises(raised, match=f"^reading s3://b/x: {words}"):
        ask([error], num_waits=0)
