"""The training loop: no step makes the host wait for the device, also not one that logs; what ranks learn of a step."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gmlp_scale.checkpoint.format import Checkpoint, step_folders, step_of
from gmlp_scale.data.loader import Loader
from gmlp_scale.distributed import logs
from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.engine.single import SingleEngine
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train import run as run_module
from gmlp_scale.train.metrics import StartUp
from gmlp_scale.train.run import run_task
from gmlp_scale.train.sinks import read_metrics
from gmlp_scale.train.step_reports import LAG_ON_GPU, StepReports
from tests.gloo_ranks import run_ranks
from tests.models.every_kind import FAMILIES, KINDS
from tests.whole_runs import SMOKE
from tests.written_shards import VOCAB_SIZE, write_tiny_shards

NUM_STEPS = 5
RECIPE = [
    "model.d_model=16", "model.d_ffn=32", "model.sequence_length=32", f"model.vocab_size={VOCAB_SIZE}",
    f"train.num_steps={NUM_STEPS}", "train.global_batch_size=4", "train.micro_batch_size=2",
    "train.log_every_steps=1", "train.evaluate_every_steps=100", "train.num_evaluation_rows=2",
    "optimizer.warmup_steps=1", "optimizer.gradient_clipping=0.5", "checkpoint.save_every_steps=100",
]  # fmt: skip
MODELS = {kind: [f"model.{field}={value}" for field, value in KINDS[kind].items()] for kind in FAMILIES}

WAITING = {
    torch.ops.aten._local_scalar_dense,  # item, float, int, bool, tolist of a tensor
    torch.ops.aten.equal,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.nonzero,
    torch.ops.aten._unique2,
}


class RefusesToWait(TorchDispatchMode):
    """Raises at whatever would make the host wait for a GPU, on any device."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        assert function.overloadpacket not in WAITING, f"{function} waits for the device"
        if function.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
            assert not any(i is not None and i.dtype == torch.bool for i in arguments[1]), "a boolean index waits"
        return function(*arguments, **(keywords or {}))


class RefusesDeepSpeedToWait(RefusesToWait):
    """Sees DeepSpeed's synchronisations too, which do nothing on a CPU."""

    def __enter__(self):
        from deepspeed.accelerator import get_accelerator

        self.accelerator = get_accelerator()
        self.accelerator.synchronize = self.refuse
        return super().__enter__()

    def __exit__(self, *exception):
        del self.accelerator.synchronize
        return super().__exit__(*exception)

    def refuse(self, *_):
        raise AssertionError("DeepSpeed waits for the device")


class ErrorIfCudaWaits:
    """torch's own watch, which sees every synchronisation but knows only CUDA."""

    def __enter__(self):
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *exception):
        torch.cuda.set_sync_debug_mode("default")


class WatchedPretraining(Pretraining):
    """Every step but the first, which the start-up log waits for, and the last, which is saved, is watched."""

    watch: type

    def open_loader(self, world: World) -> Loader:
        loader = super().open_loader(world)
        unwatched = loader.steps

        def steps(start_step: int, stop_step: int):
            for index, micro_batches in enumerate(unwatched(start_step, stop_step), start=start_step):
                is_watched = index not in (start_step, stop_step - 1)
                with self.watch() if is_watched else contextlib.nullcontext():
                    yield micro_batches

        loader.steps = steps
        return loader


def run_loop(watch: type, tmp_path: Path, *overrides: str) -> int:
    """Trains for NUM_STEPS; returns the last step."""
    write_tiny_shards(tmp_path / "shards", [40], [2], sequence_length=32)
    places = [f"data.shards={tmp_path / 'shards'}", f"output_dir={tmp_path}"]
    task = WatchedPretraining(load_run_config(SMOKE, [*RECIPE, *places, *overrides]))
    task.watch = watch
    with start_world(60, task.config.train.device, init_group=True, hear_stop_signals=False) as world:
        return run_task(task, world, StartUp(0.0)).step


@pytest.mark.parametrize("engine", ["single", "fsdp2"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_no_step_waits_for_the_device(model, precision, engine, tmp_path):
    overrides = [*MODELS[model], f"engine.kind={engine}", f"train.precision={precision}"]
    assert run_loop(RefusesToWait, tmp_path, *overrides) == NUM_STEPS


class ReadAStepLate(StepReports):
    """As on a GPU."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.lag = LAG_ON_GPU


def test_reports_read_a_step_late_change_nothing_that_is_logged_or_saved(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(logs, "LINE_EVERY_SECONDS", 0.0)
    places = []
    for name in ("at_once", "late"):
        every = ["train.log_every_steps=2", "train.evaluate_every_steps=3", "checkpoint.save_every_steps=3"]
        assert run_loop(contextlib.nullcontext, tmp_path / name, *every, f"name={name}") == NUM_STEPS
        places.append(tmp_path / name / name)
        monkeypatch.setattr(run_module, "StepReports", ReadAStepLate)
    at_once, late = (read_metrics(place / "metrics.jsonl") for place in places)
    assert [line["step"] for line in late] == [2, 3, 4, 5, 5]
    assert [_unhurried(line) for line in late] == [_unhurried(line) for line in at_once]
    assert [step_folders(place / "checkpoints")[0].name for place in places] == ["step_000000003"] * 2
    assert capsys.readouterr().err.count("evaluation:   0%") == 2 * 2, "every evaluation shows how far it is"


@pytest.mark.parametrize("reports", [StepReports, ReadAStepLate])
def test_the_last_finished_step_is_saved_where_the_loader_fails(reports, monkeypatch, tmp_path):
    unbroken, seen = Loader.steps, []

    def steps(loader, start_step, stop_step):
        for step, micro_batches in enumerate(unbroken(loader, start_step, stop_step), start_step + 1):
            if step == 4:
                raise InterruptedError("the disk is gone")
            yield micro_batches

    monkeypatch.setattr(run_module, "StepReports", reports)
    with monkeypatch.context() as patch, pytest.raises(InterruptedError, match="the disk is gone"):
        patch.setattr(Loader, "steps", steps)
        run_loop(contextlib.nullcontext, tmp_path / "failed")
    assert [step_of(folder.name) for folder in step_folders(tmp_path / "failed/smoke/checkpoints")] == [3]
    for name in ("failed", "whole"):
        assert run_loop(contextlib.nullcontext, tmp_path / name) == NUM_STEPS
        seen.append([_unhurried(line) for line in read_metrics(tmp_path / name / "smoke" / "metrics.jsonl")])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("killed_at", [3, NUM_STEPS])
def test_an_evaluation_that_a_kill_cut_off_is_made_on_resume(killed_at, monkeypatch, tmp_path):
    every = ["train.evaluate_every_steps=3", "checkpoint.save_every_steps=3"]
    evaluated = []

    def evaluate(self, engine, world, step):
        evaluated.append(step)
        if evaluated.count(step) == 1 and step == killed_at:
            raise InterruptedError("killed")
        return evaluate_well(self, engine, world, step)

    assert run_loop(contextlib.nullcontext, tmp_path / "whole", *every) == NUM_STEPS
    evaluate_well = Pretraining.evaluate
    monkeypatch.setattr(Pretraining, "evaluate", evaluate)
    with pytest.raises(InterruptedError):
        run_loop(contextlib.nullcontext, tmp_path / "killed", *every)
    for _ in range(2):  # the second one finds nothing left to do
        assert run_loop(contextlib.nullcontext, tmp_path / "killed", *every) == NUM_STEPS
    whole, killed = (read_metrics(tmp_path / name / "smoke" / "metrics.jsonl") for name in ("whole", "killed"))
    assert [_unhurried(line) for line in killed] == [_unhurried(line) for line in whole]
    assert sorted(evaluated) == sorted([3, NUM_STEPS, killed_at])


@pytest.mark.parametrize("stopped_at", [3, NUM_STEPS])
def test_a_stop_signal_cuts_an_evaluation_off_which_is_made_on_resume(stopped_at, monkeypatch, tmp_path):
    every = ["train.evaluate_every_steps=3", "train.micro_batch_size=1"]
    assert run_loop(contextlib.nullcontext, tmp_path / "whole", *every) == NUM_STEPS
    predict, num_predicted = SingleEngine.predict, 0

    def counted(self, batch):
        nonlocal num_predicted
        num_predicted += 1
        return predict(self, batch)

    first = 1 if stopped_at == 3 else 3  # of an evaluation's two batches
    with monkeypatch.context() as patch:
        patch.setattr(SingleEngine, "predict", counted)
        patch.setattr(World, "is_stop_signalled", property(lambda self: num_predicted >= first))
        assert run_loop(contextlib.nullcontext, tmp_path / "stopped", *every) == stopped_at
    assert num_predicted == first
    assert [step_of(folder.name) for folder in step_folders(tmp_path / "stopped/smoke/checkpoints")] == [stopped_at]
    assert run_loop(contextlib.nullcontext, tmp_path / "stopped", *every) == NUM_STEPS
    whole, stopped = (read_metrics(tmp_path / name / "smoke" / "metrics.jsonl") for name in ("whole", "stopped"))
    assert [_unhurried(line) for line in stopped] == [_unhurried(line) for line in whole]


@pytest.mark.parametrize("reports, decided_at", [(StepReports, 3), (ReadAStepLate, 4)])
def test_the_end_of_the_time_is_seen_by_reports_read_a_step_late_too(reports, decided_at, monkeypatch, tmp_path):
    monkeypatch.setattr(run_module, "StepReports", reports)
    budget = ["train.num_steps=20", "train.time_budget_seconds=0.001"]  # long over
    stable = ["optimizer.schedule=stable", "optimizer.decay_steps=2"]
    assert run_loop(contextlib.nullcontext, tmp_path, *budget, *stable) == decided_at + 1
    saved = step_folders(tmp_path / "smoke" / "checkpoints")
    assert [step_of(folder.name) for folder in saved] == [decided_at, decided_at + 1]
    decided = [Checkpoint.open(folder).details["time_budget"]["decided"] for folder in saved]
    assert decided == [{"at_step": decided_at, "num_steps": decided_at + 1, "decay_steps": 1}] * 2


def _unhurried(line: dict) -> dict:
    return {tag: value for tag, value in line.items() if not tag.startswith(("perf/", "memory/"))}


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "bf16"), (3, "bf16"), (1, "float32")])
def test_no_step_of_zero_waits_for_the_device(stage, precision, tmp_path):
    overrides = [*MODELS["amlp"], "engine.kind=zero", f"engine.stage={stage}", f"train.precision={precision}"]
    # In a process of its own, as DeepSpeed starts but once in each.
    assert run_ranks(run_loop, 1, RefusesDeepSpeedToWait, tmp_path, *overrides) == [NUM_STEPS]


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["single", "fsdp2"])
@pytest.mark.parametrize("model", MODELS)
def test_no_step_waits_for_a_gpu(model, engine, tmp_path):
    overrides = [*MODELS[model], f"engine.kind={engine}", "train.precision=bf16", "train.device=cuda"]
    try:
        assert run_loop(ErrorIfCudaWaits, tmp_path, *overrides) == NUM_STEPS
    finally:
        torch.cuda.set_sync_debug_mode("default")  # after a failing step pytest keeps the watch alive


@pytest.mark.parametrize("wait", [torch.Tensor.item, torch.nonzero, bool, lambda x: x[x > 0]])
def test_the_watch_sees_what_waits(wait):
    with pytest.raises(AssertionError, match="waits"), RefusesToWait():
        wait(torch.ones(1))


def _stop_steps(lag: int) -> list[tuple[int, int, float]]:
    """(step when read, its step, its loss) of each report until one says to stop; rank 1 is signalled during step 3."""
    with start_world(30, "cpu") as world:
        reports, step = StepReports(world, lambda: (step + world.rank, 0.5 * world.rank), began=0.0), 0
        reports.lag, seen = lag, []
        reports.spent_seconds = lambda: 10.1 * step + world.rank
        while not reports.is_stop:
            step += 1
            if step == 3 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            loss = torch.tensor(float(step + world.rank))
            reports.send(step, loss, loss.square(), 0.1 * step)
            for report in reports.read(until_step=step - lag):
                assert report.losses == (report.step, report.step + 1)
                assert report.compute_seconds == (report.step, report.step + 1) and report.wait_seconds == (0, 0.5)
                assert report.spent_seconds == 10.1 * report.step, "by rank 0's clock, to the last bit"
                seen.append((step, report.step, report.loss))
    return seen


@pytest.mark.parametrize("lag", [0, 2])
def test_all_ranks_stop_at_the_same_step_with_all_reports_read(lag):
    first, second = run_ranks(_stop_steps, 2, lag)
    assert first == second
    leaving = 3 + lag
    read_in_time = [(step + lag, step, step + 0.5) for step in range(1, 4)]
    assert first == read_in_time + [(leaving, step, step + 0.5) for step in range(4, leaving + 1)]


@pytest.mark.parametrize("loss, norm", [(float("nan"), 1.0), (1.0, float("inf"))])
def test_a_report_knows_that_it_is_not_finite(world, loss, norm):
    reports = StepReports(world, lambda: (0.0, 0.0), began=0.0)
    reports.send(7, torch.tensor(loss), torch.tensor(norm), 0.5)
    (report,) = reports.read(until_step=7)
    assert (report.step, report.learning_rate, report.is_finite, reports.is_stop) == (7, 0.5, False, False)
