"""What a finetuning run leaves behind: dev scores at each evaluation, the best and the last weights, predictions."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import torch

from gmlp_scale.data.epoch_loader import summarize_all
from gmlp_scale.engine import Engine
from gmlp_scale.export.folder import write_export
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.inputs import Inputs
from gmlp_scale.tasks.classification import ClassificationTask
from gmlp_scale.train.run_folder import write_text
from gmlp_scale.world import World


class Results:
    """Scores the dev parts, keeps the best weights, and writes what a finished run leaves behind."""

    def __init__(self, run: FinetuneConfig, inputs: Inputs, engine: Engine, world: World, start_step: int):
        self.run, self.inputs, self.engine, self.world = run, inputs, engine, world
        self.best = world.broadcast(self._read_best(start_step) if world.is_main else None)
        self._evaluated_step: int | None = None
        self._summaries: dict[str, np.ndarray] = {}

    def evaluate(self, step: int) -> dict[str, float]:
        """Scores by tag; writes best/ where the dev score is the best so far."""
        self._evaluated_step, self._summaries = step, {}
        scores = {part: self._scores(part) for part in self.run.parts if part.startswith("dev")}
        score = scores["dev"][self.run.task_row.main_score]
        if self.best is None or score > self.best["score"]:
            self.best = {"step": step, "score": score}
            self._write_weights("best", step, scores)
        return by_name(scores, "eval/")

    def write(self, step: int) -> dict:
        """last/, predictions/ and scores.json of the weights after the last step."""
        if self._evaluated_step != step:
            self.evaluate(step)
        scores = {part: self._scores(part) for part in self.run.parts if part.startswith("dev")}
        self._write_weights("last", step, scores)
        for part in self.run.parts:
            summaries = self._summary(part)
            self.world.on_main(functools.partial(self._write_predictions, part, summaries))
        content = {
            "task": self.run.task,
            "seed": self.run.seed,
            "step": step,
            "scores": scores,
            "best": self.best,
            "num_examples": {part: rows.num_examples for part, rows in self.inputs.rows.items()},
            "config": self.run.model_dump(mode="json"),
            "data": self.inputs.fingerprint,
        }
        path = self.run.run_dir / "scores.json"
        self.world.on_main(lambda: write_text(path, json.dumps(content, indent=2) + "\n"))
        return content

    def _summary(self, part: str) -> np.ndarray:
        """Of the weights that were evaluated last, once."""
        if part not in self._summaries:
            rows, batch_size = self.inputs.rows[part], self.run.train.micro_batch_size
            self._summaries[part] = summarize_all(rows, self.engine.predict, self.world, batch_size)
        return self._summaries[part]

    def _scores(self, part: str) -> dict[str, float]:
        return self.inputs.rows[part].scores(self._summary(part))

    def _write_predictions(self, part: str, summaries: np.ndarray) -> None:
        folder = self.run.run_dir / "predictions" / part
        folder.mkdir(parents=True, exist_ok=True)
        self.inputs.rows[part].write_predictions(summaries, folder)

    def _write_weights(self, name: str, step: int, scores: dict[str, dict[str, float]]) -> None:
        weights = dict(self.engine.full_weights())  # all ranks take part; rank 0 has them
        config = self.run.model_dump(mode="json")
        details = {
            "finetuned": {"task": self.run.task, "step": step, "scores": scores, "config": config},
            "pretrained": self.inputs.export.details if self.run.pretrained else None,
        }
        self.world.on_main(lambda: self._replace_export(self.run.run_dir / name, weights, details))

    def _replace_export(self, folder: Path, weights: dict[str, torch.Tensor], details: dict) -> None:
        """The new one takes the old one's name when it is whole."""
        unfinished, old = folder.with_name(f"{folder.name}.new"), folder.with_name(f"{folder.name}.old")
        for leftover in (unfinished, old):
            shutil.rmtree(leftover, ignore_errors=True)
        task = self.run.task_row
        is_classification = isinstance(task, ClassificationTask)
        write_export(
            unfinished,
            self.inputs.export.model,
            weights,
            tokenizer_folder=self.run.model,
            details=details,
            head="sequence_classification" if is_classification else "question_answering",
            labels=task.class_names if is_classification else (),
            row_length=self.run.data.sequence_length,
            document_stride=self.run.data.document_stride,
        )
        if folder.exists():
            folder.rename(old)
        unfinished.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

    def _read_best(self, start_step: int) -> dict | None:
        """The step and score of best/ as the steps up to `start_step` left it.

        None if it is of a later step: that step had the best score so far and will come again.
        """
        try:
            details = json.loads((self.run.run_dir / "best" / "config.json").read_text(encoding="utf-8"))["details"]
        except FileNotFoundError:
            return None
        found = details["finetuned"]
        if found["step"] > start_step:
            return None
        return {"step": found["step"], "score": found["scores"]["dev"][self.run.task_row.main_score]}


def by_name(scores: dict[str, dict[str, float]], prefix: str = "") -> dict[str, float]:
    """Scores of the dev parts in one dictionary: accuracy, and accuracy_mismatched of part dev_mismatched."""
    return {
        f"{prefix}{name}{part.removeprefix('dev')}": value
        for part, of_part in scores.items()
        for name, value in of_part.items()
    }
