"""How a long context is cut into windows, as BERT's code for SQuAD does it: pure functions of token numbers."""

from dataclasses import dataclass

import numpy as np

MAX_QUESTION_TOKENS = 64
"""A longer question loses its end."""


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
