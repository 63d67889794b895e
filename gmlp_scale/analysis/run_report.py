"""Builds the page of launch/report.py: curves, numbers, configs and spatial filters of runs, in one HTML file.

The page's text, style and script stand in run_report.html. It loads nothing, so it can be mailed or kept beside a run.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from gmlp_scale.analysis import curves
from gmlp_scale.analysis.curves import Axis, Point, band, is_drawable, line, short, stretches, y_axis
from gmlp_scale.analysis.run_records import RunRecord
from gmlp_scale.train.time_budget import num_steps_of

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
    """Values that the axis cannot show."""


@dataclass(frozen=True)
class Filters:
    """A run's spatial filters, or why there are none."""

    run: int
    step: int | None = None
    paths: Sequence[str] = ()
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
        results=_table([_results(record, tags) for record in records]),
        costs=_table([_costs(record) for record in records]),
        differences=_differences(records),
        configs=[yaml.safe_dump(record.config, sort_keys=False) for record in records],
        filters=filters,
        chart=curves,
    )


def filter_paths(filters: Sequence[np.ndarray]) -> list[str]:
    """A path for each block's filter_N. The vertical scales differ, as in the paper's Figure 4."""
    paths = []
    for filter_N in filters:
        limit = float(np.abs(filter_N).max()) or 1.0
        x = Axis(0, max(len(filter_N) - 1, 1), 0, curves.WIDTH)
        y = Axis(-limit, limit, curves.HEIGHT - 4, 4)
        paths.append(line(list(enumerate(filter_N.tolist())), x, y))
    return paths


def _charts(records: Sequence[RunRecord], plots: Sequence[Plot]) -> list[Chart]:
    """A chart of each plot for which a run has values."""
    last_step = max(1, *(record.last_step for record in records))
    x = Axis(0, last_step, curves.LEFT, curves.RIGHT)
    charts = []
    for plot in plots:
        found = [record.curve(plot.tag) for record in records]
        drawn = [[point for point in curve if is_drawable(point[1], is_log=plot.is_log)] for curve in found]
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


def _results(record: RunRecord, tags: Iterable[str]) -> dict[str, str]:
    """The run's final numbers by heading; empty where nothing is known."""
    newest = record.newest
    num_steps = num_steps_of(newest.details if newest else {}, record.config.get("train.num_steps"))
    titles = {plot.tag: plot.title.lower() for plot in LEARNING}
    # A mixture has an epoch of every source.
    epochs = sorted({tag for line in record.lines for tag in line if tag.startswith("data/epoch")})
    return {
        "step": f"{record.last_step:,}" + (f" of {num_steps:,}" if isinstance(num_steps, int) else ""),
        **{titles.get(tag, tag): _last(record, tag) for tag in sorted(tags, reverse=True) if tag.startswith("eval/")},
        "training loss": _last(record, "train/loss"),
        "parameters": f"{newest.num_parameters:,}" if newest else "",
        "rows seen": _last(record, "data/samples_seen", ",.0f"),
        "epochs": ", ".join(_last(record, tag, ".3g") for tag in epochs),
    }


def _costs(record: RunRecord) -> dict[str, str]:
    """What the run took, by heading; empty where nothing is known."""

    def of(tag: str, summary: Callable[[list[float]], float], form: str) -> str:
        values = [value for _, value in record.curve(tag) if math.isfinite(value)]
        return form.format(summary(values)) if values else ""

    skipped = [f"{line['step']:,} ({line.get('why', 'unknown')})" for line in record.skipped]
    restarts = None if record.restarts is None else [f"{step:,}" for step in record.restarts]
    return {
        "tokens per second, median": of("perf/tokens_per_second", statistics.median, "{:,.0f}"),
        "TFLOP/s per device, median": of("perf/model_tflops_per_device", statistics.median, "{:.3g}"),
        "MFU, median": of("perf/mfu", statistics.median, "{:.1%}"),
        "waiting for data, mean": of("perf/data_wait_fraction", statistics.mean, "{:.1%}"),
        "stopped by checkpoints": of("perf/checkpoint_stall_seconds", sum, "{:,.2f} s"),
        "peak memory": of("memory/peak_gib", max, "{:.2f} GiB"),
        "restarts": "" if restarts is None else _counted(restarts, "after step"),
        "updates left out": _counted(skipped, "step"),
        "newest checkpoint": f"step {record.newest.step:,}" if record.newest else "none",
    }


def _last(record: RunRecord, tag: str, form: str = "") -> str:
    points = record.curve(tag)
    return format(points[-1][1], form or ("#.5g" if abs(points[-1][1]) < 1e5 else ",.0f")) if points else ""


def _counted(items: list[str], what: str) -> str:
    shown = ", ".join(items[:6]) + (", …" if len(items) > 6 else "")
    return f"{len(items)}: {what} {shown}" if items else "0"


def _table(rows: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """The cells of each heading, one for each run. Headings without any value are left out."""
    table = {heading: [row[heading] for row in rows] for heading in rows[0]}
    return {heading: cells for heading, cells in table.items() if any(cells)}


def _differences(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    """The values of each field in which the configs differ, one for each run, as a recipe has them: null, true, [1, 2].

    "absent" stands where a run has no such field. `name` and `output_dir` are left out: they always differ.
    """
    fields = dict.fromkeys(field for record in records for field in record.config)
    found = {field: [record.config.get(field, "absent") for record in records] for field in fields}
    table = {
        field: [value if isinstance(value, str) else json.dumps(value, default=str) for value in values]
        for field, values in found.items()
        if field not in ("name", "output_dir")
    }
    return {field: values for field, values in table.items() if len(set(values)) > 1}
