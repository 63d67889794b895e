"""Tagging: CoNLL files and what is wrong with them, tags at the first tokens of words, entity F1, and predictions."""

import re
from dataclasses import replace

import numpy as np
import pytest
import seqeval.metrics as seqeval
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gmlp_scale.data.batch import IGNORED
from gmlp_scale.models import build_model
from gmlp_scale.models.task_heads import TaggedBatch
from gmlp_scale.tasks.records import DataError
from gmlp_scale.tasks.scores import entities, entity_scores
from gmlp_scale.tasks.table import TASKS
from gmlp_scale.tasks.tagging import read_conll
from tests.models.every_kind import tiny_config

TASK = replace(TASKS["tagging"], entity_types=("LOC", "PER"))
TAGS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
CONLL = """\ufeff-DOCSTART- -X- O O

Norman NNP I-NP B-PER
watch VB I-VP O
Denver NNP I-NP B-LOC
Broncos\tNNP\tI-NP\tI-LOC
. . O O
 \t
a\u00a0b DT O O\r
\u2028 DT O B-LOC
"""


def write(path, text: str) -> str:
    path.write_bytes(text.encode())
    return str(path)


def test_conll_files(tmp_path):
    sentences = read_conll(write(tmp_path / "a.txt", CONLL), "train", TASK.class_names)
    assert TASK.class_names == TAGS
    words = [["Norman", "watch", "Denver", "Broncos", "."], ["a\u00a0b", "\u2028"]]
    assert [[columns[0] for columns in sentence] for sentence in sentences] == words
    tags = [["B-PER", "O", "B-LOC", "I-LOC", "O"], ["O", "B-LOC"]]
    assert [[columns[-1] for columns in sentence] for sentence in sentences] == tags


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ("a O\nb\n", ["line 2: found 1 columns; needed: 2, as in the first line"]),
        ("a O\n\nb X O\n", ["line 3: found 3 columns; needed: 2, as in the first line"]),
        ("a\n", ["line 1: found 1 columns; needed: two or more: a word and its tag"]),
        ("a B-ORG\nb E-PER\n", [f"line {n}: the tag is {tag!r}; data.entity_types gives O, B-LOC, I-LOC, B-PER, I-PER"
                                for n, tag in ((1, "B-ORG"), (2, "E-PER"))]),
        ("a O\nb I-PER\n", ["line 2: I-PER follows O; needed: an entity begins with B-PER (BIO)"]),
        ("a B-LOC\nb I-PER\n", ["line 2: I-PER follows B-LOC; needed: an entity begins with B-PER (BIO)"]),
        ("a B-PER\n\nb I-PER\n", ["line 3: I-PER follows O; needed: an entity begins with B-PER (BIO)"]),
        ("\n-DOCSTART- O\n", ["holds no words"]),
    ],
)  # fmt: skip
def test_every_mistake_is_named_with_its_line(tmp_path, text, mistakes):
    source = write(tmp_path / "a.txt", text)
    with pytest.raises(DataError) as error:
        read_conll(source, "dev", TAGS)
    assert error.value.mistakes == mistakes and source in str(error.value)


def test_missing_files_and_bad_bytes(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data.dev: .*nowhere is no file; give a CoNLL file"):
        read_conll(str(tmp_path / "nowhere"), "dev", TAGS)
    (tmp_path / "latin").write_bytes("caf\xe9 O\n".encode("latin-1"))
    with pytest.raises(DataError, match="is not UTF-8"):
        read_conll(str(tmp_path / "latin"), "dev", TAGS)


def long_sentence(num_words: int) -> tuple[list[str], list[str]]:
    words = [("Normans", "watch", "Denver", "é日", "trees")[n * n % 5] for n in range(num_words)]
    return words, [TAGS[n * 7 % 5] for n in range(num_words)]


def read(tmp_path, tokenizer, words, tags, *, part="train", length=16, stride=5):
    lines = [" ".join(columns) for columns in zip(words, tags, strict=True)] if tags else words
    text = "\n".join(lines) + "\n\nboring\n" if not tags else "\n".join(lines) + "\n\nboring O\n"
    return TASK.read(write(tmp_path / "a.txt", text.replace(" I-", " B-")), part, tokenizer, length, stride)


@pytest.mark.parametrize("length", [16, 40, 400])
def test_the_first_token_of_each_word_has_its_tag_once_where_its_context_is_maximal(tmp_path, tokenizer, length):
    words, tags = long_sentence(40)
    rows = read(tmp_path, tokenizer, words, tags, length=length)
    assert (rows.num_examples, rows.num_rows) == (2, len(rows.token_ids_RN)) and (rows.num_rows > 2) == (length < 400)
    expected = [tag.replace("I-", "B-") for tag in tags]
    assert [TAGS[rows.labels_RN[place]] for place in zip(rows.rows_W, rows.positions_W, strict=True)][:-1] == expected
    assert (rows.labels_RN != IGNORED).sum() == 41
    for word, row, position in zip(words, rows.rows_W, rows.positions_W, strict=False):
        rest = tokenizer.decode(rows.token_ids_RN[row, position:].tolist()).lstrip()
        assert rest.startswith(word) or rest.startswith("<sep>") or word.startswith(rest.partition("<sep>")[0])
    assert np.array_equal(rows.rows_W, np.sort(rows.rows_W))
    batch = rows.batch(np.array([1, 0]))
    assert batch.token_ids_BN[1].tolist() == rows.token_ids_RN[0].tolist() and batch.labels_BN.dtype == torch.int64


def gold_summaries(rows) -> np.ndarray:
    """What a model that knows every tag would give."""
    classes = torch.from_numpy(rows.labels_RN).clamp(min=0)
    return rows.summarize(torch.nn.functional.one_hot(classes, len(TAGS)).float()).numpy()


def test_gold_tags_come_back_as_predictions_that_are_read_again(tmp_path, tokenizer):
    source = write(tmp_path / "a.txt", CONLL)
    rows = TASK.read(source, "dev", tokenizer, 12, 4)
    summaries = gold_summaries(rows)
    assert rows.scores(summaries) == {"f1": 1.0, "precision": 1.0, "recall": 1.0, "accuracy": 1.0}
    rows.write_predictions(summaries, tmp_path)
    assert read_conll(str(tmp_path / "predictions.conll"), "dev", TAGS) == read_conll(source, "dev", TAGS)
    words_alone = re.sub(r"^([^ \t]+)[ \t].*$", r"\1", CONLL.replace(" \t\n", "\n"), flags=re.MULTILINE)
    test = TASK.read(write(tmp_path / "b.txt", words_alone), "test", tokenizer, 12, 4)
    assert not test.has_labels and (test.labels_RN == IGNORED).all()
    test.write_predictions(summaries, tmp_path)
    assert (tmp_path / "predictions.conll").read_text().startswith("Norman B-PER\nwatch O\nDenver B-LOC\n")


def test_scores_by_hand():
    golds = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC"]]
    predictions = [["B-PER", "O", "O", "I-LOC"], ["B-LOC", "B-LOC"]]  # I-LOC alone begins an entity
    # 2 right (LOC at 3, LOC at 1 of the second) of 4 predicted and 3 there; 3 of 6 words have their tags
    found = entity_scores(golds, predictions)
    expected = {"f1": 4 / 7, "precision": 2 / 4, "recall": 2 / 3, "accuracy": 3 / 6}
    assert found == pytest.approx(expected)
    assert entity_scores([["O"]], [["O"]]) == {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 1.0}
    assert entities(["B-A", "I-A", "I-B", "B-B", "O", "I-A", "B-A"]) == {
        ("A", 0, 2), ("B", 2, 3), ("B", 3, 4), ("A", 5, 6), ("A", 6, 7),
    }  # fmt: skip


SENTENCES = st.lists(st.lists(st.tuples(*[st.sampled_from([*TAGS, "B-x-y", "I-x-y"])] * 2), min_size=1), min_size=1)


@given(SENTENCES)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@pytest.mark.filterwarnings("ignore")
def test_scores_are_seqevals(sentences):
    golds, predictions = ([[pair[side] for pair in sentence] for sentence in sentences] for side in (0, 1))
    found = entity_scores(golds, predictions)
    for name in ("f1", "precision", "recall"):
        assert found[name] == pytest.approx(getattr(seqeval, f"{name}_score")(golds, predictions, zero_division=0))
    assert found["accuracy"] == pytest.approx(seqeval.accuracy_score(golds, predictions))


@pytest.mark.parametrize("kind", ["gmlp", "bert-relative"])
def test_the_loss_is_the_mean_of_rows_and_so_of_micro_batches(kind):
    model = build_model(tiny_config(kind), head=TASK.head)
    model.init_weights(torch.Generator().manual_seed(0))
    ids_BN = torch.randint(5, 40, (4, 12), generator=torch.Generator().manual_seed(0))
    labels_BN = (ids_BN % 5).masked_fill(ids_BN % 3 > 0, IGNORED)
    labels_BN[2] = IGNORED
    log_BNC = model.predict(TaggedBatch(ids_BN, labels_BN)).log_softmax(-1)
    rows = []
    for log_NC, labels_N in zip(log_BNC, labels_BN, strict=True):
        places = (labels_N != IGNORED).nonzero()[:, 0]
        rows.append(-log_NC[places, labels_N[places]])
    expected = sum(row.mean() for row in rows if len(row)) / 4
    torch.testing.assert_close(model(TaggedBatch(ids_BN, labels_BN)), expected)
    halves = [model(TaggedBatch(ids_BN[part], labels_BN[part])) for part in (slice(2), slice(2, 4))]
    torch.testing.assert_close(sum(halves) / 2, expected)
