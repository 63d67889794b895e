"""How good trained models are: held-out figures on any shards, and the dev score after a short finetuning, the probe.

Every model is evaluated on the same rows and masks.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from gmlp_scale.analysis.run_records import open_writer
from gmlp_scale.checkpoint.saved_run import read_recipe, read_run
from gmlp_scale.checkpoint.trained import TrainedModel, TrainedModelError
from gmlp_scale.data.batch import MaskedBatch
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.distributed.logs import progress_bar, set_up_logging
from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.errors import InputError
from gmlp_scale.export.folder import export_checkpoint
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.finetuning import finetune, read_inputs
from gmlp_scale.plan.auto import faster_precision
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_config, package_recipes
from gmlp_scale.storage.files import redacted
from gmlp_scale.tasks.evaluate import Evaluation, evaluate, unigram_predictor
from gmlp_scale.tasks.pretraining import build_loader
from gmlp_scale.tasks.records import missing_file

_FIGURES = ("loss", "perplexity", "accuracy")
BUDGET = ("train.num_epochs=null", "train.num_steps=200", "train.evaluate_every_steps=200")
_OWN = ("model", "task", "name", "output_dir", "engine.kind", "train.device", "train.stop_after_step")


@contextmanager
def single_process(script: str) -> Iterator[World]:
    """The world of a script that evaluates. InputError if it was started with several ranks."""
    with start_world(timeout_seconds=600, hear_stop_signals=False) as world:
        if world.size > 1:
            raise InputError(f"{script} is one process: start it without torchrun or deepspeed")
        set_up_logging(world)
        yield world


def evaluate_models(models: Iterable[TrainedModel], shards: str, num_rows: int | None, world: World) -> dict[str, Any]:
    """Evaluates checkpoints of one run, or one export, on the first `num_rows` held-out rows of `shards`.

    Without `num_rows` it takes as many as the pretraining run did.

    Returns what launch/evaluate.py writes as JSON: the figures of each model, and those of unigram frequencies.

    Raises:
        TrainedModelError: the model holds no recipe of pretraining.
        ShardError: the shards have another tokenizer or sequence length, no held-out rows, or are corrupt.
    """
    batches, content = [], {}
    for trained in models:
        if not batches:
            content, batches, predict = _read_heldout(trained, shards, num_rows)
            unigram = evaluate(predict, batches, world)
            content |= {"num_masked_tokens": unigram.num_tokens, "unigram": _figures(unigram), "models": []}
        progress = progress_bar(batches, desc=Path(trained.place).name, unit=" batches", leave=False)
        with torch.inference_mode():
            result = evaluate(trained.build().to(world.device).predict, progress, world)
        content["models"].append({"place": trained.place, "step": trained.step, **_figures(result)})
    return content


def table(content: dict[str, Any]) -> str:
    """The figures as text: a line for unigram frequencies, and one for each model."""
    evaluated = [{"step": "unigram", **content["unigram"]}, *content["models"]]
    columns = [column for column in content["models"][0] if column != "place"]
    widths = [max(12, len(column) + 2) for column in columns]
    lines = [[f"{column:>{width}}" for column, width in zip(columns, widths, strict=True)]]
    for figures in evaluated:
        values = [figures.get(column, "") for column in columns]
        texts = [f"{value:.4f}" if isinstance(value, float) else str(value) for value in values]
        lines.append([f"{text:>{width}}" for text, width in zip(texts, widths, strict=True)])
    training = "; ".join(content["training_differs"]) or "the same"
    heading = (
        f"{content['num_masked_tokens']:,} masked tokens in the first {content['num_rows']:,} held-out rows of "
        f"{content['shards']}, in float32 (in training: {training})"
    )
    return "\n".join([heading, *("".join(line) for line in lines)])


def write_curve(content: dict[str, Any], run_folder: str | Path) -> None:
    """Writes the models' figures to RUN_DIR/tensorboard/evaluation, in place of what was there."""
    with open_writer(f"{run_folder}/tensorboard/evaluation", replacing=True) as writer:
        for of_model in content["models"]:
            for figure in _FIGURES:
                writer.add_scalar(f"eval/{figure}", of_model[figure], of_model["step"])


def _read_heldout(
    trained: TrainedModel, shards: str, num_rows: int | None
) -> tuple[dict[str, Any], list[MaskedBatch], Callable[[MaskedBatch], torch.Tensor]]:
    """Facts about the rows, the held-out rows masked as in the model's own pretraining, and a predictor that knows how
    often each token occurs in some training rows."""
    if trained.recipe is None:
        raise TrainedModelError(
            f"{trained.place} holds no recipe of pretraining, so the masks to use are unknown: give the export of a "
            "pretraining run, or the run"
        )
    others = {"shards": shards, "on_corrupt_shard": "error", "max_corrupt_shards": 0}
    recipe = trained.recipe.model_copy(update={"data": trained.recipe.data.model_copy(update=others)})
    with closing(build_loader(recipe, rank=0, world_size=1)) as loader:
        manifest = loader.sources[0].manifest
        if manifest.tokenizer_sha256 != trained.tokenizer_sha256:
            raise ShardError(
                f"{shards} was written with another tokenizer than that of {trained.place}: write shards with "
                f"{trained.tokenizer_folder}"
            )
        num_rows = min(num_rows or trained.num_evaluation_rows, loader.num_heldout_rows)
        content = {
            "shards": redacted(shards),
            "num_rows": num_rows,
            "training_differs": _differences(trained, manifest.sha256, num_rows),
        }
        counts_V = torch.from_numpy(loader.sources[0].token_counts(num_rows * 10))
        return content, list(loader.heldout_batches(num_rows)), unigram_predictor(counts_V, manifest.special)


def _differences(trained: TrainedModel, manifest_sha256: str, num_rows: int) -> list[str]:
    """How this evaluation differs from the run's own at that step, which the model's card shows."""
    differences, precision = [], trained.details["config"]["train"]["precision"]
    if trained.details["data"].get("manifest_sha256") != manifest_sha256:
        differences.append("other shards")
    if trained.num_evaluation_rows != num_rows:
        differences.append(f"{trained.num_evaluation_rows:,} rows")
    if precision != "float32":
        differences.append(precision)
    return differences


def _figures(evaluation: Evaluation) -> dict[str, float]:
    return {name: getattr(evaluation, name) for name in _FIGURES}


def load_probe(task: str, overrides: list[str], run_folder: str | Path) -> FinetuneConfig:
    """The task's finetuning recipe with BUDGET in place of its own length; `overrides` win over both.

    It is the package's recipe with the task's name, else GLUE's.

    Raises:
        ConfigError: the recipe or an override has a mistake, an override sets what a probe decides itself, the rows
            are longer than those of the run at `run_folder`, or files of the data are missing.
        TrainedModelError: there is no such run.
    """
    recipe = task if task in package_recipes() else "glue"
    if own := [override for override in overrides if override.partition("=")[0] in _OWN]:
        raise ConfigError(recipe, [f"{override}: a probe decides this by itself; leave it out" for override in own])
    config = load_config(FinetuneConfig, recipe, [*BUDGET, *overrides, f"task={task}"])
    mistakes, longest = [], read_recipe(run_folder).model.sequence_length
    if config.data.sequence_length > longest:
        found = f"found {config.data.sequence_length}; the run at {run_folder} takes at most {longest}"
        mistakes.append(f"data.sequence_length: {found}")
    for part in ("train", *config.parts):
        if missing := missing_file(config.data.source(part), part, config.task_row.data_set):
            mistakes.append(missing)
    if mistakes:
        raise ConfigError(recipe, mistakes)
    config.rows_per_rank(1)
    return config


def add_probe_scores(content: dict[str, Any], run_folder: str | Path, config: FinetuneConfig, world: World) -> None:
    """Exports and finetunes each model of heldout.evaluate_models in a temporary folder.

    Adds its dev score to `content` and to RUN_DIR/tensorboard/probe. Raises one of errors.USER_ERRORS.
    """
    if config.train.precision == "auto":  # once, so that all models have the same
        config = config.with_train(precision=faster_precision(read_recipe(run_folder), world.device))
    score = config.task_row.main_score
    name = f"probe_{config.task}_{score}"
    for of_model in content["models"]:
        step = of_model["step"]
        with tempfile.TemporaryDirectory() as folder:
            export_checkpoint(read_run(run_folder, step), run_folder, Path(folder, "export"))
            one = config.model_copy(update={"output_dir": folder, "model": f"{folder}/export"})
            of_model[name] = finetune(one, read_inputs(one), world)["scores"]["dev"][score]
        with open_writer(f"{run_folder}/tensorboard/probe") as writer:
            writer.add_scalar(f"eval/{name}", of_model[name], step)
