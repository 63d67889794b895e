"""How a long context is cut into windows, and how the logits of its windows give one answer, as in BERT's run_squad.py.

A token is given by its index in the context, from 0. Shape suffixes: B batch, N positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gmlp_scale.data.batch import CLS_ID, PAD_ID, SEP_ID

MAX_QUESTION_TOKENS = 64
"""A longer question loses its end."""
MAX_ANSWER_TOKENS = 30
NUM_BEST = 20
"""In each window this many of the likeliest first tokens are paired with as many last tokens."""
SUMMARY_SIZE = 4 * NUM_BEST + 1


@dataclass(frozen=True)
class Window:
    """Tokens [first, stop) of a context, of which [first_maximal, stop_maximal) have their maximal context here.

    Windows overlap, but a token may begin an answer in only one of them: where its context is maximal. The context is
    the number of tokens to its left or to its right in the window, whichever is less, plus a hundredth of the window's
    length. Of equal windows the first counts.
    """

    first: int
    stop: int
    first_maximal: int
    stop_maximal: int


def cut_windows(num_tokens: int, capacity: int, stride: int) -> list[Window]:
    """Windows of at most `capacity` tokens, each `stride` tokens after the one before, until the last token is in."""
    assert num_tokens > 0 and capacity > 0 and stride > 0
    bounds = [(0, min(capacity, num_tokens))]
    while bounds[-1][1] < num_tokens:
        first = bounds[-1][0] + min(stride, capacity)
        bounds.append((first, min(first + capacity, num_tokens)))
    greatest, chosen = np.full(num_tokens, -np.inf), np.zeros(num_tokens, int)
    for number, (first, stop) in enumerate(bounds):
        places = np.arange(stop - first)
        contexts = np.minimum(places, places[::-1]) + 0.01 * (stop - first)
        is_greater = contexts > greatest[first:stop]  # the first of equals stays
        greatest[first:stop][is_greater], chosen[first:stop][is_greater] = contexts[is_greater], number
    windows = []
    for number, (first, stop) in enumerate(bounds):
        maximal = first + np.flatnonzero(chosen[first:stop] == number)
        windows.append(Window(first, stop, *((maximal[0], maximal[-1] + 1) if len(maximal) else (first, first))))
    return windows


def window_rows(
    question_ids: Sequence[int], context_ids: Sequence[int], row_length: int, stride: int
) -> tuple[int, list[tuple[Window, np.ndarray]]]:
    """The rows `<cls> question <sep> window <sep>` of a question, one for each window of its context.

    Returns the position in each row of its window's first token, and the windows with their rows, int64 [row_length].
    """
    start = np.concatenate([[CLS_ID], question_ids[:MAX_QUESTION_TOKENS], [SEP_ID]]).astype(np.int64)
    rows = []
    for window in cut_windows(len(context_ids), row_length - len(start) - 1, stride):
        ids = np.concatenate([start, context_ids[window.first : window.stop], [SEP_ID]])
        rows.append((window, np.pad(ids, (0, row_length - len(ids)), constant_values=PAD_ID)))
    return len(start), rows


def answer_tokens(token_ranges: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """The first and the last token that hold one of the characters [start, stop).

    token_ranges: [T, 2], the characters [start, stop) of each token, in order.
    """
    first = np.searchsorted(token_ranges[:, 1], start, side="right")
    last = np.searchsorted(token_ranges[:, 0], stop, side="left") - 1
    return int(first), int(last)


def summarize(logits_BN2: Tensor) -> Tensor:
    """What the choice of the answer needs of each row's logits, [B, SUMMARY_SIZE].

    The positions and the logits of the likeliest first tokens, the same of the last tokens, and the sum of both logits
    at <cls>, which stands for "the answer is not in this window".
    """
    columns = []
    for logits_BN in logits_BN2.unbind(-1):
        # A row with fewer than NUM_BEST positions is filled up with -inf at <cls>, which is in no span.
        top = logits_BN.topk(min(NUM_BEST, logits_BN.shape[1]))
        missing = (0, NUM_BEST - top.values.shape[1])
        columns.append(torch.nn.functional.pad(top.indices.float(), missing))
        columns.append(torch.nn.functional.pad(top.values, missing, value=-torch.inf))
    return torch.cat([*columns, logits_BN2[:, 0].sum(-1, keepdim=True)], dim=1)


@dataclass(frozen=True)
class WindowScores:
    window: Window
    context_position: int
    """Position in the row of the window's first token."""
    summary: np.ndarray
    """What `summarize` gives of the window's row."""


@dataclass(frozen=True)
class Span:
    logit: float
    first: int
    last: int
    """The first and the last token of the answer."""


def spans(windows: list[WindowScores]) -> Iterator[Span]:
    """Every span of all windows that may be the answer, the likeliest first.

    A span has at most MAX_ANSWER_TOKENS tokens, all in its window's part of the context, and its first token has its
    maximal context in that window.
    """
    found = [_spans_of_window(window) for window in windows]
    logits, firsts, lasts = (np.concatenate(column) for column in zip(*found, strict=True))
    for index in np.argsort(-logits, kind="stable"):
        yield Span(float(logits[index]), int(firsts[index]), int(lasts[index]))


def best_answer(windows: list[WindowScores], context: str, token_ranges: np.ndarray) -> tuple[int, int, float]:
    """The characters [start, stop) of the likeliest span that is not blank, and the odds of no answer against it.

    The characters are without the blanks around them. The odds are the least null logit of all windows minus the span's
    logit. If there is no span, the answer is (0, 0) with odds 0, since "" already says that there is no answer.
    """
    null_logit = min(float(window.summary[-1]) for window in windows)
    for span in spans(windows):
        start, stop = int(token_ranges[span.first, 0]), int(token_ranges[span.last, 1])
        if text := context[start:stop].strip():
            start = context.index(text, start)
            return start, start + len(text), null_logit - span.logit
    return 0, 0, 0.0


def _spans_of_window(scores: WindowScores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, first tokens and last tokens of the window's spans, three arrays of equal length."""
    window = scores.window
    first_positions, first_logits, last_positions, last_logits = scores.summary[:-1].reshape(4, NUM_BEST)
    firsts = first_positions - scores.context_position + window.first
    lasts = last_positions - scores.context_position + window.first
    may_begin = (window.first_maximal <= firsts) & (firsts < window.stop_maximal)
    may_end = (window.first <= lasts) & (lasts < window.stop)
    lengths = lasts[None, :] - firsts[:, None] + 1
    pairs = np.nonzero(may_begin[:, None] & may_end[None, :] & (lengths >= 1) & (lengths <= MAX_ANSWER_TOKENS))
    logits = first_logits[pairs[0]] + last_logits[pairs[1]]
    return logits, firsts[pairs[0]], lasts[pairs[1]]
