"""Mixtures of several folders of shards: the pattern of their rows, and the loader's batches."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gmlp_scale.data.batch import IGNORED
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.data.mixture import Mixture, Pattern, SourceConfig, mixture_mistakes, source_seed, with_names
from gmlp_scale.data.shards import Manifest
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.recipe.reader import load_run_config
from tests.data.test_loader import SKIP, corrupt, join, recorded, same, tensors, unmasked
from tests.written_shards import change_manifest, write_tiny_shards

weights = st.lists(st.one_of(st.integers(1, 40), st.sampled_from([0.1, 0.25, 2.5])), min_size=1, max_size=8)


@st.composite
def changing_sources(draw) -> list[SourceConfig]:
    """The first is always there; the others may start late and end early."""
    sources = [SourceConfig(shards="a", weight=draw(st.integers(1, 5)))]
    for name in draw(st.sampled_from(["", "b", "bc", "bcd"])):
        start, weight = draw(st.integers(0, 6)), draw(st.sampled_from([0.5, 1, 3]))
        end = draw(st.none() | st.integers(start + 1, 9))
        sources.append(SourceConfig(shards=name, weight=weight, from_step=start, until_step=end))
    return sources


@settings(max_examples=40)
@given(weights)
def test_each_source_has_its_share_to_one_row_after_any_number_of_rows(weights):
    sources, rows_before = Pattern(weights).locate(np.arange(3000))
    counts = np.cumsum(np.arange(len(weights)) == sources[:, None], axis=0)
    shares = np.array(weights) / sum(weights)
    assert np.abs(counts - np.arange(1, 3001)[:, None] * shares).max() < 1
    for source in range(len(weights)):
        assert (rows_before[sources == source] == np.arange(counts[-1, source])).all()


@settings(max_examples=40)
@given(weights, st.integers(0, 10**12), st.data())
def test_a_pattern_is_known_at_any_row(weights, start, data):
    pattern = Pattern(weights)
    sources, rows_before = pattern.locate(np.arange(start, start + 50))
    for length in (0, 1, 50):
        expected = pattern.counts(start) + np.bincount(sources[:length], minlength=len(weights))
        assert (pattern.counts(start + length) == expected).all()
    assert (rows_before[:1] == pattern.counts(start)[sources[0]]).all()
    in_stock = data.draw(st.lists(st.integers(0, 500), min_size=len(weights), max_size=len(weights)))
    num_rows = pattern.num_rows_of(in_stock)
    assert (pattern.counts(num_rows) <= in_stock).all() and not (pattern.counts(num_rows + 1) <= in_stock).all()


@settings(max_examples=50)
@given(changing_sources(), st.integers(1, 7), st.integers(1, 7), st.integers(1, 9), st.sampled_from([1, 2, 4]))
def test_a_mixture_is_the_same_on_any_number_of_ranks_and_from_any_step(
    sources, rows_per_rank, later_rows_per_rank, change, world_size
):
    batch_sizes = Piecewise([(0, rows_per_rank * world_size), (change, later_rows_per_rank * world_size)])
    walked, counts = Mixture(sources, batch_sizes), np.zeros(len(sources), np.int64)
    for step in range(12):
        jumped = Mixture(sources, batch_sizes)
        assert (jumped.counts(step) == counts).all()
        positions = np.arange(batch_sizes.before(step), batch_sizes.before(step + 1))
        chosen, rows = walked.locate(positions)
        by_rank = [jumped.locate(part) for part in np.split(positions, world_size)]
        assert (np.concatenate([part[0] for part in by_rank]) == chosen).all()
        assert (np.concatenate([part[1] for part in by_rank]) == rows).all()
        assert all(sources[source].is_active(step) for source in chosen)
        for source in range(len(sources)):  # each goes on where it stood, through all changes of the others
            own = rows[chosen == source]
            assert (own == np.arange(counts[source], counts[source] + len(own))).all()
            counts[source] += len(own)


def test_the_pattern_is_pinned():
    """Numbers of this code's first version: a change of them would break the resume of every mixture."""
    assert Pattern([0.5, 0.3, 0.2]).locate(np.arange(12))[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1]
    assert [source_seed(7, place) for place in range(3)] == [7, 5248728172263328216, 1895855718835143124]


@pytest.mark.parametrize(
    "sources, names",
    [
        (["data/own/shards", "data/compare/shards"], ["own/shards", "compare/shards"]),
        (["x/a", "s3://bucket/b/?version", "b"], ["a", "bucket/b", "b"]),
        (
            ["s3://one/c4/shards", "s3://two/c4/shards", "books/shards"],
            ["one/c4/shards", "two/c4/shards", "books/shards"],
        ),
        (["own/shards=mine", "compare/shards"], ["mine", "shards"]),
    ],
)
def test_a_name_is_as_much_of_the_path_as_tells_the_sources_apart(sources, names):
    given = [source.partition("=") for source in sources]
    configs = [SourceConfig(shards=shards, weight=1, name=name or None) for shards, _, name in given]
    assert [source.name for source in with_names(configs)] == names
    assert [("name" in config.model_dump()) for config in configs] == ["=" in source for source in sources]


def test_mistakes_in_a_mixture_are_said_in_words():
    def said(*sources: dict) -> str:
        named = with_names([SourceConfig(**source) for source in sources])
        return "\n".join(mixture_mistakes(named, num_steps=20))

    a, b = {"shards": "x/a", "weight": 1}, {"shards": "s3://bucket/b/", "weight": 0.5}
    assert not said(a, b | {"from_step": 3, "until_step": 19})
    assert "found 2 sources named x/a; needed: other folders, or another `name`" in said(a, a | {"shards": "x//a/"})
    assert "found 2 sources named a; needed" in said(a | {"name": "a"}, b | {"name": "a"})
    assert "b has from_step 20; needed: below train.num_steps = 20" in said(a, b | {"from_step": 20})
    assert "b has until_step 20; needed: above from_step = 0 and below" in said(a, b | {"until_step": 20})
    assert "no source has rows for step 5" in said(a | {"until_step": 5}, b | {"from_step": 6})
    assert "no source has rows for step 0" in said()
    assert "whole only after 1,123,457 rows" in said(a, b | {"weight": 0.123457})


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


def test_folders_of_the_same_name_are_named_by_their_paths(folders, make_loader, tmp_path):
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
    assert recorded(tmp_path / "run") == {f"source_1/{skipped}"}
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


def test_corrupt_shards_of_two_sources_are_recorded_apart(folders, make_loader, tmp_path, trials):
    folder, _ = folders
    whole = {path: path.read_bytes() for path in folder.glob("*/train/*.tar")}
    (name,) = {*corrupt(folder / "a", 0), *corrupt(folder / "b", 0)}
    loader = make_loader(data=mixed(folder) | SKIP)
    batches = [join(loader.micro_batches(step)) for step in range(6)]
    assert recorded(tmp_path / "run") == {name, f"source_1/{name}"}
    for path, content in whole.items():
        path.write_bytes(content)
    resumed = make_loader(data=mixed(folder) | SKIP)
    assert all(same(join(resumed.micro_batches(step)), batches[step]) for step in range(6))
    trials("shards missing, empty, of wrong count, listed twice or out of order", 2)
