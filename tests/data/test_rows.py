"""The order of the rows for other people's trainers: what launch/pretrain.py sees, from any step, on any ranks."""

import ast
import pickle
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks import loading
from data_prep import inspect_batch
from gmlp_scale.data.batch import IGNORED, PAD_ID, SEP_ID
from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.data.rows import RowLoader, Rows
from gmlp_scale.data.shards import ShardWriter
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.errors import InputError
from gmlp_scale.recipe.reader import load_run_config
from tests.data.test_loader import join, unmasked
from tests.written_shards import change_manifest, random_rows, write_tiny_shards

ROOT = Path(__file__).parents[2]
SCHEDULE = [[0, 12], [3, 24]]


@pytest.fixture
def shards(tmp_path):
    """Two folders, of 50 and 21 training rows of 16 tokens."""
    for name, sizes, seed in (("a", [20, 30], 0), ("b", [9, 12], 10)):
        write_tiny_shards(tmp_path / name, sizes, [2], sequence_length=16, seed=seed)
    return tmp_path


def sources(shards, **changes) -> list[dict]:
    return [{"shards": f"{shards}/a", "weight": 0.75}, {"shards": f"{shards}/b", "weight": 0.25} | changes]


def taken(loader: RowLoader, num_batches: int) -> list[dict]:
    return [batch for batch, _ in zip(loader, range(num_batches), strict=False)]


def global_batches(rows: Rows, start: int, stop: int, world_size: int, **options) -> list[dict]:
    """The dictionaries of each step, those of all ranks together."""
    steps = []
    loaders = [
        RowLoader(rows, rank=rank, world_size=world_size, num_steps=stop, **options) for rank in range(world_size)
    ]
    for loader in loaders:
        loader.load_state_dict({"step": start})
    for parts in zip(*loaders, strict=True):
        steps.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    assert [loader.state_dict() for loader in loaders] == [{"step": stop}] * world_size
    for loader in loaders:
        loader.close()
    return steps


@pytest.mark.parametrize("mixture", [False, True])
def test_a_step_has_the_rows_and_masks_of_our_loader_on_any_ranks_from_any_step(mixture, shards, make_loader):
    place = sources(shards, from_step=2) if mixture else f"{shards}/a"
    fractions = [[0, 0.3], [4, 0.15]]
    data = {"shards": place, "masked_fraction": fractions}
    ours = make_loader(data=data, global_batch_size=SCHEDULE, seed=5)
    expected = [join(ours.micro_batches(step)) for step in range(8)]
    rows = Rows(place, seed=5, global_batch_size=SCHEDULE)
    for world_size in (1, 2, 3, 4):
        for start in (0, 3, 5):
            masked = global_batches(rows, start, 8, world_size, masked_fraction=fractions)
            plain = global_batches(rows, start, 8, world_size)
            for step, with_masks, without in zip(range(start, 8), masked, plain, strict=True):
                batch = expected[step]
                labels = torch.full((len(batch.labels_BM), 16), IGNORED)
                labels.scatter_(1, batch.masked_positions_BM, batch.labels_BM)
                assert torch.equal(with_masks["input_ids"], batch.token_ids_BN)
                assert torch.equal(with_masks["labels"], labels)
                assert (without["input_ids"].numpy() == unmasked(batch)).all()
                assert torch.equal(without["labels"], without["input_ids"]) and len(without) == 2


def test_the_rows_are_those_that_inspect_batch_prints(forty_rows, succeeds):
    overrides = [f"data.shards={forty_rows}", "model.sequence_length=32", "model.vocab_size=1000", "seed=3",
                 "train.global_batch_size=12", "train.micro_batch_size=4"]  # fmt: skip
    tokenizer, rows = Tokenizer(forty_rows / "tokenizer"), Rows(str(forty_rows), seed=3, global_batch_size=12)
    for step in (0, 4):
        printed = succeeds(inspect_batch.main, "--config", "smoke", "--step", step, *overrides)
        texts = [ast.literal_eval(text) for text in re.findall(r"^  text   (.*)$", printed, re.MULTILINE)]
        for world_size in (1, 2, 3, 4):
            (batch,) = global_batches(rows, step, step + 1, world_size, masked_fraction=0.15)
            assert [tokenizer.decode(row) for row in batch["input_ids"].tolist()] == texts and len(texts) == 12


def test_rows_are_a_data_set_of_torch_in_the_order_of_training(shards):
    rows = Rows(sources(shards, from_step=2), seed=5, global_batch_size=SCHEDULE)
    assert len(rows) == 71 and rows[3].dtype == torch.int64 and rows[3].shape == (16,)
    in_order = torch.cat([step["input_ids"] for step in global_batches(rows, 0, 8, 1)])
    assert torch.equal(torch.stack(rows.__getitems__(range(len(in_order)))), in_order)  # both parts of the mixture
    shuffled = np.random.default_rng(0).permutation(len(in_order)).tolist()
    for given in (rows, pickle.loads(pickle.dumps(rows))):  # which has been read here, and has threads
        found = torch.cat(list(DataLoader(given, batch_size=7, sampler=shuffled, num_workers=2)))
        assert torch.equal(found, in_order[shuffled])
    alone = Rows(f"{shards}/a", seed=5)
    assert sorted(map(tuple, torch.stack(alone.__getitems__(range(50))).tolist())) == sorted(
        map(tuple, torch.stack(alone.__getitems__(range(50, 100))).tolist())
    )
    with pytest.raises(IndexError, match="found position -1; needed: 0 or more"):
        rows[-1]


def test_the_state_is_the_number_of_finished_steps(shards):
    rows = Rows(f"{shards}/a", global_batch_size=12)
    loader = RowLoader(rows, rank=1, world_size=2, micro_batch_size=2)
    found, states = [], []
    for batch in taken(loader, 8):
        found.append(batch["input_ids"])
    iterator = iter(RowLoader(rows, rank=1, world_size=2, micro_batch_size=2, num_steps=3))
    watched = RowLoader(rows, rank=1, world_size=2, micro_batch_size=2, num_steps=3)
    for batch in watched:
        states.append(watched.state_dict()["step"])
        assert torch.equal(batch["input_ids"], next(iterator)["input_ids"])
    assert states == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert list(watched) == []
    watched.load_state_dict({"step": 1})
    again = [batch["input_ids"] for batch in watched]
    assert torch.equal(torch.cat(again[:5]), torch.cat(found[3:8])) and len(again) == 6
    for state in ({}, {"step": -1}, {"step": "1"}, {"step": True}, {"batch": 2}):
        with pytest.raises(InputError, match="needed: step, the number of finished steps"):
            watched.load_state_dict(state)


def test_the_first_batch_at_step_1_000_000_of_305_million_rows_reads_its_own_shards_alone(tmp_path):
    """The manifest lists 40,000 shards, of which only those that the step reads are there."""
    run = load_run_config("smoke", ["model.sequence_length=8", "model.vocab_size=1000"])
    shards, folder = loading.c4_shards(run), tmp_path / "shards"
    loading.write_manifest(run, shards, folder)
    fields = {"seed": 1, "global_batch_size": 256, "shuffle_group_bytes": 51 * shards[0].bytes // 2}
    rows = Rows(str(folder), **fields)
    far = rows.opened(BatchPlan(1, rows.batch_sizes, 256)).addresses(1_000_000)
    needed = sorted(set(far.shard.tolist()))
    for number in needed:
        stem = f"train-{number:05d}"
        writer = ShardWriter(folder, "train", stem, sequence_length=8, rows_per_shard=loading.C4_ROWS_PER_SHARD)
        writer.add(random_rows(loading.C4_ROWS_PER_SHARD, 8, seed=number))
        (shards[number],) = writer.close()
    loading.write_manifest(run, shards, folder)
    rows = Rows(str(folder), **fields)
    loader = RowLoader(rows, rank=1, world_size=4, micro_batch_size=8)
    loader.load_state_dict({"step": 1_000_000})
    (batch,) = taken(loader, 1)
    written = {number: random_rows(loading.C4_ROWS_PER_SHARD, 8, seed=number) for number in needed}
    expected = [written[far.shard[place]][far.row_index[place]] for place in range(64, 72)]
    assert len(rows) == 305_000_000 and len(needed) <= 25 and (batch["input_ids"].numpy() == np.stack(expected)).all()
    loader.close()


ROWS = [  # <cls> 2, <sep> 3, <pad> 0
    [2, 5, 6, 3, 7, 3, 8, 9],
    [2, 10, 11, 12, 13, 14, 15, 16],
    [2, 5, 3, 6, 7, 3, 0, 0],
    [2, 3, 5, 6, 7, 8, 9, 3],
]


def test_documents_have_positions_and_bounds_of_their_own(shards, monkeypatch):
    folder = shards / "rows"
    monkeypatch.setattr("tests.written_shards.random_rows", lambda *_, **__: np.array(ROWS, "<u2"))
    write_tiny_shards(folder, [4], sequence_length=8)
    (batch,) = RowLoader(Rows(str(folder), global_batch_size=4), documents=True, num_steps=1)
    starts = []
    for place, row in enumerate(batch["input_ids"].tolist()):
        assert row in ROWS
        positions = [0 if i == 0 or row[i - 1] == SEP_ID else None for i in range(8)]
        for i in range(8):
            positions[i] = positions[i - 1] + 1 if positions[i] is None else 0
        assert batch["position_ids"][place].tolist() == positions
        expected = [IGNORED if at == 0 or id == PAD_ID else id for id, at in zip(row, positions, strict=True)]
        assert batch["labels"][place].tolist() == expected
        starts += [8 * place + i for i in range(8) if positions[i] == 0]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [*starts, 32]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == max(np.diff([*starts, 32]))


def test_rows_of_one_document_have_an_attention_mask(shards):
    write_tiny_shards(shards / "c", [8], sequence_length=16)
    change_manifest(shards / "c", packing="document")
    (batch,) = RowLoader(Rows(f"{shards}/c", global_batch_size=8), masked_fraction=0.2, documents=True, num_steps=1)
    assert torch.equal(batch["attention_mask"], (batch["input_ids"] != PAD_ID).long())
    is_label = batch["labels"] != IGNORED
    assert (is_label.sum(dim=1) == 3).all() and batch["position_ids"].shape == (8, 16)


def test_mistakes_are_one_clear_message(shards):
    place = f"{shards}/a"
    with pytest.raises(InputError, match="global_batch_size=12 does not divide by world size 5"):
        RowLoader(Rows(place, global_batch_size=12), world_size=5)
    for size in (0, 1.5, [[1, 2], [3, 4]]):
        with pytest.raises(ValueError, match="a whole number above 0, or a list of at least two"):
            Rows(place, global_batch_size=size)
    with pytest.raises(ValueError, match="cache_folder"):
        Rows(place, cache_folder="x")
    with pytest.raises(ShardError, match="no source has rows for step 0"):
        Rows([{"shards": place, "weight": 1, "from_step": 3}])
    with pytest.raises(ShardError, match="masks none of 16 positions"):
        RowLoader(Rows(place), masked_fraction=0.01)
    with pytest.raises(FileNotFoundError, match="no shards at"):
        Rows(f"{shards}/nowhere")
    write_tiny_shards(shards / "c", [8], sequence_length=8)
    with pytest.raises(ShardError, match="sequence_length is 16, the shards have 8"):
        Rows([{"shards": place, "weight": 1}, {"shards": f"{shards}/c", "weight": 1}])


def test_the_loop_of_the_docs_takes_a_step_for_each_global_batch(tmp_path, monkeypatch):
    (loop,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    write_tiny_shards(tmp_path / "data/own_512", [600], sequence_length=16)
    expected = global_batches(Rows("data/own_512", seed=1, global_batch_size=512), 3, 5, 2)
    seen, optimizer = [], Mock()

    def model(input_ids, labels):
        if len(seen) == 64:
            raise KeyboardInterrupt
        assert optimizer.step.call_count == optimizer.zero_grad.call_count == len(seen) // 32
        seen.append(input_ids)
        return Mock()

    names = {"rank": 1, "world_size": 2, "last_step": 3, "model": model, "optimizer": optimizer}
    with pytest.raises(KeyboardInterrupt):
        exec(loop, names)
    assert names["last_step"] == 5 and optimizer.step.call_count == 2
    halves = [step["input_ids"][256:] for step in expected]
    assert torch.equal(torch.cat(seen), torch.cat(halves))
    names["loader"].close()


def test_only_torch_numpy_and_what_reads_shards_are_imported():
    code = "import sys; from gmlp_scale.data.rows import RowLoader, Rows; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"deepspeed", "transformers", "datatrove", "datasets", "sentencepiece", "tokenizers", "webdataset", "PIL"}
    heavy |= {"tensorboard"}
    assert "torch" in modules and not heavy & set(modules)
