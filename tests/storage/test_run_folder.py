"""The claim on a run folder: refused while another process holds it. Other errors say what they are."""

import errno
import fcntl
import multiprocessing
import os

import pytest

from gmlp_scale.errors import InputError
from gmlp_scale.storage.claim import ClaimedError
from gmlp_scale.storage.run_folder import claimed


def _claim(run_dir, messages) -> None:
    try:
        with claimed(run_dir):
            messages.put("claimed")
    except ClaimedError as error:
        messages.put(str(error))


def test_one_process_at_a_time(tmp_path):
    context = multiprocessing.get_context("fork")
    messages = context.Queue()
    with claimed(tmp_path / "run"):
        other = context.Process(target=_claim, args=(tmp_path / "run", messages))
        other.start()
        assert f"is in use by process {os.getpid()} on host" in messages.get(timeout=300)
        other.join()
    other = context.Process(target=_claim, args=(tmp_path / "run", messages))
    other.start()
    assert messages.get(timeout=300) == "claimed"
    other.join()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EIO])
def test_a_filesystem_that_cannot_lock_is_not_a_folder_in_use(number, tmp_path, monkeypatch):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(InputError, match=f"cannot be created or locked .{os.strerror(number)}.; set output_dir to"):
        claimed(tmp_path / "run").__enter__()


def test_a_folder_that_cannot_be_created_says_why_and_what_to_change(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/run/LOCK cannot be created .* .Not a directory.; set output_dir to"):
        claimed(tmp_path / "file" / "run").__enter__()


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path):
    with claimed(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").write_text("")
    assert (tmp_path / "run" / "LOCK").exists()
    with pytest.raises(ValueError, match="refused"), claimed(tmp_path / "other"):
        raise ValueError("refused")
    assert not (tmp_path / "other").exists()
