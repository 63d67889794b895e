"""Scores of the tasks. For any predictions they equal the scores of the official evaluation scripts.

GLUE (Wang et al. 2019) takes its scores from scikit-learn and scipy. Where these divide zero by zero, as for
predictions that are all the same, scikit-learn gives 0 and scipy nan; here all give 0.

The scripts of SQuAD v1.1 (Rajpurkar et al. 2016, evaluate-v1.1.py) and v2.0 (Rajpurkar et al. 2018, evaluate-v2.0.py)
differ if normalizing leaves no word of prediction and answer: then v1.1 gives an F1 of 0, and v2.0 an F1 of 1.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np

_PUNCTUATION = str.maketrans("", "", string.punctuation)  # only ASCII, as in the scripts
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def accuracy(predictions: Sequence[int], labels: Sequence[int]) -> float:
    """Share of the predictions that equal their label, 0 to 1. ValueError if there are no predictions."""
    if not len(labels):
        raise ValueError("accuracy of no predictions")
    return float(np.mean(np.asarray(predictions) == np.asarray(labels)))


def f1(predictions: Sequence[int], labels: Sequence[int]) -> float:
    """F1 of class 1, 0 to 1."""
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    num_ones = np.sum(predictions == 1) + np.sum(labels == 1)
    return float(2 * np.sum((predictions == 1) & (labels == 1)) / num_ones) if num_ones else 0.0


def matthews(predictions: Sequence[int], labels: Sequence[int]) -> float:
    """Matthews' correlation of two classes, 0 and 1: Pearson's of their numbers. -1 to 1."""
    return pearson(predictions, labels)


def pearson(predictions: Sequence[float], labels: Sequence[float]) -> float:
    """Pearson's correlation, -1 to 1."""
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    x, y = (np.asarray(values, np.float64) - np.mean(values, dtype=np.float64) for values in (predictions, labels))
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def spearman(predictions: Sequence[float], labels: Sequence[float]) -> float:
    """Spearman's correlation: Pearson's of the ranks, where equal values share the mean of theirs. -1 to 1."""
    return pearson(_ranks(predictions), _ranks(labels))


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, places, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first word, last word + 1) of each entity, as conlleval and seqeval find them in tags of any order.

    An entity begins at B-TYPE, or at an I-TYPE that goes on with no entity of its type. So what a model predicts counts
    even where it forgot the B.
    """
    found, kind, first = set(), "", 0
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        if kind and (prefix, name) != ("I", kind):
            found.add((kind, first, place))
            kind = ""
        if prefix != "O" and not kind:
            kind, first = name, place
    return found


def entity_scores(golds: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]) -> dict[str, float]:
    """F1, precision and recall of whole entities over all sentences, and the share of words with their tag; 0 to 1."""
    found = [(entities(gold), entities(predicted)) for gold, predicted in zip(golds, predictions, strict=True)]
    num_right = sum(len(gold & predicted) for gold, predicted in found)
    num_gold, num_predicted = (sum(map(len, of_sentences)) for of_sentences in zip(*found, strict=True))
    return {
        "f1": 2 * num_right / max(1, num_gold + num_predicted),
        "precision": num_right / max(1, num_predicted),
        "recall": num_right / max(1, num_gold),
        "accuracy": accuracy([*chain.from_iterable(predictions)], [*chain.from_iterable(golds)]),
    }


def normalize_answer(text: str) -> str:
    """Lower case, then no punctuation, then no words a, an and the, then single blanks, in this order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> int:
    return int(normalize_answer(prediction) == normalize_answer(gold))


def f1_v1(prediction: str, gold: str) -> float:
    """F1 of the two bags of words; 0 if they share none."""
    predicted_words, gold_words = normalize_answer(prediction).split(), normalize_answer(gold).split()
    num_shared = (Counter(predicted_words) & Counter(gold_words)).total()
    if not num_shared:
        return 0.0
    precision, recall = num_shared / len(predicted_words), num_shared / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def f1_v2(prediction: str, gold: str) -> float:
    """As f1_v1, but 1 if neither text has a word."""
    predicted_words, gold_words = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if not predicted_words or not gold_words:
        return float(predicted_words == gold_words)
    return f1_v1(prediction, gold)


def squad_v1_scores(golds: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    """What evaluate-v1.1.py prints, in percent. A question counts by its best gold, and 0 without a prediction.

    Args:
        golds: question id -> the texts of its answers, at least one.
        predictions: question id -> text.
    """
    exact = _maxima(exact_match, golds, predictions)
    f1 = _maxima(f1_v1, golds, predictions)
    return {"exact_match": 100 * sum(exact.values()) / len(golds), "f1": 100 * sum(f1.values()) / len(golds)}


def squad_v2_scores(
    golds: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
    threshold: float,
) -> dict[str, float]:
    """What evaluate-v2.0.py prints with --na-prob-file and --na-prob-thresh, in percent except for the thresholds.

    A prediction with null odds above `threshold` counts as no answer. HasAns_* or NoAns_* are left out if there is no
    such question. best_* are the best score that any threshold gives to the predictions, and that threshold.

    Args:
        golds: question id -> the texts of its answers, none if it cannot be answered.
        predictions: question id -> text, "" for no answer.
        null_odds: question id -> how much more likely no answer is than the prediction.

    Raises:
        ValueError: a question has no prediction or no null odds. The script fails then, too.
    """
    if missing := [id for id in golds if id not in predictions or id not in null_odds]:
        raise ValueError(f"{len(missing)} questions have no prediction or no null odds, the first {missing[0]}")
    has_answer = {id: bool(texts) for id, texts in golds.items()}
    # If normalizing leaves nothing of a question's answers, "" is right, but the question still counts as answerable.
    kept = {id: [text for text in texts if normalize_answer(text)] or [""] for id, texts in golds.items()}
    raw = {"exact": _maxima(exact_match, kept, predictions), "f1": _maxima(f1_v2, kept, predictions)}
    thresholded = {
        name: {id: float(not has_answer[id]) if null_odds[id] > threshold else score for id, score in scores.items()}
        for name, scores in raw.items()
    }
    groups = {
        "": list(golds),
        "HasAns_": [id for id in golds if has_answer[id]],
        "NoAns_": [id for id in golds if not has_answer[id]],
    }
    result = {}
    for prefix, ids in groups.items():
        if ids:
            for name, scores in thresholded.items():
                result[prefix + name] = 100 * sum(scores[id] for id in ids) / len(ids)
            result[prefix + "total"] = len(ids)
    for name, scores in raw.items():
        best, best_threshold = best_over_thresholds(scores, predictions, null_odds, has_answer)
        result |= {f"best_{name}": best, f"best_{name}_thresh": best_threshold}
    return result


def best_over_thresholds(
    scores: Mapping[str, float],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
    has_answer: Mapping[str, bool],
) -> tuple[float, float]:
    """The best score in percent and its threshold, found as the script does.

    It starts with no answer to any question, at threshold 0, and adds the predictions one by one in the order of their
    null odds. It may stop between two questions with equal odds, which no threshold can separate; these are taken in
    the order of `null_odds`.
    """
    current = best = float(sum(not answerable for answerable in has_answer.values()))
    best_threshold = 0.0
    for id in sorted(null_odds, key=lambda id: null_odds[id]):
        if id not in scores:
            continue
        if has_answer[id]:
            current += scores[id]
        elif predictions[id]:
            current -= 1
        if current > best:
            best, best_threshold = current, null_odds[id]
    return 100 * best / len(scores), best_threshold


def _maxima(
    score: Callable[[str, str], float], golds: Mapping[str, Sequence[str]], predictions: Mapping[str, str]
) -> dict[str, float]:
    return {id: max(score(predictions[id], gold) for gold in texts) for id, texts in golds.items() if id in predictions}
