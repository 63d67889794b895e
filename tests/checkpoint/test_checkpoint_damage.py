"""What each kind of damage leads to, and which checkpoint is then taken."""

import logging
import pickle
import random
from pathlib import Path

import pytest

from gmlp_scale.checkpoint import pieces
from gmlp_scale.checkpoint.format import Checkpoint, CheckpointError
from gmlp_scale.checkpoint.stores import newest_checkpoint
from gmlp_scale.errors import OtherRankError
from tests.checkpoint.fake_engine import (
    FakeEngine,
    alone,
    assert_holds,
    checkpointer_on,
    names_in,
    on_ranks,
    reseal,
    save_steps,
)
from tests.damage import damaged


def test_nothing_there_is_none(tmp_path):
    assert alone(tmp_path).newest() is None
    assert newest_checkpoint(tmp_path / "no such folder") == (None, [])


def test_keeps_the_newest_and_only_them(tmp_path):
    save_steps(tmp_path, [1, 2, 3, 10], keep_last=2)
    assert names_in(tmp_path) == ["step_000000003", "step_000000010"]


def test_leftovers_of_a_dead_run_go_at_the_start_and_nothing_else(tmp_path):
    save_steps(tmp_path, [1])
    left = ["step_000000002.tmp-0123abcd", "step_000000003.tmp-deleted", "step_000000004.damaged-0123abcd", "mine"]
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    assert newest_checkpoint(tmp_path)[0].step == 1
    assert len(names_in(tmp_path)) == 5  # looking changes nothing
    alone(tmp_path).newest()
    assert names_in(tmp_path) == ["mine", "step_000000001", "step_000000004.damaged-0123abcd"]


def test_a_step_saved_or_resumed_from_is_not_saved_again(tmp_path):
    checkpointer, engine = alone(tmp_path), FakeEngine(seed=5)
    checkpointer.save(engine, 5)
    assert checkpointer.save(engine, 5) == 0.0
    checkpointer.wait()
    resumed = alone(tmp_path)
    assert resumed.newest().step == 5
    assert resumed.save(engine, 5) == 0.0
    assert engine.num_state_calls == 1


def test_after_a_fallback_the_damaged_step_is_set_aside_and_written_anew(tmp_path):
    save_steps(tmp_path, [1, 2])
    (tmp_path / "step_000000002" / "rank_00000_000.safetensors").write_bytes(b"")

    def resume(world):
        checkpointer = checkpointer_on(tmp_path, world)
        assert checkpointer.newest().step == 1
        checkpointer.save(FakeEngine(world.rank, 2, seed=7), 2)
        checkpointer.wait()

    on_ranks(2, resume)
    assert_holds(newest_checkpoint(tmp_path)[0], seed=7)
    first, second, damaged = names_in(tmp_path)
    assert (first, second) == ("step_000000001", "step_000000002") and damaged.startswith("step_000000002.damaged-")


def test_never_writes_over_a_checkpoint_that_is_there(tmp_path):
    save_steps(tmp_path, [3])
    careless = alone(tmp_path)  # did not ask for the newest first
    careless.save(FakeEngine(seed=4), 3)
    with pytest.raises(CheckpointError, match=r"step_000000003 is there already"):
        careless.wait()
    assert names_in(tmp_path) == ["step_000000003"]
    assert_holds(newest_checkpoint(tmp_path)[0], seed=3)


def test_all_damaged_is_an_error_on_every_rank_and_rank_0_names_each(tmp_path):
    save_steps(tmp_path, [1, 2])
    (tmp_path / "step_000000001" / "DONE").unlink()
    (tmp_path / "step_000000002" / "rank_00000_000.safetensors").unlink()

    def find(world):
        with pytest.raises(CheckpointError if world.rank == 0 else OtherRankError) as raised:
            checkpointer_on(tmp_path, world).newest()
        return str(raised.value)

    message = on_ranks(2, find)[0]
    assert "step_000000001 has no DONE" in message
    assert "step_000000002: rank_00000_000.safetensors: No such file" in message
    assert names_in(tmp_path) == ["step_000000001", "step_000000002"]


def test_a_renamed_folder_is_not_taken_for_another_step(tmp_path):
    save_steps(tmp_path, [1, 2])
    (tmp_path / "step_000000001").rename(tmp_path / "step_000000009")
    assert newest_checkpoint(tmp_path)[0].step == 2


def test_300_damages_are_all_found_and_the_checkpoint_before_is_taken(tmp_path, small_files, caplog, trials):
    save_steps(tmp_path, [1, 2], world_size=2)
    draw, newest = random.Random(0), tmp_path / "step_000000002"
    files = sorted(newest.iterdir())
    assert len(files) > 4
    for trial in range(300):
        path = files[trial % len(files)]
        good = path.read_bytes()
        header_bytes = 8 + int.from_bytes(good[:8], "little") if path.suffix else len(good) - 80
        # Length, header, data; of DONE start, body, seal.
        regions = [(0, 8), (8, header_bytes), (header_bytes, len(good))]
        position = draw.randrange(*regions[trial // len(files) % 3])
        path.write_bytes(damaged(draw, good, position))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "gmlp_scale"):
            taken, passed_over = newest_checkpoint(tmp_path)
        assert (taken.step, passed_over) == (1, [newest.name]), (path.name, position)
        (warning,) = caplog.messages
        assert "step_000000002" in warning and "step_000000001" in warning
        assert path.name in warning
        path.write_bytes(good)
    assert newest_checkpoint(tmp_path)[0].step == 2
    trials("a checkpoint's bit flipped, byte zeroed, file cut or longer", 300)


class Malicious:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def test_a_pickle_is_never_run(tmp_path, trials):
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Malicious(canary)))
    assert canary.exists()  # it would
    canary.unlink()

    save_steps(tmp_path, [1])
    folder, payload = tmp_path / "step_000000001", pickle.dumps(Malicious(canary))
    file = folder / "rank_00000_000.safetensors"
    file.write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"rank_00000_000\.safetensors has"):
        Checkpoint.open(folder)
    record = {"bytes": len(payload), "xxh3_128": pieces.file_checksum(file)}
    reseal(folder, lambda done: done["files"].update({file.name: record}))
    with pytest.raises(CheckpointError, match=r"rank_00000_000\.safetensors: Error while deserializing header"):
        Checkpoint.open(folder)
    (folder / "DONE").write_bytes(payload)
    with pytest.raises(CheckpointError, match="DONE cannot be used"):
        Checkpoint.open(folder)
    assert not canary.exists()
    trials("pickles where a file is read", 3)


def test_a_done_from_elsewhere_cannot_name_files_outside(tmp_path):
    save_steps(tmp_path, [1])
    folder = tmp_path / "step_000000001"
    reseal(folder, lambda done: done["files"].update({"../secret": {"bytes": 1, "xxh3_128": "0" * 32}}))
    with pytest.raises(CheckpointError, match=r"names files that no checkpoint has.*\.\./secret"):
        Checkpoint.open(folder)
    save_steps(tmp_path / "other", [1])
    folder = tmp_path / "other" / "step_000000001"
    for piece, error in [
        (["../secret", 0, 1], "DONE cannot be used"),  # as in format 2
        ([7, 1, 0, 1], "pieces in a file that it does not list: rank_00007_000"),
    ]:
        reseal(folder, lambda done, piece=piece: done["tensors"]["model.temperature"].update(pieces=[piece]))
        with pytest.raises(CheckpointError, match=error):
            Checkpoint.open(folder)


def test_a_checkpoint_of_another_version_is_not_taken_for_damaged(tmp_path):
    save_steps(tmp_path, [1, 2])
    reseal(tmp_path / "step_000000002", lambda done: done.update(format_version=1))
    refused = r"step_000000002 is a checkpoint of format 1.* reads formats \(2, 3\) only"
    with pytest.raises(CheckpointError, match=refused):
        alone(tmp_path).newest()
    assert names_in(tmp_path) == ["step_000000001", "step_000000002"]  # nothing was moved away


def test_a_damaged_version_is_not_taken_for_another_one(tmp_path, trials):
    save_steps(tmp_path, [1, 2, 3])
    done = tmp_path / "step_000000003" / "DONE"
    text = done.read_text()
    for bit in range(7):  # one of them makes another digit, and most something else
        done.write_text(text.replace('version": 3,', f'version": {chr(ord("3") ^ 1 << bit)},'))
        checkpoint, damaged = newest_checkpoint(tmp_path)
        assert (checkpoint.step, damaged) == (2, ["step_000000003"])
    trials("a checkpoint's bit flipped, byte zeroed, file cut or longer", 7)


def test_an_index_that_the_files_contradict_is_found(tmp_path, trials):
    """Only someone who seals DONE anew can write one."""
    save_steps(tmp_path, [1, 2], world_size=2)
    key, done = "model.blocks.0.weight", tmp_path / "step_000000002" / "DONE"  # (4, 3, 2), of which each rank has two
    text = done.read_text()
    for change, error in [
        ({"shape": [4, 2, 3]}, f"rank_00000_000.safetensors does not hold {key} as DONE says"),
        ({"shape": [5, 3, 2]}, r"the pieces hold 4 indices of a tensor of shape \(5, 3, 2\)"),
        ({"pieces": [[0, 1, 0, 1], [1, 1, 0, 3]]}, f"rank_00000_000.safetensors does not hold {key} as DONE says"),
        ({"pieces": [[1, 2, 0, 2]]}, "pieces in a file that it does not list: rank_00002_000"),
    ]:
        done.write_text(text)
        reseal(done.parent, lambda done, change=change: done["tensors"][key].update(change))
        with pytest.raises(CheckpointError, match=error):
            Checkpoint.open(done.parent)
        assert newest_checkpoint(tmp_path)[0].step == 1
    trials("a checkpoint's bit flipped, byte zeroed, file cut or longer", 4)


def test_an_unknown_checksum_is_named(tmp_path):
    save_steps(tmp_path, [1])
    folder = tmp_path / "step_000000001"
    text = (folder / "DONE").read_text()
    reseal(folder, lambda done: done["files"].update({"rank_00000_000.safetensors": {"bytes": 1, "sha256": "0" * 64}}))
    with pytest.raises(CheckpointError, match=r"xxh3_128\n +Field required(.|\n)*sha256"):
        Checkpoint.open(folder)
    (folder / "DONE").write_text(text[: text.rindex('"xxh3_128"')] + '"sha256": "' + "0" * 64 + '"}')
    with pytest.raises(CheckpointError, match=r"it ends with '\"sha256\"[^']*'..., where .* an xxh3_128 checksum"):
        Checkpoint.open(folder)
