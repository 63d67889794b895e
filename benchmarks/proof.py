"""What a device must show before a long run is trusted to it: the checks of launch/gpu_proof.sh.

Each check trains a recipe on random rows through run_task, as launch/pretrain.py does, and judges what the runs left
behind. It yields one finding at a time, so that a check that is cut short has reported what it found until then.
"""

import importlib.util
import itertools
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from benchmarks.checkpointing import measure_verified_load
from benchmarks.loading import random_rows, write_shards
from gmlp_scale.checkpoint.format import Checkpoint, step_folders
from gmlp_scale.checkpoint.stores import newest_checkpoint
from gmlp_scale.data.loader import Loader
from gmlp_scale.distributed.logs import set_up_logging
from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.engine import ENGINES, engine_overrides
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train.loop import Progress
from gmlp_scale.train.metrics import StartUp, peak_memory_bytes
from gmlp_scale.train.resolve import resolve
from gmlp_scale.train.run import build_engine_of, run_task
from gmlp_scale.train.sinks import read_metrics

log = logging.getLogger(__name__)

OVERRIDES = {name: engine_overrides(engine) for name, engine in ENGINES.items()}
# The bounds of tests/engine/test_parity.py. On a CPU only small models keep to the bound of the float32 norm, since
# torch's norm of a million elements is off by 1e-5 there.
BETWEEN_ENGINES = {
    "float32": {"train/loss": 1e-5, "train/grad_norm": 1e-5},
    "bf16": {"train/loss": 3e-4, "train/grad_norm": 1e-2},
}
FROM_FLOAT32_TO_BF16 = {"train/loss": 3e-3}
FROM_CPU_TO_GPU = {"train/loss": 1e-4}
FROM_EAGER_TO_COMPILED = {"train/loss": 3e-3, "eval/loss": 3e-3}
NUM_STEPS, STOP_STEP = 6, 3
LONGEST_STOP = 3  # steps from a signal to the end, at most
INTERVAL = 10  # steps between two logs of `check_recipe`, which saves at every second one
NUM_TRAINING_ROWS, NUM_HELDOUT_ROWS = 2048, 8
SCHEDULE = [
    "train.num_steps=1000", f"train.stop_after_step={NUM_STEPS}", "train.log_every_steps=1",
    "train.evaluate_every_steps=1000", f"train.num_evaluation_rows={NUM_HELDOUT_ROWS}",
    "optimizer.peak_learning_rate=1.0e-3", "optimizer.warmup_steps=2", "optimizer.gradient_clipping=0.5",
    "checkpoint.save_every_steps=1000",
]  # fmt: skip


class DifferenceError(Exception):
    """What a check found is not what it must be."""


@dataclass(frozen=True)
class Trial:
    """Runs of one recipe on random rows, each in a folder of its own."""

    recipe: str
    overrides: list[str]
    folder: Path

    @classmethod
    def prepare(cls, recipe: str, overrides: list[str], folder: Path) -> "Trial":
        """Writes the rows. ConfigError if the recipe has mistakes."""
        trial = cls(recipe, [*SCHEDULE, *overrides, f"data.shards={folder / 'shards'}", f"output_dir={folder}"], folder)
        config = trial.config("shards")
        write_shards(config, random_rows(config, NUM_TRAINING_ROWS), folder / "shards", NUM_HELDOUT_ROWS)
        return trial

    def config(self, name: str, *overrides: str) -> RunConfig:
        return load_run_config(self.recipe, [*self.overrides, f"name={re.sub('[ ,]+', '-', name)}", *overrides])

    def world(self, *overrides: str, hear_stop_signals: bool = False) -> World:
        """With a process group, which every engine can use. Unless it hears stop signals, one ends it at once."""
        config = self.config("world", *overrides)
        options = {"init_group": True, "hear_stop_signals": hear_stop_signals}
        world = start_world(config.engine.timeout_seconds, config.train.device, **options)
        set_up_logging(world)
        return world

    def train(self, world: World, name: str, *overrides: str, task: type[Pretraining] = Pretraining) -> Progress:
        """Starts the run of this name, or goes on with it."""
        run = resolve(self.config(name, *overrides), world)
        return run_task(task(run), world, StartUp(time.perf_counter()))

    def metrics(self, name: str) -> list[dict]:
        return read_metrics(self.config(name).run_dir / "metrics.jsonl")

    def checkpoint(self, name: str) -> Checkpoint:
        """The run's newest checkpoint, verified."""
        return newest_checkpoint(self.config(name).run_dir / "checkpoints")[0]


def check_engines(trial: Trial) -> Iterator[dict]:
    """Every engine, in both precisions, trains as `single` does and goes on bit for bit where it stopped."""
    with trial.world() as world:
        for precision, engine in itertools.product(BETWEEN_ENGINES, ENGINES):
            run = f"{engine} in {precision}"
            yield judge(f"{run}: losses and norms", partial(parity, trial, world, engine, precision), engine)
            yield judge(f"{run}: resumed", partial(resuming, trial, world, engine, precision), engine)
    yield judge("single in float32: losses of the CPU", partial(parity_with_cpu, trial), needs_gpu=True)


def check_stop(trial: Trial) -> Iterator[dict]:
    """A stop signal ends a run with a checkpoint, from which it goes on bit for bit."""
    for engine in ("single", "fsdp2"):
        yield judge(f"{engine}: SIGTERM", partial(stopping, trial, engine))


def check_compile(trial: Trial) -> Iterator[dict]:
    """Compiled blocks, and their CUDA graphs, give the losses of eager ones, in training and in evaluation."""
    with trial.world() as world:
        engines = ("single", "fsdp2", "zero, stage 1")
        for engine, compile in [("single", "false"), *itertools.product(engines, ("true", "reduce-overhead"))]:
            found = partial(compiling, trial, world, engine, compile)
            yield judge(f"{engine}: train.compile={compile}", found, engine, needs_gpu=compile == "reduce-overhead")


def check_auto(trial: Trial) -> Iterator[dict]:
    """train.micro_batch_size=auto finds a number that trains."""

    def find() -> dict:
        with trial.world() as world:
            run = resolve(trial.config("auto", *OVERRIDES["single"], "train.micro_batch_size=auto"), world)
            run_task(Pretraining(run), world, StartUp(time.perf_counter()))
            peak_gib = peak_memory_bytes(world.device) / 2**30
        return {"micro_batch_size": run.train.micro_batch_size, "peak_memory_gib": peak_gib}

    yield judge("train.micro_batch_size=auto", find, needs_gpu=True)


def check_recipe(trial: Trial) -> Iterator[dict]:
    """The recipe as it is, for 5 INTERVALs: what a save costs, how fast its checkpoint loads, and a resume."""
    with trial.world() as world:
        yield judge("training and saving", partial(saving, trial, world))
        yield judge("resumed", partial(resuming_after_a_cut, trial, world))
        yield judge("verified load", partial(verified_load, trial, world))


def judge(check: str, find: Callable[[], dict], engine: str = "single", *, needs_gpu: bool = False) -> dict:
    """A finding: the check, its status (passed, failed or not run), the reason, and the figures that `find` returns.

    Whatever `find` raises is a failure.
    """
    if needs_gpu and not torch.cuda.is_available():
        return {"check": check, "status": "not run", "reason": "needs a GPU"}
    if engine.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        return {"check": check, "status": "not run", "reason": "deepspeed is not installed"}
    started, problem, figures = time.perf_counter(), None, {}
    try:
        figures = find()
    except Exception as error:
        log.exception("%s", check)
        problem = str(error) if isinstance(error, DifferenceError) else f"{type(error).__name__}: {error}"
    seconds, status = round(time.perf_counter() - started, 2), "failed" if problem else "passed"
    return {"check": check, "status": status, "reason": problem, **figures, "seconds": seconds}


def compare_metrics(trial: Trial, name: str, expected_name: str, bounds: Mapping[str, float]) -> dict:
    """Compares what two runs logged, step by step. bounds: the largest relative difference, by tag."""
    pairs = list(zip(trial.metrics(name), trial.metrics(expected_name), strict=True))
    differences, problems = {}, []
    for tag, bound in bounds.items():
        found = max(abs(row[tag] / expected[tag] - 1) for row, expected in pairs if tag in expected)
        differences[f"{tag} differs by"] = found
        if found > bound:
            problems.append(f"{tag} differs from {expected_name} by {found:.2g}; at most {bound:.2g} is allowed")
    if problems:
        raise DifferenceError("; ".join(problems))
    return differences


def compare_bits(whole: Checkpoint, resumed: Checkpoint) -> dict:
    """Compares all masters and moments of two checkpoints of one step."""
    differences = {}
    for key in whole.keys:
        one, other = whole.read(key), resumed.read(key)
        if not torch.equal(one, other):
            differences[key] = ((one - other).abs().max() / one.abs().max()).item()
    if whole.step == resumed.step and not differences:
        return {"bit_identical_tensors": len(whole.keys)}
    found = f"steps {whole.step} and {resumed.step}: {len(differences)} of {len(whole.keys)} tensors differ"
    if differences:
        worst = max(differences, key=differences.get)
        found += f", {worst} the most, by {differences[worst]:.2g} of its largest element"
    raise DifferenceError(found)


def parity(trial: Trial, world: World, engine: str, precision: str) -> dict:
    trial.train(world, f"{engine} {precision}", *OVERRIDES[engine], f"train.precision={precision}")
    if engine != "single":
        return compare_metrics(trial, f"{engine} {precision}", f"single {precision}", BETWEEN_ENGINES[precision])
    if precision == "bf16":
        return compare_metrics(trial, "single bf16", "single float32", FROM_FLOAT32_TO_BF16)
    return {"losses": [row["train/loss"] for row in trial.metrics("single float32")]}


def parity_with_cpu(trial: Trial) -> dict:
    here = [*OVERRIDES["single"], "train.precision=float32", "train.device=cpu"]
    with trial.world(*here) as world:
        trial.train(world, "cpu", *here)
    return compare_metrics(trial, "single float32", "cpu", FROM_CPU_TO_GPU)


def resuming(trial: Trial, world: World, engine: str, precision: str) -> dict:
    whole, resumed = f"{engine} {precision}", f"{engine} {precision} resumed"
    here = [*OVERRIDES[engine], f"train.precision={precision}"]
    trial.train(world, resumed, *here, f"train.stop_after_step={STOP_STEP}")
    trial.train(world, resumed, *here)
    return compare_bits(trial.checkpoint(whole), trial.checkpoint(resumed))


class Signalled(Pretraining):
    """Sends its own process SIGTERM as step STOP_STEP begins."""

    def open_loader(self, world: World) -> Loader:
        loader = super().open_loader(world)
        steps = loader.steps

        def signalling(start_step: int, stop_step: int) -> Iterator[list]:
            for step, micro_batches in enumerate(steps(start_step, stop_step), start_step + 1):
                if step == STOP_STEP:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield micro_batches

        loader.steps = signalling
        return loader


def stopping(trial: Trial, engine: str) -> dict:
    """Each run has a world of its own, since a signal ends the world's use."""
    name, here = f"{engine} signalled", OVERRIDES[engine]
    with trial.world() as world:
        trial.train(world, f"{engine} whole", *here)
    with trial.world(hear_stop_signals=True) as world:
        progress = trial.train(world, name, *here, "train.stop_after_step=100", task=Signalled)
    saved, last = trial.checkpoint(name).step, progress.step
    if saved != last or not STOP_STEP <= saved <= STOP_STEP + LONGEST_STOP:
        raise DifferenceError(f"signalled in step {STOP_STEP}, stopped after {last} with a checkpoint of step {saved}")
    with trial.world() as world:
        trial.train(world, name, *here, f"train.stop_after_step={NUM_STEPS}")
    return {"stopped_after_step": saved, **compare_bits(trial.checkpoint(f"{engine} whole"), trial.checkpoint(name))}


def compiling(trial: Trial, world: World, engine: str, compile: str) -> dict:
    """Fails too where torch would go on without compiled blocks or without CUDA graphs, which it does silently."""
    name = f"{engine} {compile}"
    # To the end of the schedule, which evaluates too.
    ends = [f"train.num_steps={NUM_STEPS}", "train.stop_after_step=null"]
    torch.compiler.reset()  # else the graphs of other cases count towards the limit
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        trial.train(world, name, *OVERRIDES[engine], f"train.compile={compile}", *ends)
    num_skips = counters["inductor"]["cudagraph_skips"]
    if compile == "reduce-overhead" and num_skips:
        raise DifferenceError(f"{num_skips} graphs ran without CUDA graphs; log.txt says why")
    return compare_metrics(trial, name, "single false", FROM_EAGER_TO_COMPILED)


def saving(trial: Trial, world: World) -> dict:
    """The first save also allocates buffers, so the second one counts: it comes at the fourth log, and the fifth log
    shows what it cost."""
    rhythm = [f"train.log_every_steps={INTERVAL}", f"checkpoint.save_every_steps={2 * INTERVAL}"]
    trial.train(world, "recipe", *rhythm, f"train.stop_after_step={5 * INTERVAL}")
    rows = {row["step"] // INTERVAL: row for row in trial.metrics("recipe")}
    keys = ("perf/tokens_per_second", "perf/step_seconds", "perf/mfu", "perf/data_wait_fraction", "memory/peak_gib")
    return {
        "first_stall_seconds": rows[3]["perf/checkpoint_stall_seconds"],
        "stall_seconds": rows[5]["perf/checkpoint_stall_seconds"],
        "steps_after_a_save_over_others": rows[5]["perf/step_seconds"] / rows[4]["perf/step_seconds"],
        **{key: rows[4].get(key) for key in keys},
    }


def resuming_after_a_cut(trial: Trial, world: World) -> dict:
    """Moves the last checkpoint away, as if the power had failed before it. The run then trains up to it again."""
    last = step_folders(trial.config("recipe").run_dir / "checkpoints")[-1]
    kept = trial.folder / "never stopped" / last.name
    kept.parent.mkdir()
    last.rename(kept)
    trial.train(world, "recipe", f"train.stop_after_step={5 * INTERVAL}")
    return compare_bits(Checkpoint.open(kept), trial.checkpoint("recipe"))


def verified_load(trial: Trial, world: World) -> dict:
    engine = build_engine_of(Pretraining(resolve(trial.config("recipe"), world)), world, is_new=False)
    figures = measure_verified_load(trial.config("recipe").run_dir / "checkpoints", engine, world)
    engine.close()
    return figures
