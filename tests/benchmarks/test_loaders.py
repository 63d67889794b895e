"""The comparison of loaders finds what is exact, what is mixed and what is corrupt, and can find the contrary."""

import json
import multiprocessing
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from benchmarks import loaders
from benchmarks.loaders import corrupt, exact, outcome, shuffle_quality
from benchmarks.token_loaders import LOADERS, Library, Reading
from tests.forked import CONTEXT
from tests.written_shards import write_tiny_shards

ROWS = np.random.default_rng(0).integers(5, 32_000, (512, 256)).astype("<u2")
RUNS = ["on 2 ranks again", "on 1 rank", "then on 4", "after SIGKILL"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Processes that need not import anything, and few steps."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: CONTEXT)
    values = {
        "ROWS_PER_SHARD": 32,
        "CORRUPT_ROWS": 512,
        "EXACT_BATCH": 8,
        "EXACT_STEPS": 3,
        "FIRST_BATCH_STEPS": (2, 5),
    }
    values |= {"RATE_BATCH": 32, "RATE_STEPS": 2, "SORTED_ROWS": 2**11, "SORTED_LENGTH": 8, "SORTED_BATCH": 64}
    for name, value in values.items():
        monkeypatch.setattr(loaders, name, value)


def write_raw(rows_RN, folder, rows_per_shard):
    folder.mkdir(parents=True)
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


def exact_of(library, folder):
    library.write(ROWS, folder / "rows", 32)
    return exact(library, folder / "rows", ROWS)


def test_ours_is_exact_on_any_number_of_ranks_and_after_a_kill(tmp_path):
    assert exact_of(LOADERS["gmlp_scale"], tmp_path) == dict.fromkeys(RUNS, "exact")


def test_webdataset_is_exact_only_by_running_through_its_batches_on_as_many_ranks(tmp_path):
    pytest.importorskip("webdataset")
    found = exact_of(LOADERS["webdataset"], tmp_path)
    assert found["on 2 ranks again"] == found["after SIGKILL"] == "exact" and found["on 1 rank"] == "0 of 3 batches"


def test_a_loader_that_restarts_is_found_inexact(tmp_path):
    assert exact_of(Library(write_raw, restarts), tmp_path) == dict.fromkeys(RUNS, "0 of 3 batches")


def test_a_state_of_the_ranks_own_rows_is_right_on_as_many_ranks_alone(tmp_path):
    found = exact_of(Library(write_raw, local_step), tmp_path)
    assert found["on 2 ranks again"] == found["after SIGKILL"] == "exact"
    assert found["on 1 rank"] == found["then on 4"] == "0 of 3 batches"


def test_an_error_of_the_loader_is_reported():
    with pytest.raises(ValueError, match=r"^there is no such row$") as raised:
        loaders.result(no_row)
    assert loaders.last_line(raised.value) == "ValueError: there is no such row"


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
def test_corrupt_bytes(name, flipped, cut, tmp_path):
    if name == "webdataset":
        pytest.importorskip("webdataset")
    found = corrupt(LOADERS.get(name, Library(write_raw, restarts)), tmp_path / "rows", ROWS)
    assert found["a byte flipped"].startswith(flipped) and found["a file cut"].startswith(cut)


def test_rows_that_come_twice_are_no_wrong_rows():
    assert outcome(ROWS[:4], ROWS[:4]) == "no effect"
    assert outcome(ROWS[[0, 0, 1, 2]], ROWS[:4]) == "silent: 0 wrong rows given, 1 rows lost"


def test_shuffle_quality():
    uniform = np.random.default_rng(0).permutation(2**14)
    assert shuffle_quality(uniform) == pytest.approx({"travel": 1, "variance": 1}, rel=0.2)
    assert shuffle_quality(np.arange(2**14)) == pytest.approx({"travel": 0, "variance": 64}, rel=0.01)
    blocks = np.arange(2**14).reshape(-1, 64)[np.random.default_rng(0).permutation(2**8)].reshape(-1)
    assert shuffle_quality(blocks) == pytest.approx({"travel": 1, "variance": 64}, rel=0.2)


def test_every_part_is_measured_and_one_that_fails_does_not_end_the_others(tmp_path, monkeypatch, succeeds):
    pytest.importorskip("webdataset")
    write_tiny_shards(tmp_path / "shards", [512], [2], sequence_length=8)
    webdataset = replace(LOADERS["webdataset"], buffer=2)
    few = {"gmlp_scale": LOADERS["gmlp_scale"], "webdataset": webdataset, "raw": Library(write_raw, ends)}
    monkeypatch.setattr(loaders, "LOADERS", few)
    succeeds(loaders.main, "--shards", tmp_path / "shards", "--output", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    ours, other, raw = report["loaders"].values()
    parts = ["version", "exact", "corrupt", "size", "shuffle", "first_batch", "rates"]
    assert list(ours) == list(other) == list(raw) == parts and "failed" not in str([ours, other])
    assert raw["exact"] == {"failed": "ValueError: no rows"} and raw["size"]["bytes per token"] == 2
    assert list(ours["first_batch"]) == ["at step 2", "at step 5"] and list(other["rates"]) == [
        "2 workers",
        "0 workers",
    ]
    assert min(other["rates"].values()) > 0 and ours["size"] == other["size"]
    assert ours["shuffle"]["variance, default"] < other["shuffle"]["variance, buffer of 2"]
    assert "| exact: then on 4 | exact | 0 of 3 batches | - |" in (tmp_path / "report.md").read_text()


def ends(how: Reading, state):
    raise ValueError("no rows")


def test_an_absent_library_is_named(tmp_path, monkeypatch, launched):
    write_tiny_shards(tmp_path / "shards", [512], [2], sequence_length=8)
    monkeypatch.setattr(loaders, "LOADERS", {"other": Library(write_raw, restarts, ("no-such-package",))})
    code, _, message = launched(loaders.main, "--shards", tmp_path / "shards", "--output", tmp_path / "report.json")
    assert code == 1 and "no-such-package is not installed" in message


def test_datasets_through_its_own_iterator_gives_each_row_once(tmp_path):
    pytest.importorskip("datasets")
    pytest.importorskip("torchdata")
    library = LOADERS["torchdata over datasets"]
    library.write(ROWS, tmp_path / "x", 64)
    batches = islice(library.opened(Reading(tmp_path / "x", 8, 256, workers=0), None)[0], 64)
    assert sorted(map(tuple, torch.cat(list(batches)).tolist())) == sorted(map(tuple, ROWS.tolist()))
