"""Masked language modelling on rows of text (section 4 of the paper)."""

from functools import cached_property
from typing import Any

import torch

from gmlp_scale.data.loader import Loader
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine
from gmlp_scale.models import build_model
from gmlp_scale.models.heads import MaskedLanguageModel
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.tasks.evaluate import evaluate, shown
from gmlp_scale.tasks.start_weights import read_start, start_from


class Pretraining:
    """The Task of a pretraining recipe."""

    def __init__(self, config: RunConfig):
        self.config, self.train, self.optimizer = config, config.train, config.optimizer
        self.tokens_per_step = config.tokens_per_step

    @property
    def num_rows(self) -> int:
        return self.loader.num_rows

    @cached_property
    def flops_per_step(self) -> Piecewise:
        return self.config.flops_per_step()

    @property
    def data(self) -> str:
        folders = ", ".join(source.config.shards for source in self.loader.sources)
        return f"{folders}, {self.num_rows:,} rows and {self.loader.num_heldout_rows:,} held out"

    @property
    def fingerprint(self) -> dict[str, Any]:
        return self.loader.fingerprint()

    def open_loader(self, world: World) -> Loader:
        """Raises ShardError if no rows are held out."""
        self.loader = build_loader(self.config, rank=world.rank, world_size=world.size)
        if not self.loader.num_heldout_rows:
            self.loader.close()
            shards = " and ".join(source.shards for source in self.config.data.sources)
            needed = "write it with more documents or a larger --heldout-fraction"
            raise ShardError(f"{shards} has no held-out rows to evaluate on: {needed}")
        return self.loader

    def build_model(self) -> MaskedLanguageModel:
        return build_model(self.config.model, seed=None)

    def initialise(self, model: MaskedLanguageModel) -> None:
        model.init_weights(torch.Generator().manual_seed(self.config.seed))
        if self.config.init_from:
            start_from(read_start(self.config.init_from), model, self.config)

    def epochs(self, step: int) -> dict[str, float]:
        return self.loader.epochs(step)

    def evaluate(self, engine: Engine, world: World, step: int) -> dict[str, float]:
        """Held-out loss, perplexity and accuracy."""
        rows_per_batch = self.train.micro_batch_size * world.size
        num_rows = min(self.train.num_evaluation_rows, self.loader.num_heldout_rows)
        batches = shown(self.loader.heldout_batches(num_rows), world, -(-num_rows // rows_per_batch))
        return evaluate(engine.predict, batches, world).by_tag()

    def finish(self, engine: Engine, world: World, step: int) -> None:
        """Does nothing: the last checkpoint is the result."""


def build_loader(run: RunConfig, *, rank: int, world_size: int) -> Loader:
    """The run's loader for one rank of `world_size`."""
    return Loader(
        run.data,
        run.batch_plan(rank=rank, world_size=world_size),
        sequence_length=run.model.sequence_length,
        vocab_size=run.model.vocab_size,
        run_dir=run.run_dir,
    )
