"""Reports of benchmarks/run.py and images.py: printed as JSON, compared with an earlier one, and as tables for docs."""

import datetime
import json
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gmlp_scale.errors import InputError

WORST_CHANGE = 0.05


def report_as_measured(device: str, parts: Iterable[dict], output: Path | None) -> dict:
    """The last of `parts`, with the date, the machine and this command; printed as JSON. `output` has each as it comes,
    so that a benchmark that is cut off leaves what it has measured."""
    import torch  # not above, nor the next: launch/gpu_proof.sh writes its report with this file after every part

    from gmlp_scale.storage.files import write_text

    cpu = platform.processor() or platform.machine()
    machine = {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu ({cpu})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for figures in parts:
        report = {"date": datetime.date.today().isoformat(), "machine": machine, "command": sys.argv[1:], **figures}
        if output:
            write_text(output, json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return report


def read_report(path: Path) -> dict:
    """A report that benchmarks/run.py wrote. InputError if the file is not one."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        _ = [figures for parts in report["recipes"].values() for figures in parts.values()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(
            f"{path} is no report of benchmarks/run.py: {error!r}. Give a file that --output wrote"
        ) from None
    return report


def worsened(before: dict, now: dict) -> list[str]:
    """A line for each figure that is more than 5 % worse than before: smaller in `ratios`, larger in `costs`.

    InputError if the two reports have no figure in common.
    """
    old, new = dict(figures(before)), dict(figures(now))
    if not old.keys() & new.keys():
        raise InputError("no ratio is in both reports: measure the same recipes and parts as the file")
    lines = []
    for key in sorted(old.keys() & new.keys()):
        change = new[key] / old[key] - 1
        if (-change if key[2] == "ratios" else change) > WORST_CHANGE:
            recipe, part, _, name = key
            lines.append(f"{recipe} {part} {name}: {old[key]:.4g} before, {new[key]:.4g} now ({change:+.1%})")
    return lines


def figures(report: dict) -> Iterator[tuple[tuple[str, str, str, str], float]]:
    """((recipe, part, "ratios" or "costs", name), value) of every ratio and cost."""
    for recipe, parts in report.get("recipes", {}).items():
        for part, measured in parts.items():
            for kind in ("ratios", "costs"):
                for name, value in measured.get(kind, {}).items():
                    yield (recipe, part, kind, name), value


def table(report: dict) -> str:
    """Markdown tables of the measured steps and of what more ranks cost."""
    measured = {part for parts in report["recipes"].values() for part in parts}
    return "\n\n".join(markdown(columns, rows(report)) for part, (columns, rows) in TABLES.items() if part in measured)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def _step_rows(report: dict) -> Iterator[list[str]]:
    """Each recipe's measured step, its two floors, and the shares of its time."""
    for recipe, parts in report["recipes"].items():
        if "step" not in parts:
            continue
        step = parts["step"]
        yield [
            recipe,
            f"{step['rows']} in {step['precision']}",
            _milliseconds(step["step_seconds"]),
            f"{step['ratios']['fraction_of_ceiling']:.2f}",
            _share(step["mfu"]),
            _milliseconds(step["operations_floor_seconds"]),
            _milliseconds(step["bytes_floor_seconds"]),
            _share(step["ratios"].get("isolated_products_over_step")),
            ", ".join(f"{kind} {share:.0%}" for kind, share in step.get("time_split", {}).items() if share >= 0.01),
        ]


def _scaling_rows(report: dict) -> Iterator[list[str]]:
    """What more ranks cost each engine. Bytes are per parameter and rank."""
    for recipe, parts in report["recipes"].items():
        for ranks, measured in parts.get("scaling", {}).items():
            for engine, figures in measured.get("engines", {}).items():
                if "not run" not in figures:
                    yield [
                        recipe,
                        ranks.removesuffix(" ranks"),
                        engine,
                        f"{measured['start_up_seconds']:.1f}",
                        _milliseconds(figures["step_seconds"]),
                        f"{figures['communication_share']:.0%}",
                        *(f"{figures[key]:.2f}" if key in figures else "-" for key in SCALING_BYTES.values()),
                    ]


STEP_COLUMNS = (
    "recipe", "rows", "step ms", "of the ceiling", "MFU", "operations floor ms", "bytes floor ms", "products alone",
    "what the time goes to",
)  # fmt: skip
SCALING_BYTES = {
    "sent B": "sent_bytes_per_parameter",
    "over the formula": "sent_over_formula",
    "peak B": "peak_bytes_per_parameter",
    "planned states B": "planned_states_per_parameter",
    "16-bytes model B": "sixteen_bytes_model",
}
"""Columns, and their figures in the report."""
SCALING_COLUMNS = ("recipe", "ranks", "engine", "start-up s", "step ms", "of it communication", *SCALING_BYTES)
TABLES = {"step": (STEP_COLUMNS, _step_rows), "scaling": (SCALING_COLUMNS, _scaling_rows)}
"""Columns and rows by part."""


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f}"
