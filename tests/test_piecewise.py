"""Numbers that change at given steps, beside the sums that a loop over the steps finds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gmlp_scale.piecewise import Piecewise

lengths_and_values = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50)), min_size=1, max_size=4)


def piecewise(pieces: list[tuple[int, int]]) -> tuple[Piecewise, list[int]]:
    """Each value for its number of steps, the last for 20 more; and the number of every step."""
    starts = [sum(length for length, _ in pieces[:index]) for index in range(len(pieces))]
    of_steps = [value for length, value in pieces for _ in range(length)]
    changing = Piecewise([[start, value] for start, (_, value) in zip(starts, pieces, strict=True)])
    return changing, of_steps + [pieces[-1][1]] * 20


@settings(deadline=None, derandomize=True, max_examples=50)
@given(lengths_and_values, lengths_and_values, st.integers(0, 400))
def test_values_and_sums_are_those_of_a_loop_over_the_steps(pieces, others, total):
    changing, of_steps = piecewise(pieces)
    assert [changing.at(step) for step in range(len(of_steps))] == of_steps
    sums = [sum(of_steps[:step]) for step in range(len(of_steps) + 1)]
    assert [changing.before(step) for step in range(len(sums))] == sums
    if total < sums[-1]:
        assert changing.steps_within(total) == sum(of_all <= total for of_all in sums) - 1
    other, of_other = piecewise(others)
    products = [one * another for one, another in zip(of_steps, of_other, strict=False)]
    assert [changing.times(other).at(step) for step in range(len(products))] == products


def test_a_number_is_the_same_at_every_step_and_far_sums_are_at_once():
    same = Piecewise(256)
    assert (same.values, same.before(10**12), same.shown()) == ((256,), 256 * 10**12, "256")
    growing = Piecewise([[0, 1024], [10_000, 4096]])
    assert growing.before(10**12) == 10_000 * 1024 + (10**12 - 10_000) * 4096
    assert growing.map(lambda rows: rows // 2).shown() == "512, then 2,048 from step 10,000"
