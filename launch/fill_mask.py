"""Fills the <mask> of sentences with a run's model. The model sees each sentence alone, without any text around it.

python launch/fill_mask.py --run outputs/gmlp_base "Paris is the <mask> of France."
"""

import argparse
import sys

from gmlp_scale.analysis.predictions import MASK, describe, fill
from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.distributed.logs import command
from gmlp_scale.errors import InputError
from gmlp_scale.options import count
from gmlp_scale.storage.files import plain_place


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run", required=True, type=plain_place, metavar="RUN_DIR_OR_URL", help="a run of launch/pretrain.py"
    )
    parser.add_argument("--step", type=int, help="the checkpoint after this step (default: the newest good one)")
    parser.add_argument("--top", type=count, default=5, help="candidates for each sentence (default: %(default)s)")
    parser.add_argument("sentences", nargs="+", metavar="SENTENCE", help=f"text with one {MASK} or more")
    options = parser.parse_args()
    if absent := [sentence for sentence in options.sentences if MASK not in sentence]:
        raise InputError(f"no {MASK} in: {'; '.join(absent)}")
    trained = read_run(options.run, options.step)
    num_tokens = trained.config.vocab_size
    if options.top > num_tokens:
        raise InputError(f"--top: found {options.top}; needed: at most {num_tokens}, the model's number of tokens")
    model, tokenizer = trained.build(), trained.tokenizer()
    for sentence in options.sentences:
        print(sentence)
        print(describe(fill(model, tokenizer, sentence), tokenizer, options.top))
    return 0


if __name__ == "__main__":
    sys.exit(main())
