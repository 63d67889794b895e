"""GLUE's tasks read the files that are downloaded, score as the benchmark does and write what its server takes."""

import logging

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch

from gmlp_scale.finetune.glue import FOLDERS
from gmlp_scale.models.task_heads import LabelledBatch, label_loss
from gmlp_scale.tasks.records import DataError
from gmlp_scale.tasks.table import TASKS
from tests.tasks.official_glue import write_glue

OFFICIAL = {
    "matthews": sklearn.metrics.matthews_corrcoef,
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": sklearn.metrics.f1_score,
    "pearson": lambda labels, predictions: scipy.stats.pearsonr(labels, predictions).statistic,
    "spearman": lambda labels, predictions: scipy.stats.spearmanr(labels, predictions).statistic,
}
SCORES = {"cola": ["matthews"], "mrpc": ["accuracy", "f1"], "qqp": ["accuracy", "f1"], "stsb": ["pearson", "spearman"]}


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    return write_glue(tmp_path_factory.mktemp("glue"))


def read(glue, tokenizer, task: str, part: str, file: str):
    return TASKS[task].read(str(glue / FOLDERS[task] / f"{file}.tsv"), part, tokenizer, 32, None)


@pytest.mark.parametrize("task", FOLDERS)
def test_official_files_are_read_and_scored(glue, tokenizer, task):
    suffix = "_matched" if task == "mnli" else ""
    train, dev = (read(glue, tokenizer, task, *part) for part in (("train", "train"), ("dev", f"dev{suffix}")))
    assert train.num_examples == dev.num_examples == 12 and dev.has_labels
    logits_RC = np.random.default_rng(0).normal(2, 1, (12, dev.summary_size)).astype(np.float32)
    found = dev.scores(logits_RC)
    assert [name for name in found if name != "loss"] == SCORES.get(task, ["accuracy"])
    predictions_R = logits_RC[:, 0] if task == "stsb" else logits_RC.argmax(-1)
    for name in found.keys() - {"loss"}:
        assert found[name] == pytest.approx(OFFICIAL[name](dev.labels_R, predictions_R), abs=1e-6)
    assert TASKS[task].main_score == SCORES.get(task, ["accuracy"])[0]


@pytest.mark.parametrize("task", FOLDERS)
def test_submissions_have_the_servers_form(glue, tokenizer, tmp_path, task):
    suffix = "_mismatched" if task == "mnli" else ""
    rows = read(glue, tokenizer, task, f"test{suffix}", f"test{suffix}")
    assert not rows.has_labels
    logits_RC = np.zeros((4, rows.summary_size), np.float32)
    logits_RC[:, 0] = (2.0, 0.12345, 5.25, 1.0)
    rows.write_predictions(logits_RC, tmp_path)
    written = {"stsb": ["2.000", "0.123", "5.250", "1.000"], "mnli": ["entailment"] * 4}
    written |= dict.fromkeys(("qnli", "rte"), ["entailment"] * 4)
    lines = [f"{n}\t{prediction}" for n, prediction in enumerate(written.get(task, ["0"] * 4))]
    name = "MNLI-mm" if task == "mnli" else FOLDERS[task]
    assert (tmp_path / f"{name}.tsv").read_text().splitlines() == ["index\tprediction", *lines]


def test_quotes_and_byte_order_marks_are_no_part_of_the_form(glue, tokenizer):
    mrpc = read(glue, tokenizer, "mrpc", "dev", "dev")
    assert mrpc.examples[0].texts[0].startswith('"') and mrpc.examples[0].texts[1].endswith("100 .")


def test_broken_lines_of_qqp_are_left_out_and_counted(glue, tokenizer, caplog):
    with caplog.at_level(logging.WARNING, logger="gmlp_scale"):
        rows = read(glue, tokenizer, "qqp", "train", "train")
    assert rows.num_examples == 12
    assert "2 broken lines were left out; first line 2: found 5 columns; needed 6: id, qid1" in caplog.text
    with pytest.raises(DataError, match="line 2: found 5 columns; needed 6"):
        read(glue, tokenizer, "qqp", "dev", "train")


def test_labels_as_datasets_gives_them(tmp_path, tokenizer):
    pytest.importorskip("datasets")
    import datasets

    def rows_of(task: str, part: str, **columns):
        path = tmp_path / f"{task}_{part}.parquet"
        datasets.Dataset.from_dict(columns).to_parquet(path)
        return TASKS[task].read(str(path), part, tokenizer, 16, None)

    texts = {"sentence1": ["a", "b"], "sentence2": ["b", "c"], "idx": [0, 1]}
    assert rows_of("stsb", "dev", **texts, label=[3.8, 0.0]).labels_R.tolist() == pytest.approx([3.8, 0])
    assert not rows_of("stsb", "test", **texts, label=[-1.0, -1.0]).has_labels
    assert rows_of("rte", "dev", **texts, label=[1, 0]).labels_R.tolist() == [1, 0]
    assert not rows_of("mrpc", "test", **texts, label=[-1, -1]).has_labels


@pytest.mark.parametrize("score", ["5.1", "-0.5", "nan", "much"])
def test_scores_of_sts_b_are_from_0_to_5(tmp_path, tokenizer, score):
    path = tmp_path / "dev.tsv"
    path.write_text(f"sentence1\tsentence2\tscore\na\tb\t{score}\n")
    with pytest.raises(DataError, match=f"line 2: score is '{score}'; stsb has 0 to 5"):
        TASKS["stsb"].read(str(path), "dev", tokenizer, 16, None)


def test_sts_b_learns_by_the_squared_error(glue, tokenizer):
    rows = read(glue, tokenizer, "stsb", "dev", "dev")
    batch = rows.batch(np.arange(3))
    assert isinstance(batch, LabelledBatch) and batch.labels_B.dtype == torch.float32
    logits_BC = torch.tensor([[1.0], [2.0], [4.5]])
    expected = ((logits_BC[:, 0] - batch.labels_B) ** 2).mean()
    assert torch.allclose(label_loss(logits_BC, batch.labels_B), expected)
    assert len(set(rows.labels_R.tolist())) > 2
