"""Fills the <mask> of a sentence with a model's most probable tokens."""

import torch
from torch import Tensor

from gmlp_scale.data.batch import CLS_ID, MASK_ID, PAD_ID, SEP_ID, MaskedBatch
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.models.backbone import Backbone

MASK = "<mask>"


@torch.inference_mode()
def fill(model: Backbone, tokenizer: Tokenizer, sentence: str) -> Tensor:
    """probabilities_MV: of each token at each <mask> of the sentence, as the export's fill-mask pipeline gives them.

    A word's token begins with the space before the word, so a mask takes the place of that space too. A model that
    cannot mask padding gets a row as long as in training.
    """
    first, *others = [tokenizer.encode(part) for part in sentence.replace(f" {MASK}", MASK).split(MASK)]
    ids = [CLS_ID, *first]
    for part in others:
        ids += [MASK_ID, *part]
    ids.append(SEP_ID)
    if not model.masks_padding:
        ids += [PAD_ID] * (model.sequence_length - len(ids))
    ids_1N = torch.tensor([ids])
    positions_1M = (ids_1N == MASK_ID).nonzero()[:, 1].unsqueeze(0)
    logits_1MV = model.predict(MaskedBatch(ids_1N, positions_1M, torch.zeros_like(positions_1M)))
    return logits_1MV[0].softmax(-1)


def describe(probabilities_MV: Tensor, tokenizer: Tokenizer, num_candidates: int) -> str:
    """A line for each <mask>: its most probable tokens, with their probabilities."""
    lines = []
    for probabilities, ids in zip(*(top.tolist() for top in probabilities_MV.topk(num_candidates)), strict=True):
        words = (f"{tokenizer.decode([id])!r} {p:.1%}" for p, id in zip(probabilities, ids, strict=True))
        lines.append("    " + "   ".join(words))
    return "\n".join(lines)
