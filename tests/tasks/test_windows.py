"""Windows over long contexts and maximal context, against BERT's rule written out token by token."""

import numpy as np
import pytest

from gmlp_scale.tasks.windows import answer_tokens, cut_windows


def maximal_by_hand(spans: list[tuple[int, int]], token: int) -> int:
    """The window in which `token` has its maximal context (run_squad.py of BERT, _check_is_max_context)."""
    best_score, best = None, None
    for number, (first, stop) in enumerate(spans):
        if not first <= token < stop:
            continue
        score = min(token - first, stop - 1 - token) + 0.01 * (stop - first)
        if best_score is None or score > best_score:
            best_score, best = score, number
    return best


@pytest.mark.parametrize(
    "capacity, stride", [(445, 128), (61, 128), (125, 128), (128, 128), (50, 7), (300, 299), (1, 1)]
)
@pytest.mark.parametrize("num_tokens", [1, 2, 50, 61, 127, 128, 129, 445, 446, 573, 574, 1000, 1999, 2000])
def test_windows_and_maximal_context(num_tokens, capacity, stride):
    if num_tokens > 600 and capacity == 1:
        num_tokens = 600  # one window a token is slow by hand
    windows = cut_windows(num_tokens, capacity, stride)
    spans = [(window.first, window.stop) for window in windows]
    # BERT's loop: on by the stride (or the window, where that is less) until the last token is in
    first, expected = 0, []
    while True:
        expected.append((first, min(first + capacity, num_tokens)))
        if expected[-1][1] == num_tokens:
            break
        first += min(capacity, stride)
    assert spans == expected
    chosen = [maximal_by_hand(spans, token) for token in range(num_tokens)]
    for number, window in enumerate(windows):
        by_hand = [token for token, best in enumerate(chosen) if best == number]
        assert list(range(window.first_maximal, window.stop_maximal)) == by_hand


def test_a_row_of_512_tokens_by_hand():
    # A question of 10 tokens leaves 512 - 10 - 3 = 499.
    windows = cut_windows(700, 499, 128)
    assert [(w.first, w.stop) for w in windows] == [(0, 499), (128, 627), (256, 700)]
    # Midway between the centres 249 and 377 is token 313, where the contexts are equal and the first window has it.
    # The last window is shorter, with its centre at 477.5: right of token 441 it is the better of the last two.
    assert [(w.first_maximal, w.stop_maximal) for w in windows] == [(0, 314), (314, 442), (442, 700)]


def test_answer_tokens_hold_every_character_of_the_answer():
    ranges = np.array([[0, 3], [3, 4], [3, 4], [4, 9], [9, 10]])  # two tokens share character 3
    assert answer_tokens(ranges, 0, 3) == (0, 0)
    assert answer_tokens(ranges, 3, 4) == (1, 2)
    assert answer_tokens(ranges, 2, 5) == (0, 3)
    assert answer_tokens(ranges, 5, 6) == (3, 3)
    assert answer_tokens(ranges, 9, 10) == (4, 4)
