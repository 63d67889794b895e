"""Windows over long contexts, against BERT's rule written out token by token, and which span in them is the answer."""

import numpy as np
import pytest

from gmlp_scale.tasks.windows import NUM_BEST, Window, WindowScores, answer_tokens, best_answer, cut_windows, spans


def maximal_by_hand(bounds: list[tuple[int, int]], token: int) -> int:
    """The window in which `token` has its maximal context (run_squad.py of BERT, _check_is_max_context)."""
    contexts = {
        number: min(token - first, stop - 1 - token) + 0.01 * (stop - first)
        for number, (first, stop) in enumerate(bounds)
        if first <= token < stop
    }
    return max(contexts, key=contexts.get)  # the first of equals


@pytest.mark.parametrize(
    "capacity, stride", [(445, 128), (61, 128), (125, 128), (128, 128), (50, 7), (300, 299), (1, 1)]
)
@pytest.mark.parametrize("num_tokens", [1, 2, 50, 61, 127, 128, 129, 445, 446, 573, 574, 1000, 1999, 2000])
def test_windows_and_maximal_context(num_tokens, capacity, stride):
    if num_tokens > 600 and capacity == 1:
        num_tokens = 600  # one window a token is slow by hand
    windows = cut_windows(num_tokens, capacity, stride)
    bounds = [(window.first, window.stop) for window in windows]
    # BERT's loop: on by the stride (or the window, where that is less) until the last token is in
    first, expected = 0, [(0, min(capacity, num_tokens))]
    while expected[-1][1] < num_tokens:
        first += min(capacity, stride)
        expected.append((first, min(first + capacity, num_tokens)))
    assert bounds == expected
    chosen = [maximal_by_hand(bounds, token) for token in range(num_tokens)]
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
    answers = {(0, 3): (0, 0), (3, 4): (1, 2), (2, 5): (0, 3), (5, 6): (3, 3), (9, 10): (4, 4)}
    assert {characters: answer_tokens(ranges, *characters) for characters in answers} == answers


# A context of 60 tokens, each of which is a blank and a letter: token t holds characters [2t, 2t + 2).
CONTEXT = "".join(f" {chr(ord('a') + token % 26)}" for token in range(60))
RANGES = np.array([[2 * token, 2 * token + 2] for token in range(60)])
WHOLE = Window(0, 60, 0, 60)


def scored(window: Window, first: dict[int, float], last: dict[int, float], null_logit: float = 0.0, position=5):
    """Window scores with these logits for tokens of the context; all else is <cls> with -100."""
    columns = []
    for logits in (first, last):
        missing = NUM_BEST - len(logits)
        columns.append(np.array([token - window.first + position for token in logits] + [0] * missing))
        columns.append(np.array([*logits.values()] + [-100.0] * missing))
    return WindowScores(window, position, np.concatenate([*columns, [null_logit]]))


def answered(windows, context=CONTEXT, ranges=RANGES) -> tuple[str, float]:
    """The text of the best answer and the odds against it."""
    start, stop, odds = best_answer(windows, context, ranges)
    return context[start:stop], odds


def test_the_likeliest_span_wins_and_is_cut_by_characters():
    windows = [scored(WHOLE, {3: 5.0, 10: 4.0}, {5: 3.0, 12: 4.5}, null_logit=2.0)]
    # 3-5: 8; 3-12: 9.5; 10-12: 8.5; 10-5 runs backwards
    assert [(s.logit, s.first, s.last) for s in spans(windows)] == [(9.5, 3, 12), (8.5, 10, 12), (8.0, 3, 5)]
    assert answered(windows) == ("d e f g h i j k l m", 2.0 - 9.5)


def test_a_span_has_at_most_thirty_tokens_which_are_in_its_window():
    assert [s.last for s in spans([scored(WHOLE, {0: 1.0}, {29: 1.0, 30: 9.0})])] == [29]
    window = scored(Window(10, 20, 10, 20), {8: 9.0, 12: 1.0, 20: 9.0}, {7: 9.0, 14: 1.0, 20: 9.0})
    assert [(s.first, s.last) for s in spans([window])] == [(12, 14)]


def test_a_span_begins_where_its_token_has_maximal_context_and_may_end_beyond():
    left = scored(Window(0, 30, 0, 20), {19: 1.0, 25: 9.0}, {28: 1.0})
    right = scored(Window(10, 40, 20, 40), {19: 9.0, 25: 2.0}, {28: 1.0})
    assert [(s.logit, s.first, s.last) for s in spans([left, right])] == [(3.0, 25, 28), (2.0, 19, 28)]


def test_null_logit_is_the_least_over_windows():
    left = scored(Window(0, 30, 0, 20), {1: 1.0}, {2: 1.0}, null_logit=7.0)
    right = scored(Window(10, 40, 20, 40), {21: 2.0}, {22: 2.0}, null_logit=-3.0)
    assert answered([left, right]) == ("v w", -3.0 - 4.0)


def test_a_blank_span_is_no_answer_and_there_may_be_none():
    windows = [scored(Window(0, 3, 0, 3), {1: 5.0, 2: 1.0}, {1: 5.0, 2: 1.0})]
    found = answered(windows, "ab   cd", np.array([[0, 2], [2, 5], [5, 7]]))
    assert found == ("cd", -6.0)  # 1-1 (10) is blank, 1-2 (6) is "   cd"
    assert answered([scored(WHOLE, {5: 1.0}, {3: 1.0}, null_logit=4.0)]) == ("", 0.0)
