"""What gmlp_scale/train/run.py needs to know of pretraining, characters, images or finetuning."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Protocol

import torch

from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine, OptimizerConfig, TrainConfig
from gmlp_scale.models.backbone import Backbone
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.recipe.config import PretrainingRecipe, Recipe


class BatchLoader(Protocol):
    """Gives one rank its training batches."""

    wait_seconds: float
    """How long the loop has waited for batches so far."""

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[Any]]:
        """The micro-batches of each step, from `start_step` finished steps until `stop_step` are finished."""

    def close(self) -> None: ...


class Task(ABC):
    """All that differs between pretraining and finetuning. All ranks call every method together.

    What most tasks do alike stands here.
    """

    config: Recipe
    train: TrainConfig
    """The config's `train` section, with values for what it leaves to the data."""
    optimizer: OptimizerConfig
    num_rows: int
    """Training rows in an epoch; of all sources together, if there are several."""
    tokens_per_step: Piecewise
    data: str
    """Where the data is and how much of it there is, in a line."""
    fingerprint: dict[str, Any]
    """Identifies the data: a resumed run must have the same. JSON-able."""

    def __init__(self, config: PretrainingRecipe):
        self.config, self.train, self.optimizer = config, config.train, config.optimizer
        self.tokens_per_step = config.tokens_per_step

    @cached_property
    def flops_per_step(self) -> Piecewise:
        """Training FLOPs of one global batch: 3 x the forward pass."""
        return self.config.flops_per_step()

    @abstractmethod
    def open_loader(self, world: World) -> BatchLoader:
        """Called first. The attributes above may be known only after it."""

    def build_model(self) -> Backbone:
        """The model with its head, in float32, not initialised."""
        return self.config.build_model()

    def initialise(self, model: Backbone) -> None:
        """Fills a new run's weights in place: the same on every rank."""
        model.init_weights(torch.Generator().manual_seed(self.config.seed))

    def epochs(self, step: int) -> dict[str, float]:
        """How often the training rows were seen in the steps up to `step`, by tag."""
        return {"data/epoch": self.train.batch_sizes.before(step) / self.num_rows}

    @abstractmethod
    def evaluate(self, engine: Engine, world: World, step: int) -> dict[str, float]:
        """The values to log after `step`, by tag. StopSignalled cuts it off; the resumed run begins with it."""

    def finish(self, engine: Engine, world: World, step: int) -> None:  # noqa: B027 - the last checkpoint is the result
        """Writes the task's results after the schedule's last step. StopSignalled cuts it off, as an evaluation."""
