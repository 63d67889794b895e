"""How a long context is cut into windows, and how their logits give one answer, as BERT's code for SQuAD does it.

Pure functions of token numbers and logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

MAX_QUESTION_TOKENS = 64
"""A longer question loses its end."""


NUM_BEST = 20
"""First and last positions that are paired in each window."""
MAX_ANSWER_TOKENS = 30


@dataclass(frozen=True)
class Window:
    """Tokens [first, stop) of a context; of them [first_maximal, stop_maximal) have their maximal context here.

    A token's context in a window is the lesser of the numbers of tokens to its left and right; of all windows that
    hold it the one with the most (and then the longest, and then the first) gives it its maximal context, so that each
    token is for one window to answer with. The tokens of a window that have it there are neighbours, or none.
    """

    first: int
    stop: int
    first_maximal: int
    stop_maximal: int


def cut_windows(num_tokens: int, capacity: int, stride: int) -> list[Window]:
    """Windows of at most `capacity` tokens, each `stride` on from the one before, until the last token is in."""
    assert num_tokens > 0 and capacity > 0 and stride > 0
    bounds = [(0, min(capacity, num_tokens))]
    while bounds[-1][1] < num_tokens:
        first = bounds[-1][0] + min(stride, capacity)
        bounds.append((first, min(first + capacity, num_tokens)))
    tokens = np.arange(num_tokens)
    contexts = np.stack([_contexts(tokens, first, stop) for first, stop in bounds])
    chosen = contexts.argmax(axis=0)  # the first of equals
    windows = []
    for number, (first, stop) in enumerate(bounds):
        maximal = np.flatnonzero(chosen == number)
        windows.append(Window(first, stop, *((maximal[0], maximal[-1] + 1) if len(maximal) else (first, first))))
    return windows


def answer_tokens(token_ranges: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """The first and the last token that hold a character of [start, stop), the tokens' ranges [T, 2] in order."""
    first = np.searchsorted(token_ranges[:, 1], start, side="right")
    last = np.searchsorted(token_ranges[:, 0], stop, side="left") - 1
    return int(first), int(last)


def _contexts(tokens: np.ndarray, first: int, stop: int) -> np.ndarray:
    context = np.minimum(tokens - first, stop - 1 - tokens) + 0.01 * (stop - first)
    return np.where((first <= tokens) & (tokens < stop), context, -np.inf)


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
