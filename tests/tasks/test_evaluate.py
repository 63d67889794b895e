"""Evaluation against sums written out by hand."""

import math

import pytest
import torch

from gmlp_scale.data.batch import IGNORED, MaskedBatch, SpecialIds
from gmlp_scale.distributed.world import lone_world
from gmlp_scale.tasks.evaluate import evaluate, unigram_predictor


def batch(labels: list[list[int]]) -> MaskedBatch:
    labels_BM = torch.tensor(labels)
    return MaskedBatch(torch.zeros(len(labels), 8, dtype=torch.int64), torch.zeros_like(labels_BM), labels_BM)


def test_loss_and_accuracy_are_over_tokens_not_rows_or_batches():
    batches = [batch([[6, 7], [6, IGNORED]]), batch([[IGNORED, IGNORED], [5, IGNORED]])]
    logits_V = torch.tensor([0.0, 0, 0, 0, 0, 1, 3, 2])
    log_softmax = logits_V.log_softmax(0)
    result = evaluate(lambda b: logits_V.expand(*b.labels_BM.shape, -1), batches, lone_world())
    assert result.num_tokens == 4
    assert result.loss == pytest.approx(-(2 * log_softmax[6] + log_softmax[7] + log_softmax[5]).item() / 4)
    assert result.accuracy == 0.5
    assert result.by_tag() == {"eval/loss": result.loss, "eval/perplexity": math.exp(result.loss), "eval/accuracy": 0.5}


def test_unigram_perplexity_of_its_own_counts_is_the_entropy():
    counts_V = torch.tensor([9, 9, 9, 9, 9, 3, 7, 5])  # each one more than seen; special tokens are never predicted
    labels = [[5] * 4 + [6] * 8 + [7] * 6]
    result = evaluate(unigram_predictor(counts_V), [batch(labels)], lone_world())
    frequencies = [4 / 18, 8 / 18, 6 / 18]
    assert result.loss == pytest.approx(-sum(f * math.log(f) for f in frequencies))


def test_unigrams_have_the_special_tokens_of_their_own_vocabulary():
    special = SpecialIds(end=2, mask=7, ranges=((0, 3), (7, 8)))
    result = evaluate(unigram_predictor(torch.zeros(8), special), [batch([[3, 4, 5, 6]])], lone_world())
    assert result.loss == pytest.approx(math.log(4))


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(ValueError, match="no held-out row"):
        evaluate(lambda b: torch.zeros(*b.labels_BM.shape, 8), [batch([[IGNORED]])], lone_world())
