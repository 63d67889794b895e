"""Steps that are not finite or far above the others: logged, left out or refused, alike on all ranks and on resume."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gmlp_scale.checkpoint.format import Checkpoint
from gmlp_scale.distributed.world import start_world
from gmlp_scale.engine import TrainConfig
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train.metrics import StartUp
from gmlp_scale.train.run import run_task
from gmlp_scale.train.sinks import read_metrics
from gmlp_scale.train.step_guard import FEWEST_RECENT, MOST_IN_A_ROW, NotFiniteError, SpikeError, StepGuard
from gmlp_scale.train.step_reports import StepReport
from tests.gloo_ranks import run_ranks
from tests.train.test_loop import RECIPE, SMOKE
from tests.written_shards import write_tiny_shards

NOT_FINITE_STEP, SPIKE_STEP, LAST_STEP = 5, FEWEST_RECENT + 5, FEWEST_RECENT + 8


class PretrainingWithBadBatches(Pretraining):
    """Rank 1's loss is multiplied by `factors[step]`."""

    def __init__(self, config, factors: dict[int, float]):
        super().__init__(config)
        self.factors, self.step = factors, 0

    def open_loader(self, world):
        loader, self.rank = super().open_loader(world), world.rank
        unwatched = loader.steps

        def steps(start_step, stop_step):
            for self.step, micro_batches in enumerate(unwatched(start_step, stop_step), start_step + 1):
                yield micro_batches

        loader.steps = steps
        return loader

    def build_model(self):
        model = super().build_model()
        is_bad_rank = self.rank == self.bad_rank
        model.register_forward_hook(lambda *call: call[-1] * (self.factors.get(self.step, 1.0) if is_bad_rank else 1.0))
        return model


def _run(directory: Path, overrides: list[str], factors: dict[int, float], stop_after: int = LAST_STEP) -> None:
    every = [f"data.shards={directory.parent / 'shards'}", f"output_dir={directory}", "optimizer.warmup_steps=1"]
    every += [f"train.num_steps={LAST_STEP}", f"train.stop_after_step={stop_after}", "train.log_every_steps=10"]
    config = load_run_config(SMOKE, [*RECIPE, *every, *overrides])
    task = PretrainingWithBadBatches(config, factors)
    with start_world(60, "cpu", init_group=config.engine.needs_process_group, hear_stop_signals=False) as world:
        task.bad_rank = world.size - 1
        run_task(task, world, StartUp(0.0))


ENGINES = {
    "single": (1, ["engine.kind=single"]),
    "fsdp2": (2, ["engine.kind=fsdp2"]),
    "zero 1": (2, ["engine.kind=zero", "engine.stage=1", "train.precision=bf16"]),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_updates_left_out_are_left_out_again_after_a_resume(engine, tmp_path, trials):
    world_size, overrides = ENGINES[engine]
    write_tiny_shards(tmp_path / "shards", [40], [2], sequence_length=32)
    overrides = [*overrides, "train.on_not_finite=skip", "train.on_spike=skip", "checkpoint.save_every_steps=30"]
    bad = {NOT_FINITE_STEP: math.nan, SPIKE_STEP: 1e4}
    run_ranks(_run, world_size, tmp_path / "undisturbed", overrides, bad)
    run_ranks(_run, world_size, tmp_path / "resumed", overrides, bad, SPIKE_STEP + 1)
    checkpoints = tmp_path / "resumed" / "smoke" / "checkpoints"
    shutil.rmtree(checkpoints / f"step_{SPIKE_STEP + 1:09d}")  # so that it resumes before the spike
    # What was bad at its first visit is good now, as after a fault of the hardware: the record decides.
    run_ranks(_run, world_size, tmp_path / "resumed", overrides, {})
    record = (tmp_path / "resumed" / "smoke" / "skipped_steps.jsonl").read_text()
    assert [json.loads(line)["step"] for line in record.splitlines()] == [NOT_FINITE_STEP, SPIKE_STEP]
    resumed, undisturbed = (
        Checkpoint.open(root / f"step_{LAST_STEP:09d}")
        for root in (checkpoints, tmp_path / "undisturbed" / "smoke" / "checkpoints")
    )
    for key in undisturbed.keys:
        assert torch.equal(resumed.read(key), undisturbed.read(key)), key
    lines = read_metrics(tmp_path / "undisturbed" / "smoke" / "metrics.jsonl")
    assert all(math.isfinite(line["train/loss"]) for line in lines if "train/loss" in line)
    trials("NaN, Inf or a 10,000-fold loss in one rank's batch", 2)


def _guard(tmp_path, world, **settings) -> StepGuard:
    """Of a pretraining recipe. `printer`, `lacks` and `data_changes` change what the guard asks the recipe for."""
    fields = {"train.on_not_finite"} - {settings.pop("lacks", "")}
    recipe = SimpleNamespace(
        run_dir=tmp_path,
        batch_printer=settings.pop("printer", "print_batch.py"),
        data_changes=settings.pop("data_changes", [0]),
        fields=lambda: fields,
    )
    config = TrainConfig(**{"num_steps": 10**6, "global_batch_size": 8, "micro_batch_size": 8, **settings})
    recent_losses = [(step, 4.0 + 0.01 * (step % 3)) for step in range(1, 200)]
    tmp_path.mkdir(exist_ok=True)
    return StepGuard(recipe, config, world, {"recent_losses": recent_losses})


def _see(guard: StepGuard, step: int, loss: float, norm: float = 1.0) -> torch.Tensor:
    marked = guard.marked(torch.tensor(loss), torch.tensor(loss), step)
    guard.see(StepReport(step, loss, norm if marked.isfinite() else math.nan, 1e-3, losses=(loss,)))
    return marked


@pytest.mark.parametrize("on_spike, is_marked", [("log", False), ("skip", True)])
def test_a_spike_is_logged_with_its_place(on_spike, is_marked, monkeypatch, tmp_path, world, caplog):
    batch_sizes = [(0, 8), (200, 16)]
    guard = _guard(tmp_path, world, on_spike=on_spike, global_batch_size=batch_sizes)
    monkeypatch.setattr("gmlp_scale.train.step_guard.log.propagate", True, raising=False)
    assert _see(guard, 200, 4.1).isfinite()
    assert not caplog.messages
    assert _see(guard, 201, 9.0).isnan() == is_marked
    assert "step 201: the loss is 9.0000, above 4.4" in caplog.text
    assert "positions 1600 to 1615" in caplog.text
    assert ("left out" in caplog.text) == is_marked
    assert (201 in dict(guard.recent_losses)) != is_marked


def test_what_stops_a_run(monkeypatch, tmp_path, world, trials):
    guard = _guard(tmp_path, world, on_spike="stop")
    with pytest.raises(SpikeError, match=r"step 200: .*on_spike=skip goes on"):
        _see(guard, 200, 9.0)
    with pytest.raises(NotFiniteError, match=r"step 201: .* rank 0 .*print_batch.py --step 200 .*on_not_finite=skip"):
        _see(guard, 201, math.nan, math.nan)
    with pytest.raises(NotFiniteError, match="the gradient norm, though not the loss of any rank"):
        _see(guard, 202, 4.0, math.inf)
    for on_spike in ("log", "skip", "stop"):
        guard = _guard(tmp_path, world, on_spike=on_spike)
        with pytest.raises(NotFiniteError, match="rank 0"):  # also above every limit
            _see(guard, 203, math.inf, math.inf)
    with pytest.raises(NotFiniteError, match="the gradient norm"):
        _see(guard, 204, 60.0, math.inf)
    trials("NaN, Inf or a 10,000-fold loss in one rank's batch", 7)


def test_what_the_recipe_lacks_is_not_offered(tmp_path, world):
    guard = _guard(tmp_path, world, printer="", lacks="train.on_not_finite")
    with pytest.raises(NotFiniteError, match=r"of the data order\. The update .*, or train in float32\.$"):
        _see(guard, 200, math.nan, math.nan)
    guard = _guard(tmp_path, world, lacks="train.on_not_finite", precision="float32")
    with pytest.raises(NotFiniteError, match=r", or set optimizer\.gradient_clipping\.$"):
        _see(guard, 200, math.nan, math.nan)


def test_updates_left_out_in_a_row_stop_the_run(monkeypatch, tmp_path, world):
    guard = _guard(tmp_path, world, on_not_finite="skip")
    for step in range(200, 200 + MOST_IN_A_ROW - 1):
        _see(guard, step, math.nan, math.nan)
    with pytest.raises(NotFiniteError, match=rf"number {MOST_IN_A_ROW} in a row\..* float32\.$"):
        _see(guard, 200 + MOST_IN_A_ROW - 1, math.nan, math.nan)
    guard.close()
    # With the cause mended the run goes on; without, it ends at the first new one.
    guard = _guard(tmp_path, world, on_not_finite="skip")
    for step in range(200, 200 + MOST_IN_A_ROW):
        assert _see(guard, step, 4.0).isnan()
    with pytest.raises(NotFiniteError, match=rf"number {MOST_IN_A_ROW + 1} in a row"):
        _see(guard, 200 + MOST_IN_A_ROW, math.nan, math.nan)
    assert _see(guard, 200 + MOST_IN_A_ROW, 4.0).isfinite()
    guard = _guard(tmp_path / "spikes", world, on_spike="skip")
    with pytest.raises(NotFiniteError, match=r"in a row.*on_spike=log"):
        for step in range(200, 200 + MOST_IN_A_ROW):
            _see(guard, step, 60.0)


def test_losses_before_a_planned_change_of_the_data_are_no_measure_of_those_after_it(tmp_path, world):
    for data_changes, is_left_out in (([0, 199], False), ([0, 198], False), ([0, 150, 200], True), ([0], True)):
        guard = _guard(tmp_path / str(data_changes), world, data_changes=data_changes, on_spike="skip")
        assert _see(guard, 200, 9.0).isnan() == is_left_out
    config = load_run_config(SMOKE, ["data.masked_fraction=[[0,0.3],[7,0.15]]"])
    assert config.data_changes == [0, 7, 0]


def test_a_resumed_run_has_the_limits_of_one_that_never_stopped(tmp_path, world):
    """A device's host reads reports with a lag, but has read all when a checkpoint is written."""
    losses = np.random.default_rng(0).normal(4, 0.1, 400)
    limits = {}
    for stops in ((), (250,)):
        guard, unread = _guard(tmp_path, world), None
        guard.recent_losses = []
        for step, loss in enumerate(losses, start=1):
            guard.marked(torch.tensor(loss), torch.tensor(loss), step)
            limits.setdefault(step, set()).add(guard._limits[step])
            reports = [unread] if unread else []
            unread = StepReport(step, loss, 1.0, 1e-3, losses=(loss,))
            if step in stops:
                reports, unread = [*reports, unread], None
            for report in reports:
                guard.see(report)
            if step in stops:
                resumed = _guard(tmp_path, world)
                resumed.recent_losses = guard.recent_losses
                guard = resumed
    assert all(len(found) == 1 for found in limits.values())


def test_a_line_that_a_kill_cut_short_spoils_no_later_one(tmp_path, world):
    record = tmp_path / "skipped_steps.jsonl"
    record.write_text('{"step": 5}\n{"st')
    guard = _guard(tmp_path, world, on_not_finite="skip")
    _see(guard, 200, math.nan, math.nan)
    guard.close()
    assert [line["step"] for line in read_metrics(record)] == [5, 200]
