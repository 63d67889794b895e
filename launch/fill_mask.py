"""Fills the <mask> of sentences with a run's model; the words around each sentence are those of nothing but itself.

python launch/fill_mask.py --run outputs/gmlp_base "Paris is the <mask> of France."
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from gmlp_scale.data.batch import CLS_ID, MASK_ID, NUM_SPECIAL_TOKENS, SEP_ID, MaskedBatch
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.run import USER_ERRORS, load_pretrained

MASK = "<mask>"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, metavar="RUN_DIR")
    parser.add_argument("--step", type=int, help="the checkpoint after this step (default: the newest good one)")
    parser.add_argument("--top", type=int, default=5, help="candidates for each sentence (default: %(default)s)")
    parser.add_argument("sentences", nargs="+", metavar="SENTENCE", help=f"text with one {MASK} or more")
    options = parser.parse_args()
    if absent := [sentence for sentence in options.sentences if MASK not in sentence]:
        print(f"no {MASK} in: {'; '.join(absent)}", file=sys.stderr)
        return 2
    try:
        run, _, model = load_pretrained(options.run, options.step)
        tokenizer = Tokenizer(f"{run.data.shards}/tokenizer")
        for sentence in options.sentences:
            probabilities_MV = fill(model, tokenizer, sentence)
            print(sentence)
            for probabilities, ids in zip(*(t.tolist() for t in probabilities_MV.topk(options.top)), strict=True):
                words = (f"{tokenizer.decode([id])!r} {p:.1%}" for p, id in zip(probabilities, ids, strict=True))
                print("   ", "   ".join(words))
    except (*USER_ERRORS, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


@torch.inference_mode()
def fill(model: nn.Module, tokenizer: Tokenizer, sentence: str) -> Tensor:
    """probabilities_MV of each <mask> of the sentence over the ordinary tokens.

    A word's token starts with the blank before it, so the mask takes the place of that blank too.
    """
    first, *others = [tokenizer.encode(part) for part in sentence.replace(f" {MASK}", MASK).split(MASK)]
    ids = [CLS_ID, *first]
    for part in others:
        ids += [MASK_ID, *part]
    ids_1N = torch.tensor([[*ids, SEP_ID]])
    positions_1M = (ids_1N == MASK_ID).nonzero()[:, 1].unsqueeze(0)
    logits_1MV = model.predict(MaskedBatch(ids_1N, positions_1M, torch.zeros_like(positions_1M)))
    logits_1MV[..., :NUM_SPECIAL_TOKENS] = -torch.inf
    return logits_1MV[0].softmax(-1)


if __name__ == "__main__":
    sys.exit(main())
