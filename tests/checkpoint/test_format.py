"""What is on disk, and what can be read of it at which world size."""

import json

import pytest
import torch
from safetensors.torch import load_file

from gmlp_scale.checkpoint.format import Checkpoint, CheckpointError
from gmlp_scale.checkpoint.pieces import TensorRecord, layout_of, merged
from gmlp_scale.checkpoint.stores import newest_checkpoint
from tests.checkpoint.fake_engine import (
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


def test_moves_between_world_sizes_2_3_1(tmp_path, small_files):
    engines = [FakeEngine(rank, 2, seed=8) for rank in range(2)]
    for step, world_size, next_world_size in [(10, 2, 3), (20, 3, 1), (30, 1, 5)]:

        def save(world, step=step, world_size=world_size, engines=engines):
            checkpointer = checkpointer_on(tmp_path, world)
            checkpointer.save(engines[world.rank], step)
            checkpointer.wait()

        def load(world, world_size=next_world_size):
            checkpointer = checkpointer_on(tmp_path, world)
            engine = FakeEngine(world.rank, world_size, seed=1)
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
    assert (done["step"], done["format_version"], done["details"]) == (12000, 3, {"name": "of a test"})
    assert done["tensors"]["model.embedding.weight"] == {"shape": [7, 3], "pieces": [[0, 1, 0, 4], [1, 1, 0, 3]]}
    assert done["tensors"]["model.blocks.0.weight"] == {"shape": [4, 3, 2], "pieces": [[0, 2, 0, 2]]}  # equal shares
    second = load_file(folder / "rank_00001_000.safetensors")
    assert torch.equal(second["model.embedding.weight"], FakeEngine(seed=12000).tensors["model.embedding.weight"][4:])


def test_reads_any_slice(tmp_path):
    save_steps(tmp_path, [1], world_size=3)
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
            return layout_of({f"model.blocks.{block}.weight": ([1000, 8], 0, first, count) for block in range(3)})

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


def test_a_checkpoint_of_format_2_is_read(tmp_path, small_files):
    """It had an entry (file, first, count) for every piece."""
    save_steps(tmp_path, [1], world_size=3)
    folder = tmp_path / "step_000000001"
    tensors = Checkpoint.open(folder).tensors

    def to_version_2(done):
        done["format_version"] = 2
        for key, tensor in tensors.items():
            done["tensors"][key]["pieces"] = list(tensor.pieces_between(0, tensor.length))

    reseal(folder, to_version_2)
    assert '["rank_00001_000.safetensors", 3, 3]' in (folder / "DONE").read_text()
    assert_holds(Checkpoint.open(folder), seed=1)
