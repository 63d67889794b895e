"""Held-out loss, perplexity and accuracy of token prediction, on the same rows and masks every time."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gmlp_scale.data.batch import IGNORED, OUR_SPECIAL_IDS, MaskedBatch, SpecialIds
from gmlp_scale.distributed.logs import progress_bar
from gmlp_scale.distributed.world import StopSignalled, World
from gmlp_scale.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Evaluation:
    """Means over `num_tokens` predicted tokens. Perplexities compare only within one tokenizer."""

    loss: float
    accuracy: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    def by_tag(self) -> dict[str, float]:
        return {"eval/loss": self.loss, "eval/perplexity": self.perplexity, "eval/accuracy": self.accuracy}


def perplexity(loss: float) -> float:
    """exp(loss), or infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def evaluation_batches(batches: Iterable[T], world: World, num_batches: int | None = None) -> Iterator[T]:
    """The batches, of which all ranks have equally many, with a bar. StopSignalled on all ranks once any has a stop
    signal."""
    bar = {"desc": "evaluation", "unit": " batches", "leave": False, "disable": not world.is_main}
    for batch in progress_bar(batches, total=num_batches, **bar):
        if any(world.gather(world.is_stop_signalled)):
            raise StopSignalled
        yield batch


def evaluate(
    predict: Callable[[Any], Tensor],
    batches: Iterable[Any],
    world: World,
    labels_of: Callable = attrgetter("labels_BM"),
) -> Evaluation:
    """Evaluates this rank's batches and sums over the ranks. All ranks must have equally many batches.

    Args:
        predict: an engine's or a model's; returns logits_BMV at the positions of the labels.
        labels_of: gives a batch's labels_BM, IGNORED where there is nothing to predict.

    Raises:
        InputError: no rank has a token to predict.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=world.device)  # loss, correct, tokens
    for batch in batches:
        batch = batch.to(world.device)
        logits_BMV, labels_BM = predict(batch), labels_of(batch)
        is_label_BM = labels_BM != IGNORED
        logits_TV, labels_T = logits_BMV[is_label_BM].float(), labels_BM[is_label_BM]
        loss = F.cross_entropy(logits_TV, labels_T, reduction="sum")
        correct = (logits_TV.argmax(-1) == labels_T).sum()
        totals += torch.stack([loss.double(), correct.double(), is_label_BM.sum().double()])
    loss, correct, num_tokens = world.sum(totals.tolist())
    if not num_tokens:
        raise InputError(
            "no held-out row has a masked token: check the shards' held-out split and train.num_evaluation_rows"
        )
    return Evaluation(loss / num_tokens, correct / num_tokens, int(num_tokens))


def unigram_predictor(token_counts_V: Tensor, special: SpecialIds = OUR_SPECIAL_IDS) -> Callable[[MaskedBatch], Tensor]:
    """Predicts every masked token by its frequency among ordinary tokens, each counted once more than it was seen.

    It knows nothing of the context: a model must get below its loss.
    """
    log_frequencies_V = torch.log(token_counts_V.double() + 1)
    log_frequencies_V[special.among(torch.arange(len(log_frequencies_V)))] = -math.inf
    logits_V = log_frequencies_V.log_softmax(0).float()
    return lambda batch: logits_V.to(batch.labels_BM.device).expand(*batch.labels_BM.shape, -1)
