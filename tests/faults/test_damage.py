"""Damaged checkpoints and shards, saves that are cut off, pickles: what this project and plain parts make of it."""

import pickle
import random
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import webdataset

from gmlp_scale.data.manifest import CorruptShardError
from gmlp_scale.data.shards import Manifest, ShardRows
from tests.checkpoint.test_format import Malicious
from tests.damage import damaged
from tests.faults.plain_parts import PARTS, is_whole
from tests.faults.table import OURS
from tests.forked import fork
from tests.gloo_ranks import rank_variables, run_ranks
from tests.written_shards import write_tiny_shards

pytestmark = pytest.mark.faults
NUM_DAMAGES, NUM_SHARD_DAMAGES, NUM_LIMITS = 100, 300, 10
SLOW = {"DeepSpeed": 20}  # it takes seconds for each load


def _files(folder: Path) -> list[Path]:
    """All but the Python file that DeepSpeed lays beside its own, which nothing reads."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py")


def _damage_again_and_again(part: str, folder: Path) -> tuple[int, int]:
    """How often something else was loaded than saved, or an error raised; and how often the former."""
    PARTS[part].save(folder, 1)
    draw, files, found, lost = random.Random(part), _files(folder), 0, 0
    for trial in range(SLOW.get(part, NUM_DAMAGES)):
        path = files[trial % len(files)]
        good = path.read_bytes()
        path.write_bytes(damaged(draw, good, draw.randrange(len(good))))
        try:
            lost += not is_whole(PARTS[part].load(folder), (1,))
        except BaseException:  # DCP's own error is no Exception
            found += 1
        path.write_bytes(good)
    assert is_whole(PARTS[part].load(folder), (1,))
    return found + lost, lost


@pytest.mark.parametrize("part", PARTS)
def test_damage_is_found(part, tmp_path, trials):
    ((num_trials, lost),) = run_ranks(_damage_again_and_again, 1, part, tmp_path)
    assert part != OURS or (num_trials, lost) == (NUM_DAMAGES, 0)
    trials("a checkpoint's bit flipped, byte zeroed, file cut or longer", num_trials, lost, part=part)


def _save_twice(part: str, folder: Path, num_bytes: int, is_killed: bool) -> None:
    """No file of the second save may grow beyond `num_bytes`: there the kernel kills this process, or write() fails."""
    PARTS[part].save(folder, 1)
    if is_killed:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    try:
        PARTS[part].save(folder, 2)
    except BaseException as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(f"{part} at {num_bytes} bytes: {error!r}"[:200])


def _sizes(part: str, folder: Path) -> list[int]:
    PARTS[part].save(folder, 1)
    return [path.stat().st_size for path in _files(folder)]


def _num_lost(part: str, folders: list[Path]) -> int:
    """Of how many folders neither the first nor the second save can be loaded whole."""
    lost = 0
    for folder in folders:
        try:
            lost += not is_whole(PARTS[part].load(folder), (1, 2))
        except BaseException:
            lost += 1
    return lost


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "full disk"])
@pytest.mark.parametrize("part", PARTS)
def test_what_was_good_survives_a_save_that_is_cut_off(part, is_killed, tmp_path, trials):
    (sizes,) = run_ranks(_sizes, 1, part, tmp_path)
    largest = max(sizes)
    folders = [tmp_path / f"{number}" for number in range(NUM_LIMITS)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        limit = number * (largest - 1) // (NUM_LIMITS - 1)
        child = fork(_save_twice, part, folder, limit, is_killed, environment=rank_variables(1)[0])
        child.join()
        assert child.exitcode == (-signal.SIGXFSZ if is_killed else 0)
    (lost,) = run_ranks(_num_lost, 1, part, folders)
    assert part != OURS or not lost
    trials("killed within a save" if is_killed else "full disk during a save", NUM_LIMITS, lost, part=part)


def _load_pickles(part: str, folder: Path, canary: Path) -> tuple[int, int]:
    """Each file in turn is a pickle that makes `canary`. How many files there were, and how often it was made."""
    PARTS[part].save(folder, 1)
    files, lost = _files(folder), 0
    for path in files:
        good = path.read_bytes()
        path.write_bytes(pickle.dumps(Malicious(canary)))
        try:
            PARTS[part].load(folder)
        except BaseException as error:
            print(f"{part}: {error!r}"[:200])
        lost += canary.exists()
        canary.unlink(missing_ok=True)
        path.write_bytes(good)
    return len(files), lost


@pytest.mark.parametrize("part", PARTS)
def test_a_pickle_is_not_run(part, tmp_path, trials):
    (tmp_path / "checkpoints").mkdir()
    ((num_files, lost),) = run_ranks(_load_pickles, 1, part, tmp_path / "checkpoints", tmp_path / "canary")
    assert part != OURS or not lost
    trials("pickles where a file is read", num_files, lost, part=part)


def _read_plainly(path) -> np.ndarray:
    return np.concatenate([sample["npy"] for sample in webdataset.WebDataset(str(path), shardshuffle=False).decode()])


def test_every_damage_of_a_shard_is_found(tmp_path, trials):
    rows = write_tiny_shards(tmp_path, [600], sequence_length=16)["train"]
    (shard,) = Manifest.load(tmp_path).splits.train
    path = tmp_path / shard.name
    good, draw, found, lost = path.read_bytes(), random.Random(0), 0, 0
    assert (_read_plainly(path) == rows).all()
    for _ in range(NUM_SHARD_DAMAGES):
        path.write_bytes(damaged(draw, good, draw.randrange(len(good))))
        with pytest.raises(CorruptShardError):
            ShardRows(path, shard, 16)
        try:
            lost += not np.array_equal(_read_plainly(path), rows)
        except Exception:
            found += 1
    row = "a shard's bit flipped, byte zeroed, file cut or longer"
    trials(row, NUM_SHARD_DAMAGES)
    trials(row, found + lost, lost, part="webdataset")
