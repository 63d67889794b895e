"""A recipe that every part of the benchmark runs in seconds."""

from pathlib import Path

from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.recipe.reader import load_run_config

SMOKE = Path(__file__).parents[2] / "configs/pretrain/smoke.yaml"


def tiny_run(folder: Path, *overrides: str) -> RunConfig:
    common = ["engine.kind=single", "train.compile=false", "train.device=cpu", f"output_dir={folder}"]
    return load_run_config(SMOKE, [*common, *overrides])
