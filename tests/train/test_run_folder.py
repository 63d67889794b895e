"""The claim on a run folder: refused while another process holds it, and other errors told as what they are."""

import errno
import fcntl
import multiprocessing
import os

import pytest

from gmlp_scale.train.run_folder import RunFolderError, claimed


def _claim(run_dir, messages) -> None:
    try:
        with claimed(run_dir):
            messages.put("claimed")
    except RunFolderError as error:
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
    with pytest.raises(RunFolderError, match=f"cannot be locked .{os.strerror(number)}.; set output_dir to"):
        claimed(tmp_path / "run").__enter__()
