"""Scores against figures worked out by hand from the official scripts' rules, and against their definitions."""

import math
import warnings
from collections import Counter

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from gmlp_scale.tasks.scores import (
    accuracy,
    best_over_thresholds,
    exact_match,
    f1,
    f1_v1,
    f1_v2,
    matthews,
    normalize_answer,
    pearson,
    spearman,
    squad_v1_scores,
    squad_v2_scores,
)

# prediction, gold, exact match, F1 of v1.1, F1 of v2.0
PAIRS = [
    ("the Cat!", "cat", 1, 1, 1),
    ("", "cat", 0, 0, 0),
    ("", "", 1, 0, 1),  # nothing shared is 0 in v1.1, agreement in v2.0
    ("the", "An a", 1, 0, 1),  # only articles
    ("?!", "the", 1, 0, 1),
    ("the", "cat", 0, 0, 0),
    ("U.S.", "us", 1, 1, 1),
    ("$5.2 million", "5.2 million", 1, 1, 1),
    ("twenty-five", "twenty five", 0, 0, 0),  # the hyphen goes without leaving a blank
    ("an-apple", "apple", 0, 0, 0),  # and before the articles do
    ("th'e cat", "cat", 1, 1, 1),
    ("“cat”", "cat", 0, 0, 0),  # only ASCII punctuation goes
    ("cat — dog", "cat dog", 0, 4 / 5, 4 / 5),  # so a dash is a word: 2 of 3 and 2 of 2
    ("cat\u00a0the\u2003dog", "cat dog", 1, 1, 1),  # any Unicode blank separates
    ("ÉCOLE", "école", 1, 1, 1),
    ("a b c", "b c d", 0, 4 / 5, 4 / 5),  # 2 of 2 and 2 of 3
    ("dog dog cat", "dog cat cat", 0, 2 / 3, 2 / 3),  # bags, not sets
    ("theatre", "re", 0, 0, 0),  # articles are whole words
    ("the the the", "", 1, 0, 1),
]


@pytest.mark.parametrize("prediction, gold, exact, v1, v2", PAIRS)
def test_pairs_by_hand(prediction, gold, exact, v1, v2):
    assert exact_match(prediction, gold) == exact
    assert f1_v1(prediction, gold) == pytest.approx(v1, abs=1e-12)
    assert f1_v2(prediction, gold) == pytest.approx(v2, abs=1e-12)


def test_v1_takes_the_best_gold_and_counts_a_missing_prediction_as_zero():
    golds = {"one": ["cat", "black cat"], "two": ["Paris"], "three": ["in 1999", "1999"], "four": ["x"]}
    predictions = {"one": "black cat sat", "two": "the Paris", "three": "around 1999"}
    scores = squad_v1_scores(golds, predictions)
    # one: 2/3 and 1 -> 0.8 (with "cat" only 0.5); two: 1; three: 1/2 and 1 -> 2/3; four: 0
    assert scores == {"exact_match": 25.0, "f1": pytest.approx(100 * (0.8 + 1 + 2 / 3) / 4)}


def test_v2_by_hand():
    golds = {"q1": ["Paris"], "q2": [], "q3": ["black cat"], "q4": [], "q5": ["seven"]}
    predictions = {"q1": "Paris", "q2": "x", "q3": "cat sat", "q4": "", "q5": "eight"}
    null_odds = {"q1": -5.0, "q2": -3.0, "q3": 1.0, "q4": 2.0, "q5": 4.0}
    at_zero = squad_v2_scores(golds, predictions, null_odds, threshold=0.0)
    # q1 right; q2 answered but should not be; q3 and q5 held back although they have answers; q4 right
    assert (at_zero["exact"], at_zero["f1"], at_zero["total"]) == (40, 40, 5)
    assert at_zero["HasAns_exact"] == pytest.approx(100 / 3) and at_zero["HasAns_total"] == 3
    assert (at_zero["NoAns_exact"], at_zero["NoAns_f1"], at_zero["NoAns_total"]) == (50, 50, 2)
    # no answer at all: 2 of 5; then q1 +1 = 3; q2 -1; q3 +0 (F1 +0.5); q4 +0 as it is empty; q5 +0
    assert (at_zero["best_exact"], at_zero["best_exact_thresh"]) == (60, -5)
    assert (at_zero["best_f1"], at_zero["best_f1_thresh"]) == (60, -5)
    at_two = squad_v2_scores(golds, predictions, null_odds, threshold=2.0)
    # q1 right, q2 wrong, q3 F1 1/2, q4 not above 2 but empty and so right, q5 held back
    assert (at_two["exact"], at_two["f1"]) == (40, pytest.approx(50))


def test_v2_best_thresholds_of_exact_match_and_f1_may_differ():
    golds = {"q1": ["Paris"], "q2": ["black cat"], "q3": []}
    predictions = {"q1": "Paris", "q2": "cat", "q3": "y"}
    scores = squad_v2_scores(golds, predictions, {"q1": 0.5, "q2": 0.75, "q3": 1.0}, threshold=1.0)
    assert (scores["best_exact"], scores["best_exact_thresh"]) == (pytest.approx(200 / 3), 0.5)
    assert (scores["best_f1"], scores["best_f1_thresh"]) == (pytest.approx(100 * (2 + 2 / 3) / 3), 0.75)


def test_v2_gold_of_which_nothing_is_left_still_counts_as_answerable():
    scores = squad_v2_scores({"q": ["the"]}, {"q": ""}, {"q": 0.0}, threshold=1.0)
    assert scores["exact"] == 100 and scores["HasAns_total"] == 1 and "NoAns_total" not in scores
    held_back = squad_v2_scores({"q": ["the"]}, {"q": ""}, {"q": 2.0}, threshold=1.0)
    assert held_back["exact"] == 0


def test_v2_missing_prediction_is_named():
    with pytest.raises(ValueError, match="1 questions have no prediction or no null odds, the first q2"):
        squad_v2_scores({"q1": [], "q2": []}, {"q1": ""}, {"q1": 0.0, "q2": 0.0}, threshold=0.0)


def test_accuracy():
    assert accuracy([1, 0, 2, 2], [1, 1, 2, 0]) == 0.5
    with pytest.raises(ValueError, match="no predictions"):
        accuracy([], [])


CLASSES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30)
NUMBERS = st.lists(st.tuples(st.integers(-20, 80), st.integers(0, 15)), min_size=2, max_size=30)


@given(CLASSES)
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_scores_of_classes_are_scikit_learns(pairs):
    predictions, labels = np.array(pairs).T
    assert accuracy(predictions, labels) == pytest.approx(sklearn.metrics.accuracy_score(labels, predictions))
    assert f1(predictions, labels) == pytest.approx(sklearn.metrics.f1_score(labels, predictions, zero_division=0))
    with warnings.catch_warnings(action="ignore"):  # it warns of a single class
        expected = sklearn.metrics.matthews_corrcoef(labels, predictions)
    assert matthews(predictions, labels) == pytest.approx(expected)


@given(NUMBERS)
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_correlations_are_scipys(pairs):
    predictions, labels = (np.array(column, np.float32) / 10 for column in zip(*pairs, strict=True))
    for ours, theirs in ((pearson, scipy.stats.pearsonr), (spearman, scipy.stats.spearmanr)):
        with warnings.catch_warnings(action="ignore"):  # it warns of constants, for which it gives nan
            expected = np.nan_to_num(theirs(predictions.astype(np.float64), labels.astype(np.float64)).statistic)
        assert ours(predictions, labels) == pytest.approx(expected, abs=1e-9)


WORDS = st.sampled_from(["the", "A", "an", "cat", "Cat.", "dog", "—", "“x”", "é", "'", "\u00a0", "5,000", "don't", ""])
TEXTS = st.one_of(st.lists(WORDS, max_size=6).map(" ".join), st.text(max_size=20))


@given(TEXTS, TEXTS)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_f1_is_its_definition(prediction, gold):
    left, right = (normalize_answer(text).split() for text in (prediction, gold))
    pool, num_shared = list(right), 0
    for word in left:
        if word in pool:
            pool.remove(word)
            num_shared += 1
    expected = 2 * num_shared / (len(left) + len(right)) if num_shared else 0.0
    assert f1_v1(prediction, gold) == pytest.approx(expected, abs=1e-12)
    assert f1_v1(prediction, gold) == f1_v1(gold, prediction)
    assert f1_v2(prediction, gold) == (1.0 if not left and not right else f1_v1(prediction, gold))
    assert exact_match(prediction, gold) == (left == right)
    if exact_match(prediction, gold):
        assert f1_v2(prediction, gold) == 1.0 and Counter(left) == Counter(right)


@given(TEXTS)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_normalising_twice_changes_nothing(text):
    once = normalize_answer(text)
    assert normalize_answer(once) == once


QUESTIONS = st.lists(
    st.tuples(st.sampled_from([[], ["cat"], ["black cat", "cat"]]), st.sampled_from(["", "cat", "black cat", "dog"])),
    min_size=1,
    max_size=8,
)


@given(QUESTIONS, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_best_threshold_is_the_best_of_all(questions, random):
    golds = {str(number): texts for number, (texts, _) in enumerate(questions)}
    predictions = {str(number): text for number, (_, text) in enumerate(questions)}
    null_odds = dict(zip(golds, random.sample(range(-10, 10), len(golds)), strict=True))  # all different

    def score(threshold: float, name: str) -> float:
        return squad_v2_scores(golds, predictions, null_odds, threshold)[name]

    for name in ("exact", "f1"):
        found = squad_v2_scores(golds, predictions, null_odds, 0.0)
        tried = {threshold: score(threshold, name) for threshold in (-math.inf, *null_odds.values())}
        assert found[f"best_{name}"] == pytest.approx(max(tried.values()))
        if found[f"best_{name}"] > tried[-math.inf] + 1e-9:
            assert tried[found[f"best_{name}_thresh"]] == pytest.approx(found[f"best_{name}"])


def test_best_threshold_walks_equal_odds_in_their_order():
    scores, has_answer = {"q1": 1.0, "q2": 0.0}, {"q1": True, "q2": False}
    predictions = {"q1": "x", "q2": "y"}
    assert best_over_thresholds(scores, predictions, {"q1": 3.0, "q2": 3.0}, has_answer) == (100.0, 3.0)
    assert best_over_thresholds(scores, predictions, {"q2": 3.0, "q1": 3.0}, has_answer) == (50.0, 0.0)
