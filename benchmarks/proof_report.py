"""The results of launch/gpu_proof.sh: a line for each part in results.jsonl, and report.md, written anew after each."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.reports import figures, markdown, table

STOPPED, KILLED = 124, 137
"""Exit codes of `timeout`. STOPPED: the part was stopped at its limit. KILLED: it did not stop then and was killed, or
something else killed it before its limit."""


class Goal(NamedTuple):
    what: str
    wanted: str
    """`at most` or `at least`, and a number."""
    part: str
    check: str | None
    """The finding that holds the figure; None for a report of benchmarks/run.py."""
    figure: str
    """Its key in the finding, or the name of a ratio or cost in the report."""


FLOP_RATE, SAVES = "FLOP/s over the best matrix product", "training and saving"
STALL = "training stopped by a save over a plain copy of its bytes to the host"
GOALS = [
    Goal(f"gmlp_base: {FLOP_RATE}", "at least 0.40", "step_gmlp_base", None, "fraction_of_ceiling"),
    Goal(f"gmlp_large: {FLOP_RATE}", "at least 0.45", "step_gmlp_large", None, "fraction_of_ceiling"),
    Goal(f"gmlp_xlarge: {FLOP_RATE}", "at least 0.50", "step_gmlp_xlarge", None, "fraction_of_ceiling"),
    Goal(STALL, "at most 1.1", "checkpoint_gmlp_base", None, "stall_over_copy"),
    Goal("ten steps after a save over ten others", "at most 1.02", "recipe", SAVES, "steps_after_a_save_over_others"),
    Goal(
        "verified load over a plain read of its files", "at least 0.8", "recipe", "verified load",
        "load_over_plain_read",
    ),
]  # fmt: skip


def record(folder: Path, part: str, *, code: int, seconds: int, limit: int, command: str, printed: str) -> dict:
    """Adds a part that ended with exit code `code` to `folder`, with what it printed; returns its line."""
    checks, measured = _read(printed)
    status, reason = _outcome(code, code == STOPPED or (code == KILLED and seconds >= limit), checks, bool(measured))
    line = {"part": part, "status": status, "reason": reason, "seconds": seconds, "limit_seconds": limit}
    line |= {"command": command, "exit_code": code, "checks": checks} | ({"measured": measured} if measured else {})
    with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    lines = [json.loads(text) for text in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    (folder / "report.md").write_text(report({line["part"]: line for line in lines}), encoding="utf-8")
    return line


def _read(printed: str) -> tuple[list[dict], dict | None]:
    """The findings that a check printed, without a last line that was cut; or the report that a benchmark printed."""
    with contextlib.suppress(ValueError):
        if "check" not in (measured := json.loads(printed)):
            return [], measured
    whole_lines = printed.splitlines() if printed.endswith("\n") else printed.splitlines()[:-1]
    return [json.loads(line) for line in whole_lines if line.startswith('{"check": ')], None


def _outcome(code: int, was_cut: bool, checks: list[dict], is_measured: bool) -> tuple[str, str | None]:
    """Status and reason of a part."""
    num_failed = sum(check["status"] == "failed" for check in checks)
    not_run = [check for check in checks if check["status"] == "not run"]
    if was_cut:
        done = "what it measured until then is below" if is_measured else f"{len(checks)} checks done"
        return "cut by its limit", done + (f", {num_failed} of them failed" if checks else "")
    if num_failed:
        return "failed", f"{num_failed} of {len(checks)} checks"
    if code:
        return "failed", f"exit code {code}: log.txt says why"
    reasons = "; ".join(sorted({check["reason"] for check in not_run}))
    if checks and len(not_run) == len(checks):
        return "not run", reasons
    return "passed", f"{len(not_run)} checks not run: {reasons}" if not_run else None


def report(parts: dict[str, dict]) -> str:
    """Markdown: the parts, the checks that did not pass, the figures of the benchmarks, and the goals."""
    machine = next(iter(parts.get("environment", {}).get("checks", [])), {})
    on_gpu = machine.get("device_type") == "cuda"
    lines = ["# What one GPU showed" if on_gpu else "# A trial of launch/gpu_proof.sh without a GPU", ""]
    if not on_gpu:
        lines += ["The shapes were tiny. It shows that the parts run and that a CPU passes them, nothing of a GPU.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items() if key not in ("check", "status", "reason")]
    rows = (
        [name, part["status"], part["reason"] or "", str(part["seconds"]), str(part["limit_seconds"])]
        for name, part in parts.items()
    )
    lines += ["", markdown(["part", "status", "why", "seconds", "limit"], rows)]
    lines += ["", "FSDP2 gathers and scatters nothing on one rank, so NCCL's collectives are not shown here."]
    lines += ["", *_checks_not_passed(parts), "", *_measured(parts)]
    lines += ["", markdown(["goal", "wanted", "found", ""], (_goal_row(goal, parts, on_gpu) for goal in GOALS))]
    return "\n".join(lines) + "\n"


def _checks_not_passed(parts: dict[str, dict]) -> Iterator[str]:
    for part in parts.values():
        for check in part.get("checks", []):
            if check["status"] != "passed":
                yield f"- {part['part']}, {check['check']}: {check['status']}: {check['reason']}"
        for of_recipe in part.get("measured", {}).get("recipes", {}).values():
            for name, peer in of_recipe.get("step", {}).get("contenders", {}).items():
                if isinstance(peer, str):  # why it is missing
                    yield f"- {part['part']}, {name}: not run: {peer}"


def _measured(parts: dict[str, dict]) -> Iterator[str]:
    reports = {name: part["measured"] for name, part in parts.items() if "measured" in part}
    for measured in reports.values():
        if any("step" in of_recipe for of_recipe in measured.get("recipes", {}).values()):
            yield from (table(measured), "")
    rows = []
    for name, measured in reports.items():
        rows += [[name, key[3], f"{value:.3g}"] for key, value in figures(measured)]
        for kernel, found in measured.get("kernels", {}).items():
            rows.append([name, f"{kernel}: fraction of its floor", f"{found['fraction_of_floor']:.3g}"])
    yield markdown(["part", "ratio or cost", "value"], rows)


def _goal_row(goal: Goal, parts: dict[str, dict], on_gpu: bool) -> list[str]:
    found = _found(goal, parts.get(goal.part, {}))
    if found is None:
        status = parts.get(goal.part, {}).get("status", "not run")
        return [goal.what, goal.wanted, "", f"not measured: {goal.part} {status}"]
    bound, number = goal.wanted.rsplit(" ", 1)
    is_met = found <= float(number) if bound == "at most" else found >= float(number)
    verdict = ("met" if is_met else "missed") if on_gpu else "says nothing: no GPU"
    return [goal.what, goal.wanted, f"{found:.3g}", verdict]


def _found(goal: Goal, part: dict) -> float | None:
    if goal.check:
        return next((check.get(goal.figure) for check in part.get("checks", []) if check["check"] == goal.check), None)
    return next((value for key, value in figures(part.get("measured", {})) if key[3] == goal.figure), None)
