"""Ranks that were started with different recipes, options, data or versions refuse to train together."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from gmlp_scale.distributed import logs
from gmlp_scale.distributed.world import start_world
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.agreement import _what_ranks_share, require_agreement
from tests.forked import Script
from tests.gloo_ranks import rank_variables, run_ranks
from tests.whole_runs import FSDP2, RECIPE, SMOKE, finish, logged
from tests.written_shards import add_tokenizer, write_tiny_shards

FIELDS = [
    ("seed", "0", "7"),
    ("train.global_batch_size", "8", "16"),
    ("optimizer.peak_learning_rate", "0.0001", "0.001"),
    ("data.masked_fraction", "0.15", "0.2"),
    ("optimizer.gradient_clipping", "0.5", "null"),
    ("train.num_steps", "9", "10"),
    ("checkpoint.save_every_steps", "2", "3"),
    ("engine.kind", '"fsdp2"', '"single"'),
    ("model.d_ffn", "32", "64"),
    ("train.micro_batch_size", "2", "4"),
    ("train.stop_after_step", "null", "4"),
    ("train.compile", "false", "true"),
]
FINETUNING = ["--config", "sst2", "model=an_export", "data.train=a", "data.dev=b", *FSDP2]


def _prepare(shards: Path | None) -> None:
    torch.set_num_threads(1)
    logs.OTHERS_REPORT_AFTER_SECONDS = 0.0  # no launcher ends the others
    if shards:  # where each host has a folder of its own at one path
        os.dup2(os.open(shards, os.O_RDONLY), 99)


def start(script: str, words: list[object], *own: list[str], shards: list[Path] | None = None) -> list[Script]:
    """A rank for each list of words of its `own`; each may also have a folder of shards of its own."""
    ranks = zip(own, rank_variables(len(own)), shards or [None] * len(own), strict=True)
    return [
        Script(script, [*words, *of_rank], environment=variables, prepare=partial(_prepare, folder))
        for of_rank, variables, folder in ranks
    ]


def refusal(ranks: list[Script]) -> str:
    codes, _, errors = zip(*[rank.end() for rank in ranks], strict=True)
    assert codes == (2,) * len(ranks), errors
    assert all("the ranks were not started alike: " in error and "Traceback" not in error for error in errors), errors
    return errors[1]


@pytest.mark.parametrize("field, first, second", FIELDS, ids=[field for field, *_ in FIELDS])
def test_ranks_with_different_recipe_files_are_refused_with_the_field(field, first, second, forty_rows, tmp_path):
    files = []
    for number, value in enumerate((first, second)):
        recipe = [*RECIPE, *FSDP2, "train.compile=false", f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
        changed = load_run_config(SMOKE, [*recipe, f"{field}={value}"])
        files.append(tmp_path / f"recipe_{number}.yaml")
        files[number].write_text(changed.to_yaml())
    error = refusal(start("launch/pretrain.py", [], *(["--config", str(file)] for file in files)))
    lines = [line for line in error.splitlines() if line.startswith("  ")]
    assert f"  {field}: found {first} on rank 0 (host " in lines[0 if field != "engine.kind" else 1]
    assert f"); {second} on rank 1 (host " in error
    assert field == "engine.kind" or len(lines) == 1
    assert not (tmp_path / "smoke").exists()


@pytest.mark.parametrize(
    "script, words, own, found",
    [
        ("launch/pretrain.py", ["--config", "gmlp_ti", *FSDP2], "seed=9", "seed: found 0 on"),
        ("launch/pretrain.py", ["--config", "gmlp", *FSDP2], "model.d_ffn=64", "model.d_ffn: found "),
        ("launch/finetune.py", FINETUNING, "dropout=0.3", "dropout: found 0.1 on"),
        ("launch/finetune.py", FINETUNING, "--seeds=3", "seeds: found 1 on"),
    ],
    ids=["images", "characters", "finetuning", "an option of a sweep"],
)
def test_every_kind_of_run_is_compared(script, words, own, found, tmp_path):
    assert found in refusal(start(script, [*words, f"output_dir={tmp_path}"], [], [own]))


def test_ranks_that_find_different_data_at_one_path_are_refused(forty_rows, tmp_path):
    write_tiny_shards(tmp_path / "other", [17, 23], [12], sequence_length=32, seed=5)
    add_tokenizer(tmp_path / "other")
    words = ["--config", SMOKE, *RECIPE, *FSDP2, "data.shards=/proc/self/fd/99", f"output_dir={tmp_path}"]
    error = refusal(start("launch/pretrain.py", words, [], [], shards=[forty_rows, tmp_path / "other"]))
    assert "  data.manifest_sha256: found " in error and error.count("\n  data.") == 1


def test_what_belongs_to_one_machine_may_differ(forty_rows, tmp_path):
    words = ["--config", SMOKE, *RECIPE, *FSDP2, f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    finish(start("launch/pretrain.py", words, [], [f"data.cache_dir={tmp_path}/cache"]))
    assert logged(tmp_path / "smoke")[-1]["step"] == 9


def _disagree() -> list[str]:
    """The messages where the last two of twelve ranks have another version, and where one rank lacks a field."""
    with start_world(60, "cpu") as world:
        shared = _what_ranks_share(load_run_config("smoke"))
        require_agreement(world, shared)
        messages = []
        old = shared | {"version of torch": "2.0"} if world.rank > 9 else shared
        for of_rank in (old, shared if world.rank else {**shared, "train.new": None}):
            with pytest.raises(ConfigError) as error:
                require_agreement(world, of_rank)
            messages.append(str(error.value))
    return messages


def test_another_version_and_a_field_that_a_rank_lacks_are_named():
    version, lacking = run_ranks(_disagree, 12)[11]
    host = version.rpartition("(host ")[2].partition(")")[0]
    first = ", ".join(f"rank {rank} (host {host})" for rank in range(8))
    assert f'  version of torch: found "{torch.__version__}" on {first}, 2 more; "2.0" on rank 10' in version
    assert f"  train.new: found null on rank 0 (host {host}); nothing on rank 1" in lacking
