"""From the numbers of a question's windows to its answer, as BERT's code for SQuAD does it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gmlp_scale.finetune.windows import Window

NUM_BEST = 20
"""First and last positions that are paired in each window."""
MAX_ANSWER_TOKENS = 30


@dataclass(frozen=True)
class WindowScores:
    """The highest logits of one window's row: positions and logits [NUM_BEST] of first and last tokens."""

    window: Window
    context_position: int
    """Position in the row of the window's first token."""
    first_positions: np.ndarray
    first_logits: np.ndarray
    last_positions: np.ndarray
    last_logits: np.ndarray
    null_logit: float
    """Of <cls> as the first and the last token together: that the answer is not in this window."""


@dataclass(frozen=True)
class Span:
    logit: float
    first: int
    last: int
    """Tokens of the context, both within the answer."""


def spans(windows: list[WindowScores]) -> Iterator[Span]:
    """Every span that may be the answer, over all windows together, the likeliest first.

    Its tokens are of the context, at most MAX_ANSWER_TOKENS, and its first has its maximal context in that window.
    """
    found = [_spans_of_window(window) for window in windows]
    logits, firsts, lasts = (np.concatenate(column) for column in zip(*found, strict=True))
    for index in np.argsort(-logits, kind="stable"):
        yield Span(float(logits[index]), int(firsts[index]), int(lasts[index]))


def best_answer(windows: list[WindowScores], context: str, token_ranges: np.ndarray) -> tuple[str, float]:
    """The text of the likeliest span that is not blank, cut from the context, and the odds of no answer against it.

    The odds are the least of the windows' null logits less the span's logit. Where there is no span, the answer is ""
    with even odds, since it says already that there is no answer.
    """
    null_logit = min(window.null_logit for window in windows)
    for span in spans(windows):
        text = context[token_ranges[span.first, 0] : token_ranges[span.last, 1]].strip()
        if text:
            return text, null_logit - span.logit
    return "", 0.0


def _spans_of_window(scores: WindowScores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logits, first tokens and last tokens of the window's spans, three arrays of one length."""
    window = scores.window
    firsts = scores.first_positions - scores.context_position + window.first
    lasts = scores.last_positions - scores.context_position + window.first
    may_begin = (window.first_maximal <= firsts) & (firsts < window.stop_maximal)
    may_end = (window.first <= lasts) & (lasts < window.stop)
    lengths = lasts[None, :] - firsts[:, None] + 1
    pairs = np.nonzero(may_begin[:, None] & may_end[None, :] & (lengths >= 1) & (lengths <= MAX_ANSWER_TOKENS))
    logits = scores.first_logits[pairs[0]] + scores.last_logits[pairs[1]]
    return logits, firsts[pairs[0]], lasts[pairs[1]]
