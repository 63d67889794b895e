"""Scores of the tasks, equal to the official evaluation scripts' on any predictions. Pure functions.

SQuAD v1.1 (Rajpurkar et al. 2016, evaluate-v1.1.py) and v2.0 (Rajpurkar et al. 2018, evaluate-v2.0.py) differ where an
answer has no word left after normalising: v1.1 gives such a pair an F1 of 0 even where the two agree, v2.0 of 1.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII alone, as in the scripts
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def accuracy(predictions: Sequence[int], labels: Sequence[int]) -> float:
    """Share of the predictions that are the label, 0 to 1. ValueError where there is none."""
    if not len(labels):
        raise ValueError("accuracy of no predictions")
    return float(np.mean(np.asarray(predictions) == np.asarray(labels)))


def normalize_answer(text: str) -> str:
    """Lower-cased, without punctuation and then without the words a, an and the, blanks squeezed: in this order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> int:
    return int(normalize_answer(prediction) == normalize_answer(gold))


def f1_v1(prediction: str, gold: str) -> float:
    """F1 of the two bags of words; 0 where they share none."""
    predicted_words, gold_words = normalize_answer(prediction).split(), normalize_answer(gold).split()
    num_shared = (Counter(predicted_words) & Counter(gold_words)).total()
    if not num_shared:
        return 0.0
    precision, recall = num_shared / len(predicted_words), num_shared / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def f1_v2(prediction: str, gold: str) -> float:
    """As f1_v1, but where either has no word it is 1 if neither has."""
    predicted_words, gold_words = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if not predicted_words or not gold_words:
        return float(predicted_words == gold_words)
    return f1_v1(prediction, gold)


def squad_v1_scores(golds: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    """What evaluate-v1.1.py prints, in percent: the maximum over the golds, 0 for a question without a prediction.

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
    """What evaluate-v2.0.py prints with --na-prob-file and --na-prob-thresh, in percent but for the thresholds.

    A prediction whose null odds are above `threshold` counts as no answer. HasAns_* and NoAns_* are left out where
    there is no such question; best_* are what the best threshold for each gives, over the predictions as they are.

    Args:
        golds: question id -> the texts of its answers, none where it cannot be answered.
        predictions: question id -> text, "" for no answer. ValueError where one is missing: the script fails there too.
        null_odds: question id -> how much no answer is preferred to the prediction.
    """
    if missing := [id for id in golds if id not in predictions or id not in null_odds]:
        raise ValueError(f"{len(missing)} questions have no prediction or no null odds, the first {missing[0]}")
    has_answer = {id: bool(texts) for id, texts in golds.items()}
    # An answer of which normalising leaves nothing is no answer, yet its question counts among those that have one.
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
    """(best score in percent, its threshold), walking the questions by their null odds as the script does.

    It starts from no answer everywhere (threshold 0) and takes the predictions one by one, of equal odds in the order
    of `null_odds`; so among questions of equal odds it may stop between two, which no threshold can.
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
