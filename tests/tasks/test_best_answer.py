"""From logits to an answer: which spans may be one, and pooling over windows."""

import numpy as np

from gmlp_scale.tasks.windows import NUM_BEST, Window, WindowScores, best_answer, spans

# A context of 60 tokens, each of which is a blank and a letter: token t holds characters [2t, 2t + 2).
CONTEXT = "".join(f" {chr(ord('a') + token % 26)}" for token in range(60))
RANGES = np.array([[2 * token, 2 * token + 2] for token in range(60)])


def scored(window: Window, first: dict[int, float], last: dict[int, float], null_logit: float = 0.0, position=5):
    """Window scores with these logits for tokens of the context; all else is <cls> with -100."""
    columns = []
    for logits in (first, last):
        missing = NUM_BEST - len(logits)
        columns.append(np.array([token - window.first + position for token in logits] + [0] * missing))
        columns.append(np.array([*logits.values()] + [-100.0] * missing))
    return WindowScores(window, position, *columns, null_logit)


WHOLE = Window(0, 60, 0, 60)


def test_the_likeliest_span_wins_and_is_cut_by_characters():
    windows = [scored(WHOLE, {3: 5.0, 10: 4.0}, {5: 3.0, 12: 4.5}, null_logit=2.0)]
    # 3-5: 8; 3-12: 9.5; 10-12: 8.5; 10-5 runs backwards
    assert [(s.logit, s.first, s.last) for s in spans(windows)] == [(9.5, 3, 12), (8.5, 10, 12), (8.0, 3, 5)]
    assert best_answer(windows, CONTEXT, RANGES) == ("d e f g h i j k l m", 2.0 - 9.5)


def test_answers_have_at_most_thirty_tokens():
    assert [s.last for s in spans([scored(WHOLE, {0: 1.0}, {29: 1.0, 30: 9.0})])] == [29]


def test_positions_outside_the_window_are_no_answer():
    windows = [scored(Window(10, 20, 10, 20), {8: 9.0, 12: 1.0, 20: 9.0}, {7: 9.0, 14: 1.0, 20: 9.0})]
    assert [(s.first, s.last) for s in spans(windows)] == [(12, 14)]


def test_a_span_begins_where_its_token_has_maximal_context_and_may_end_beyond():
    left = scored(Window(0, 30, 0, 20), {19: 1.0, 25: 9.0}, {28: 1.0})
    right = scored(Window(10, 40, 20, 40), {19: 9.0, 25: 2.0}, {28: 1.0})
    assert [(s.logit, s.first, s.last) for s in spans([left, right])] == [(3.0, 25, 28), (2.0, 19, 28)]


def test_null_logit_is_the_least_over_windows():
    windows = [
        scored(Window(0, 30, 0, 20), {1: 1.0}, {2: 1.0}, null_logit=7.0),
        scored(Window(10, 40, 20, 40), {21: 2.0}, {22: 2.0}, null_logit=-3.0),
    ]
    assert best_answer(windows, CONTEXT, RANGES) == ("v w", -3.0 - 4.0)


def test_blank_text_is_no_answer():
    context = "ab   cd"
    ranges = np.array([[0, 2], [2, 5], [5, 7]])
    windows = [scored(Window(0, 3, 0, 3), {1: 5.0, 2: 1.0}, {1: 5.0, 2: 1.0})]
    assert best_answer(windows, context, ranges) == ("cd", -6.0)  # 1-1 (10) is blank, 1-2 (6) is "   cd"


def test_no_span_at_all():
    assert best_answer([scored(WHOLE, {5: 1.0}, {3: 1.0}, null_logit=4.0)], CONTEXT, RANGES) == ("", 0.0)
