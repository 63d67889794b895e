"""Prints the global batch of a step exactly as training sees it: the rows, their text and their masks.

python data_prep/inspect_batch.py --config configs/pretrain/gmlp_base.yaml --step 1000 data.shards=SHARDS_DIR

For each row it prints the row's place in the order, its source in a mixture, its epoch, its shard and its number
there; the text, with <mask> where training masks it; and the masked tokens as `position:original>shown`. A vocabulary
without a mask token has the text alone.
"""

import argparse
import sys

from gmlp_scale.data.batch import IGNORED
from gmlp_scale.data.data_config import check_manifests
from gmlp_scale.data.json_tokenizer import AnyTokenizer, open_tokenizer
from gmlp_scale.data.loader import Loader
from gmlp_scale.data.shards import Manifest
from gmlp_scale.data.source import read_rows
from gmlp_scale.distributed.logs import command
from gmlp_scale.errors import InputError
from gmlp_scale.options import count
from gmlp_scale.recipe.reader import load_run_config


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe's file, or its name: gmlp_base")
    parser.add_argument(
        "--step", type=int, required=True, help="finished steps before it; the first batch is of step 0"
    )
    parser.add_argument("--rows", type=count, help="print only so many (default: all)")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    options = parser.parse_intermixed_args()
    run = load_run_config(options.config, options.overrides)
    if not 0 <= options.step < run.train.num_steps:
        raise InputError(f"--step is {options.step}; the run has the steps 0 to {run.train.num_steps - 1}")
    run = run.with_train(micro_batch_size=1)
    manifests = [Manifest.load(source.shards) for source in run.data.sources]
    check_manifests(manifests, run.data, run.model.sequence_length, run.model.vocab_size)
    loader = Loader(run.data, run.batch_plan(rank=0, world_size=1), manifests, run_dir=run.run_dir)
    print_batch(loader, open_tokenizer(run.data.tokenizer_folder), options.step, options.rows)
    return 0


def print_batch(loader: Loader, tokenizer: AnyTokenizer, step: int, num_rows: int | None) -> None:
    addresses = loader.addresses(step)
    is_masked = loader.sources[0].manifest.special.mask is not None
    batches = loader.micro_batches(step, addresses) if is_masked else read_rows(loader.sources, addresses)  # row by row
    sources = [loader.sources[place] for place in addresses.source]
    positions = loader.plan.positions(step)
    for index in range(min(num_rows or len(positions), len(positions))):
        source = sources[index]
        shard = source.manifest.splits.train[addresses.shard[index]]
        source_name = f"source {source.config.name}  " if loader.config.is_mixture else ""
        print(
            f"position {positions[index]}  {source_name}epoch {addresses.epoch[index]}  {shard.name} "
            f"row {addresses.row_index[index]}  global row {addresses.global_row_index[index]}"
        )
        token_ids = (batches[index].token_ids_BN[0] if is_masked else batches[index]).tolist()
        print(f"  text   {tokenizer.decode(token_ids)!r}")
        if not is_masked:
            continue
        masked = zip(batches[index].masked_positions_BM[0].tolist(), batches[index].labels_BM[0].tolist(), strict=True)
        shown = [
            f"{position}:{tokenizer.decode([label])!r}>{tokenizer.decode([token_ids[position]])!r}"
            for position, label in masked
            if label != IGNORED
        ]
        print(f"  masks  {' '.join(shown)}")


if __name__ == "__main__":
    sys.exit(main())
