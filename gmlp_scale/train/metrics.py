"""Writes a run's metrics to metrics.jsonl, TensorBoard, a tracker and the console, all from one dictionary per step.

Users rely on the tags (README, "What a run leaves behind"). A resumed run cuts both files after the checkpoint's step,
so that neither shows a step twice.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gmlp_scale.distributed.world import StopSignalled, World
from gmlp_scale.engine import TrainConfig
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.plan.devices import GPUS
from gmlp_scale.tasks.evaluate import perplexity
from gmlp_scale.train.events import picture_summary, recipe_summaries
from gmlp_scale.train.log_files import EventsFile, MetricsFile
from gmlp_scale.train.step_reports import StepReport
from gmlp_scale.train.tracker import WandbRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


class StartUp:
    """The parts of the time from a process's start to the end of its first step.

    since: when the first part began, in seconds of time.perf_counter().
    """

    def __init__(self, since: float):
        self.since = self._part_began = since
        self.seconds: dict[str, float] = {}
        """By part, in the order in which the parts first ended."""

    def finish(self, part: str) -> None:
        """Adds the time since the last call to `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._part_began
        self._part_began = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s: {parts}"


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """The device's data-sheet peak in TFLOP/s, or None if GPUS lacks it, as it does every CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    gpu = next((gpu for gpu in GPUS.values() if gpu.part_of_name in name), None)
    return gpu and (gpu.float32_tflops if precision == "float32" else gpu.bf16_tflops)


class Metrics:
    """Writes what the loop measures. Every rank has one; only rank 0's writes files and to the console.

    Args:
        config: has the schedule, from which the time left follows, and the tracker.
        fields: the recipe's, by their whole names, for TensorBoard and the tracker.
        epochs: called with a step; returns how often each source's rows were seen up to it, by tag.
        flops_per_step: training FLOPs of the global batch: 3 x the forward pass, the head on the masked positions only.
        peak_tflops_per_device: what perf/mfu divides by; None leaves perf/mfu out.
        start_up: has the parts so far; the first step is the last part.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        config: TrainConfig,
        fields: dict[str, Any],
        *,
        start_step: int,
        tokens_per_step: Piecewise,
        epochs: Callable[[int], dict[str, float]],
        flops_per_step: Piecewise,
        peak_tflops_per_device: float | None,
        start_up: StartUp,
    ):
        self.world, self.config = world, config
        self.tokens_per_step, self.flops_per_step, self.epochs = tokens_per_step, flops_per_step, epochs
        self.peak_tflops_per_device = peak_tflops_per_device
        self.checkpoint_stall_seconds = 0.0
        self.evaluation_seconds = 0.0
        """How long the last evaluation took; 0 before the first."""
        self.start_up = start_up
        self.run_dir = run_dir
        self._files: list[MetricsFile | EventsFile | WandbRun] = []
        self.is_evaluated = False
        world.on_main(lambda: self._open_files(fields, start_step))
        self.is_evaluated = world.broadcast(self.is_evaluated)
        """Whether metrics.jsonl has the evaluation after `start_step`."""
        self.start_clock(0.0)

    def _open_files(self, fields: dict[str, Any], start_step: int) -> None:
        metrics_file = MetricsFile(self.run_dir / "metrics.jsonl", start_step)
        self.is_evaluated = any(tag.startswith("eval/") for line in metrics_file.of_start_step for tag in line)
        self._files.append(metrics_file)
        self._events = EventsFile(self.run_dir / "tensorboard", start_step)
        self._files.append(self._events)
        for summary in recipe_summaries(fields):
            self._events.add_summary(start_step, summary)
        if self.config.tracker:
            self._files.append(WandbRun(self.run_dir, fields))

    def start_clock(self, data_wait_seconds: float) -> None:
        """Begins the interval that the next line of the log averages over."""
        self._clock, self._clock_wait = time.perf_counter(), data_wait_seconds
        self._losses: list[float] = []

    @contextlib.contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Keeps what runs inside out of the step time and the tokens per second."""
        before = time.perf_counter()
        yield
        self._clock += time.perf_counter() - before

    def log_start_up(self) -> None:
        """Call once, when the device has finished the first step."""
        self.start_up.finish("first step")
        log.info("start-up %s", self.start_up)

    def see(self, report: StepReport) -> None:
        """Call for every step, in order."""
        self._losses.append(report.loss)

    def log_training(self, report: StepReport, data_wait_seconds: float) -> None:
        """Writes the report of the step last seen, with the mean finite loss and the speed since the line before."""
        step, seconds, num_steps = report.step, time.perf_counter() - self._clock, len(self._losses)
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        loss = sum(finite) / len(finite) if finite else math.nan
        num_tokens, num_flops = (
            each.before(step) - each.before(step - num_steps) for each in (self.tokens_per_step, self.flops_per_step)
        )
        tflops = num_flops / seconds / self.world.size / 1e12
        values = {
            "train/loss": loss,
            "train/perplexity": perplexity(loss),
            "train/grad_norm": report.norm,
            "train/learning_rate": report.learning_rate,
            "perf/tokens_per_second": num_tokens / seconds,
            "perf/model_tflops_per_device": tflops,
            "perf/step_seconds": seconds / num_steps,
            "perf/data_wait_fraction": (data_wait_seconds - self._clock_wait) / seconds,
            "perf/checkpoint_stall_seconds": self.checkpoint_stall_seconds,
            "memory/peak_gib": peak_memory_bytes(self.world.device) / 2**30,
            "data/samples_seen": self.config.batch_sizes.before(step),
            **self.epochs(step),
        }
        if self.peak_tflops_per_device:
            values["perf/mfu"] = tflops / self.peak_tflops_per_device
        self._write(step, values)
        if self.world.is_main:
            left = self._seconds_left(report, seconds / num_steps)
            log.info(_console_line(step, self.config.last_step, values, left))
        self.checkpoint_stall_seconds = 0.0
        self.start_clock(data_wait_seconds)

    def log_evaluation(self, step: int, evaluate: Callable[[int], dict[str, float]]) -> bool:
        """Evaluates, outside the clock, and writes the values. False, and nothing is written, after a stop signal."""
        self.world.note(f"the evaluation after step {step}")
        began = time.perf_counter()
        with self.clock_stopped():
            try:
                values = evaluate(step)
            except StopSignalled:
                return False
        self.evaluation_seconds = time.perf_counter() - began
        self._write(step, values)
        if self.world.is_main:
            shown = "  ".join(f"{tag} {value:.4f}" for tag, value in values.items())
            log.info("step %d  %s  (%s)", step, shown, _duration(self.evaluation_seconds))
        return True

    def add_picture(self, step: int, tag: str, figure: "Figure") -> None:
        """Adds a picture to TensorBoard, on rank 0."""
        self._events.add_summary(step, picture_summary(tag, figure))

    def _seconds_left(self, report: StepReport, step_seconds: float) -> float:
        """Until this start ends, or until the time budget is spent if that is sooner. Counts the steps to come and the
        evaluations from this step on, each as long as the last one."""
        step, every, last_step = report.step, self.config.evaluate_every_steps, self.config.last_step
        num_evaluations = last_step // every - (step - 1) // every
        num_evaluations += last_step == self.config.num_steps and last_step % every != 0
        seconds = (last_step - step) * step_seconds + num_evaluations * self.evaluation_seconds
        budget = self.config.time_budget_seconds
        return seconds if budget is None else min(seconds, max(0.0, budget - report.spent_seconds))

    def _write(self, step: int, values: dict[str, float]) -> None:
        for file in self._files:
            file.add(step, values)

    def close(self) -> None:
        for file in self._files:
            file.close()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that the device's allocator has held; on a CPU, the process's largest resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _console_line(step: int, last_step: int, values: dict[str, float], seconds_left: float) -> str:
    mfu = f"mfu {values['perf/mfu']:.1%}  " if "perf/mfu" in values else ""
    return (
        f"step {step}/{last_step}  loss {values['train/loss']:.4f}  grad norm {values['train/grad_norm']:.3f}  "
        f"lr {values['train/learning_rate']:.2e}  {values['perf/tokens_per_second']:,.0f} tokens/s  "
        f"{values['perf/model_tflops_per_device']:.3g} TFLOP/s  {mfu}"
        f"{values['memory/peak_gib']:.2f} GiB  {_duration(seconds_left)} left"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s")]
    first = next((i for i, (number, _) in enumerate(parts) if number), 3)
    return " ".join(f"{number}{unit}" for number, unit in parts[first : first + 2])
