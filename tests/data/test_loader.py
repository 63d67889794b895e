import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gmlp_scale.data import source
from gmlp_scale.data.batch import IGNORED, MaskedBatch
from gmlp_scale.data.data_config import DataConfig
from gmlp_scale.data.manifest import CorruptShardError, ShardError
from gmlp_scale.data.shards import Manifest, ShardRows
from gmlp_scale.data.source import OpenShards
from tests.damage import flipped
from tests.written_shards import change_manifest


def tensors(batch: MaskedBatch):
    return batch.token_ids_BN, batch.masked_positions_BM, batch.labels_BM


def join(batches: list[MaskedBatch]) -> MaskedBatch:
    return MaskedBatch(*(torch.cat(parts) for parts in zip(*map(tensors, batches), strict=True)))


def same(left: MaskedBatch, right: MaskedBatch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(left), tensors(right), strict=True))


def unmasked(batch: MaskedBatch) -> np.ndarray:
    """The rows as they were before the masks."""
    labels_BM = torch.where(
        batch.labels_BM == IGNORED, batch.token_ids_BN.gather(1, batch.masked_positions_BM), batch.labels_BM
    )
    return batch.token_ids_BN.scatter(1, batch.masked_positions_BM, labels_BM).numpy()


@st.composite
def plans(draw):
    """(rows of each shard, number of ranks, micro-batches of a step from each change on, their size)."""
    num_micro_batches = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    return (
        sizes,
        draw(st.integers(1, 16)),
        list(zip((0, 5, 17), num_micro_batches, strict=False)),
        draw(st.integers(1, 3)),
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans(), st.integers(0, 40), st.sampled_from([1, 5_000, 10**9]))
def test_the_global_batch_is_the_same_on_any_world_size(
    write_shards, make_loader, tmp_path_factory, plan, step, group_bytes
):
    sizes, world_size, changes, micro_batch_size = plan
    folder, _ = write_shards(sizes, folder=tmp_path_factory.mktemp("shards"))
    batch_sizes = [(start, world_size * num * micro_batch_size) for start, num in changes]
    data = {"shuffle_group_bytes": group_bytes, "masked_fraction": [(0, 0.3), (17, 0.15)]}
    fields = {"global_batch_size": batch_sizes if len(changes) > 1 else batch_sizes[0][1], "data": data}
    loader = make_loader(folder, micro_batch_size=1, **fields)
    positions = loader.plan.positions
    assert [p for earlier in range(step) for p in positions(earlier)] == list(range(positions(step)[0]))
    whole = join(loader.micro_batches(step))
    assert whole.labels_BM.shape[1] == (5 if step < 17 else 2)
    num_now = [num for start, num in changes if start <= step][-1]
    parts = []
    for rank in range(world_size):
        sizes = {"micro_batch_size": micro_batch_size, "rank": rank, "world_size": world_size}
        micro_batches = make_loader(folder, **sizes, **fields).micro_batches(step)
        assert [len(batch.token_ids_BN) for batch in micro_batches] == [micro_batch_size] * num_now
        parts += micro_batches
    assert same(whole, join(parts))


def test_an_epoch_shows_every_row_once_and_positions_run_on(write_shards, make_loader):
    folder, rows = write_shards([30, 7, 50, 13])  # 100 rows, 12.5 steps of 8
    loader = make_loader(folder, data={"shuffle_group_bytes": 25_000})
    seen = np.concatenate([unmasked(join(batches)) for batches in loader.steps(0, 25)])
    expected = sorted(map(tuple, rows["train"].tolist()))
    for epoch in (seen[:100], seen[100:]):
        assert sorted(map(tuple, epoch.tolist())) == expected
    assert not (seen[:100] == seen[100:]).all()
    assert loader.num_rows == 100
    assert [loader.epochs(step) for step in (0, 12, 25)] == [{"data/epoch": epoch} for epoch in (0, 0.96, 2)]
    assert loader.plan.positions(3) == range(24, 32)
    assert make_loader(folder, rank=1, world_size=2).plan.positions(3) == range(28, 32)


def test_prefetched_steps_equal_computed_ones_from_any_start(write_shards, make_loader, trials):
    folder, _ = write_shards([40, 20])
    loader, fresh = make_loader(folder), make_loader(folder)
    for start, stop in ((0, 12), (9, 11), (10_000, 10_003), (5, 5)):
        steps = list(loader.steps(start, stop))
        assert len(steps) == stop - start
        for step, batches in enumerate(steps, start=start):
            assert same(join(batches), join(fresh.micro_batches(step)))
    assert loader.wait_seconds > 0
    trials("resume in a later epoch, at an epoch's end, 100 batches on", 3)


@pytest.mark.parametrize("world_size", [1, 8])
def test_the_next_group_is_opened_while_one_is_read(world_size, write_shards, make_loader, monkeypatch):
    folder, _ = write_shards([10] * 40)
    shard_bytes = Manifest.load(folder).splits.train[0].bytes
    data, fields = {"shuffle_group_bytes": 3 * shard_bytes}, {"world_size": world_size, "micro_batch_size": 1}
    loader, fresh = (make_loader(folder, data=data, **fields) for _ in range(2))
    opened, waited_for, num_open, read = [], [], [], OpenShards.read

    def noting_read(shards: OpenShards, shards_B, row_indices_B):
        waited_for.append(set(shards_B.tolist()) - shards._open.keys())
        rows_BN = read(shards, shards_B, row_indices_B)
        num_open.append(len(shards._open))
        return rows_BN

    with monkeypatch.context() as patch:
        patch.setattr(OpenShards, "read", noting_read)
        patch.setattr(source, "ShardRows", lambda path, *rest: opened.append(path) or ShardRows(path, *rest))
        batches = list(loader.steps(0, 50))  # an epoch
        assert len(opened) == len(set(opened)) and (world_size > 1 or len(opened) == 40)
        batches += loader.steps(50, 100)
    assert waited_for[0] and not any(waited_for[1:50] + waited_for[51:])
    assert max(num_open) <= 2 * 3 + 8
    assert all(same(join(batches[step]), join(fresh.micro_batches(step))) for step in range(100))


def test_no_thread_is_left_behind(write_shards, make_loader):
    folder, _ = write_shards([40], heldout=[4])
    before = set(threading.enumerate())
    loader = make_loader(folder)
    for _ in loader.steps(0, 1000):
        break
    list(loader.heldout_batches(4))
    loader.close()
    assert set(threading.enumerate()) == before


def test_an_error_reaches_the_consumer_at_its_step(write_shards, make_loader):
    folder, _ = write_shards([10, 10])
    loader = make_loader(folder, data={"shuffle_group_bytes": 1})
    second = loader.sources[0].locate(np.arange(20)).shard[-1]
    path = folder / Manifest.load(folder).splits.train[second].name
    path.write_bytes(b"\0" * path.stat().st_size)
    steps = loader.steps(0, 3)
    next(steps)
    with pytest.raises(CorruptShardError, match=rf"{path.name} .* or set data\.on_corrupt_shard=skip"):
        next(steps)


def test_batches_that_do_not_divide_are_refused(write_shards, make_loader):
    folder, _ = write_shards([10])
    with pytest.raises(ValueError, match=r"global_batch_size=8 .*world size 3 .*micro_batch_size=2: change one"):
        make_loader(folder, world_size=3)


@pytest.mark.parametrize("packing, padded", [("packed", False), ("document", True)])
def test_batches_say_whether_their_rows_are_padded(packing, padded, write_shards, make_loader):
    folder, _ = write_shards([10], heldout=[4])
    change_manifest(folder, packing=packing)
    loader = make_loader(folder, data={"packing": packing})
    assert {batch.to("cpu").padded for batch in loader.micro_batches(0)} == {padded}
    assert {batch.padded for batch in loader.heldout_batches(4)} == {padded}


def test_shards_that_do_not_fit_the_recipe_are_one_error(write_shards, make_loader):
    folder, _ = write_shards([10])
    with pytest.raises(ShardError) as error:
        make_loader(folder, sequence_length=32, vocab_size=999, data={"packing": "document"})
    for part in (
        "sequence_length is 32, the shards have 16",
        "vocab_size is 999, the shards have 1000",
        "data.packing",
    ):
        assert part in str(error.value)
    with pytest.raises(ShardError, match="masks none of 16 positions"):
        make_loader(folder, data={"masked_fraction": 0.01})


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match="skip needs"):
        DataConfig(shards="x", on_corrupt_shard="skip")
    with pytest.raises(ValueError, match="error needs 0"):
        DataConfig(shards="x", max_corrupt_shards=3)
    with pytest.raises(ValueError, match="cache_max_bytes=5 without a cache_dir"):
        DataConfig(shards="x", cache_max_bytes=5)
    assert DataConfig(shards="x", cache_dir="y", cache_max_bytes=5).cache_max_bytes == 5
    with pytest.raises(ValueError, match="cache_dir=s3://bucket/cache: needed is a folder of this machine"):
        DataConfig(shards="x", cache_dir="s3://bucket/cache")


def test_a_fingerprint_changes_with_the_data(write_shards, make_loader, tmp_path, trials):
    one = make_loader(write_shards([10])[0]).fingerprint()
    again = make_loader(write_shards([10], folder=tmp_path / "copy")[0]).fingerprint()
    other = make_loader(write_shards([11], folder=tmp_path / "other")[0]).fingerprint()
    assert one == again == json.loads(json.dumps(one))
    assert one["manifest_sha256"] != other["manifest_sha256"] and other["train_rows"] == 11
    trials("other data, tokenizer, seed or model on resume", 1)


# Corrupt shards

SKIP = {"on_corrupt_shard": "skip", "max_corrupt_shards": 2}


def corrupt(folder: Path, *indices: int) -> list[str]:
    names = [Manifest.load(folder).splits.train[index].name for index in indices]
    for name in names:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(flipped(content, len(content) // 2))
    return names


def recorded(run_dir: Path) -> set[str]:
    """The names of the shards that a run skipped."""
    lines = (run_dir / "corrupt_shards.jsonl").read_text().splitlines()
    assert all("sha256" in json.loads(line)["found"] for line in lines)
    return {json.loads(line)["shard"] for line in lines}


def test_skipped_shards_give_the_same_rows_on_any_world_size(write_shards, make_loader, tmp_path, trials):
    folder, rows = write_shards([20, 20, 10, 30])
    names = corrupt(folder, 1, 2)
    run_dirs = iter(tmp_path / f"run{n}" for n in range(9))
    whole = make_loader(folder, data=SKIP, run_dir=next(run_dirs))
    ranks = [make_loader(folder, data=SKIP, rank=r, world_size=4, run_dir=tmp_path / "ranks") for r in range(4)]
    for step in (0, 4, 9, 12):
        assert same(
            join(whole.micro_batches(step)), join([batch for loader in ranks for batch in loader.micro_batches(step)])
        )
    epoch = np.concatenate([unmasked(join(whole.micro_batches(step))) for step in range(10)])
    sound = {tuple(row) for row in rows["train"][np.r_[0:20, 50:80]].tolist()}
    assert len(epoch) == 80 and {tuple(row) for row in epoch.tolist()} == sound
    assert recorded(tmp_path / "run0") == recorded(tmp_path / "ranks") == set(names)
    trials("shards missing, empty, of wrong count, listed twice or out of order", len(names))


def test_a_resumed_run_skips_recorded_shards_that_were_repaired(write_shards, make_loader, tmp_path):
    folder, _ = write_shards([20] * 4)
    whole = {path: path.read_bytes() for path in folder.glob("train/*.tar")}
    corrupt(folder, 1, 2)
    undisturbed = make_loader(folder, data=SKIP)
    batches = [join(undisturbed.micro_batches(step)) for step in range(20)]
    for path, content in whole.items():
        path.write_bytes(content)
    resumed = make_loader(folder, data=SKIP)
    assert all(same(join(resumed.micro_batches(step)), batches[step]) for step in range(20))
    (tmp_path / "run" / "corrupt_shards.jsonl").write_text("")  # as the warning says
    anew = make_loader(folder, data=SKIP)
    assert not all(same(join(anew.micro_batches(step)), batches[step]) for step in range(20))


def test_a_source_keeps_its_skipped_shards_when_others_join(write_shards, make_loader, tmp_path):
    folder, _ = write_shards([20] * 4, folder=tmp_path / "one")
    other, _ = write_shards([20] * 4, folder=tmp_path / "two")
    whole = {path: path.read_bytes() for path in folder.glob("train/*.tar")}
    names = corrupt(folder, 1, 2)
    alone = make_loader(folder, data=SKIP)
    batches = [join(alone.micro_batches(step)) for step in range(10)]
    both = [{"shards": str(folder), "weight": 1}, {"shards": str(other), "weight": 1, "from_step": 10}]
    for state in ("corrupt", "repaired"):
        if state == "repaired":
            for path, content in whole.items():
                path.write_bytes(content)
        resumed = make_loader(data=SKIP | {"shards": both})
        assert all(same(join(resumed.micro_batches(step)), batches[step]) for step in range(10)), state
        assert recorded(tmp_path / "run") == set(names)


def test_a_record_that_cannot_be_written_is_written_at_a_later_step(write_shards, make_loader, tmp_path):
    folder, _ = write_shards([20] * 4)
    names = corrupt(folder, 1, 2)
    (tmp_path / "run").write_text("a file where the run folder should be")
    loader = make_loader(folder, data=SKIP)
    for step in range(10):
        loader.micro_batches(step)
    (tmp_path / "run").unlink()
    loader.micro_batches(10)
    assert recorded(tmp_path / "run") == set(names)


def test_more_corrupt_shards_than_allowed_end_the_run(write_shards, make_loader, tmp_path, trials):
    folder, _ = write_shards([20] * 6)
    names = corrupt(folder, 0, 2, 4)
    loader = make_loader(folder, data=SKIP)
    with pytest.raises(ShardError, match=r"3 shards are corrupt, data\.max_corrupt_shards is 2"):
        for step in range(15):
            loader.micro_batches(step)
    assert recorded(tmp_path / "run") == set(names)
    with pytest.raises(ShardError, match=r"3 shards are corrupt.* and delete their lines there, or raise"):
        make_loader(folder, data=SKIP)  # a restart does not forget
    trials("shards missing, empty, of wrong count, listed twice or out of order", len(names))


def test_nothing_sound_is_an_error(write_shards, make_loader, trials):
    folder, _ = write_shards([20, 20])
    corrupt(folder, 0, 1)
    with pytest.raises(ShardError, match="every shard of the split is corrupt"):
        make_loader(folder, data=SKIP).micro_batches(0)
    trials("shards missing, empty, of wrong count, listed twice or out of order", 2)


# Held-out rows


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_heldout_rows_are_the_same_on_any_world_size(world_size, write_shards, make_loader):
    folder, rows = write_shards([10], [6, 5])
    (whole,) = make_loader(folder, micro_batch_size=8, seed=1).heldout_batches(8)
    fields = {"global_batch_size": 2 * world_size, "world_size": world_size, "seed": 5}
    ranks = [list(make_loader(folder, rank=r, **fields).heldout_batches(8)) for r in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    in_order = join([batch for together in zip(*ranks, strict=True) for batch in together])
    filled = (in_order.labels_BM != IGNORED).any(dim=1)
    assert filled[:8].all() and not filled[8:].any()
    assert same(whole, MaskedBatch(*(tensor[:8] for tensor in tensors(in_order))))
    assert (unmasked(whole) == rows["heldout"][:8]).all()


def test_heldout_rows_end_where_the_split_ends(write_shards, make_loader):
    folder, _ = write_shards([10], [6, 5])
    batches = list(make_loader(folder).heldout_batches(10_000))
    assert len(batches) == 6 and (join(batches).labels_BM != IGNORED).any(dim=1).sum() == 11
    without = write_shards([10], folder=folder)[0]
    with pytest.raises(ShardError, match="no held-out rows"):
        next(make_loader(without).heldout_batches(10))


def test_a_corrupt_heldout_shard_is_never_skipped(write_shards, make_loader, trials):
    folder, _ = write_shards([10], [6])
    name = Manifest.load(folder).splits.heldout[0].name
    (folder / name).write_bytes(b"")
    with pytest.raises(CorruptShardError, match=rf"{name} is corrupt: .*\. Write or copy it again$"):
        next(make_loader(folder, data=SKIP).heldout_batches(10))
    trials("shards missing, empty, of wrong count, listed twice or out of order", 1)
