"""Writes docs/science.md: what the finished runs say about each claim. A missing run is never filled in."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from gmlp_scale.export.card import render
from gmlp_scale.science.claims import ALIKE, LEVEL, PARTS, QUANTITIES, RATES, Quantity, holm, p_value, rates_of, verdict
from gmlp_scale.science.runs import HELDOUT_ROWS, Table, arguments

_LOST = ", undecided after the correction"


def document(table: Table) -> str:
    """The page on what is done. page.md has its text."""
    precision = table.precision()
    overrides = dict.fromkeys((*table.overrides, f"train.precision={precision}"))
    sentences = _sentences(table)
    parts, chosen = [], {}
    for part, (title, models) in PARTS.items():
        if part in table.parts:
            dense_rate = table.chosen_rate("gmlp_dense", part) if part == "d" else None
            chosen |= {(model, rate): None for model in models if (rate := table.chosen_rate(model, part))}
            parts.append(
                {
                    "title": title,
                    "rates": ", ".join(f"{rate:g}" for rate in rates_of(part)),
                    "rows": [_row(table, model, part) for model in models],
                    "sentences": [sentences[quantity] for quantity in QUANTITIES if quantity.part == part],
                    "picture": dense_rate and table.run("gmlp_dense", dense_rate, 0).name,
                }
            )
    text = render(
        "page.md",
        package="gmlp_scale.science",
        letters=table.parts,
        tokens=_tokens(table, "gmlp"),
        longer=_tokens(table, "gmlp_wide"),
        in_precision=f" in {precision}" if precision else "",
        seeds=table.num_seeds,
        heldout_rows=f"{HELDOUT_ROWS:,}",
        alike=f"{ALIKE:.3f}",
        counts=_counts_of(sentences.values()),
        parts=parts,
        commands=[_command(model, rate, overrides) for model, rate in chosen],
    )
    return text.rstrip() + "\n"


def sentence(quantity: Quantity, values: Sequence[float], counts: str, num_seeds: int, corrected_p: float = 1.0) -> str:
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
        is_lost = found_verdict != "undecided" and corrected_p >= LEVEL
        corrected = f"by Holm {corrected_p:.2g}" + (_LOST if is_lost else "")
        detail = f" (p = {p_value(values):.2g}, {corrected})"
    return f"- **{found_verdict.capitalize()}**: {f'{quantity.claim}. ' if quantity.claim else ''}{found}{detail}."


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    is_spread = len(values) > 1 and np.isfinite(values).all()
    return f"{np.mean(values):.3f}" + (f" ± {np.std(values, ddof=1):.3f}" if is_spread else "")


def _tokens(table: Table, model: str) -> str:
    """That a run of the model sees."""
    run = table.run(model, RATES[0], 0)
    return f"{run.tokens_per_step.before(run.train.num_steps):,}"


def _row(table: Table, model: str, part: str) -> str:
    chosen, losses = table.chosen_rate(model, part), [*table.losses(model, part).values()]
    grid = {rate: "not run" if loss is None else f"{loss:.3f}" for rate, loss in table.grid(model, part).items()}
    tried = ", ".join(f"**{text}**" if rate == chosen else text for rate, text in grid.items())
    shown = f"{len(losses)} of {table.num_seeds} seeds are done | |"
    if len(losses) == table.num_seeds:
        shown = f"{spread(losses)} | {math.exp(np.mean(losses)):.1f} |"
    return f"| {model} | {table.num_parameters(model):,} | {tried} | {shown}"


def _sentences(table: Table) -> dict[Quantity, str]:
    """What the runs say about every quantity of the table's parts."""
    values = {quantity: table.values(quantity) for quantity in QUANTITIES if quantity.part in table.parts}
    done = {quantity: len(found) == table.num_seeds for quantity, found in values.items()}
    # A claim whose runs are not done counts too, or each one that is done would raise the others' p.
    claims = {quantity: p_value(values[quantity]) if done[quantity] else 1.0 for quantity in values if quantity.claim}
    corrected = dict(zip(claims, holm([*claims.values()]), strict=True))
    return {
        quantity: sentence(quantity, found, _counts(table, quantity), table.num_seeds, corrected.get(quantity, 1.0))
        for quantity, found in values.items()
    }


def _counts_of(sentences: Iterable[str]) -> str:
    """How the claims came out, in one sentence."""
    verdicts = Counter(text.split("**")[1] for text in sentences if "**" in text)
    found = ", ".join(f"{count} x {text.lower()}" for text, count in verdicts.most_common())
    lost = sum(_LOST in text for text in sentences)
    decided = verdicts["Holds"] + verdicts["Does not hold"]
    survival = f"{lost} of the {decided} decided do not survive the correction"
    return f"Verdicts on {verdicts.total()} claims: {found}. {survival}."


def _counts(table: Table, quantity: Quantity) -> str:
    done = {model: len(table.losses(model, quantity.part)) for model in quantity.models}
    return ", ".join(f"{model} {count} of {table.num_seeds}" for model, count in done.items())


def _command(model: str, rate: float, overrides: Iterable[str]) -> str:
    recipe, *fields = arguments(model, rate, 0)
    return shlex.join(["python", "launch/pretrain.py", "--config", recipe, *fields, *overrides])
