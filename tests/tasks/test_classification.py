"""Sentences and pairs: every form of file, bad input with its line, rows, scores and submissions, as GLUE's are."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch

from gmlp_scale.finetune.glue import FOLDERS
from gmlp_scale.models.task_heads import LabelledBatch, label_loss
from gmlp_scale.tasks.classification import read_examples, truncated
from gmlp_scale.tasks.records import DataError
from gmlp_scale.tasks.scores import accuracy
from gmlp_scale.tasks.table import TASKS
from tests.tasks.official_glue import MNLI_COLUMNS, write_glue

MNLI, SST2, COLA, STSB = (TASKS[name] for name in ("mnli", "sst2", "cola", "stsb"))


def write(path, *lines: str):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def mistakes_of(task, source, part="train") -> list[str]:
    with pytest.raises(DataError) as error:
        read_examples(task, source, part)
    assert source in str(error.value)
    return error.value.mistakes


MNLI_LINE = '{}\t1\t2e\tfiction\t( x )\t( y )\t(P)\t(P)\tA "quoted man\tHe runs .\tneutral\ta\tb\tc\td\t{}'
MNLI_TEXTS = ('A "quoted man', "He runs .")  # quotes mean nothing


@pytest.mark.parametrize(
    "task, part, lines, expected",
    [
        (MNLI, "dev", [f"{MNLI_COLUMNS}\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
                       MNLI_LINE.format(7, "contradiction"), MNLI_LINE.format(8, "-"), MNLI_LINE.format(9, "neutral")],
         [("7", MNLI_TEXTS, 2), ("9", MNLI_TEXTS, 1)]),  # the example without consensus is left out
        (SST2, "train", ["sentence\tlabel", "good\u2028film \t1", "bad\x0cfilm\t0"],  # other readers break these lines
         [("0", ("good\u2028film ",), 1), ("1", ("bad\x0cfilm",), 0)]),
        (SST2, "test", ["index\tsentence", "3\tgood", "5\tbad"], [("3", ("good",), None), ("5", ("bad",), None)]),
        (COLA, "dev", ["gj04\t0\t*\tThey drank the pub.", "gj04\t1\t\tThe car honked."],  # no header
         [("0", ("They drank the pub.",), 0), ("1", ("The car honked.",), 1)]),
        (COLA, "test", ["index\tsentence", "3\tgood"], [("3", ("good",), None)]),  # this file has a header
        (COLA, "train", ["sentence\tlabel", "good\t1"], [("0", ("good",), 1)]),
    ],
)  # fmt: skip
def test_files_of_glue_and_ones_own(tmp_path, task, part, lines, expected):
    examples = read_examples(task, write(tmp_path / f"{part}.tsv", *lines), part)
    assert [(example.number, example.texts, example.label) for example in examples] == expected


@pytest.mark.parametrize(
    "lines, labels",
    [
        (["sentence\tlabel", "good\t1", "bad\t0"], [1, 0]),
        (["index\tsentence\tlabel", "0\tgood\t-1", "1\tbad\t-1"], None),
        (["index\tsentence", "0\tgood", "1\tbad"], None),
    ],
)
def test_a_test_part_is_scored_if_it_has_labels(tmp_path, tokenizer, lines, labels):
    rows = SST2.read(write(tmp_path / "test.tsv", *lines), "test", tokenizer, 16, None)
    assert rows.has_labels == (labels is not None)
    assert rows.labels_R.tolist() == (labels or [-1, -1])


def test_the_first_score_is_the_main_one(tmp_path, tokenizer):
    def all_right(predictions, labels) -> float:
        return float((predictions == labels).all())

    task = replace(COLA, scores=(all_right, accuracy))
    rows = task.read(write(tmp_path / "a.tsv", "x\t0\t*\tone", "x\t1\t\ttwo"), "dev", tokenizer, 16, None)
    assert task.main_score == "all_right" and task.shown("all_right", 0.5) == "50.00"
    assert list(rows.scores(np.array([[2.0, 0.0], [2.0, 0.0]])).items())[:2] == [("all_right", 0.0), ("accuracy", 0.5)]


def test_jsonl_and_parquet_as_datasets_writes_them(tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = {"premise": ["A man plays"] * 2, "hypothesis": ["He moves", "He sleeps"]}
    table = datasets.Dataset.from_dict({**texts, "label": [0, 2], "idx": [0, 1]})
    table.to_json(tmp_path / "train.jsonl")
    table.to_parquet(tmp_path / "train.parquet")
    expected = [("0", ("A man plays", "He moves"), 0), ("1", ("A man plays", "He sleeps"), 2)]
    for name in ("train.jsonl", "train.parquet"):
        examples = read_examples(MNLI, str(tmp_path / name), "train")
        assert [(e.number, e.texts, e.label) for e in examples] == expected


def test_a_local_folder_of_the_hubs_form(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "glue"
    (folder / "sst2").mkdir(parents=True)
    table = datasets.Dataset.from_list([{"sentence": "good", "label": 1, "idx": 0}])
    table.to_parquet(folder / "sst2" / "validation-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: sst2\n  data_files:\n  - split: validation\n    path: sst2/validation-*\n---\n"
    )
    assert [(e.texts, e.label) for e in read_examples(SST2, str(folder), "dev")] == [(("good",), 1)]
    assert "datasets cannot load sst2 split train" in mistakes_of(SST2, str(folder), "train")[0]
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text("")  # which datasets 4 refuses by a RuntimeError
    assert "scripts are no longer supported" in mistakes_of(SST2, str(tmp_path / "scripted"), "train")[0]


def test_what_is_taken_for_a_name_on_the_hub_may_be_a_file_that_is_not_there(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (found,) = mistakes_of(SST2, "nowhere/train.csv", "train")
    assert found.endswith("Nor is there such a file here; a file ends in .tsv, .json, .jsonl, .parquet")


NO_SCORES = ("5.1", "-0.5", "nan", "much")
NO_LABEL = "; mnli has entailment, neutral, contradiction"


@pytest.mark.parametrize(
    "task, part, name, lines, mistakes",
    [
        (SST2, "train", "a.tsv", ["sentence\tclass", "x\t1"], ["line 2: no column label; found sentence, class"]),
        (SST2, "train", "a.tsv", ["text\tlabel", "x\t1"], ["line 2: no column sentence; found text, label"]),
        (SST2, "train", "a.tsv", ["sentence\tlabel", "\t\t1"], ["line 2: found 3 columns; needed 2: sentence, label"]),
        (SST2, "train", "a.tsv", ["sentence\tlabel"], ["holds no examples"]),
        (SST2, "train", "a.jsonl", ["{"], ["line 1 is damaged (Expecting property name"]),
        (SST2, "train", "a.jsonl", ["[1]"], ["line 1: found list; a line holds an object"]),
        (SST2, "train", "a.jsonl", ['{"sentence": 3, "label": 1}'], ["line 1: sentence is 3, which is no text"]),
        (SST2, "train", "a.jsonl", ['{"sentence": "\\ud800", "label": 1}'], ["line 1 is damaged ('utf-8' codec"]),
        (SST2, "train", "a.parquet", ["x"], ["is not Parquet, or is damaged (Parquet file"]),
        (SST2, "train", "a.tsv", ["label\tsentence\tlabel", "1\tx\t0"], ["column label stands there twice: leave one"]),
        (MNLI, "dev", "a.tsv", [f"{MNLI_COLUMNS}\tlabel1\tlabel1", "x"], ["column label1 stands there twice"]),
        (SST2, "train", "a.jsonl", ["[" * 100_000], ["line 1 is damaged (maximum recursion depth"]),
        (SST2, "train", "a.csv", ["x"], ["has the suffix '.csv'; known are .tsv, .json, .jsonl, .parquet"]),
        (COLA, "train", "a.tsv", ["x\t0\tno"], ["line 1: found 3 columns; needed 4: source, label, mark, sentence"]),
        (MNLI, "train", "a.tsv", ["sentence1\tsentence2\tgold_label", "a\tb\tneutral", "a\tb\tentails", "a\tb\t2"],
         [f"line 3: gold_label is 'entails'{NO_LABEL}", f"line 4: gold_label is '2'{NO_LABEL}"]),
        (SST2, "dev", "a.tsv", ["sentence\tlabel", "good\t-1"], ["line 2: label is '-1'; sst2 has 0, 1"]),
        (SST2, "dev", "a.jsonl", ['{"sentence": "x", "label": -1}'], ["line 1: label is -1; sst2 has 0, 1"]),
        (SST2, "test", "a.tsv", ["sentence\tlabel", "good\tyes", "bad\t0"], ["line 2: label is 'yes'; sst2 has 0, 1"]),
        (SST2, "test", "a.tsv", ["sentence\tlabel", "good\t1", "bad\t-1", "dull\t-1"],
         ["2 of 3 labels are missing or -1; give all labels, or none"]),
        (SST2, "test", "a.jsonl", ['{"sentence": "x"}', '{"sentence": "y", "label": 1}'],
         ["1 of 2 labels are missing or -1; give all labels, or none"]),
        (SST2, "test", "a.tsv", ["sentence", "good", "", "bad"], ["line 3 is empty: give the text, or take the line"]),
        (STSB, "dev", "a.tsv", ["sentence1\tsentence2\tscore", *(f"a\tb\t{score}" for score in NO_SCORES)],
         [f"line {n}: score is '{score}'; stsb has 0 to 5" for n, score in enumerate(NO_SCORES, start=2)]),
    ],
)  # fmt: skip
def test_every_mistake_is_named_with_its_line(tmp_path, task, part, name, lines, mistakes):
    found = mistakes_of(task, write(tmp_path / name, *lines), part)
    assert len(found) == len(mistakes)
    assert all(one.startswith(start) for one, start in zip(found, mistakes, strict=True)), found


def test_parquet_with_a_column_twice_or_a_damaged_page_is_refused(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = [["good"] * 9, [1] * 9, [0] * 9]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table(columns, names=["sentence", "label", "label"]), path)
    assert mistakes_of(SST2, str(path)) == ["column label stands there twice: leave one out"]
    parquet.write_table(pyarrow.table(columns[:2], names=["sentence", "label"]), path)
    content = bytearray(path.read_bytes())
    content[10:40] = b"\xff" * 30
    path.write_bytes(content)
    assert mistakes_of(SST2, str(path))[0].startswith("is not Parquet, or is damaged (")


def test_missing_file_and_bad_bytes(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data.train: .*nowhere.tsv does not exist; .* nyu-mll/glue"):
        read_examples(SST2, str(tmp_path / "nowhere.tsv"), "train")
    (tmp_path / "latin.tsv").write_bytes("sentence\tlabel\ncaf\xe9\t1\n".encode("latin-1"))
    assert mistakes_of(SST2, str(tmp_path / "latin.tsv"))[0].startswith("is not UTF-8")


def test_many_mistakes_are_counted(tmp_path):
    source = write(tmp_path / "a.tsv", "sentence\tlabel", *["x\t2"] * 13)
    with pytest.raises(DataError) as error:
        read_examples(SST2, source, "train")
    assert str(error.value).startswith(f"{source}: 13 mistakes\n") and str(error.value).endswith("\n  and 3 more")


def test_rows_of_pairs_are_cut_from_the_longer_text(tmp_path, tokenizer):
    long, short = "good film " * 10, "bad acting"
    lines = ["sentence1\tsentence2\tgold_label", f"{long}\t{short}\tneutral", "a\tman\tneutral"]
    rows = MNLI.read(write(tmp_path / "a.tsv", *lines), "train", tokenizer, 16, None)
    ids = rows.token_ids_RN[0].tolist()
    first, second = tokenizer.encode(long.strip()), tokenizer.encode(short)
    assert len(second) < 7  # the shorter text is whole
    assert ids == [2, *first[: 13 - len(second)], 3, *second, 3]
    padded = [2, *tokenizer.encode("a"), 3, *tokenizer.encode("man"), 3]
    assert rows.token_ids_RN[1].tolist() == padded + [0] * (16 - len(padded))
    batch = rows.batch(np.array([1, 0, 1]))
    assert batch.token_ids_BN.dtype == torch.int64 and batch.token_ids_BN[1].tolist() == ids
    assert batch.labels_B.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "lengths, available, kept",
    [([3, 4], 10, [3, 4]), ([9, 2], 6, [4, 2]), ([5, 5], 5, [3, 2]), ([20], 7, [7]), ([0, 9], 4, [0, 4])],
)
def test_truncation(lengths, available, kept):
    assert truncated(lengths, available) == kept


def test_scores_and_submission_of_mnli(tmp_path, tokenizer):
    lines = ["index\tsentence1\tsentence2\tgold_label", "10\ta\tb\tneutral", "11\ta\tb\tentailment"]
    rows = MNLI.read(write(tmp_path / "a.tsv", *lines), "dev_mismatched", tokenizer, 16, None)
    logits_RC = np.log(np.array([[0.25, 0.5, 0.25], [0.125, 0.125, 0.75]]))
    assert rows.scores(logits_RC) == {"accuracy": 0.5, "loss": pytest.approx((math.log(2) + math.log(8)) / 2)}
    rows.write_predictions(logits_RC, tmp_path)
    assert (tmp_path / "MNLI-mm.tsv").read_text() == "index\tprediction\n10\tneutral\n11\tcontradiction\n"


def test_fingerprint_follows_texts_and_labels(tmp_path, tokenizer):
    sources = [write(tmp_path / f"{n}.tsv", "sentence\tlabel", *lines) for n, lines in
               enumerate((["a\t1", "b\t0"], ["a\t1", "b\t1"], ["a\t1", "c\t0"], ["a\t1", "b\t0"]))]  # fmt: skip
    prints = [SST2.read(source, "train", tokenizer, 16, None).fingerprint for source in sources]
    assert prints[0] == prints[3] and len(set(prints)) == 3


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
    datasets = pytest.importorskip("datasets")

    def rows_of(task: str, part: str, **columns):
        path = tmp_path / f"{task}_{part}.parquet"
        datasets.Dataset.from_dict(columns).to_parquet(path)
        return TASKS[task].read(str(path), part, tokenizer, 16, None)

    texts = {"sentence1": ["a", "b"], "sentence2": ["b", "c"], "idx": [0, 1]}
    assert rows_of("stsb", "dev", **texts, label=[3.8, 0.0]).labels_R.tolist() == pytest.approx([3.8, 0])
    assert not rows_of("stsb", "test", **texts, label=[-1.0, -1.0]).has_labels
    assert rows_of("rte", "dev", **texts, label=[1, 0]).labels_R.tolist() == [1, 0]
    assert not rows_of("mrpc", "test", **texts, label=[-1, -1]).has_labels


def test_sts_b_learns_by_the_squared_error(glue, tokenizer):
    rows = read(glue, tokenizer, "stsb", "dev", "dev")
    batch = rows.batch(np.arange(3))
    assert isinstance(batch, LabelledBatch) and batch.labels_B.dtype == torch.float32
    logits_BC = torch.tensor([[1.0], [2.0], [4.5]])
    expected = ((logits_BC[:, 0] - batch.labels_B) ** 2).mean()
    assert torch.allclose(label_loss(logits_BC, batch.labels_B), expected)
    assert len(set(rows.labels_R.tolist())) > 2
