"""Held-out perplexity of a run's checkpoint, fixed rows and masks, beside the unigram perplexity.

python launch/evaluate.py --run outputs/gmlp_base --shards data/c4_512
"""

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from gmlp_scale.data.loader import Loader
from gmlp_scale.data.shards import ShardError
from gmlp_scale.pretrain import USER_ERRORS, load_pretrained
from gmlp_scale.train.evaluate import evaluate, unigram_predictor
from gmlp_scale.world import start_world


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, metavar="RUN_DIR")
    parser.add_argument("--step", type=int, help="the checkpoint after this step (default: the newest good one)")
    parser.add_argument("--shards", required=True, metavar="SHARDS_DIR")
    parser.add_argument("--rows", type=int, default=10_000, help="held-out rows, the first ones (default: %(default)s)")
    options = parser.parse_args()
    try:
        with start_world(timeout_seconds=600, hear_stop_signals=False) as world, torch.inference_mode():
            run, checkpoint, model = load_pretrained(options.run, options.step)
            loader = Loader(
                run.data.model_copy(update={"shards": options.shards}),
                sequence_length=run.model.sequence_length,
                vocab_size=run.model.vocab_size,
                seed=run.seed,
                global_batch_size=run.train.micro_batch_size,
                micro_batch_size=run.train.micro_batch_size,
                rank=0,
                world_size=1,
                run_dir=options.run,
            )
            if loader.manifest.tokenizer_sha256 != checkpoint.details["data"]["tokenizer_sha256"]:
                raise ShardError(f"{options.shards} was written with another tokenizer than that of {options.run}")
            batches = list(loader.heldout_batches(options.rows))
            model_result = evaluate(model.to(world.device).predict, tqdm(batches, unit=" batches", disable=None), world)
            counts_V = torch.from_numpy(loader.token_counts(options.rows * 10))
            unigram_result = evaluate(unigram_predictor(counts_V), batches, world)
    except USER_ERRORS as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{checkpoint.path}: {model_result.num_tokens:,} masked tokens of {options.shards}")
    print(f"  perplexity          {model_result.perplexity:10.3f}   (loss {model_result.loss:.4f})")
    print(f"  unigram perplexity  {unigram_result.perplexity:10.3f}   (loss {unigram_result.loss:.4f})")
    print(f"  accuracy            {model_result.accuracy:10.4f}   (unigram {unigram_result.accuracy:.4f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
