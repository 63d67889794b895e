"""The export of a pretraining run."""

from pathlib import Path

from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.export.folder import ExportError, check_is_free, write_export
from gmlp_scale.run import load_pretrained
from gmlp_scale.train.metrics import read_metrics


def export_pretrained(run_dir: Path, step: int | None, folder: Path) -> Path:
    """Writes the model of a run's newest good checkpoint, or of the one after `step`; returns that checkpoint's path.

    Its details are the step, the last held-out evaluation until then, the data's fingerprint and the resolved config.

    Raises:
        One of pretrain.USER_ERRORS: the run or the checkpoint cannot be read.
        ExportError: the folder is taken, or the tokenizer beside the shards is not the one of the run.
    """
    check_is_free(folder)
    run, checkpoint, model = load_pretrained(run_dir, step)
    tokenizer_folder = f"{run.data.shards}/tokenizer"
    if Tokenizer(tokenizer_folder).sha256 != checkpoint.details["data"]["tokenizer_sha256"]:
        raise ExportError(
            f"{tokenizer_folder} is not the tokenizer of the rows that {run_dir} was trained on: "
            f"put the shards of the run back, or their place into data.shards of {run_dir / 'config.yaml'}"
        )
    write_export(
        folder,
        run.model,
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        tokenizer_folder=tokenizer_folder,
        details={"step": checkpoint.step, "heldout": _heldout_result(run_dir, checkpoint.step), **checkpoint.details},
    )
    return checkpoint.path


def _heldout_result(run_dir: Path, step: int) -> dict[str, float] | None:
    """The last evaluation up to `step`: its step, loss, perplexity and accuracy. None where there is none."""
    path = run_dir / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    evaluations = [row for row in rows if "eval/perplexity" in row and row["step"] <= step]
    return {name.removeprefix("eval/"): value for name, value in evaluations[-1].items()} if evaluations else None
