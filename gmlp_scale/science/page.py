"""Writes docs/science.md: what the finished runs say about each claim. A missing run is never filled in."""

import math
import shlex
from collections.abc import Iterable, Sequence

import numpy as np

from gmlp_scale.export.card import render
from gmlp_scale.science.claims import ALIKE, PARTS, QUANTITIES, RATES, Quantity, p_value, verdict
from gmlp_scale.science.runs import HELDOUT_ROWS, Table, arguments


def document(table: Table) -> str:
    """The page on what is done. page.md has its text."""
    run, precision = table.run(table.models[0], RATES[0], 0), table.precision()
    rates = {model: table.chosen_rate(model) for model in table.models}
    overrides = dict.fromkeys((*table.overrides, f"train.precision={precision}"))
    parts = []
    for part, (title, models) in PARTS.items():
        if part in table.parts:
            dense_rate = rates["gmlp_dense"] if part == "d" else None
            parts.append(
                {
                    "title": title,
                    "rows": [_row(table, model) for model in models],
                    "sentences": [_sentence_of(table, quantity) for quantity in QUANTITIES if quantity.part == part],
                    "picture": dense_rate and table.run("gmlp_dense", dense_rate, 0).name,
                }
            )
    text = render(
        "page.md",
        package="gmlp_scale.science",
        tokens=f"{run.tokens_per_step.before(run.train.num_steps):,}",
        in_precision=f" in {precision}" if precision else "",
        seeds=table.num_seeds,
        heldout_rows=f"{HELDOUT_ROWS:,}",
        alike=f"{ALIKE:.3f}",
        rates=", ".join(f"{rate:g}" for rate in RATES),
        parts=parts,
        commands=[_command(model, rate, overrides) for model, rate in rates.items() if rate],
    )
    return text.rstrip() + "\n"


def sentence(quantity: Quantity, values: Sequence[float], counts: str, num_seeds: int) -> str:
    """What the quantity's values on the seeds say. `counts`: how many runs of its models are done, in words."""
    found_verdict = verdict(values, num_seeds)
    found = f"{quantity.text}: {spread(values)}" if values else quantity.text
    if found_verdict == "not run":
        detail = f" (done: {counts})"
    elif quantity.claim is None:
        return f"- {found}."
    elif not np.isfinite(values).all():
        detail = " (a loss was not finite)"
    else:
        detail = f" (p = {p_value(values):.2g})"
    return f"- **{found_verdict.capitalize()}**: {f'{quantity.claim}. ' if quantity.claim else ''}{found}{detail}."


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    is_spread = len(values) > 1 and np.isfinite(values).all()
    return f"{np.mean(values):.3f}" + (f" ± {np.std(values, ddof=1):.3f}" if is_spread else "")


def _row(table: Table, model: str) -> str:
    chosen, losses = table.chosen_rate(model), [*table.losses(model).values()]
    grid = {rate: "not run" if loss is None else f"{loss:.3f}" for rate, loss in table.grid(model).items()}
    tried = ", ".join(f"**{text}**" if rate == chosen else text for rate, text in grid.items())
    shown = f"not run ({len(losses)} of {table.num_seeds} seeds are done) | |"
    if len(losses) == table.num_seeds:
        shown = f"{spread(losses)} | {math.exp(np.mean(losses)):.1f} |"
    return f"| {model} | {table.num_parameters(model):,} | {tried} | {shown}"


def _sentence_of(table: Table, quantity: Quantity) -> str:
    counts = ", ".join(f"{model} {len(table.losses(model))} of {table.num_seeds}" for model in quantity.models)
    return sentence(quantity, table.values(quantity), counts, table.num_seeds)


def _command(model: str, rate: float, overrides: Iterable[str]) -> str:
    recipe, *fields = arguments(model, rate, 0)
    return shlex.join(["python", "launch/pretrain.py", "--config", recipe, *fields, *overrides])
