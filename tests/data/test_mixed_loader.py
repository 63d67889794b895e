"""The loader on several folders of shards."""

import json

import numpy as np
import pytest
import torch

from gmlp_scale.data.batch import IGNORED
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.data.shards import Manifest
from gmlp_scale.recipe.reader import load_run_config
from tests.data.test_loader import SKIP, corrupt, join, same, tensors, unmasked
from tests.written_shards import change_manifest, write_tiny_shards


@pytest.fixture
def folders(tmp_path):
    """a: 40 training and 9 held-out rows; b: 10 and 2; the rows of each."""
    rows = {
        name: write_tiny_shards(tmp_path / name, train, heldout, sequence_length=16, seed=seed)
        for name, train, heldout, seed in (("a", [25, 15], [9], 0), ("b", [4, 6], [2], 10))
    }
    return tmp_path, rows


def mixed(folder, **of_b) -> dict:
    """A `data` section of 3 rows of a to 1 of b."""
    b = {"shards": f"{folder}/b", "weight": 0.25} | of_b
    return {"shards": ({"shards": f"{folder}/a", "weight": 0.75}, b)}


def keys(rows: np.ndarray) -> list[tuple]:
    return sorted(map(tuple, rows.tolist()))


def test_each_source_has_its_share_and_its_own_epochs(folders, make_loader):
    folder, rows = folders
    loader = make_loader(data=mixed(folder))
    seen = np.concatenate([unmasked(join(batches)) for batches in loader.steps(0, 10)])  # 60 rows of a, 20 of b
    sources = np.concatenate([loader.addresses(step).source for step in range(10)])
    assert sources.reshape(10, 8).sum(axis=1).tolist() == [2] * 10
    of_b = seen[sources == 1]
    assert keys(of_b[:10]) == keys(of_b[10:]) == keys(rows["b"]["train"])
    assert keys(seen[sources == 0][:40]) == keys(rows["a"]["train"])
    assert loader.epochs(10) == {"data/epoch/a": 1.5, "data/epoch/b": 2.0}
    assert loader.num_rows == 50


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_mixture_is_the_same_on_any_world_size(world_size, folders, make_loader):
    data = mixed(folders[0], from_step=2, until_step=5)
    whole = make_loader(data=data)
    ranks = [make_loader(data=data, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step in (1, 2, 4, 5, 1000):
        parts = [batch for loader in ranks for batch in loader.micro_batches(step)]
        assert same(join(whole.micro_batches(step)), join(parts))
    heldout = zip(*(loader.heldout_batches(6) for loader in ranks), strict=True)
    in_order = join([batch for together in heldout for batch in together])
    assert same(join(list(whole.heldout_batches(6))), type(in_order)(*(t[:6] for t in tensors(in_order))))


def test_a_source_that_joins_later_changes_nothing_before(folders, make_loader):
    folder, _ = folders
    alone = make_loader(f"{folder}/a")
    loader = make_loader(data=mixed(folder, from_step=3))
    for step in range(3):
        assert same(join(alone.micro_batches(step)), join(loader.micro_batches(step)))
    assert loader.epochs(3) == {"data/epoch/a": 24 / 40, "data/epoch/b": 0}
    assert loader.addresses(3).source.sum() == 2


def test_two_sources_draw_nothing_alike(folders, make_loader):
    folder, _ = folders
    write_tiny_shards(folder / "c", [25, 15], [9], sequence_length=16)  # the rows of a
    sources = tuple({"shards": f"{folder}/{name}", "weight": 1} for name in "ac")
    loader = make_loader(data={"shards": sources}, global_batch_size=80)
    batch, addresses = join(loader.micro_batches(0)), loader.addresses(0)
    chosen = addresses.source
    of_a, of_c = (addresses.global_row_index[chosen == source] for source in (0, 1))
    assert (of_a != of_c).mean() > 0.8
    by_row = [batch.masked_positions_BM[chosen == place][np.argsort(of)] for place, of in ((0, of_a), (1, of_c))]
    assert not torch.equal(*by_row) and (by_row[0] == by_row[1]).all(dim=1).float().mean() < 0.2
    (heldout,) = loader.heldout_batches(2)  # the same row of each
    assert len(np.unique(unmasked(heldout), axis=0)) == 1 and not torch.equal(*heldout.masked_positions_BM)


def test_heldout_rows_have_the_shares_of_the_sources_that_last(folders, make_loader):
    folder, rows = folders
    loader = make_loader(data=mixed(folder), micro_batch_size=8)
    assert loader.num_heldout_rows == 11
    shown = [unmasked(batch)[(batch.labels_BM != IGNORED).any(dim=1)] for batch in loader.heldout_batches(10**6)]
    assert keys(np.concatenate(shown)) == keys(np.concatenate([rows[name]["heldout"] for name in "ab"]))
    assert make_loader(data=mixed(folder, weight=0.75)).num_heldout_rows == 5  # b has no third row
    assert make_loader(data=mixed(folder, until_step=9)).num_heldout_rows == 9
    without = write_tiny_shards(folder / "b", [4, 6], sequence_length=16)
    assert len(without["heldout"]) == 0 and make_loader(data=mixed(folder)).num_heldout_rows == 9


def test_a_fingerprint_names_every_source(folders, make_loader):
    facts = make_loader(data=mixed(folders[0], from_step=4)).fingerprint()
    assert facts == json.loads(json.dumps(facts)) and "manifest_sha256" not in facts
    assert facts["train_rows"] == 50 and list(facts["sources"]) == ["a", "b"]
    assert facts["sources"]["b"] == {
        "manifest_sha256": Manifest.load(folders[0] / "b").sha256,
        "train_rows": 10, "weight": 0.25, "from_step": 4, "until_step": None,
    }  # fmt: skip


def test_folders_of_the_same_name_are_told_apart_by_their_paths(folders, make_loader, tmp_path):
    """data/own/shards beside data/compare/shards, as in the docs, was refused."""
    folder, _ = folders
    for name in "ab":
        (folder / name).rename(folder / "shards")
        (folder / name).mkdir()
        (folder / "shards").rename(folder / name / "shards")
    sources = [{"shards": f"{folder}/{name}/shards", "weight": 1} for name in "ab"]
    run = load_run_config("smoke", [f"data.shards={json.dumps(sources)}", "model.vocab_size=1000"])
    loader = make_loader(data=run.data.model_dump())
    assert loader.epochs(1) == {"data/epoch/a/shards": 4 / 40, "data/epoch/b/shards": 4 / 10}
    assert list(loader.fingerprint()["sources"]) == ["a/shards", "b/shards"]
    (skipped,) = corrupt(folder / "b/shards", 0)
    list(make_loader(data=run.data.model_dump() | SKIP).steps(0, 2))
    record = json.loads((tmp_path / "run" / "corrupt_shards.jsonl").read_text())
    assert record["shard"] == f"b/shards/{skipped}"
    named = make_loader(data={"shards": (sources[0], sources[1] | {"name": "new"})})
    assert named.epochs(1) == {"data/epoch/shards": 4 / 40, "data/epoch/new": 4 / 10}


def test_sources_that_do_not_fit_together_are_refused(folders, make_loader):
    folder, _ = folders
    change_manifest(folder / "b", tokenizer_sha256="1" * 64)
    with pytest.raises(ShardError, match=r"/b were written with another tokenizer than those at .*/a: write all"):
        make_loader(data=mixed(folder))
    change_manifest(folder / "b", packing="document")
    with pytest.raises(ShardError, match=r"the shards at .*/b do not fit the recipe: data\.packing is packed"):
        make_loader(data=mixed(folder))


def test_corrupt_shards_of_two_sources_are_told_apart(folders, make_loader, tmp_path, trials):
    folder, _ = folders
    whole = {path: path.read_bytes() for path in folder.glob("*/train/*.tar")}
    (name,) = {*corrupt(folder / "a", 0), *corrupt(folder / "b", 0)}
    loader = make_loader(data=mixed(folder) | SKIP)
    batches = [join(loader.micro_batches(step)) for step in range(6)]
    lines = (tmp_path / "run" / "corrupt_shards.jsonl").read_text().splitlines()
    assert {json.loads(line)["shard"] for line in lines} == {f"a/{name}", f"b/{name}"}
    for path, content in whole.items():
        path.write_bytes(content)
    resumed = make_loader(data=mixed(folder) | SKIP)
    assert all(same(join(resumed.micro_batches(step)), batches[step]) for step in range(6))
    trials("shards missing, empty, of wrong count, listed twice or out of order", 2)
