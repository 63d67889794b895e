"""What is on disk, what can be read of it at which world size, and which checkpoint is taken after damage."""

import json
import logging
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gmlp_scale.checkpoint import pieces
from gmlp_scale.checkpoint.format import Checkpoint, CheckpointError
from gmlp_scale.checkpoint.pieces import TensorRecord, layout_of, merged
from gmlp_scale.checkpoint.stores import newest_checkpoint
from gmlp_scale.errors import OtherRankError
from tests.checkpoint.fake_engine import (
    DETAILS,
    FakeEngine,
    Piece,
    alone,
    assert_holds,
    checkpointer_on,
    names_in,
    on_ranks,
    reseal,
    save_steps,
)
from tests.damage import damaged


@pytest.mark.parametrize("by_elements", [False, True])
def test_moves_between_world_sizes_2_3_1(tmp_path, small_files, by_elements):
    engines = [FakeEngine(rank, 2, seed=8, by_elements=by_elements) for rank in range(2)]
    for step, world_size, next_world_size in [(10, 2, 3), (20, 3, 1), (30, 1, 5)]:

        def save(world, step=step, world_size=world_size, engines=engines):
            checkpointer = checkpointer_on(tmp_path, world)
            checkpointer.save(engines[world.rank], step)
            checkpointer.wait()

        def load(world, world_size=next_world_size):
            checkpointer = checkpointer_on(tmp_path, world)
            engine = FakeEngine(world.rank, world_size, seed=1, by_elements=by_elements)
            checkpointer.newest().load_into(engine)
            return engine

        on_ranks(world_size, save)
        engines = on_ranks(next_world_size, load)
        assert {engine.step for engine in engines} == {step}
        assert_holds(newest_checkpoint(tmp_path)[0], seed=8)
        assert len(list((tmp_path / f"step_{step:09d}").glob("rank_00000_*"))) > 1


def test_files_are_plain_safetensors_and_json(tmp_path):
    save_steps(tmp_path, [12000], world_size=2)
    folder = tmp_path / "step_000012000"
    assert names_in(folder) == ["DONE", "rank_00000_000.safetensors", "rank_00001_000.safetensors"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # who may read one file may read all
    done = json.loads((folder / "DONE").read_text())
    assert (done["step"], done["format_version"], done["details"]) == (12000, 4, DETAILS)
    assert done["tensors"]["model.embedding.weight"] == {"shape": [7, 3], "pieces": [[0, 1, 0, 4], [1, 1, 0, 3]]}
    assert done["tensors"]["model.blocks.0.weight"] == {"shape": [4, 3, 2], "pieces": [[0, 2, 0, 2]]}  # equal shares
    second = load_file(folder / "rank_00001_000.safetensors")
    assert torch.equal(second["model.embedding.weight"], FakeEngine(seed=12000).tensors["model.embedding.weight"][4:])


def test_pieces_by_elements_are_flat_in_their_files(tmp_path):
    save_steps(tmp_path, [1], world_size=2, by_elements=True)
    folder, key = tmp_path / "step_000000001", "model.embedding.weight"
    tensors = json.loads((folder / "DONE").read_text())["tensors"]
    assert tensors[key] == {"shape": [7, 3], "pieces": [[0, 1, 0, 11], [1, 1, 0, 10]], "by_elements": True}
    assert tensors["model.temperature"] == {"shape": [], "pieces": [[0, 1, 0, 1]], "by_elements": True}
    assert tensors["model.blocks.0.norm.bias"] == {"shape": [5], "pieces": [[0, 1, 0, 3], [1, 1, 0, 2]]}
    second = load_file(folder / "rank_00001_000.safetensors")
    assert torch.equal(second[key], FakeEngine(seed=1).tensors[key].flatten()[11:])
    assert_holds(Checkpoint.open(folder), seed=1)


@pytest.mark.parametrize("by_elements", [False, True])
def test_reads_any_slice(tmp_path, by_elements):
    save_steps(tmp_path, [1], world_size=3, by_elements=by_elements)
    checkpoint, whole = newest_checkpoint(tmp_path)[0], FakeEngine(seed=1).tensors["model.embedding.weight"]
    for first in range(8):
        for stop in range(first, 8):
            tensor = checkpoint.read("model.embedding.weight", first, stop)
            assert torch.equal(tensor, whole[first:stop])
    checkpoint.read("model.embedding.weight").zero_()  # its own memory: the file stays as it is
    assert_holds(Checkpoint.open(checkpoint.path), seed=1)


def test_a_wrong_read_says_what_is_there(tmp_path):
    save_steps(tmp_path, [1])
    checkpoint = newest_checkpoint(tmp_path)[0]
    with pytest.raises(CheckpointError, match=r"no 'model.embedding.weigth'.*nearest: .*'model.embedding.weight'"):
        checkpoint.read("model.embedding.weigth")
    for first, stop in [(0, 8), (-1, 2), (5, 4)]:
        with pytest.raises(CheckpointError, match=rf"\(7, 3\), not its indices {first} to {stop}"):
            checkpoint.read("model.embedding.weight", first, stop)


def test_pieces_that_leave_a_hole_or_overlap_are_not_saved(tmp_path):
    for wrong in [slice(0, 6), slice(1, 7)]:
        engine = FakeEngine()
        piece = Piece(engine.tensors["model.embedding.weight"][wrong], (7, 3), wrong.start)
        engine.state = lambda piece=piece: iter([("model.embedding.weight", piece)])
        checkpointer = alone(tmp_path)
        checkpointer.save(engine, 1)
        with pytest.raises(CheckpointError, match=r"model\.embedding\.weight: .* do not cover the tensor once"):
            checkpointer.wait()
        assert names_in(tmp_path) == []


def test_the_index_does_not_grow_with_the_ranks():
    """Before: 256 pieces a tensor, 45 MB of DONE for gmlp_xlarge."""

    def index_of(num_ranks: int) -> str:
        def layout(rank):
            count = 1000 // num_ranks + (rank < 1000 % num_ranks)
            first = sum(1000 // num_ranks + (other < 1000 % num_ranks) for other in range(rank))
            return layout_of(
                {f"model.blocks.{block}.weight": ([1000, 8], False, 0, first, count) for block in range(3)}
            )

        return json.dumps(merged([layout(rank) for rank in range(num_ranks)]))

    assert len(index_of(256)) < 1.1 * len(index_of(3))
    (record, *_) = [TensorRecord.model_validate(tensor) for tensor in json.loads(index_of(256)).values()]
    assert list(record.pieces_between(0, 1000))[231:233] == [
        ("rank_00231_000.safetensors", 924, 4),
        ("rank_00232_000.safetensors", 928, 3),
    ]
    assert list(record.pieces_between(3, 5)) == [
        ("rank_00000_000.safetensors", 0, 4),
        ("rank_00001_000.safetensors", 4, 4),
    ]


def test_checkpoints_of_formats_3_and_2_are_read(tmp_path, small_files):
    """Format 2 had an entry (file, first, count) for every piece."""
    save_steps(tmp_path, [1], world_size=3)
    folder = tmp_path / "step_000000001"
    tensors = Checkpoint.open(folder).tensors
    reseal(folder, lambda done: done.update(format_version=3))
    assert_holds(Checkpoint.open(folder), seed=1)

    def to_version_2(done):
        done["format_version"] = 2
        for key, tensor in tensors.items():
            done["tensors"][key]["pieces"] = list(tensor.pieces_between(0, tensor.length))

    reseal(folder, to_version_2)
    assert '["rank_00001_000.safetensors", 3, 3]' in (folder / "DONE").read_text()
    assert_holds(Checkpoint.open(folder), seed=1)


def test_nothing_there_is_none(tmp_path):
    assert alone(tmp_path).newest() is None
    assert newest_checkpoint(tmp_path / "no such folder") == (None, [])


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
    refused = r"step_000000002 is a checkpoint of format 1.* reads formats \(2, 3, 4\) only"
    with pytest.raises(CheckpointError, match=refused):
        alone(tmp_path).newest()
    assert names_in(tmp_path) == ["step_000000001", "step_000000002"]  # nothing was moved away


def test_a_damaged_version_is_not_taken_for_another_one(tmp_path, trials):
    save_steps(tmp_path, [1, 2, 3])
    done = tmp_path / "step_000000003" / "DONE"
    text = done.read_text()
    for bit in range(7):  # one of them makes another digit, and most something else
        done.write_text(text.replace('version": 4,', f'version": {chr(ord("4") ^ 1 << bit)},'))
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
        ({"by_elements": True}, r"the pieces hold 4 elements of a tensor of shape \(4, 3, 2\)"),
        ({"pieces": [[0, 1, 0, 1], [1, 1, 0, 3]]}, f"rank_00000_000.safetensors does not hold {key} as DONE says"),
        ({"pieces": [[1, 2, 0, 2]]}, "pieces in a file that it does not list: rank_00002_000"),
    ]:
        done.write_text(text)
        reseal(done.parent, lambda done, change=change: done["tensors"][key].update(change))
        with pytest.raises(CheckpointError, match=error):
            Checkpoint.open(done.parent)
        assert newest_checkpoint(tmp_path)[0].step == 1
    trials("a checkpoint's bit flipped, byte zeroed, file cut or longer", 5)


@pytest.mark.parametrize(
    "details",
    [
        {},
        DETAILS | {"config": None},
        DETAILS | {"config": {}},
        DETAILS | {"config": {"train": None, "optimizer": {}}},
        {"config": DETAILS["config"]},
        DETAILS | {"data": {}},
        DETAILS | {"data": ["rows"]},
        DETAILS | {"time_budget": None},
    ],
    ids=str,
)
def test_a_done_without_the_run_s_details_is_damaged_whatever_its_seal(details, tmp_path, trials):
    save_steps(tmp_path, [1, 2])
    reseal(tmp_path / "step_000000002", lambda done: done.update(details=details))
    taken, passed_over = newest_checkpoint(tmp_path)
    assert (taken.step, passed_over) == (1, ["step_000000002"])
    trials("a checkpoint's bit flipped, byte zeroed, file cut or longer", 1)


def test_an_unknown_checksum_is_named(tmp_path):
    save_steps(tmp_path, [1])
    folder = tmp_path / "step_000000001"
    text = (folder / "DONE").read_text()
    reseal(folder, lambda done: done["files"].update({"rank_00000_000.safetensors": {"bytes": 1, "sha256": "0" * 64}}))
    with pytest.raises(CheckpointError, match=r"xxh3_128: Field required; .*sha256: Extra"):
        Checkpoint.open(folder)
    (folder / "DONE").write_text(text[: text.rindex('"xxh3_128"')] + '"sha256": "' + "0" * 64 + '"}')
    with pytest.raises(CheckpointError, match=r"it ends with '\"sha256\"[^']*'..., where .* an xxh3_128 checksum"):
        Checkpoint.open(folder)
