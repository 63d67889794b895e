"""Weights & Biases beside TensorBoard: the recipe's fields and the same values by tag.

Its own variables say where they go: WANDB_MODE=offline for a node without a network, WANDB_PROJECT, WANDB_API_KEY.
"""

import logging
import uuid
from pathlib import Path
from typing import Any

from gmlp_scale.errors import InputError
from gmlp_scale.storage.files import write_text

log = logging.getLogger(__name__)

PROJECT = "gmlp_scale"
"""Where WANDB_PROJECT is not set."""


class WandbRun:
    """One for the whole run: a resumed run goes on with the one whose id is in its folder.

    W&B keeps the first values of a step. So what a resumed run tells again of steps after its checkpoint is left out.
    What W&B refuses later is told once; training goes on without it.
    """

    def __init__(self, run_dir: Path, fields: dict[str, Any]):
        import wandb

        settings = wandb.setup().settings
        try:
            self._run = wandb.init(
                dir=run_dir,
                project=settings.project or PROJECT,
                name=fields["name"],
                id=_own_id(run_dir / "wandb_id"),
                resume="allow" if settings.mode == "online" else None,
                config=fields,
                # The command line, which W&B would store, may hold a password of a URL.
                settings=wandb.Settings(
                    console="off", silent=True, disable_code=True, disable_git=True, x_disable_meta=True
                ),
            )
        except wandb.Error as error:
            needed = "run `wandb login`, set WANDB_MODE=offline and sync later, or set train.tracker to null"
            raise InputError(f"train.tracker: found wandb, which refuses the run ({error}); {needed}") from error
        log.info("W&B: %s", self._run.dir if self._run.offline else self._run.url)
        self._is_failing = False

    def add(self, step: int, values: dict[str, float]) -> None:
        try:
            self._run.log(values, step=step)
        except Exception as error:  # its own process may be gone, in more than one way
            if not self._is_failing:
                log.warning("W&B refuses the values of step %d (%r). Training goes on without it", step, error)
            self._is_failing = True

    def close(self) -> None:
        try:
            self._run.finish()
        except Exception as error:
            log.warning("W&B did not take the last values (%r); they are in metrics.jsonl", error)


def _own_id(path: Path) -> str:
    if not path.exists():
        write_text(path, uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8")
