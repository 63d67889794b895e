"""transformers' Trainer on rows that stay exact: kill it, and start it again on another number of processes.

torchrun --nproc_per_node 2 examples/transformers_trainer.py --shards data/own/shards --output outputs/trainer

The model is a small BERT; any model of transformers takes these batches.
"""

import argparse
import os

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from gmlp_scale.data.rows import RowLoader, Rows

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shards", required=True)
parser.add_argument("--output", required=True)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save-steps", type=int, default=100)
parser.add_argument("--global-batch", type=int, default=256)
parser.add_argument("--micro-batch", type=int, default=8)
parser.add_argument("--width", type=int, default=256)


class ExactRows(TrainerCallback):
    """The Trainer's checkpoint has the step, which is all that the rows need."""

    def __init__(self, loader: RowLoader):
        self.loader = loader

    def on_train_begin(self, args, state, control, **_):
        self.loader.load_state_dict({"step": state.global_step})


class RowTrainer(Trainer):
    """Takes the loader as it is: accelerate would cut the batches once more."""

    def get_train_dataloader(self) -> RowLoader:
        return self.loader


def main(options: argparse.Namespace) -> None:
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        save_steps=options.save_steps,
        per_device_train_batch_size=options.micro_batch,
        ignore_data_skip=True,  # nothing needs to be skipped
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        learning_rate=1e-3,
        logging_steps=10,
    )
    rank, world_size = arguments.process_index, arguments.world_size
    arguments.gradient_accumulation_steps = options.global_batch // (world_size * options.micro_batch)
    rows = Rows(options.shards, seed=1, global_batch_size=options.global_batch)
    loader = RowLoader(
        rows, rank=rank, world_size=world_size, micro_batch_size=options.micro_batch, masked_fraction=0.15
    )
    manifest = rows.manifests[0]
    config = BertConfig(
        vocab_size=manifest.vocab_size, hidden_size=options.width, intermediate_size=4 * options.width,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=manifest.sequence_length,
    )  # fmt: skip
    trainer = RowTrainer(BertForMaskedLM(config), arguments, callbacks=[ExactRows(loader)])
    trainer.loader = loader
    os.makedirs(options.output, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.output))


if __name__ == "__main__":
    main(parser.parse_args())
