"""The comparison of loaders finds what is exact, what is mixed and what is corrupt, and can find the contrary."""

import json
import multiprocessing
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import loaders
from benchmarks.loaders import compared, measure_corrupt, measure_exact, outcome, shuffle_quality, spoil
from benchmarks.token_loaders import LOADERS, Reading
from tests.forked import CONTEXT
from tests.written_shards import write_tiny_shards

ROWS = np.random.default_rng(0).integers(5, 32_000, (512, 256)).astype("<u2")
RUN = ["resume", "on 1 rank", "then on 4", "after a kill"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Processes that need not import anything, and few steps."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: CONTEXT)
    for name, value in (("EXACT_BATCH", 8), ("EXACT_STEPS", 3), ("FIRST_BATCH_STEPS", (2, 5)), ("RATE_STEPS", 2)):
        monkeypatch.setattr(loaders, name, value)
    for name, value in (("RATE_BATCH", 32), ("RATE_ROWS", 512), ("SORTED_ROWS", 2**11), ("SORTED_LENGTH", 8)):
        monkeypatch.setattr(loaders, name, value)


def write_raw(rows_RN, folder, rows_per_shard):
    folder.mkdir()
    rows_RN.tofile(folder / "rows.bin")


def restarts(how: Reading, state):
    """A raw file in the file's order, whose reader forgets where it was and checks nothing."""
    rows = np.fromfile(how.folder / "rows.bin", "<u2").reshape(-1, how.sequence_length).astype(np.int64)
    own = torch.from_numpy(rows[how.rank :: how.world_size])
    return iter(own.split(how.rank_rows)), lambda: {}


def local_step(how: Reading, state):
    """The same, which goes on at its own rank's row: right on as many ranks, wrong on others."""
    start, batches = state or 0, restarts(how, None)[0]
    given = iter(range(start + 1, 10**6))
    own = list(batches)[start // how.rank_rows :]
    counts = [start]
    return (counts.append(next(given)) or batch for batch in own), lambda: (len(counts) - 1) * how.rank_rows + start


@pytest.fixture
def raw(monkeypatch):
    def install(opened) -> str:
        monkeypatch.setitem(LOADERS, "raw", (write_raw, opened))
        return "raw"

    return install


def test_ours_is_exact_on_any_number_of_ranks_and_after_a_kill(tmp_path):
    assert measure_exact("gmlp_scale", ROWS, tmp_path / "x") == dict.fromkeys(RUN, "exact")


def test_webdataset_is_exact_only_by_running_through_its_batches_on_as_many_ranks(tmp_path):
    pytest.importorskip("webdataset")
    found = measure_exact("webdataset", ROWS, tmp_path / "x")
    assert found["resume"] == found["after a kill"] == "exact" and "of 3 batches" in found["on 1 rank"]


def test_a_loader_that_restarts_is_found_inexact(tmp_path, raw):
    found = measure_exact(raw(restarts), ROWS, tmp_path / "x")
    assert list(found) == RUN and found["resume"] == found["after a kill"] == "0 of 3 batches, 100% seen before"


def test_a_state_of_the_ranks_own_rows_is_right_on_as_many_ranks_alone(tmp_path, raw):
    found = measure_exact(raw(local_step), ROWS, tmp_path / "x")
    assert found["resume"] == found["after a kill"] == "exact"
    assert found["on 1 rank"].startswith("0 of 3 batches") and found["then on 4"].startswith("0 of 3 batches")


def test_batches_are_compared_as_sets_of_rows():
    assert compared([["a", "b"]], [["a", "b"]], []) == "exact"
    assert compared([["a", "b"], ["c", "d"]], [["a", "b"], ["c", "e"]], [["d"]]) == "1 of 2 batches, 25% seen before"
    assert compared([], [["a"]], []) != "exact"


def test_an_error_of_the_loader_is_reported():
    with pytest.raises(ChildProcessError, match=r"^ValueError: there is no such row$"):
        loaders.result(no_row)


def no_row():
    raise ValueError("there is no such row")


@pytest.mark.parametrize(
    ("name", "flipped", "cut"),
    [
        ("gmlp_scale", "refused: CorruptShardError: shard train/train-00000-0000", "refused: CorruptShardError"),
        ("webdataset", "silent: 1 wrong rows given, 1 rows lost", "refused: ReadError"),
        ("raw", "silent: 1 wrong rows given, 1 rows lost", "refused: ValueError: cannot reshape"),
    ],
)
def test_corrupt_bytes(name, flipped, cut, tmp_path, raw):
    if name == "webdataset":
        pytest.importorskip("webdataset")
    raw(restarts)
    found = measure_corrupt(name, ROWS, tmp_path / "x")
    assert found["flipped"].startswith(flipped) and found["cut"].startswith(cut)


def test_rows_that_come_twice_are_no_wrong_rows():
    hashes = loaders.hashes_of(ROWS[:4])
    assert outcome(hashes, ROWS[:4]) == "no effect"
    assert outcome([hashes[0], *hashes[:3]], ROWS[:4]) == "silent: 0 wrong rows given, 1 rows lost"


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_the_middle_of_a_file_is_spoilt(tmp_path, damage):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    spoil(path, damage)
    assert path.read_bytes() == (bytes(60) if damage == "cut" else bytes(60) + b"\xff" + bytes(39))


def test_shuffle_quality():
    uniform = np.random.default_rng(0).permutation(2**14)
    assert shuffle_quality(uniform, 64) == pytest.approx({"travel": 1, "variance": 1}, rel=0.2)
    assert shuffle_quality(np.arange(2**14), 64) == pytest.approx({"travel": 0, "variance": 64}, rel=0.01)
    blocks = np.arange(2**14).reshape(-1, 64)[np.random.default_rng(0).permutation(2**8)].reshape(-1)
    assert shuffle_quality(blocks, 64) == pytest.approx({"travel": 1, "variance": 64}, rel=0.2)


def test_every_part_is_measured_and_an_absent_loader_is_named(tmp_path, monkeypatch, succeeds):
    pytest.importorskip("webdataset")
    write_tiny_shards(tmp_path / "shards", [512], [2], sequence_length=8)
    monkeypatch.setattr(loaders, "version", absent_litdata)
    monkeypatch.setattr(loaders, "first_batch_seconds", lambda run, folder: {"seconds": 0.5})
    monkeypatch.setattr(loaders, "BUFFERS", {"webdataset": 2})
    words = ["--shards", tmp_path / "shards", "--rounds", "1", "--output", tmp_path / "report.json"]
    succeeds(loaders.main, *words, "--loaders", "gmlp_scale", "webdataset", "litdata")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["command"] == sys.argv[1:]
    ours, other = (report["loaders"][name] for name in ("gmlp_scale", "webdataset"))
    assert report["loaders"]["litdata"] == {"version": "not installed: litdata"}
    assert ours.keys() == other.keys() == {"version", *loaders.PARTS}
    assert list(ours["first_batch"]) == ["2", "5", "1000000"] and list(other["rates"]) == ["0 workers", "2 workers"]
    assert min(other["rates"].values()) > 0 and ours["bytes"] == other["bytes"] > 2
    assert ours["shuffle"]["default"]["variance"] < other["shuffle"]["2 rows"]["variance"]
    text = (tmp_path / "report.md").read_text()
    assert "| litdata | not installed: litdata |" in text and "| gmlp_scale | exact | exact | exact | exact |" in text


def absent_litdata(package):
    if package == "litdata":
        raise loaders.PackageNotFoundError(package)
    return "1"


def test_datasets_through_its_own_iterator_gives_each_row_once(tmp_path):
    pytest.importorskip("datasets")
    pytest.importorskip("torchdata")
    write, opened = LOADERS["torchdata, datasets"]
    write(ROWS, Path(tmp_path / "x"), 64)
    batches = islice(opened(Reading(tmp_path / "x", 8, 256, num_workers=0), None)[0], 64)
    assert sorted(map(tuple, torch.cat(list(batches)).tolist())) == sorted(map(tuple, ROWS.tolist()))
