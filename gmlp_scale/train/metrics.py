"""Writes a run's metrics to metrics.jsonl, TensorBoard, a tracker and the console, all from one dictionary per step.

Users rely on the tags (docs/training.md, "What a run leaves behind"). A resumed run cuts both files after the
checkpoint's step, so that neither shows a step twice.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterator

import torch

from gmlp_scale.distributed.world import StopSignalled, World
from gmlp_scale.engine import Engine
from gmlp_scale.plan.layouts import GPUS
from gmlp_scale.tasks.evaluate import perplexity
from gmlp_scale.tasks.task import BatchLoader, Task
from gmlp_scale.train.filters import draw_filters, spatial_filters
from gmlp_scale.train.schedule import Schedule
from gmlp_scale.train.sinks import EventsFile, MetricsFile, TrackerRun, picture_summary, recipe_summaries
from gmlp_scale.train.step_reports import StepReport

log = logging.getLogger(__name__)


def due(step: int, every: int) -> bool:
    return step % every == 0


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
        task: has the sizes from which speeds follow. perf/mfu is left out where the device's peak is not known.
        schedule: the time left follows from it.
        start_up: has the parts so far; the first step is the last part.
    """

    def __init__(
        self, task: Task, loader: BatchLoader, schedule: Schedule, world: World, *, start_step: int, start_up: StartUp
    ):
        self.task, self.world, self.start_up = task, world, start_up
        self._train, self._loader, self._schedule = task.train, loader, schedule
        given = task.train.peak_tflops_per_device
        self.peak_tflops_per_device = given or peak_tflops(world.device, task.train.precision)
        self.checkpoint_stall_seconds = 0.0
        self.evaluation_seconds = 0.0
        """How long the last evaluation took; 0 before the first."""
        self._files: list[MetricsFile | EventsFile | TrackerRun] = []
        self.is_evaluated: bool = world.on_main(lambda: self._open_files(start_step))
        """Whether metrics.jsonl has the evaluation after `start_step`."""
        self.start_clock()

    def _open_files(self, start_step: int) -> bool:
        run_dir, fields = self.task.config.run_dir, self.task.config.fields()
        metrics_file = MetricsFile(run_dir / "metrics.jsonl", start_step)
        self._events = EventsFile(run_dir / "tensorboard", start_step)
        self._files += [metrics_file, self._events]
        for summary in recipe_summaries(fields):
            self._events.add_summary(start_step, summary)
        if self._train.tracker:
            self._files.append(TrackerRun(self._train.tracker, run_dir, fields))
        return any(tag.startswith("eval/") for line in metrics_file.of_start_step for tag in line)

    def start_clock(self) -> None:
        """Begins the interval that the next line of the log averages over."""
        self._clock, self._clock_wait = time.perf_counter(), self._loader.wait_seconds
        self._reports: list[StepReport] = []

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
        """Writes a line where one is due."""
        self._reports.append(report)
        if due(report.step, self._train.log_every_steps):
            self.log_rest()

    def log_rest(self) -> None:
        """Writes the report of the step last seen, with the mean finite loss and the speed since the line before."""
        if not self._reports:
            return
        report, seconds, num_steps = self._reports[-1], time.perf_counter() - self._clock, len(self._reports)
        finite = [seen.loss for seen in self._reports if math.isfinite(seen.loss)]
        loss = sum(finite) / len(finite) if finite else math.nan
        step, sizes = report.step, (self.task.tokens_per_step, self.task.flops_per_step)
        num_tokens, num_flops = (size.before(step) - size.before(step - num_steps) for size in sizes)
        tflops = num_flops / seconds / self.world.size / 1e12
        values = {
            "train/loss": loss,
            "train/perplexity": perplexity(loss),
            "train/grad_norm": report.norm,
            "train/learning_rate": report.learning_rate,
            "perf/tokens_per_second": num_tokens / seconds,
            "perf/model_tflops_per_device": tflops,
            "perf/step_seconds": seconds / num_steps,
            "perf/data_wait_fraction": (self._loader.wait_seconds - self._clock_wait) / seconds,
            "perf/checkpoint_stall_seconds": self.checkpoint_stall_seconds,
            "memory/peak_gib": peak_memory_bytes(self.world.device) / 2**30,
            "data/samples_seen": self._train.batch_sizes.before(step),
            **self.task.epochs(step),
        }
        if self.peak_tflops_per_device:
            values["perf/mfu"] = tflops / self.peak_tflops_per_device
        self._write(step, values)
        if self.world.is_main:
            left = self._seconds_left(report, seconds / num_steps)
            log.info(_console_line(step, self._schedule.last_step, values, left))
        self.checkpoint_stall_seconds = 0.0
        self.start_clock()

    def evaluate(self, engine: Engine, step: int) -> bool:
        """Evaluates, outside the clock, and writes the values. False, and nothing is written, after a stop signal."""
        began = time.perf_counter()
        with self.clock_stopped():
            try:
                values = self.task.evaluate(engine, self.world, step)
            except StopSignalled:
                return False
            if self._train.log_filters:
                filters = spatial_filters(engine.full_weights())  # all ranks take part; only rank 0 gets them
                if self.world.is_main:
                    self._events.add_summary(step, picture_summary("filters", draw_filters(filters)))
        self.evaluation_seconds = time.perf_counter() - began
        self._write(step, values)
        if self.world.is_main:
            shown = "  ".join(f"{tag} {value:.4f}" for tag, value in values.items())
            log.info("step %d  %s  (%s)", step, shown, _duration(self.evaluation_seconds))
        return True

    def _seconds_left(self, report: StepReport, step_seconds: float) -> float:
        """Until this start ends, or until the time budget is spent if that is sooner. Counts the steps to come and the
        evaluations from this step on, each as long as the last one."""
        step, every, last_step = report.step, self._train.evaluate_every_steps, self._schedule.last_step
        num_evaluations = last_step // every - (step - 1) // every
        num_evaluations += last_step == self._schedule.num_steps and last_step % every != 0
        seconds = (last_step - step) * step_seconds + num_evaluations * self.evaluation_seconds
        return min(seconds, self._schedule.seconds_left(report))

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
