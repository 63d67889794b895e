"""Classification of images, as in section 3 of the paper: recipes with `task: images`.

A row is an image and a position in it is a patch. The order of the rows is that of pretraining.
"""

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from math import isqrt
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gmlp_scale.checkpoint.config import CheckpointConfig
from gmlp_scale.data.augmentation import AugmentationConfig
from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.data.image_loader import ImageDataConfig, ImageLoader, load_image_manifest
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine, EngineConfig, OptimizerConfig, TrainConfig
from gmlp_scale.fields import Count, FreeInBranch, FreeOnResume, Positive
from gmlp_scale.models import ModelConfig, build_model
from gmlp_scale.models.image_classifier import ImageClassifier
from gmlp_scale.recipe.config import ConfigError, PretrainingRecipe
from gmlp_scale.tasks.evaluate import evaluation_batches
from gmlp_scale.tasks.task import Task


class ImagesConfig(PretrainingRecipe, frozen=True, extra="forbid"):
    """A recipe of image classification."""

    purpose: ClassVar[str] = "pretraining on images"

    task: Literal["images"]
    """Recipes of masked language modelling have no `task`."""
    model: ModelConfig
    """The model. Its positions are the patches, and vocab_size is the number of classes."""
    patch_size: Annotated[Count, Field(le=4096)]
    """Pixels on a side of a patch. An image has as many patches as model.sequence_length, in a square. [pixels]"""
    survival_probability: Annotated[Positive, Field(le=1)] = 1.0
    """Stochastic depth: how likely the last block's residual branch stays; from 1 at the first block it falls evenly.
    [fraction]"""
    data: ImageDataConfig
    augmentation: AugmentationConfig
    train: TrainConfig
    optimizer: FreeInBranch[OptimizerConfig]
    engine: FreeOnResume[EngineConfig]
    checkpoint: FreeOnResume[CheckpointConfig]

    @property
    def image_size(self) -> int:
        """Pixels on a side of an image."""
        return isqrt(self.model.sequence_length) * self.patch_size

    def build_model(self) -> ImageClassifier:
        head = partial(
            ImageClassifier,
            patch_size=self.patch_size,
            survival_probability=self.survival_probability,
            label_smoothing=self.augmentation.label_smoothing,
        )
        return build_model(self.model, head=head, seed=None)

    def num_rows(self) -> int:
        """Raises FileNotFoundError where there are no shards, and ShardError where they do not fit the recipe."""
        return load_image_manifest(self.data.shards, self.model.vocab_size).num_rows("train")

    def mistakes(self) -> Iterable[str]:
        yield from super().mistakes()
        num_patches, micro_batch_size = self.model.sequence_length, self.train.micro_batch_size
        if isqrt(num_patches) ** 2 != num_patches:
            yield f"model.sequence_length: found {num_patches}; needed: the patches of a square image, such as 196"
        if micro_batch_size == "auto":
            yield "train.micro_batch_size: found auto; needed: a number with task=images"
        elif self.augmentation.mixes and micro_batch_size % 2:
            needed = "an even number, or augmentation.mixup_alpha=0 and augmentation.cutmix_alpha=0: pairs are mixed"
            yield f"train.micro_batch_size: found {micro_batch_size}; needed: {needed}"


class Images(Task):
    """The Task of an ImagesConfig."""

    def open_loader(self, world: World) -> ImageLoader:
        config = self.config
        if not find_spec("kornia"):
            raise ConfigError(config.name, ["augmentation: found no kornia; needed: it, or the extra `images`"])
        loader = self._loader = ImageLoader(
            config.data,
            config.augmentation,
            config.batch_plan(rank=world.rank, world_size=world.size),
            image_size=config.image_size,
            num_classes=config.model.vocab_size,
        )
        self.num_rows, self.fingerprint = loader.manifest.num_rows("train"), loader.fingerprint()
        sizes = f"{self.num_rows:,} images and {loader.manifest.num_rows('heldout'):,} held out"
        self.data = f"{config.data.shards}, {sizes}, {len(loader.manifest.classes):,} classes"
        return loader

    def evaluate(self, engine: Engine, world: World, step: int) -> dict[str, float]:
        batches = self._loader.heldout_batches(self.train.num_evaluation_rows)
        return {f"eval/{name}": value for name, value in evaluate_images(engine.predict, batches, world).items()}


def evaluate_images(
    predict: Callable[[ImageBatch], Tensor], batches: Iterable[tuple[ImageBatch, int]], world: World
) -> dict[str, float]:
    """The loss, and the shares of images whose label is the likeliest (accuracy) or among the five likeliest.

    Args:
        predict: an engine's or a model's; returns logits_BC.
        batches: this rank's, as ImageLoader.heldout_batches gives them. All ranks must have equally many.
    """
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)  # loss, top 1, top 5, images
    for batch, num_counted in evaluation_batches(batches, world):
        batch = batch.to(world.device)
        logits_BC, labels_B = predict(batch)[:num_counted], batch.labels_B[:num_counted]
        loss = F.cross_entropy(logits_BC, labels_B, reduction="sum")
        is_right_BK = logits_BC.topk(min(5, logits_BC.shape[1])).indices == labels_B[:, None]
        counted = loss.new_tensor(num_counted)
        totals += torch.stack([loss, is_right_BK[:, 0].sum(), is_right_BK.sum(), counted]).double()
    loss, top_1, top_5, num_images = world.sum(totals.tolist())
    return {"loss": loss / num_images, "accuracy": top_1 / num_images, "top_5_accuracy": top_5 / num_images}
