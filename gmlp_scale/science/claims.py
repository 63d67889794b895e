"""The claims: the models that are trained, the parts of the table, and what each claim measures on every seed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SCHEDULE = (
    "train.num_steps=4000", "optimizer.warmup_steps=400", "train.evaluate_every_steps=500",
    "train.log_every_steps=100", "checkpoint.keep_last=1",
)  # fmt: skip
"""Of the runs: 16.4 M tokens in the recipes' batches of 32 rows of 128."""
LONGER = ("train.num_steps=9766", "optimizer.warmup_steps=976")
"""Of those of the wide models instead: 40 M tokens."""

MODELS: dict[str, tuple[str, ...]] = {
    "gmlp": ("compare_gmlp",),
    "amlp": ("compare_amlp",),
    "bert": ("compare_bert",),
    "bert_absolute": ("compare_bert", "model.positions=absolute"),
    "bert_relative_only": ("compare_bert", "model.positions=relative_only"),
    "mixer": ("compare_gmlp", "model.kind=mixer", "model.num_blocks=7", "model.d_spatial=64", "model.d_ffn=384"),
    "gmlp_multiplicative": ("compare_gmlp", "model.gating=multiplicative", "model.d_ffn=384"),
    "gmlp_additive": ("compare_gmlp", "model.gating=additive", "model.d_ffn=384"),
    "gmlp_linear": ("compare_gmlp", "model.gating=linear", "model.d_ffn=384"),
    "gmlp_dense": ("compare_gmlp", "model.spatial=dense"),
    "gmlp_6": ("compare_gmlp", "model.num_blocks=6"),
    "amlp_16": ("compare_amlp", "model.d_attn=16"),
    "amlp_32": ("compare_amlp", "model.d_attn=32"),
    "amlp_128": ("compare_amlp", "model.d_attn=128"),
    "gmlp_4": ("compare_gmlp", "model.num_blocks=4"),
    "gmlp_16": ("compare_gmlp", "model.num_blocks=16"),
    "bert_2": ("compare_bert", "model.num_blocks=2"),
    "bert_8": ("compare_bert", "model.num_blocks=8"),
    "modern_transformer": ("compare_modern_transformer",),
    "avey": ("compare_gmlp", "model.kind=avey", "model.num_blocks=6", "model.d_ffn=552", "model.spatial=dense"),
    "avey_toeplitz": (
        "compare_gmlp", "model.kind=avey", "model.num_blocks=6", "model.d_ffn=592", "model.spatial=toeplitz",
    ),
    "avey_static": (
        "compare_gmlp", "model.kind=avey", "model.num_blocks=6", "model.d_ffn=592", "model.spatial=toeplitz",
        "model.layers=static",
    ),
    "avey_dynamic": (
        "compare_gmlp", "model.kind=avey", "model.num_blocks=6", "model.d_ffn=592", "model.layers=dynamic",
    ),
    "gmlp_dynamic": ("compare_gmlp", "model.spatial=dynamic_toeplitz"),
    "gmlp_wide": ("compare_gmlp", "model.d_model=256", "model.num_blocks=9", "model.d_ffn=1024", *LONGER),
    "amlp_wide": ("compare_amlp", "model.d_model=256", "model.num_blocks=7", "model.d_ffn=1088", *LONGER),
    "modern_transformer_wide": (
        "compare_modern_transformer", "model.d_model=256", "model.d_ffn=440", "model.num_heads=8", *LONGER,
    ),
    "gmlp_dynamic_wide": (
        "compare_gmlp", "model.d_model=256", "model.num_blocks=9", "model.d_ffn=1024",
        "model.spatial=dynamic_toeplitz", *LONGER,
    ),
}  # fmt: skip
"""A recipe and its overrides for each model. d_ffn is chosen for as many parameters as gmlp has: an unsplit gating has
three quarters of gmlp's. The wide ones have three times as many as the small ones."""

RATES = (1.5e-3, 3e-3, 6e-3)
"""Of the parts on the paper. The best for gMLP after 2,000 steps lies between the upper two (docs/optimizers.md)."""

_AVEYS = ("avey", "avey_toeplitz", "avey_static", "avey_dynamic")
_SINCE = ("gmlp", "amlp", "bert", "modern_transformer", *_AVEYS, "gmlp_dynamic")
GMLP_DEPTHS, BERT_DEPTHS = ("gmlp_4", "gmlp", "gmlp_16"), ("bert_2", "bert", "bert_8")
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "b": ("Models (Tables 3 and 6)", ("gmlp", "amlp", "bert", "bert_absolute", "bert_relative_only", "mixer")),
    "a": ("Gatings (Table 3)", ("gmlp", "gmlp_multiplicative", "gmlp_additive", "gmlp_linear")),
    "d": ("Dense and Toeplitz W (section 4, Figure 9)", ("gmlp", "gmlp_dense")),
    "e": ("Width of the tiny attention (section 4.3)", ("gmlp_6", "amlp_16", "amlp_32", "amlp", "amlp_128")),
    "c": ("Depth at fixed width (Table 4, Figure 5)", (*GMLP_DEPTHS, *BERT_DEPTHS)),
    "f": ("Encoders since the paper", _SINCE),
    "g": ("Three times larger", ("gmlp_wide", "modern_transformer_wide", "amlp_wide", "gmlp_dynamic_wide")),
}
"""Title and models by letter, in the order in which they are trained: the most telling first."""


def rates_of(part: str) -> tuple[float, ...]:
    """The peak learning rates at which each model of the part is tried. So within a part all are tuned alike.

    Part f has a higher one too, since most models of the others did best at the highest of RATES. Part g has one: at
    3e-3 each of its models' small forms is at most 0.03 above its best.
    """
    match part:
        case "f":
            return (*RATES, 1.2e-2)
        case "g":
            return (3e-3,)
        case _:
            return RATES


LEVEL = 0.05
"""Of p, below which a claim is decided."""

ALIKE = math.log(4.35 / 4.26)
"""The difference of the loss between gMLP and the best BERT of Table 3, which the paper calls insignificant beside what
scaling changes."""


@dataclass(frozen=True)
class Trained:
    """What a finished run gave. A loss that was not finite is infinite."""

    loss: float
    num_parameters: int
    toeplitz_share: float = math.nan
    """Of a dense W, the mean of the blocks' shares."""


@dataclass(frozen=True)
class Quantity:
    part: str
    text: str
    models: tuple[str, ...]
    value: Callable[..., float]
    """Of the models' runs with one seed, one Trained each, in the order of `models`."""
    claim: str | None = None
    """What holds if the quantity is above zero; None for one that is only reported."""


def below(part: str, better: str, worse: str, claim: str, margin: float = 0.0) -> Quantity:
    """The claim that one model's loss is below another's, or above it by less than `margin`."""
    allowed = f" + {margin:.3f}" if margin else ""
    text = f"Loss of {worse} - loss of {better}{allowed}"
    return Quantity(part, text, (better, worse), lambda one, other: other.loss - one.loss + margin, claim)


def slope(*runs: Trained) -> float:
    """Least squares: the change of the loss when the parameters, embeddings included, double."""
    x = np.log2([run.num_parameters for run in runs])
    return float((x - x.mean()) @ np.array([run.loss for run in runs]) / ((x - x.mean()) ** 2).sum())


def toeplitz_share(weight_NN: np.ndarray) -> float:
    """The part of a matrix's energy, its sum of squares, that the nearest Toeplitz matrix has: its diagonals' means.

    Noise has (2n - 1) / n^2.
    """
    diagonals = [np.diagonal(weight_NN, offset) for offset in range(1 - len(weight_NN), len(weight_NN))]
    return float(sum(len(diagonal) * diagonal.mean() ** 2 for diagonal in diagonals) / (weight_NN**2).sum())


_NOT_WORSE = f"at most {ALIKE:.3f} worse than"

QUANTITIES = (
    below("b", "gmlp", "bert", f"gMLP is {_NOT_WORSE} BERT with relative positions (paper: 4.35 and 4.26)", ALIKE),
    below("b", "gmlp", "bert_absolute", f"gMLP is {_NOT_WORSE} BERT with absolute positions (4.35 and 4.37)", ALIKE),
    below("b", "amlp", "bert", "aMLP beats BERT with relative positions (base models of Table 6: 3.95 and 4.17)"),
    below("b", "amlp", "gmlp", "aMLP beats gMLP (Table 6: 3.95 and 4.28)"),
    below("b", "bert", "bert_absolute", "Relative positions beat absolute ones in BERT (4.26 and 4.37)"),
    below("b", "gmlp", "bert_relative_only", "gMLP beats relative positions alone (4.35 and 5.64)"),
    below("b", "gmlp", "mixer", "gMLP beats MLP-Mixer (4.35 and 5.34; the latter not checked against the paper)"),
    below("a", "gmlp", "gmlp_multiplicative", "The split gating beats the multiplicative one (4.35 and 4.53)"),
    below("a", "gmlp", "gmlp_additive", "The split gating beats the additive one (4.35 and 4.97)"),
    below("a", "gmlp", "gmlp_linear", "The split gating beats the linear one (4.35 and 5.14)"),
    below("a", "gmlp_multiplicative", "gmlp_additive", "The multiplicative gating beats the additive (4.53 and 4.97)"),
    below("a", "gmlp_additive", "gmlp_linear", "The additive gating beats the linear one (4.97 and 5.14)"),
    below("d", "gmlp", "gmlp_dense", f"A Toeplitz W is {_NOT_WORSE} a dense one (the paper: quality-neutral)", ALIKE),
    Quantity(
        "d", "Toeplitz share of the energy of the dense W (of noise: 0.016)", ("gmlp_dense",),
        lambda run: run.toeplitz_share,
    ),
    Quantity(
        "d", "That share - 1/2", ("gmlp_dense",), lambda run: run.toeplitz_share - 0.5,
        "A dense W becomes Toeplitz-like by itself, with most of its energy",
    ),
    below("e", "amlp_16", "gmlp_6", "A tiny attention of width 16 beats none"),
    Quantity(
        "e", "Loss won by width 16 - loss won from width 16 to 128", ("gmlp_6", "amlp_16", "amlp_128"),
        lambda none, narrow, wide: (none.loss - narrow.loss) - (narrow.loss - wide.loss),
        "The tiny attention's presence matters more than its capacity",
    ),
    below("e", "amlp_128", "amlp", "Width 128 beats the paper's 64"),
    Quantity("c", "Change of gMLP's loss per doubling of its parameters", GMLP_DEPTHS, slope),
    Quantity("c", "Change of BERT's loss per doubling of its parameters", BERT_DEPTHS, slope),
    Quantity(
        "c", "BERT's slope - gMLP's slope", (*BERT_DEPTHS, *GMLP_DEPTHS),
        lambda *runs: slope(*runs[:3]) - slope(*runs[3:]),
        "gMLP's loss falls more steeply with its parameters than BERT's",
    ),
    below("f", "avey", "gmlp", "Avey beats gMLP"),
    below("f", "avey", "amlp", "Avey beats aMLP"),
    below("f", "avey_toeplitz", "avey", "In Avey's static layers a Toeplitz W beats the authors' dense one"),
    below("f", "avey_toeplitz", "gmlp", "Avey with a Toeplitz W beats gMLP"),
    below("f", "avey_toeplitz", "amlp", "Avey with a Toeplitz W beats aMLP"),
    below("f", "modern_transformer", "bert", "The modern Transformer beats BERT"),
    below("f", "modern_transformer", "gmlp", "The modern Transformer beats gMLP"),
    below("f", "modern_transformer", "amlp", "The modern Transformer beats aMLP"),
    below("f", "avey_toeplitz", "avey_static", "With a Toeplitz W Avey's alternation beats its static layers alone"),
    below("f", "avey_toeplitz", "avey_dynamic", "With a Toeplitz W Avey's alternation beats its dynamic layers alone"),
    below("f", "avey_static", "avey_dynamic", "Static layers alone beat dynamic ones, which do not know the order"),
    below("f", "gmlp_dynamic", "gmlp", "A Toeplitz W with a part from the input beats a fixed one"),
)  # fmt: skip


def p_value(values: Sequence[float]) -> float:
    """Two-sided p of Student's t-test that the mean is zero; of paired runs, give their differences.

    The distribution is Abramowitz and Stegun's 26.7.3 (odd degrees of freedom) and 26.7.4 (even).
    """
    freedom = len(values) - 1
    if freedom < 1 or not np.isfinite(values).all():
        return 1.0
    deviation = float(np.std(values, ddof=1))
    if deviation == 0.0:
        return float(np.mean(values) == 0.0)
    angle = math.atan(abs(float(np.mean(values))) / deviation * math.sqrt((freedom + 1) / freedom))
    is_odd = freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for index in range(1 + is_odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * index / (index + 1)
    within = 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total
    return max(0.0, 1.0 - within)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for their number (Holm 1979): at 5 %, at most one page in 20 has a false claim."""
    corrected, floor = [1.0] * len(p_values), 0.0
    for place, index in enumerate(np.argsort(p_values)):
        floor = max(floor, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = floor
    return corrected


def verdict(values: Sequence[float], num_seeds: int) -> str:
    """Of a claim, from its quantity on the seeds that have all their runs. `LEVEL` decides, without a correction."""
    if len(values) < num_seeds:
        return "not run"
    if p_value(values) >= LEVEL:
        return "undecided"
    return "holds" if np.mean(values) > 0 else "does not hold"
