"""The results of launch/gpu_proof.sh: a line for each part in results.jsonl, and report.md, written anew after each."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.comparison import figures, table

STOPPED, KILLED = 124, 137
"""Exit codes of `timeout`. STOPPED: the part was stopped at its limit. KILLED: it did not stop then and was killed, or
something else killed it before its limit."""


class Goal(NamedTuple):
    what: str
    wanted: float
    is_most: bool
    """Whether `wanted` is the most allowed, or the least."""
    part: str
    check: str | None
    """The finding that holds the figure; None for a report of benchmarks/run.py."""
    figure: str
    """Its key in the finding, or the name of a ratio or cost in the report."""


GOALS = [
    *(
        Goal(
            f"{recipe}: FLOP/s over the best matrix product", fraction, False,
            f"step_{recipe}", None, "fraction_of_ceiling",
        )
        for recipe, fraction in (("gmlp_base", 0.67), ("gmlp_large", 0.71), ("gmlp_xlarge", 0.73))
    ),
    Goal(
        "training stopped by a save over a plain copy of its bytes to the host", 1.1, True,
        "checkpoint_gmlp_base", None, "stall_over_copy",
    ),
    Goal(
        "ten steps after a save over ten others", 1.02, True,
        "recipe", "training and saving", "steps_after_a_save_over_others",
    ),
    Goal("verified load over a plain read of its files", 0.8, False, "recipe", "verified load", "load_over_plain_read"),
]  # fmt: skip


def record(folder: Path, part: str, *, code: int, seconds: int, limit: int, command: str, printed: str) -> dict:
    """Adds a part that ended with exit code `code` to `folder`, with what it printed; returns its line."""
    checks, measured = _read(printed)
    was_cut = code == STOPPED or (code == KILLED and seconds >= limit)
    line = {
        "part": part,
        **_outcome(code, was_cut, checks),
        "seconds": seconds,
        "limit_seconds": limit,
        "command": command,
    }
    return _add(folder, line | {"exit_code": code, "checks": checks} | ({"measured": measured} if measured else {}))


def record_not_run(folder: Path, part: str, reason: str) -> dict:
    return _add(folder, {"part": part, "status": "not run", "reason": reason})


def _add(folder: Path, line: dict) -> dict:
    with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    lines = [json.loads(text) for text in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    (folder / "report.md").write_text(report({line["part"]: line for line in lines}), encoding="utf-8")
    return line


def _read(printed: str) -> tuple[list[dict], dict | None]:
    """The findings that a check printed, without a last line that was cut; or the report that a benchmark printed."""
    try:
        measured = json.loads(printed)
    except ValueError:
        pass
    else:
        if "check" not in measured:
            return [], measured
    whole_lines = printed.splitlines() if printed.endswith("\n") else printed.splitlines()[:-1]
    return [json.loads(line) for line in whole_lines if line.startswith('{"check": ')], None


def _outcome(code: int, was_cut: bool, checks: list[dict]) -> dict[str, str | None]:
    """status and reason of a part."""
    failed = [check for check in checks if check["status"] == "failed"]
    not_run = [check for check in checks if check["status"] == "not run"]
    if was_cut:
        return {"status": "cut by its limit", "reason": f"{len(checks)} checks done, {len(failed)} of them failed"}
    if failed:
        return {"status": "failed", "reason": f"{len(failed)} of {len(checks)} checks"}
    if code:
        return {"status": "failed", "reason": f"exit code {code}: log.txt says why"}
    reasons = sorted({check["reason"] for check in not_run})
    if checks and len(not_run) == len(checks):
        return {"status": "not run", "reason": "; ".join(reasons)}
    return {"status": "passed", "reason": f"{len(not_run)} checks not run: {'; '.join(reasons)}" if not_run else None}


def report(parts: dict[str, dict]) -> str:
    """Markdown: the parts, the checks that did not pass, the figures of the benchmarks, and the goals."""
    machine = next(iter(parts.get("environment", {}).get("checks", [])), {})
    on_gpu = machine.get("device_type") == "cuda"
    lines = ["# What one GPU showed" if on_gpu else "# A trial of launch/gpu_proof.sh without a GPU", ""]
    if not on_gpu:
        lines += ["The shapes were tiny. It shows that the parts run and that a CPU passes them, nothing of a GPU.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items() if key not in ("check", "status", "reason")]
    lines += ["", "| part | status | why | seconds | limit |", "| --- | --- | --- | --- | --- |"]
    for part in parts.values():
        seconds, limit = part.get("seconds", ""), part.get("limit_seconds", "")
        lines.append(f"| {part['part']} | {part['status']} | {part['reason'] or ''} | {seconds} | {limit} |")
    lines += ["", "FSDP2 gathers and scatters nothing on one rank, so NCCL's collectives are not shown here."]
    lines += ["", *_checks_not_passed(parts), *_measured(parts), *_goals(parts, on_gpu)]
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
    yield ""


def _measured(parts: dict[str, dict]) -> Iterator[str]:
    reports = {name: part["measured"] for name, part in parts.items() if "measured" in part}
    for measured in reports.values():
        if any("step" in of_recipe for of_recipe in measured.get("recipes", {}).values()):
            yield from (table(measured), "")
    yield from ("| part | ratio or cost | value |", "| --- | --- | --- |")
    for name, measured in reports.items():
        if "recipes" in measured:
            yield from (f"| {name} | {key[3]} | {value:.3g} |" for key, value in figures(measured))
        for kernel, its_figures in measured.get("kernels", {}).items():
            yield f"| {name} | {kernel}: fraction of its floor | {its_figures['fraction_of_floor']:.3g} |"
    yield ""


def _goals(parts: dict[str, dict], on_gpu: bool) -> Iterator[str]:
    yield from ("| goal | wanted | found | |", "| --- | --- | --- | --- |")
    for goal in GOALS:
        found = _found(goal, parts)
        wanted = f"{'at most' if goal.is_most else 'at least'} {goal.wanted:g}"
        if found is None:
            verdict = f"not measured: {goal.part} {parts.get(goal.part, {}).get('status', 'not run')}"
        elif not on_gpu:
            verdict = "says nothing: no GPU"
        else:
            verdict = "met" if (found <= goal.wanted if goal.is_most else found >= goal.wanted) else "missed"
        yield f"| {goal.what} | {wanted} | {'' if found is None else format(found, '.3g')} | {verdict} |"


def _found(goal: Goal, parts: dict[str, dict]) -> float | None:
    part = parts.get(goal.part, {})
    if goal.check:
        return next((check.get(goal.figure) for check in part.get("checks", []) if check["check"] == goal.check), None)
    measured = figures(part["measured"]) if "measured" in part else ()
    return next((value for key, value in measured if key[3] == goal.figure), None)
