"""Finetuning as a task of gmlp_scale/train/run.py. Beside what every run's folder holds, it writes

best/, last/          exports with the head: the weights with the best dev score, and the last ones
predictions/PART/     the last weights' predictions in the benchmark's official format
scores.json           the last weights' scores on every part with labels, written last: a run that has it is done
"""

import hashlib
import logging
import math
import shutil
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from gmlp_scale.checkpoint.trained import TrainedModel, copy_weights, read_export
from gmlp_scale.data.batch import PAD_ID
from gmlp_scale.data.batch_plan import EpochLoader
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine, TrainConfig
from gmlp_scale.engine.optimizer import AdamwConfig
from gmlp_scale.errors import InputError
from gmlp_scale.export.folder import json_text, write_export
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.models import build_model
from gmlp_scale.models.backbone import Backbone
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.storage.files import read_json_if_there, write_text
from gmlp_scale.tasks.table import TaskRows, summarize_all
from gmlp_scale.tasks.task import Task
from gmlp_scale.train.metrics import StartUp
from gmlp_scale.train.resolve import with_decided_precision
from gmlp_scale.train.run import run_task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """What all runs of one model on one task's data share."""

    pretrained: TrainedModel
    rows: dict[str, TaskRows]
    """The rows of train and of each of FinetuneConfig.parts."""

    @cached_property
    def fingerprint(self) -> dict[str, str | int]:
        """SHA-256 of the weights, the tokenizer and the rows to learn from, which a resumed run must find again."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.pretrained.weights.items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        learned = {part: rows.fingerprint for part, rows in self.rows.items() if not part.startswith("test")}
        return {
            "weights_sha256": digest.hexdigest(),
            "tokenizer_sha256": self.pretrained.tokenizer_sha256,
            **{f"{part}_sha256": fingerprint for part, fingerprint in learned.items()},
        }

    @cached_property
    def tests_fingerprint(self) -> dict[str, str]:
        """SHA-256 of the test parts. They may be added to a finished run or changed: it then predicts them anew."""
        return {part: rows.fingerprint for part, rows in self.rows.items() if part.startswith("test")}


def read_inputs(run: FinetuneConfig) -> Inputs:
    """Reads the export and every part of the data that the recipe gives.

    Raises:
        FileNotFoundError, ExportError, DataError: naming the file and what is wrong with it.
        ConfigError: the rows are longer than the model allows.
    """
    pretrained = read_export(run.model)
    longest = pretrained.config.sequence_length
    if run.data.sequence_length > longest:
        found = f"found {run.data.sequence_length}; the model at {run.model} takes at most {longest}"
        raise ConfigError(run.name, [f"data.sequence_length: {found}"])
    tokenizer = pretrained.tokenizer()
    rows = {
        part: run.task_row.read(
            run.data.source(part), part, tokenizer, run.data.sequence_length, run.data.document_stride
        )
        for part in ("train", *run.parts)
    }
    for part in run.parts:
        same_file = run.data.source(part) == run.data.train and Path(run.data.train).is_file()
        if same_file or rows[part].fingerprint == rows["train"].fingerprint:
            log.warning("data.%s holds the training data (%s): its score says nothing", part, run.data.source(part))
        if not rows[part].has_labels:
            log.info("data.%s has no labels: its predictions are written, but not scored", part)
    return Inputs(pretrained, rows)


def finetune(config: FinetuneConfig, inputs: Inputs, world: World) -> dict | None:
    """Finetunes from the newest good checkpoint with run_task, and raises as it does.

    Returns the content of scores.json, or None if it stopped before the end.
    """
    task = Finetuning(with_precision(config, inputs, world), inputs)
    run_task(task, world, StartUp(since=time.perf_counter()))
    return task.content


def with_precision(run: FinetuneConfig, inputs: Inputs, world: World) -> FinetuneConfig:
    """The run with float32 or bf16 for `auto`, as pretraining decides it for a run of this model."""
    of_model = run.model_copy(update={"model": inputs.pretrained.config})
    return run.with_train(precision=with_decided_precision(of_model, world).train.precision)


class Finetuning(Task):
    """The Task of a finetuning recipe: it scores the dev parts, keeps the best weights, and writes the predictions.

    Raises:
        ConfigError: train.stop_after_step is after the last step, which depends on the number of rows.
    """

    def __init__(self, config: FinetuneConfig, inputs: Inputs):
        self.config, self.inputs = config, inputs
        self.num_rows = inputs.rows["train"].num_rows
        sizes = (f"{part} {rows.num_examples:,} examples" for part, rows in inputs.rows.items())
        self.data = f"{config.task}, {', '.join(sizes)}"
        self.train: TrainConfig = config.train_config(self.num_rows)
        self.optimizer: AdamwConfig = config.optimizer_config(self.num_rows)
        self.lengths_R = (inputs.rows["train"].token_ids_RN != PAD_ID).sum(1)
        self.cuts_padding = inputs.pretrained.config.masks_padding
        self.mean_length = round(self.lengths_R.mean()) if self.cuts_padding else config.data.sequence_length
        """What a row costs: its text, or the padding too. [tokens]"""
        self.tokens_per_step = self.train.batch_sizes.map(lambda rows: rows * self.mean_length)
        self.content: dict | None = None
        """What scores.json holds; None until it is written."""
        self._evaluated_step: int | None = None
        self._summaries: dict[str, np.ndarray] = {}

    @cached_property
    def flops_per_step(self) -> Piecewise:
        """At the mean length of the rows."""
        shortened = self.inputs.pretrained.config.model_copy(update={"sequence_length": self.mean_length})
        with torch.device("meta"):
            model = build_model(shortened, head=self.config.task_row.head)
        return self.train.batch_sizes.map(lambda rows: 3 * model.flops_per_sample() * rows)

    def open_loader(self, world: World) -> EpochLoader:
        self.fingerprint = self.inputs.fingerprint
        rows, plan = self.inputs.rows["train"], self.config.batch_plan(rank=world.rank, world_size=world.size)
        by_length = self.config.train.like_lengths and self.cuts_padding
        return EpochLoader(rows, plan, self.lengths_R if by_length else None, cuts_padding=self.cuts_padding)

    def build_model(self) -> Backbone:
        head, dropout = self.config.task_row.head, self.config.dropout
        return build_model(self.inputs.pretrained.config, head=head, dropout=dropout, seed=None)

    def initialise(self, model: Backbone) -> None:
        """Random weights from the seed; then, if `pretrained`, the export's trunk, whatever head that has."""
        super().initialise(model)
        if self.config.pretrained:
            with torch.device("meta"):
                trunk = build_model(self.inputs.pretrained.config, head=Backbone)
            copy_weights(model, {name: self.inputs.pretrained.weights[name] for name, _ in trunk.named_parameters()})

    def evaluate(self, engine: Engine, world: World, step: int) -> dict[str, float]:
        """Scores by tag. Writes best/ if the dev score is the best so far."""
        if self._evaluated_step is None:
            self.best = world.on_main(lambda: self._read_best(step))
        rows = self.inputs.rows
        scored = [part for part in self.config.parts if part.startswith("dev") and rows[part].has_labels]
        self._evaluated_step, self._summaries = step, self._predict(scored, engine, world)
        scores = self._scores(self._summaries)
        score = scores["dev"][self.config.task_row.main_score]
        best = self.best and self.best["score"]
        if best is None or score > best or math.isnan(best):
            self.best = {"step": step, "score": score}
            self._write_weights("best", engine, world, step, scores)
        return by_name(scores, "eval/")

    def finish(self, engine: Engine, world: World, step: int) -> None:
        """Writes last/, predictions/ and scores.json."""
        if self._evaluated_step != step:
            self.evaluate(engine, world, step)
        rest = [part for part in self.config.parts if part not in self._summaries]
        summaries = self._summaries | self._predict(rest, engine, world)
        scores = self._scores(summaries)
        for name, value in by_name(scores).items():
            log.info("%s: %s", name, self.config.task_row.shown(name, value))
        self._write_weights("last", engine, world, step, scores)
        self.content = {
            "task": self.config.task,
            "seed": self.config.seed,
            "step": step,
            "scores": scores,
            "best": self.best,
            "num_examples": {part: rows.num_examples for part, rows in self.inputs.rows.items()},
            "config": self.config.to_json(),
            "data": self.inputs.fingerprint,
            "tests": self.inputs.tests_fingerprint,
        }
        world.on_main(lambda: self._write_results(summaries))

    def _predict(self, parts: list[str], engine: Engine, world: World) -> dict[str, np.ndarray]:
        """The summaries of these parts."""
        plan = self.config.batch_plan(rank=world.rank, world_size=world.size)
        return {
            part: summarize_all(self.inputs.rows[part], engine.predict, world, plan, cuts_padding=self.cuts_padding)
            for part in parts
        }

    def _scores(self, summaries: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
        """The scores of each part that has labels."""
        rows = self.inputs.rows
        return {part: rows[part].scores(of_part) for part, of_part in summaries.items() if rows[part].has_labels}

    def _write_results(self, summaries: dict[str, np.ndarray]) -> None:
        for part, of_part in summaries.items():
            folder = self.config.run_dir / "predictions" / part
            folder.mkdir(parents=True, exist_ok=True)
            self.inputs.rows[part].write_predictions(of_part, folder)
        write_text(self.config.run_dir / "scores.json", json_text(self.content))

    def _write_weights(self, name: str, engine: Engine, world: World, step: int, scores: dict) -> None:
        weights = dict(engine.full_weights())  # all ranks take part; only rank 0 gets them
        details = {
            "finetuned": {"task": self.config.task, "step": step, "scores": scores, "config": self.config.to_json()},
            "pretrained": self.inputs.pretrained.details if self.config.pretrained else None,
        }
        task = self.config.task_row
        trained = replace(
            self.inputs.pretrained,
            weights=weights,
            details=details,
            head=task.head_name,
            labels=task.class_names,
            row_length=self.config.data.sequence_length,
        )
        world.on_main(lambda: self._replace_export(self.config.run_dir / name, trained))

    def _replace_export(self, folder: Path, trained: TrainedModel) -> None:
        """Writes the new export beside the old one, and gives it the old one's name once it is whole."""
        unfinished, old = folder.with_name(f"{folder.name}.new"), folder.with_name(f"{folder.name}.old")
        of_killed = folder.parent.glob(f".{unfinished.name}.unfinished-*")
        for leftover in (unfinished, old, *of_killed):
            shutil.rmtree(leftover, ignore_errors=True)
        write_export(trained, unfinished, document_stride=self.config.data.document_stride)
        if folder.exists():
            folder.rename(old)
        unfinished.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

    def _read_best(self, step: int) -> dict | None:
        """The step and score of best/, for evaluations from `step` on.

        None if best/ is of `step` or a later one: a killed run wrote it, and this run will evaluate that step again.
        """
        place = f"{self.config.run_folder}/best/config.json"
        match read_json_if_there(place):
            case None:
                return None
            case {"details": {"finetuned": {"step": int(best_step), "scores": {"dev": dict(scores)}}}}:
                score = scores.get(self.config.task_row.main_score)
                return {"step": best_step, "score": score} if best_step < step else None
        raise InputError(f"{place} is damaged: remove the folder best; the next evaluation writes it")


def by_name(scores: dict[str, dict[str, float]], prefix: str = "") -> dict[str, float]:
    """The parts' scores in one dictionary: accuracy of dev, accuracy_mismatched, accuracy_test and so on.

    A score that is not finite is null in a file, and NaN here.
    """
    return {
        f"{prefix}{name}{f'_{part}'.removeprefix('_dev')}": math.nan if value is None else value
        for part, of_part in scores.items()
        for name, value in of_part.items()
    }
