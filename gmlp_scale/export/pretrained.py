"""The export of a pretraining run."""

from pathlib import Path

from gmlp_scale.export.folder import check_is_free, write_export
from gmlp_scale.train.metrics import read_metrics
from gmlp_scale.trained import read_run


def export_pretrained(run_dir: Path, step: int | None, folder: Path) -> Path:
    """Writes the model of a run's newest good checkpoint, or of the one after `step`; returns that checkpoint's path.

    Its details are the step, the last held-out evaluation until then, the data's fingerprint and the resolved config.

    Raises:
        ConfigError, CheckpointError: the run or the checkpoint cannot be read.
        ExportError, TrainedModelError: the folder is taken, or the run's tokenizer is no longer beside its shards.
    """
    check_is_free(folder)
    trained = read_run(run_dir, step)
    trained.tokenizer()  # raises where it is another one
    write_export(
        folder,
        trained.config,
        trained.weights,
        tokenizer_folder=trained.tokenizer_folder,
        details={"step": trained.step, "heldout": _heldout_result(run_dir, trained.step), **trained.details},
    )
    return trained.place


def _heldout_result(run_dir: Path, step: int) -> dict[str, float] | None:
    """The last evaluation up to `step`: its step, loss, perplexity and accuracy. None where there is none."""
    path = run_dir / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    evaluations = [row for row in rows if "eval/perplexity" in row and row["step"] <= step]
    return {name.removeprefix("eval/"): value for name, value in evaluations[-1].items()} if evaluations else None
