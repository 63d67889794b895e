"""FinetuneConfig: a recipe of finetuning; see configs/finetune."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import BaseModel, Field

from gmlp_scale.checkpoint.config import CheckpointConfig
from gmlp_scale.engine import EngineConfig, TrainConfig
from gmlp_scale.engine.optimizer import AdamwConfig
from gmlp_scale.fields import Count, FreeOnResume, NotNegative, Positive, Share
from gmlp_scale.models.layers import Recompute
from gmlp_scale.recipe.checks import stop_mistakes
from gmlp_scale.recipe.config import ConfigError, Recipe
from gmlp_scale.storage.files import Place
from gmlp_scale.tasks.table import TASKS, FinetuneTask
from gmlp_scale.tasks.tagging import TaggingTask
from gmlp_scale.tasks.windows import MAX_QUESTION_TOKENS


class FinetuneDataConfig(BaseModel, frozen=True, extra="forbid"):
    """Each part is a file (.tsv, .jsonl, .parquet, SQuAD's .json; CoNLL for tagging) or a name that `datasets` loads
    (nyu-mll/glue)."""

    train: Place[str]
    """The examples to learn from."""
    dev: Place[str]
    """The development set, which decides which weights are the best."""
    dev_mismatched: Place[str | None] = None
    """MNLI's second development set."""
    test: Place[str | None] = None
    """Scored once, at the end, if it has labels. Its predictions are written in any case."""
    test_mismatched: Place[str | None] = None
    """MNLI's second test set."""
    sequence_length: Count
    """The greatest length of a row, in training and in evaluation; at most the model's. A micro-batch is as long as its
    longest row. If the model reads padding, every row has this length. [tokens]"""
    document_stride: Count | None = None
    """SQuAD and tagging: from the start of one window of a text to the start of the next. [tokens]"""
    entity_types: list[str] | None = None
    """Tagging: the types of entities, as in B-TYPE and I-TYPE."""

    def source(self, part: str) -> str | None:
        return getattr(self, part)


class FinetuneTrainConfig(BaseModel, frozen=True, extra="forbid"):
    num_epochs: Positive | None = None
    """The length of the schedule in passes over the rows. The last step may take some rows of another pass. [epochs]"""
    num_steps: Count | None = None
    """The same in optimizer updates. Give one of the two. [steps]"""
    stop_after_step: FreeOnResume[Count | None] = None
    """Leave after this step with a checkpoint, as if stopped by a signal. [steps]"""
    global_batch_size: Count
    """Rows per step over all ranks. [rows]"""
    micro_batch_size: FreeOnResume[Count]
    """Rows per forward pass on one rank. [rows]"""
    like_lengths: bool = False
    """Draw rows of like length into one step, so that less of it is padding; the steps come in random order. A model
    that reads padding gets the usual order."""
    device: FreeOnResume[Literal["auto", "cpu", "cuda"]] = "auto"
    """auto: a GPU for each rank where there are any, else the CPU."""
    precision: Literal["auto", "float32", "bf16"] = "bf16"
    """bf16: parameters and products in bfloat16 with a float32 master. auto: as in pretraining, once for a sweep."""
    compile: FreeOnResume[bool] = False
    """torch.compile for each block, on a GPU for each group of them."""
    recompute: FreeOnResume[Recompute] = "none"
    """What the backward pass computes again to save memory, as in pretraining."""
    recheck_every_steps: FreeOnResume[Count | None] = None
    """How often each rank computes a micro-batch twice, as in pretraining. [steps]"""
    log_every_steps: FreeOnResume[Count] = 50
    """How often a line is added to the log, metrics.jsonl and TensorBoard. [steps]"""
    evaluate_every_steps: FreeOnResume[Count | None] = None
    """How often the development set is evaluated; null: once per epoch. The end always is. [steps]"""
    profile_steps: FreeOnResume[tuple[Count, Count] | None] = None
    """The first and the last step to profile, as in pretraining. [steps]"""
    tracker: FreeOnResume[Literal["wandb", "trackio"] | None] = None
    """As in pretraining."""
    peak_tflops_per_device: FreeOnResume[Positive | None] = None
    """Data-sheet peak that perf/mfu divides by. null looks the device up. [TFLOP/s]"""
    allow_changed_on_resume: FreeOnResume[list[str]] = []
    """Fields that may differ from the checkpoint's although they change the run."""


class FinetuneOptimizerConfig(BaseModel, frozen=True, extra="forbid"):
    """As AdamwConfig, except for the warm-up."""

    peak_learning_rate: Positive
    """The learning rate at the end of the warm-up. [no unit]"""
    warmup_fraction: Share = 0.1
    """How much of the schedule the rate climbs from 0 to its peak; it falls to 0 over the rest. [fraction]"""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """How much of AdamW's mean of gradients, and of their squares, each step keeps. [fraction]"""
    eps: Positive = 1e-6
    """What AdamW adds to the root of the mean square, so that it never divides by 0. [no unit]"""
    weight_decay: NotNegative = 0.01
    """Each step takes this times the learning rate off the weights, on matrices only. [no unit]"""
    gradient_clipping: Positive | None = None
    """Largest global gradient norm; null never clips. [no unit]"""


class GridConfig(BaseModel, frozen=True, extra="forbid"):
    """--grid tries every pair of these."""

    global_batch_size: list[Count] = Field(min_length=1)
    """Values of train.global_batch_size. [rows]"""
    peak_learning_rate: list[Positive] = Field(min_length=1)
    """Values of optimizer.peak_learning_rate. [no unit]"""


class FinetuneConfig(Recipe, frozen=True, extra="forbid"):
    """One finetuning run."""

    purpose: ClassVar[str] = "finetuning"
    branch_from: ClassVar[None] = None
    # The model and the data may lie elsewhere: fingerprints say whether the weights and the rows are still the same.

    task: str
    """One of tasks.table.TASKS."""
    model: FreeOnResume[Place[str]]
    """A folder that launch/export.py wrote, or one at a URL."""
    pretrained: bool = True
    """false: take the export's model and tokenizer, but random weights, as a baseline without pretraining."""
    dropout: Share = 0.1
    """After the embedding, on residual branches, on attention probabilities and before the classifier. [fraction]"""
    data: FreeOnResume[FinetuneDataConfig]
    train: FinetuneTrainConfig
    optimizer: FinetuneOptimizerConfig
    engine: FreeOnResume[EngineConfig]
    checkpoint: FreeOnResume[CheckpointConfig]
    grid: FreeOnResume[GridConfig]

    @property
    def task_row(self) -> FinetuneTask:
        """The row of TASKS; tagging's has the recipe's types of entities."""
        row = TASKS[self.task]
        return replace(row, entity_types=tuple(self.data.entity_types)) if self.data.entity_types else row

    @property
    def parts(self) -> list[str]:
        """The parts of the data that were given, besides train."""
        return [part for part in self.task_row.data_set.parts if self.data.source(part)]

    def num_steps(self, num_rows: int) -> int:
        """The length of the schedule for this number of training rows."""
        return self.train.num_steps or math.ceil(self.train.num_epochs * num_rows / self.train.global_batch_size)

    def train_config(self, num_rows: int) -> TrainConfig:
        """The `train` section of a run over this number of training rows.

        Raises:
            ConfigError: train.stop_after_step is beyond the end of the schedule.
        """
        if mistakes := list(stop_mistakes(self.train.stop_after_step, self.num_steps(num_rows))):
            raise ConfigError(self.name, mistakes)
        every = self.train.evaluate_every_steps or math.ceil(num_rows / self.train.global_batch_size)
        decided = {"num_steps": self.num_steps(num_rows), "evaluate_every_steps": every}
        return TrainConfig(**self.train.model_dump(exclude={"num_epochs", "like_lengths", *decided}), **decided)

    def optimizer_config(self, num_rows: int) -> AdamwConfig:
        """The `optimizer` section of a run over this number of training rows."""
        fields = self.optimizer.model_dump(exclude={"warmup_fraction"})
        warmup_steps = int(self.optimizer.warmup_fraction * self.num_steps(num_rows))
        return AdamwConfig(**fields, warmup_steps=warmup_steps)

    def mistakes(self) -> Iterable[str]:
        train, data = self.train, self.data
        yield from super().mistakes()
        if (train.num_epochs is None) == (train.num_steps is None):
            found = f"found {train.num_epochs} with train.num_steps = {train.num_steps}"
            yield f"train.num_epochs: {found}; give one of the two and set the other to null"
        for batch in self.grid.global_batch_size:
            if batch % train.micro_batch_size:
                needed = f"must be a multiple of train.micro_batch_size = {train.micro_batch_size}"
                yield f"grid.global_batch_size: found {batch}; {needed}"
        if self.task not in TASKS:
            yield f"task: found {self.task!r}; one of {', '.join(TASKS)}"
            return
        for part in ("dev_mismatched", "test", "test_mismatched"):
            if data.source(part) and part not in TASKS[self.task].data_set.parts:
                yield f"data.{part}: found {data.source(part)}; {self.task} has no such part, so leave it null"
        has_entities = isinstance(TASKS[self.task], TaggingTask)
        least = 1 + 2 * TASKS[self.task].num_texts
        if data.sequence_length < least:
            yield f"data.sequence_length: found {data.sequence_length}; needed: at least {least}"
        if has_entities != bool(data.entity_types):
            needed = "the TYPEs of the files' tags B-TYPE" if has_entities else "null, as only tagging has them"
            yield f"data.entity_types: found {data.entity_types}; needed: {needed}"
        if repeated := [kind for kind, number in Counter(data.entity_types or ()).items() if number > 1]:
            yield f"data.entity_types: found {', '.join(repeated)} more than once; needed: each type once"
        if not TASKS[self.task].has_windows:
            if data.document_stride:
                yield f"data.document_stride: found {data.document_stride}; {self.task} has no windows: leave it null"
            return
        if not data.document_stride:
            yield f"data.document_stride: missing; {self.task} cuts long texts into windows (the paper: 128 for SQuAD)"
        if not has_entities and data.sequence_length < MAX_QUESTION_TOKENS + 4:
            yield (
                f"data.sequence_length: found {data.sequence_length}; a question of {MAX_QUESTION_TOKENS} tokens and a "
                f"window need at least {MAX_QUESTION_TOKENS + 4}"
            )
