"""Builds the page of launch/report.py: curves, numbers, configs and spatial filters of runs, in one HTML file.

The page's text, style and script stand in run_report.html. It loads nothing, so it can be mailed or kept beside a run.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from gmlp_scale.analysis import curves
from gmlp_scale.analysis.curves import Axis, Point, band, line, short, stretches, y_axis
from gmlp_scale.analysis.run_records import RunRecord
from gmlp_scale.train.schedule import num_steps_of

NUM_COLORS = 6
"""In run_report.html. More runs get the same colours again, with dashes."""


@dataclass(frozen=True)
class Plot:
    """How one tag of metrics.jsonl is drawn."""

    tag: str
    title: str
    is_log: bool = False
    from_zero: bool = False


LEARNING = (
    Plot("eval/perplexity", "Held-out perplexity", is_log=True),
    Plot("train/perplexity", "Training perplexity", is_log=True),
    Plot("eval/accuracy", "Held-out accuracy"),
    Plot("train/loss", "Training loss"),
    Plot("train/grad_norm", "Gradient norm", is_log=True),
    Plot("train/learning_rate", "Learning rate", from_zero=True),
)
SPEED = (
    Plot("perf/tokens_per_second", "Tokens per second", from_zero=True),
    Plot("perf/model_tflops_per_device", "TFLOP/s per device", from_zero=True),
    Plot("perf/mfu", "Model FLOP/s utilisation", from_zero=True),
    Plot("memory/peak_gib", "Peak memory, GiB", from_zero=True),
    Plot("perf/data_wait_fraction", "Share of time waiting for data", from_zero=True),
    Plot("perf/checkpoint_stall_seconds", "Seconds stopped by checkpoints", from_zero=True),
)


@dataclass(frozen=True)
class Curve:
    run: int
    points: list[Point]
    line: str
    """Path through the means."""
    band: str
    """Path around the lowest and highest values; empty where every point is a single value."""


@dataclass(frozen=True)
class Chart:
    plot: Plot
    x_axis: Axis
    y_axis: Axis
    curves: list[Curve]
    num_left_out: int
    """Values that the axis cannot show: not finite, or not positive on a logarithmic axis."""


@dataclass(frozen=True)
class Filters:
    """A run's spatial filters, or why there are none."""

    run: int
    step: int | None = None
    paths: tuple[str, ...] = ()
    """One for each block, in a box of curves.WIDTH x curves.HEIGHT."""
    reason: str = ""


def page(records: Sequence[RunRecord], filters: Sequence[Filters], written_at: datetime) -> str:
    """The HTML of the comparison. Every text of a run is escaped."""
    environment = Environment(
        loader=PackageLoader("gmlp_scale.analysis", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": short, "numbers": _numbers}
    known = {plot.tag for plot in LEARNING + SPEED}
    tags = dict.fromkeys(tag for record in records for line in record.lines for tag in line if tag != "step")
    others = tuple(Plot(tag, tag) for tag in tags if tag not in known)
    sections = [("Learning", LEARNING), ("Speed and memory", SPEED), ("All other metrics", others)]
    return environment.get_template("run_report.html").render(
        title=" · ".join(record.name for record in records[:3]) + (" …" if len(records) > 3 else ""),
        written_at=written_at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        runs=records,
        num_colors=NUM_COLORS,
        sections=[(name, _charts(records, plots)) for name, plots in sections],
        results=_table(records, _result_columns(tags)),
        costs=_table(records, COST_COLUMNS),
        differences=_differences(records),
        configs=[yaml.safe_dump(record.config, sort_keys=False) for record in records],
        filters=filters,
        chart=curves,
    )


def filter_paths(filters: Sequence[np.ndarray]) -> tuple[str, ...]:
    """A path for each block's filter_N. The vertical scales differ, as in the paper's Figure 4."""
    paths = []
    for filter_N in filters:
        limit = float(np.abs(filter_N).max()) or 1.0
        x = Axis(0, max(len(filter_N) - 1, 1), 0, curves.WIDTH)
        y = Axis(-limit, limit, curves.HEIGHT - 4, 4)
        paths.append(line(list(enumerate(filter_N.tolist())), x, y))
    return tuple(paths)


def _charts(records: Sequence[RunRecord], plots: Sequence[Plot]) -> list[Chart]:
    """A chart of each plot for which a run has values."""
    last_step = max(1, *(record.last_step for record in records))
    x = Axis(0, last_step, curves.LEFT, curves.RIGHT)
    charts = []
    for plot in plots:
        found = [record.curve(plot.tag) for record in records]
        drawn = [
            [(step, value) for step, value in curve if math.isfinite(value) and (value > 0 or not plot.is_log)]
            for curve in found
        ]
        values = [value for curve in drawn for _, value in curve]
        if not values:
            continue
        y = y_axis(values, is_log=plot.is_log, from_zero=plot.from_zero)
        lines = [_curve(run, curve, x, y) for run, curve in enumerate(drawn) if curve]
        charts.append(Chart(plot, x, y, lines, sum(map(len, found)) - len(values)))
    return charts


def _curve(run: int, values: list[tuple[int, float]], x: Axis, y: Axis) -> Curve:
    points = stretches(values)
    means = [(point.step, point.mean) for point in points]
    return Curve(run, points, line(means, x, y), band(points, x, y) if len(points) < len(values) else "")


def _numbers(curve: Curve) -> str:
    """[step, value] of each point, as JSON for the page's script."""
    return f"[{','.join(f'[{point.step},{point.mean:.5g}]' for point in curve.points)}]"


Column = tuple[str, Callable[[RunRecord], str]]
"""A heading, and what stands below it for a run; empty if nothing is known."""


def _epochs(record: RunRecord) -> str:
    """The run's epochs; of a mixture, the epochs of every source."""
    tags = sorted({tag for line in record.lines for tag in line if tag.startswith("data/epoch")})
    return ", ".join(_last(record, tag, ".3g") for tag in tags)


def _result_columns(tags: Sequence[str]) -> list[Column]:
    titles = {plot.tag: plot.title.lower() for plot in LEARNING}
    scores = [tag for tag in tags if tag.startswith("eval/")]
    return [
        ("step", lambda record: f"{record.last_step:,}{_of_all(record)}"),
        *((titles.get(tag, tag), lambda record, tag=tag: _last(record, tag)) for tag in sorted(scores, reverse=True)),
        ("training loss", lambda record: _last(record, "train/loss")),
        ("parameters", lambda record: f"{record.newest.num_parameters:,}" if record.newest else ""),
        ("rows seen", lambda record: _last(record, "data/samples_seen", ",.0f")),
        ("epochs", _epochs),
    ]


COST_COLUMNS: tuple[Column, ...] = (
    ("tokens per second, median", lambda record: _of(record, "perf/tokens_per_second", statistics.median, ",.0f")),
    ("TFLOP/s per device, median", lambda r: _of(r, "perf/model_tflops_per_device", statistics.median, ".3g")),
    ("MFU, median", lambda record: _of(record, "perf/mfu", statistics.median, ".1%")),
    ("waiting for data, mean", lambda record: _of(record, "perf/data_wait_fraction", statistics.mean, ".1%")),
    ("stopped by checkpoints", lambda record: _of(record, "perf/checkpoint_stall_seconds", sum, ",.2f", " s")),
    ("peak memory", lambda record: _of(record, "memory/peak_gib", max, ".2f", " GiB")),
    ("restarts", lambda record: _restarts(record)),
    ("updates left out", lambda record: _skipped(record)),
    ("newest checkpoint", lambda record: f"step {record.newest.step:,}" if record.newest else "none"),
)


def _last(record: RunRecord, tag: str, form: str = "") -> str:
    points = record.curve(tag)
    return format(points[-1][1], form or ("#.5g" if abs(points[-1][1]) < 1e5 else ",.0f")) if points else ""


def _of(record: RunRecord, tag: str, summary: Callable[[list[float]], float], form: str, unit: str = "") -> str:
    values = record.finite(tag)
    return format(summary(values), form) + unit if values else ""


def _of_all(record: RunRecord) -> str:
    num_steps = num_steps_of(record.newest.details if record.newest else {}, record.config.get("train.num_steps"))
    return f" of {num_steps:,}" if isinstance(num_steps, int) else ""


def _restarts(record: RunRecord) -> str:
    return "" if record.restarts is None else _counted([f"{step:,}" for step in record.restarts], "after step")


def _skipped(record: RunRecord) -> str:
    return _counted([f"{line['step']:,} ({line.get('why', 'unknown')})" for line in record.skipped], "step")


def _counted(items: list[str], what: str) -> str:
    shown = ", ".join(items[:6]) + (", …" if len(items) > 6 else "")
    return f"{len(items)}: {what} {shown}" if items else "0"


def _table(records: Sequence[RunRecord], columns: Sequence[Column]) -> dict[str, list[str]]:
    """The cells of each column by its heading, one for each run. Columns without any value are left out."""
    table = {heading: [cell(record) for record in records] for heading, cell in columns}
    return {heading: cells for heading, cells in table.items() if any(cells)}


def _differences(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    """The values of each field in which the configs differ, one for each run; "absent" where a run has no such field.

    `name` and `output_dir` are left out: they always differ.
    """
    fields = dict.fromkeys(field for record in records for field in record.config)
    table = {field: [_as_typed(record.config.get(field, "absent")) for record in records] for field in fields}
    return {
        field: values
        for field, values in table.items()
        if field not in ("name", "output_dir") and any(value != values[0] for value in values)
    }


def _as_typed(value: Any) -> str:
    """A config's value as a recipe has it: null, true, [1, 2]."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
