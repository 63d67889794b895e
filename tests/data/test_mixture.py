import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmlp_scale.data.mixture import Mixture, Pattern, SourceConfig, mixture_mistakes, source_seed, with_names
from gmlp_scale.piecewise import Piecewise

weights = st.lists(st.one_of(st.integers(1, 40), st.sampled_from([0.1, 0.25, 2.5])), min_size=1, max_size=8)


@st.composite
def changing_sources(draw) -> list[SourceConfig]:
    """The first is always there; the others may start late and end early."""
    sources = [SourceConfig(shards="a", weight=draw(st.integers(1, 5)))]
    for name in draw(st.sampled_from(["", "b", "bc", "bcd"])):
        start, weight = draw(st.integers(0, 6)), draw(st.sampled_from([0.5, 1, 3]))
        end = draw(st.none() | st.integers(start + 1, 9))
        sources.append(SourceConfig(shards=name, weight=weight, from_step=start, until_step=end))
    return sources


@settings(max_examples=40)
@given(weights)
def test_each_source_has_its_share_to_one_row_after_any_number_of_rows(weights):
    sources, rows_before = Pattern(weights).locate(np.arange(3000))
    counts = np.cumsum(np.arange(len(weights)) == sources[:, None], axis=0)
    shares = np.array(weights) / sum(weights)
    assert np.abs(counts - np.arange(1, 3001)[:, None] * shares).max() < 1
    for source in range(len(weights)):
        assert (rows_before[sources == source] == np.arange(counts[-1, source])).all()


@settings(max_examples=40)
@given(weights, st.integers(0, 10**12), st.data())
def test_a_pattern_is_known_at_any_row(weights, start, data):
    pattern = Pattern(weights)
    sources, rows_before = pattern.locate(np.arange(start, start + 50))
    for length in (0, 1, 50):
        expected = pattern.counts(start) + np.bincount(sources[:length], minlength=len(weights))
        assert (pattern.counts(start + length) == expected).all()
    assert (rows_before[:1] == pattern.counts(start)[sources[0]]).all()
    in_stock = data.draw(st.lists(st.integers(0, 500), min_size=len(weights), max_size=len(weights)))
    num_rows = pattern.num_rows_of(in_stock)
    assert (pattern.counts(num_rows) <= in_stock).all() and not (pattern.counts(num_rows + 1) <= in_stock).all()


@settings(max_examples=50)
@given(changing_sources(), st.integers(1, 7), st.integers(1, 7), st.integers(1, 9), st.sampled_from([1, 2, 4]))
def test_a_mixture_is_the_same_on_any_number_of_ranks_and_from_any_step(
    sources, rows_per_rank, later_rows_per_rank, change, world_size
):
    batch_sizes = Piecewise([(0, rows_per_rank * world_size), (change, later_rows_per_rank * world_size)])
    walked, counts = Mixture(sources, batch_sizes), np.zeros(len(sources), np.int64)
    for step in range(12):
        jumped = Mixture(sources, batch_sizes)
        assert (jumped.counts(step) == counts).all()
        positions = np.arange(batch_sizes.before(step), batch_sizes.before(step + 1))
        chosen, rows = walked.locate(positions)
        by_rank = [jumped.locate(part) for part in np.split(positions, world_size)]
        assert (np.concatenate([part[0] for part in by_rank]) == chosen).all()
        assert (np.concatenate([part[1] for part in by_rank]) == rows).all()
        assert all(sources[source].is_active(step) for source in chosen)
        for source in range(len(sources)):  # each goes on where it stood, through all changes of the others
            own = rows[chosen == source]
            assert (own == np.arange(counts[source], counts[source] + len(own))).all()
            counts[source] += len(own)


def test_the_pattern_is_pinned():
    """Numbers of this code's first version: a change of them would break the resume of every mixture."""
    assert Pattern([0.5, 0.3, 0.2]).locate(np.arange(12))[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1]
    assert [source_seed(7, place) for place in range(3)] == [7, 5248728172263328216, 1895855718835143124]


@pytest.mark.parametrize(
    "sources, names",
    [
        (["data/own/shards", "data/compare/shards"], ["own/shards", "compare/shards"]),
        (["x/a", "s3://bucket/b/?version", "b"], ["a", "bucket/b", "b"]),
        (
            ["s3://one/c4/shards", "s3://two/c4/shards", "books/shards"],
            ["one/c4/shards", "two/c4/shards", "books/shards"],
        ),
        (["own/shards=mine", "compare/shards"], ["mine", "shards"]),
    ],
)
def test_a_name_is_as_much_of_the_path_as_tells_the_sources_apart(sources, names):
    given = [source.partition("=") for source in sources]
    configs = [SourceConfig(shards=shards, weight=1, name=name or None) for shards, _, name in given]
    assert [source.name for source in with_names(configs)] == names
    assert [("name" in config.model_dump()) for config in configs] == ["=" in source for source in sources]


def test_mistakes_in_a_mixture_are_said_in_words():
    def said(*sources: dict) -> str:
        named = with_names([SourceConfig(**source) for source in sources])
        return "\n".join(mixture_mistakes(named, num_steps=20))

    a, b = {"shards": "x/a", "weight": 1}, {"shards": "s3://bucket/b/", "weight": 0.5}
    assert not said(a, b | {"from_step": 3, "until_step": 19})
    assert "found 2 sources named x/a; needed: other folders, or another `name`" in said(a, a | {"shards": "x//a/"})
    assert "found 2 sources named a; needed" in said(a | {"name": "a"}, b | {"name": "a"})
    assert "b has from_step 20; needed: below train.num_steps = 20" in said(a, b | {"from_step": 20})
    assert "b has until_step 20; needed: above from_step = 0 and below" in said(a, b | {"until_step": 20})
    assert "no source has rows for step 5" in said(a | {"until_step": 5}, b | {"from_step": 6})
    assert "no source has rows for step 0" in said()
    assert "whole only after 1,123,457 rows" in said(a, b | {"weight": 0.123457})
