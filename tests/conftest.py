"""Options and fixtures that every test may use."""

import atexit
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

# Two workers have two cores, and threads that wait for each other spin, which a busy machine makes much worse. Torch
# reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from gmlp_scale.storage import claim

# transformers copies the code of an export to one folder for all processes of a user: two suites would mix theirs up.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="gmlp_scale-modules-")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)

# A suite that `nohup` or a shell's `&` started ignores these, and so would the runs that tests stop by them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

NEEDS_S3 = "needs s3fs and moto's server"
STARTED = time.monotonic()


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the recipes give now")
    parser.addoption("--faults", metavar="FILE", help="run the tests of faults alone and write their table into FILE")
    parser.addoption("--hosts", metavar="FILE", help="run the tests on several hosts alone and write FILE")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--faults"):
        chosen = [item for item in items if "trials" in item.fixturenames]
    elif config.getoption("--hosts"):
        chosen = [item for item in items if item.get_closest_marker("hosts")]
    else:
        return
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
    if item.get_closest_marker("faults") and not item.config.getoption("--faults"):
        pytest.skip("only in `make faults`")
    if item.get_closest_marker("hosts") and not item.config.getoption("--hosts"):
        pytest.skip("only in `make hosts`")


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if path := config.getoption("--faults"):
        from tests.faults.table import document

        kind = "trials"
    elif path := config.getoption("--hosts"):
        from tests.hosts.table import document

        kind = "seen"
    else:
        return
    passed = terminalreporter.stats.get("passed", [])
    records = [value for report in passed for name, value in report.user_properties if name == kind]
    text = document(records, time.monotonic() - STARTED)
    terminalreporter.write_line(text)
    if records and exitstatus == 0:
        Path(path).write_text(text)


@pytest.fixture(autouse=True)
def restored_log_and_signals():
    """A launcher that a test calls sets up its own log, which hides the lines from the tests after it. And a run that
    was asked to stop keeps hearing the signals, as its process is to end."""
    log = logging.getLogger("gmlp_scale")
    handlers, propagate, level = log.handlers, log.propagate, log.level
    hearing = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    }
    yield
    for number, handler in hearing.items():
        signal.signal(number, handler)
    log.handlers, log.propagate = handlers, propagate
    log.setLevel(level)


@pytest.fixture(scope="session")
def forty_rows(tmp_path_factory) -> Path:
    """Shards with 40 training rows of 32 tokens in two files, and 12 held-out rows; not to be changed."""
    from tests.written_shards import add_tokenizer, write_tiny_shards

    folder = tmp_path_factory.mktemp("data") / "shards"
    write_tiny_shards(folder, [17, 23], [12], sequence_length=32)
    add_tokenizer(folder)
    return folder


@pytest.fixture
def world(monkeypatch):
    """That of one process on a CPU."""
    from gmlp_scale.distributed.world import start_world

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with start_world(30, "cpu") as world:
        yield world


@pytest.fixture
def trials(record_property):
    """trials(row, number of trials, lost) adds to the table of `make faults`; tests/faults/table.py has the rows."""
    from tests.faults.table import Trials

    return Trials(record_property)


@pytest.fixture
def launched(monkeypatch, capsys):
    """launched(main, options...) -> (exit code, what it printed, its error)."""

    def run(main, *options) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["launcher", *map(str, options)])
        try:
            code = main()
        except SystemExit as end:  # argparse's own refusals
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def succeeds(launched):
    """succeeds(main, options...) -> what it printed."""

    def run(main, *options) -> str:
        code, printed, error = launched(main, *options)
        assert code == 0, error
        return printed

    return run


@pytest.fixture
def refuses(launched):
    """refuses(message, main, options...) -> the error, which is all that the launcher prints; it leaves with 2."""

    def run(message: str, main, *options) -> str:
        code, printed, error = launched(main, *options)
        assert (code, printed) == (2, ""), options
        assert message in error and "Traceback" not in error, error
        return error

    return run


@pytest.fixture
def update_golden(request) -> bool:
    return request.config.getoption("--update-golden")


@pytest.fixture
def quick(monkeypatch):
    """Claims that change often and are not given up while they do, however slow the machine. Processes never seem to
    have ended."""
    monkeypatch.setattr(claim, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(claim, "_GONE_AFTER_SECONDS", 600.0)
    monkeypatch.setattr(claim, "_LOOK_EVERY_SECONDS", 0.02)
    monkeypatch.setattr(claim, "_is_other_process", lambda process: True)


@pytest.fixture(scope="module")
def server():
    """A FaultyS3."""
    server = pytest.importorskip("tests.data_prep.faulty_s3", reason=NEEDS_S3).FaultyS3()
    yield server
    server.close()


@pytest.fixture
def s3(server, monkeypatch):
    """A client of `server`, which has an empty bucket named bucket."""
    s3fs = pytest.importorskip("s3fs", reason=NEEDS_S3)
    boto3 = pytest.importorskip("boto3", reason=NEEDS_S3)
    for name, value in {
        "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    server.fault_fraction, server.is_refusing, server.is_late = 0.0, False, False
    for entry in client.list_objects_v2(Bucket="bucket").get("Contents", []):
        client.delete_object(Bucket="bucket", Key=entry["Key"])
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def no_launcher(monkeypatch) -> None:
    """No launcher's variables, of which accelerate would take one that an earlier test's world left for many ranks."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
