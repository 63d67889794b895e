"""Writes docs/science.md: what the finished runs say about each claim. A missing run is never filled in."""

import math
import shlex
from collections.abc import Iterable, Sequence

import numpy as np

from gmlp_scale.science.claims import ALIKE, PARTS, QUANTITIES, RATES, Quantity, p_value, verdict
from gmlp_scale.science.runs import HELDOUT_ROWS, Table, arguments

_HEAD = """# The paper's claims, small and with seeds

Models of about 2 M parameters, each trained on {tokens:,} tokens of English text{precision}. A model is tried at three
learning rates with seed 0. It takes the one with the lowest loss (bold; a better one may lie beyond), and has {seeds}
seeds there. A seed draws the initial weights, the order of the rows and their masks. The loss is that of the last
checkpoint on the first {heldout_rows:,} held-out rows, or all if there are fewer, in float32, with the same masks for
every model; ± is the seeds' standard deviation. Gatings without a split have three quarters of the hidden width, so as
many parameters. Parameters include the embeddings, so the depths of a family span less than one doubling.

A claim is tested by a two-sided t-test of differences paired by seed, at 5 %, without a correction for the number of
claims. With three seeds the mean difference must be above 2.5 standard deviations of the paired differences. Seed 0
also chose the rate on these rows, which makes its loss a little too low, the more so where the rate matters little.
Where the paper calls models level, the loss may be higher by {alike:.3f}: Table 3's difference, which it calls
insignificant beside what scaling changes. Numbers in brackets are the paper's perplexities. Small models after few
tokens tell how such models start, not where the paper's end. A Transformer's loss falls slowly until attention forms,
and then fast; a run may end before that, with a loss far above the others'.

```bash
python launch/science.py --output outputs/science --shards data/compare/shards
python launch/science.py --output docs/science --table docs/science.md
```

The first command prints what is left to do, trains it, skips what is done and goes on with what was stopped. Several
share the runs, such as two with `OMP_NUM_THREADS=1` on two cores. `--part b` trains one part, `--dry-run` nothing.
To train other sizes, give fields that are the same for all models of a part, as
`--part d model.d_model=512 model.d_ffn=3072 model.num_blocks=36`.

What a run gave is in outputs/science/results; `--output outputs/science --table science.md` writes a page of it. The
second command writes this page from docs/science/results. Copied to outputs/science/results, these count as done, for
runs on the same shards.
"""

_PICTURE = """
![W of two blocks of {name}](science.png)

```bash
python launch/plot_model.py matrices --run outputs/science/{name} --blocks 0 5 --output docs/science.png
```"""

_COMMANDS = """## Commands

Each run is an ordinary one of launch/pretrain.py. Here are those of seed 0 at the rates that are chosen; the
others differ in the rate, the seed and the name. Each run's config.yaml has its shards and folder.
"""


def document(table: Table) -> str:
    """The page on what is done."""
    run = table.run(table.models[0], RATES[0], 0)
    tokens, precision = run.tokens_per_step.before(run.train.num_steps), table.precision()
    in_precision = f" in {precision}" if precision else ""
    lines = [
        _HEAD.format(
            tokens=tokens, precision=in_precision, seeds=table.num_seeds, alike=ALIKE, heldout_rows=HELDOUT_ROWS
        )
    ]
    for part in (part for part in PARTS if part in table.parts):
        title, models = PARTS[part]
        grid = ", ".join(f"{rate:g}" for rate in RATES)
        lines += [f"## {title}", "", f"| model | parameters | loss of seed 0 at {grid} | loss | perplexity |"]
        lines += ["| --- | --- | --- | --- | --- |", *(_row(table, model) for model in models), ""]
        lines += [_told(table, quantity) for quantity in QUANTITIES if quantity.part == part]
        if part == "d" and (rate := table.chosen_rate("gmlp_dense")):
            lines.append(_PICTURE.format(name=table.run("gmlp_dense", rate, 0).name))
        lines.append("")
    rates = {model: table.chosen_rate(model) for model in table.models}
    overrides = dict.fromkeys((*table.overrides, f"train.precision={precision}"))
    commands = [_command(model, rate, overrides) for model, rate in rates.items() if rate]
    if commands:
        lines += [_COMMANDS, "```bash", *commands, "```", ""]
    return "\n".join(lines)


def sentence(quantity: Quantity, values: Sequence[float], counts: str, num_seeds: int) -> str:
    """What the quantity's values on the seeds say. `counts`: how many runs of its models are done, in words."""
    told = verdict(values, num_seeds)
    found = f"{quantity.text}: {spread(values)}" if values else quantity.text
    if told == "not run":
        detail = f" (done: {counts})"
    elif quantity.claim is None:
        return f"- {found}."
    elif not np.isfinite(values).all():
        detail = " (a loss was not finite)"
    else:
        detail = f" (p = {p_value(values):.2g})"
    return f"- **{told.capitalize()}**: {f'{quantity.claim}. ' if quantity.claim else ''}{found}{detail}."


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


def _told(table: Table, quantity: Quantity) -> str:
    counts = ", ".join(f"{model} {len(table.losses(model))} of {table.num_seeds}" for model in quantity.models)
    return sentence(quantity, table.values(quantity), counts, table.num_seeds)


def _command(model: str, rate: float, overrides: Iterable[str]) -> str:
    recipe, *fields = arguments(model, rate, 0)
    return shlex.join(["python", "launch/pretrain.py", "--config", recipe, *fields, *overrides])
