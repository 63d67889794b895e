"""Lightning's Trainer on rows that stay exact: kill it, and start it again on another number of processes.

torchrun --nproc_per_node 2 examples/lightning_trainer.py --shards data/own/shards --output outputs/lightning

Each process takes its rows of a step as one batch: Lightning counts batches when it resumes, so a step should have as
many of them on any number of processes.
"""

import argparse
import os
from pathlib import Path

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import BertConfig, BertForMaskedLM

from gmlp_scale.data.rows import RowLoader, Rows

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shards", required=True)
parser.add_argument("--output", required=True, type=Path)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save-steps", type=int, default=100)
parser.add_argument("--global-batch", type=int, default=256)
parser.add_argument("--width", type=int, default=256)


class MaskedLanguageModel(lightning.LightningModule):
    def __init__(self, rows: Rows, width: int):
        super().__init__()
        self.rows, manifest = rows, rows.manifests[0]
        self.model = BertForMaskedLM(
            BertConfig(
                vocab_size=manifest.vocab_size, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=manifest.sequence_length,
            )
        )  # fmt: skip

    def train_dataloader(self) -> RowLoader:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        self.loader = RowLoader(self.rows, rank=rank, world_size=world_size, masked_fraction=0.15)
        return self.loader

    def on_train_start(self) -> None:
        # Lightning fetches a batch ahead, so the state that it saved is one step too far.
        self.loader.load_state_dict({"step": self.trainer.global_step})

    def training_step(self, batch: dict, _) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(options: argparse.Namespace) -> None:
    rows = Rows(options.shards, seed=1, global_batch_size=options.global_batch)
    trainer = lightning.Trainer(
        accelerator="auto", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="auto",
        max_steps=options.steps, use_distributed_sampler=False, logger=False, enable_progress_bar=False,
        callbacks=[ModelCheckpoint(options.output, every_n_train_steps=options.save_steps, save_last=True)],
    )  # fmt: skip
    last = options.output / "last.ckpt"
    trainer.fit(MaskedLanguageModel(rows, options.width), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main(parser.parse_args())
