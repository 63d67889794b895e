"""A store that fails once as a job begins or opens a file is asked again."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gmlp_scale.prepare.input_files import find_inputs
from gmlp_scale.prepare.job import JobFolder
from gmlp_scale.prepare.read_records import FileReader, Record
from gmlp_scale.storage.files import write_file


@pytest.fixture
def fail_once(monkeypatch):
    """fail_once(name): the store's next call of this method fails."""
    monkeypatch.setattr("gmlp_scale.storage.files._WAIT_SECONDS", (0.0,))

    def set_up(name: str) -> None:
        method, failures = getattr(MemoryFileSystem, name), [ConnectionResetError("reset")]

        def fail_first(*arguments, **options):
            if failures:
                raise failures.pop()
            return method(*arguments, **options)

        monkeypatch.setattr(MemoryFileSystem, name, fail_first)

    yield set_up
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_a_job_begins_and_a_file_is_opened(fail_once):
    fail_once("exists")
    job = JobFolder("memory://unsteady/out")
    with job.begun({"tasks": 1}):
        assert job.read("job.json") == {"tasks": 1}
    write_file("memory://unsteady/a.txt", b"text")
    (file,) = find_inputs(["memory://unsteady/a.txt"])
    fail_once("open")
    assert list(FileReader(file, text_field="text", max_record_bytes=10)) == [Record("text", 1)]
