"""A run folder on a disk or at a URL: one job holds it, and whatever the store does, the local files go up."""

import errno
import fcntl
import multiprocessing
import os
import threading

import fsspec
import pytest

from gmlp_scale.errors import InputError
from gmlp_scale.storage import files, run_folder
from gmlp_scale.storage.claim import ClaimedError
from gmlp_scale.storage.files import list_files, read_file, write_file
from gmlp_scale.storage.run_folder import RemoteFolder, claimed


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


@pytest.mark.parametrize("name", ["LOCK", "config.yaml", "metrics.jsonl", "skipped_steps.jsonl", "wandb_id"])
def test_a_pipe_in_the_folder_is_refused(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=f"{name} is a pipe or a device, which a run would wait for: move it away"):
        claimed(tmp_path).__enter__()


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path):
    with claimed(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").write_text("")
    assert (tmp_path / "run" / "LOCK").exists()
    with pytest.raises(ValueError, match="refused"), claimed(tmp_path / "other"):
        raise ValueError("refused")
    assert not (tmp_path / "other").exists()


URL = "memory://runs/smoke"


@pytest.fixture(autouse=True)
def memory():
    yield fsspec.filesystem("memory")
    fsspec.filesystem("memory").rm("/", recursive=True)


@pytest.fixture
def folder(quick, tmp_path):
    return RemoteFolder(URL, tmp_path / "local")


def contents() -> dict[str, bytes]:
    return {name: read_file(f"{URL}/{name}") for name in list_files(URL) if not name.startswith("claims/")}


def test_a_second_job_is_refused_and_one_that_lost_its_claim_writes_nothing(folder, tmp_path):
    refused = f"another job writes to {URL}: process {os.getpid()} on .* or give this run another name"
    lost = f"another job has taken {URL} over"
    with pytest.raises(ClaimedError, match=lost), folder.held():
        with pytest.raises(ClaimedError, match=refused):
            RemoteFolder(URL, tmp_path / "other").held().__enter__()
        write_file(f"{URL}/claims/000002.json", b"{}")  # as while this process stood still
        (folder.local / "metrics.jsonl").write_text("late")
        folder.check_claim()
        with pytest.raises(ClaimedError, match=lost):
            folder.before_publish()
        with pytest.raises(ClaimedError, match=lost):
            folder.check_claim()
    assert contents() == {}


def test_what_changes_goes_up_while_the_run_goes_on(folder, monkeypatch):
    monkeypatch.setattr(run_folder, "PUSH_EVERY_SECONDS", 0.01)
    write_file(f"{URL}/metrics.jsonl", b"1\n")
    write_file(f"{URL}/best/config.json", b"{}")
    with folder.held():
        assert sorted(path.name for path in folder.local.iterdir()) == ["metrics.jsonl"]
        (folder.local / "tensorboard").mkdir()
        (folder.local / "tensorboard/events").write_bytes(b"event")
        with (folder.local / "metrics.jsonl").open("ab") as file:
            file.write(b"2\n")
        while contents().get("metrics.jsonl") != b"1\n2\n" or "tensorboard/events" not in contents():
            threading.Event().wait(0.01)
        for name in ("best.new/weights", "checkpoints/step_000000001.tmp-x-1/file", ".config.yaml.tmp"):
            (folder.local / name).parent.mkdir(parents=True, exist_ok=True)
            (folder.local / name).write_bytes(b"not whole")
    expected = {"metrics.jsonl": b"1\n2\n", "best/config.json": b"{}", "tensorboard/events": b"event"}
    assert contents() == expected and not folder.local.exists()


def test_a_store_that_fails_is_logged_once_and_ends_nothing_before_the_end(folder, memory, monkeypatch, caplog):
    monkeypatch.setattr(files, "_WAIT_SECONDS", ())

    def fail(*arguments, **options):
        raise ConnectionResetError("reset")

    with (
        pytest.raises(OSError, match=r"writing .*metrics.jsonl failed 1 times.* The files are in .*local: copy them"),
        folder.held(),
    ):
        (folder.local / "metrics.jsonl").write_bytes(b"1\n")
        with monkeypatch.context() as patched:
            patched.setattr(type(memory), "put_file", fail)
            folder._try_push()
            folder._try_push()
        assert len(caplog.messages) == 1 and f"do not reach {URL}" in caplog.messages[0]
        folder._try_push()
        assert contents() == {"metrics.jsonl": b"1\n"}
        (folder.local / "metrics.jsonl").write_bytes(b"1\n2\n")
        monkeypatch.setattr(type(memory), "put_file", fail)
    assert (folder.local / "metrics.jsonl").read_bytes() == b"1\n2\n", "nothing is lost"


def test_what_an_earlier_run_left_on_this_host_is_not_taken_for_the_urls(folder):
    folder.local.mkdir()
    (folder.local / "metrics.jsonl").write_bytes(b"stale")
    with folder.held():
        assert not list(folder.local.iterdir())
    assert contents() == {}
