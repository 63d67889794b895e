"""Contrastive training on SQuAD's and MNLI's files, resuming, and scores beside BM25, by sentence-transformers."""

import json
import math
import shutil
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from gmlp_scale.distributed.world import start_world
from gmlp_scale.finetune.finetuning import finetune, read_inputs
from gmlp_scale.finetune.search import read_answered, read_triples, search_by_words, search_scores, train_search
from gmlp_scale.tasks.question_answering import Question
from gmlp_scale.tasks.records import DataError
from launch.search import main
from tests.finetune.conftest import sentiment_run, write_tiny_export
from tests.gloo_ranks import run_ranks

pytestmark = pytest.mark.usefixtures("no_launcher")
WORDS = (
    "ship", "sea", "dog", "cat", "town", "people", "house", "tree", "rain", "wind", "stone", "bread", "king", "road",
    "bell", "snow",
)  # fmt: skip
PASSAGES = [f"the {word} went over to see what some {word} had done" for word in WORDS]
MNLI = """sentence1\tsentence2\tgold_label
a dog sleeps\tit rests\tentailment
a dog sleeps\tit is big\tneutral
a dog sleeps\tan animal rests\tentailment
a dog sleeps\tit runs\tcontradiction
it rains\tit is wet\tentailment
it snows\tit is hot\tcontradiction
"""
SETTINGS = {"per_device_train_batch_size": 4, "learning_rate": 3e-3, "save_steps": 2, "num_train_epochs": 1}


@pytest.fixture(scope="session")
def model(tmp_path_factory, tokenizer_folder) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    return write_tiny_export(folder, tokenizer_folder, sequence_length=32, masks_padding=True)


@pytest.fixture
def squad(write_squad) -> Path:
    """Passages with two questions each."""
    return write_squad(
        "squad.json",
        [
            (passage, [(f"where did the {word} go", [(word, 4)]), (f"who saw a {word}", [(word, 4)])])
            for word, passage in zip(WORDS, PASSAGES, strict=True)
        ],
    )


@pytest.fixture
def mnli(tmp_path) -> Path:
    (tmp_path / "mnli.tsv").write_text(MNLI)
    return tmp_path / "mnli.tsv"


def test_a_triple_is_a_premise_with_the_first_sentence_that_it_entails_and_contradicts(mnli):
    assert read_triples(str(mnli)) == [{"anchor": "a dog sleeps", "positive": "it rests", "negative": "it runs"}]


def test_files_without_a_triple_or_an_answer_are_refused(mnli, write_squad):
    mnli.write_text("".join(line for line in MNLI.splitlines(keepends=True) if not line.endswith("contradiction\n")))
    with pytest.raises(DataError, match="no first sentence has both an entailed and a contradicted one"):
        read_triples(str(mnli))
    with pytest.raises(DataError, match="no question has an answer"):
        read_answered(str(write_squad("none.json", [(PASSAGES[0], [("who", [])])])), "dev")


def test_scores_are_what_they_are_by_hand():
    """The questions' passages are found first, second and eleventh; equal scores keep the passages' order."""
    questions = [Question(str(number), "?", PASSAGES[number], ()) for number in (0, 1, 15)]
    found = np.zeros((3, 16))
    found[:, :10], found[2, 15] = np.arange(20, 10, -1), 5
    scores = search_scores(lambda asked: found, PASSAGES, questions)
    assert scores == pytest.approx({"nDCG@10": (1 + 1 / math.log2(3)) / 3, "recall@10": 2 / 3})


def test_bm25_finds_a_rare_word():
    scores_QP = search_by_words(PASSAGES)(["where did the bell go", "a word that no passage holds", "the ?"])
    assert scores_QP.shape == (3, 16) and scores_QP[0].argmax() == WORDS.index("bell")
    assert (np.delete(scores_QP[0], WORDS.index("bell")) < scores_QP[0].max()).all() and not scores_QP[1:].any()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(some[name], others[name]) for name in some)


def test_a_training_that_was_cut_off_while_it_saved_resumes_to_the_same_weights(squad, mnli, model, tmp_path):
    whole = train_search(model, str(squad), str(mnli), tmp_path / "whole", **SETTINGS)
    checkpoints = tmp_path / "cut" / "checkpoints"
    shutil.copytree(tmp_path / "whole" / "checkpoints", checkpoints)
    assert {path.name for path in checkpoints.iterdir()} == {f"checkpoint-{step}" for step in (2, 4, 6, 8, 9)}
    for step in (6, 8, 9):
        shutil.rmtree(checkpoints / f"checkpoint-{step}")
    (checkpoints / "checkpoint-4" / "trainer_state.json").unlink()
    (checkpoints / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    begun = weights(checkpoints / "checkpoint-2")
    cut = train_search(model, str(squad), str(mnli), tmp_path / "cut", **SETTINGS)
    assert equal(weights(whole), weights(cut)) and not equal(begun, weights(cut))


def test_finetuning_starts_from_the_trunk_that_was_trained_for_search(squad, model, tmp_path):
    trained = train_search(model, str(squad), None, tmp_path / "search", **SETTINGS)
    run = sentiment_run(tmp_path, trained, "train.num_steps=2")
    inputs = read_inputs(run)
    assert inputs.pretrained.weights["embedding.weight"].equal(weights(trained)["model.embedding.weight"])
    assert not inputs.pretrained.weights["embedding.weight"].equal(weights(model)["model.embedding.weight"])
    with start_world(30, "cpu") as world:
        assert finetune(run, inputs, world)["step"] == 2


def train_an_epoch(model: Path, squad: Path, folder: Path, batch_size: int) -> None:
    settings = {"num_train_epochs": 1, "save_steps": 4, "logging_steps": 1}
    train_search(model, str(squad), None, folder, per_device_train_batch_size=batch_size, **settings)


def losses(folder: Path, last_step: int) -> list[float]:
    state = json.loads((folder / "checkpoints" / f"checkpoint-{last_step}" / "trainer_state.json").read_text())
    return [line["loss"] for line in state["log_history"] if "loss" in line]


def test_two_ranks_share_the_rows_and_take_each_other_s_passages_as_negatives(squad, model, tmp_path):
    """So the loss is that of one rank with twice the batch: over eight passages, not over four."""
    run_ranks(train_an_epoch, 2, model, squad, tmp_path / "two", 4)
    train_an_epoch(model, squad, tmp_path / "eight", 8)
    train_an_epoch(model, squad, tmp_path / "four", 4)
    two, eight, four = (losses(tmp_path / name, step) for name, step in (("two", 4), ("eight", 4), ("four", 8)))
    assert (len(two), len(eight), len(four)) == (4, 4, 8)
    assert abs(fmean(two) - fmean(eight)) < abs(fmean(two) - fmean(four)) / 3


def test_the_command_trains_scores_answers_and_does_nothing_twice(squad, model, tmp_path, succeeds):
    options = ["--model", model, "--pairs", squad, "--dev", squad, "--output", tmp_path, "--epochs", 30]
    options += ["--batch-size", 16, "--rate", 3e-3, "--ask", "where did the bell go"]
    printed = succeeds(main, *options)
    table = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("|")]
    assert table[0] == ["32 questions, 16 passages", "nDCG@10", "recall@10"]
    scores = {name: float(ndcg) for name, ndcg, _ in table[2:]}
    assert scores["BM25"] > 90 and scores["trained"] > scores["as exported"] + 10
    assert f"BM25: {PASSAGES[WORDS.index('bell')]}" in printed
    trained = tmp_path / "seed_0" / "model"
    saved = (trained / "model.safetensors").stat().st_mtime_ns
    assert succeeds(main, *options).endswith(printed[printed.index("| 32 questions") :])
    assert (trained / "model.safetensors").stat().st_mtime_ns == saved
    embeddings = SentenceTransformer(str(trained), trust_remote_code=True).encode(["a dog", "a ship"])
    assert embeddings.shape == (2, 16)


def test_options_that_fit_nothing_are_refused(squad, model, tmp_path, launched):
    for options, message in (
        ([], "give --pairs, --triples or both"),
        (["--pairs", squad, "--rate", "0"], "found 0"),
    ):
        code, _, error = launched(main, "--model", model, "--dev", squad, "--output", tmp_path / "out", *options)
        assert code == 2 and message in error
