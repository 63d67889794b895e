"""FinetuneConfig: a recipe of finetuning; see configs/finetune."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, Field, PositiveInt

from gmlp_scale.config import num_micro_batches, schedule_mistakes, zero_3_mistakes
from gmlp_scale.engine import EngineConfig
from gmlp_scale.engine.optimizer import OptimizerConfig
from gmlp_scale.models.backbone import Recompute
from gmlp_scale.tasks.question_answering import QuestionTask
from gmlp_scale.tasks.table import TASKS, FinetuneTask
from gmlp_scale.tasks.windows import MAX_QUESTION_TOKENS
from gmlp_scale.train.checkpointer import CheckpointConfig
from gmlp_scale.train.loop import TrainConfig

FREE_ON_RESUME = ("model", "data.", "grid.")
"""Beside what pretraining leaves free: that the weights and the rows are the same, their fingerprints say."""


class FinetuneDataConfig(BaseModel, frozen=True, extra="forbid"):
    """Each part is a file (.tsv, .jsonl, .parquet, SQuAD's .json) or a name that `datasets` loads (nyu-mll/glue)."""

    train: str
    dev: str
    dev_mismatched: str | None = None
    """MNLI's second development set."""
    test: str | None = None
    """Without labels; its predictions are written."""
    test_mismatched: str | None = None
    sequence_length: PositiveInt
    """Every row is padded to it, in training and in evaluation; at most the model's."""
    document_stride: PositiveInt | None = None
    """SQuAD: tokens from the beginning of one window to that of the next."""

    def source(self, part: str) -> str | None:
        return getattr(self, part)


class FinetuneTrainConfig(BaseModel, frozen=True, extra="forbid"):
    num_epochs: float | None = Field(None, gt=0)
    """The length of the schedule in passes over the rows; the last step may take some rows of a further one."""
    num_steps: PositiveInt | None = None
    """The same in optimizer updates; give one of the two."""
    stop_after_step: PositiveInt | None = None
    """Leave there with a checkpoint, as if stopped by a signal."""
    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bf16"] = "bf16"
    compile: bool = False
    recompute: Recompute = "none"
    log_every_steps: PositiveInt = 50
    evaluate_every_steps: PositiveInt | None = None
    """null: once per epoch. The end is always evaluated."""
    peak_tflops_per_device: float | None = Field(None, gt=0)
    allow_changed_on_resume: list[str] = []


class FinetuneOptimizerConfig(BaseModel, frozen=True, extra="forbid"):
    """As OptimizerConfig, but for the warm-up."""

    peak_learning_rate: float = Field(gt=0)
    warmup_fraction: float = Field(0.1, ge=0, lt=1)
    """Of the schedule."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    gradient_clipping: float | None = Field(None, gt=0)


class GridConfig(BaseModel, frozen=True, extra="forbid"):
    """What --grid tries: every pair."""

    global_batch_size: list[PositiveInt] = Field(min_length=1)
    peak_learning_rate: list[float] = Field(min_length=1)


class FinetuneConfig(BaseModel, frozen=True, extra="forbid"):
    """One finetuning run."""

    name: str = Field(pattern=r"^[\w.-]+$")
    """The run folder is output_dir/name."""
    output_dir: Path = Path("outputs")
    seed: int = Field(ge=0)
    """Of the head's weights, the order of the rows and dropout."""
    task: str
    """mnli, sst2, squad_v1 or squad_v2."""
    model: Path
    """A folder that launch/export.py wrote."""
    pretrained: bool = True
    """false: take the export's model and tokenizer but random weights, a baseline that shows what pretraining gives."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """After the embedding, on residual branches, on attention probabilities and before the classifier."""
    data: FinetuneDataConfig
    train: FinetuneTrainConfig
    optimizer: FinetuneOptimizerConfig
    engine: EngineConfig
    checkpoint: CheckpointConfig
    grid: GridConfig

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name

    @property
    def task_row(self) -> FinetuneTask:
        return TASKS[self.task]

    @property
    def parts(self) -> list[str]:
        """Of the data, besides train: those that were given."""
        return [part for part in self.task_row.parts if self.data.source(part)]

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.data.sequence_length

    def num_micro_batches(self, world_size: int) -> int:
        """Micro-batches per rank and step. Raises ConfigError where the global batch cannot be cut evenly."""
        return num_micro_batches(self.name, self.train.global_batch_size, self.train.micro_batch_size, world_size)

    def num_steps(self, num_rows: int) -> int:
        """Of the schedule over so many training rows."""
        return self.train.num_steps or math.ceil(self.train.num_epochs * num_rows / self.train.global_batch_size)

    def train_config(self, num_rows: int) -> TrainConfig:
        """What the loop needs, with the schedule over so many training rows."""
        fields = self.train.model_dump(exclude={"num_epochs", "num_steps", "evaluate_every_steps"})
        steps_per_epoch = math.ceil(num_rows / self.train.global_batch_size)
        return TrainConfig(
            **fields,
            num_steps=self.num_steps(num_rows),
            evaluate_every_steps=self.train.evaluate_every_steps or steps_per_epoch,
        )

    def optimizer_config(self, num_rows: int) -> OptimizerConfig:
        """What the optimizer needs, with the warm-up of the schedule over so many training rows."""
        fields = self.optimizer.model_dump(exclude={"warmup_fraction"})
        warmup_steps = int(self.optimizer.warmup_fraction * self.num_steps(num_rows))
        return OptimizerConfig(**fields, warmup_steps=warmup_steps)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def mistakes(self) -> Iterable[str]:
        """What no section can see alone."""
        train, data = self.train, self.data
        yield from schedule_mistakes(
            train.global_batch_size, train.micro_batch_size, train.stop_after_step, train.num_steps
        )
        yield from zero_3_mistakes(self.engine, train.compile, train.recompute)
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
            if data.source(part) and part not in self.task_row.parts:
                yield f"data.{part}: found {data.source(part)}; {self.task} has no such part, so leave it null"
        if not isinstance(self.task_row, QuestionTask):
            if data.document_stride:
                yield f"data.document_stride: found {data.document_stride}; {self.task} has no windows: leave it null"
            return
        if not data.document_stride:
            yield f"data.document_stride: missing; {self.task} cuts its contexts into windows (the paper: 128)"
        if data.sequence_length < MAX_QUESTION_TOKENS + 4:
            yield (
                f"data.sequence_length: found {data.sequence_length}; a question of {MAX_QUESTION_TOKENS} tokens and a "
                f"window need at least {MAX_QUESTION_TOKENS + 4}"
            )
