import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gmlp_scale.data.batch import CLS_ID, IGNORED, MASK_ID, NUM_SPECIAL_TOKENS, SEP_ID, num_masked_positions
from gmlp_scale.data.masking import mask_rows

VOCAB_SIZE = 1000


def random_rows(num_rows, num_positions):
    rows = np.random.default_rng(0).integers(NUM_SPECIAL_TOKENS, VOCAB_SIZE, (num_rows, num_positions)).astype("<u2")
    rows[:, 0], rows[:, -1] = CLS_ID, SEP_ID
    return rows


def mask(rows, *, seed=0, epoch=0, first_row=0, num_masked=None):
    batch = mask_rows(
        rows,
        np.full(len(rows), epoch),
        np.arange(first_row, first_row + len(rows)),
        seed=seed,
        num_masked=num_masked or num_masked_positions(rows.shape[1]),
        vocab_size=VOCAB_SIZE,
    )
    return batch.token_ids_BN.numpy(), batch.masked_positions_BM.numpy(), batch.labels_BM.numpy()


def test_fixed_counts():
    assert (num_masked_positions(512), num_masked_positions(128)) == (77, 19)


@given(st.integers(2, 200), st.integers(1, 40), st.integers(0, 2**32), st.data())
def test_masks_are_sound_on_any_rows(num_positions, num_masked, seed, data):
    num_masked = min(num_masked, num_positions)
    num_rows = data.draw(st.integers(1, 6))
    rows = np.random.default_rng(seed).integers(0, 30, (num_rows, num_positions)).astype("<u2")
    before = rows.copy()
    token_ids, positions, labels = mask(rows, seed=seed, num_masked=num_masked)
    assert (rows == before).all()
    assert positions.shape == labels.shape == (num_rows, num_masked)
    assert (np.diff(positions, axis=1) > 0).all() and positions.min() >= 0 and positions.max() < num_positions
    for row in range(num_rows):
        originals = rows[row, positions[row]].astype(int)
        ordinary = originals >= NUM_SPECIAL_TOKENS
        assert (labels[row] == np.where(ordinary, originals, IGNORED)).all()
        assert ordinary.sum() == min(num_masked, (rows[row] >= NUM_SPECIAL_TOKENS).sum())
        changed = np.flatnonzero(token_ids[row] != rows[row])
        assert set(changed) <= set(positions[row][ordinary])
        new = token_ids[row, changed]
        assert ((new == MASK_ID) | ((new >= NUM_SPECIAL_TOKENS) & (new < VOCAB_SIZE))).all()


def test_masks_are_a_pure_function_of_seed_epoch_and_row():
    rows = random_rows(40, 128)
    whole = mask(rows)
    parts = [mask(rows[start : start + 7], first_row=start) for start in range(0, 40, 7)]
    for together, apart in zip(whole, zip(*parts, strict=True), strict=True):
        assert (together == np.concatenate(apart)).all()
    for other in (mask(rows, seed=1), mask(rows, epoch=1), mask(rows, first_row=40)):
        assert (whole[1] != other[1]).any(axis=1).all()


def test_masks_are_pinned():
    """A change of them would go on with other masks in a resumed run: it needs another checkpoint.FORMAT_VERSION."""
    rows = np.arange(5, 45).reshape(2, 20).astype("<u2")
    token_ids, positions, _ = mask(rows, num_masked=6, seed=3, epoch=2, first_row=10)
    assert positions.tolist() == [[2, 4, 7, 8, 15, 17], [1, 5, 6, 10, 12, 19]]
    assert token_ids[np.arange(2)[:, None], positions].tolist() == [[4, 4, 4, 4, 4, 4], [4, 4, 31, 4, 4, 4]]


def test_statistics():
    rows = random_rows(4000, 128)
    rows[:, 64] = CLS_ID
    token_ids, positions, labels = mask(rows)
    chosen = np.bincount(positions.reshape(-1), minlength=128)
    assert chosen[[0, 64, 127]].sum() == 0
    expected = 4000 * 19 / 125
    ordinary = np.delete(chosen, [0, 64, 127])
    assert abs(ordinary - expected).max() < 5.5 * np.sqrt(expected)
    chi_square = (((ordinary - expected) ** 2) / (expected * (1 - 19 / 125))).sum()
    assert 70 < chi_square < 190  # 124 degrees of freedom: mean 124, standard deviation 16

    new = np.take_along_axis(token_ids, positions, axis=1)
    is_mask, is_same = new == MASK_ID, new == labels
    is_random = ~is_mask & ~is_same
    assert abs(is_mask.mean() - 0.8) < 0.006
    assert abs(is_same.mean() - 0.1) < 0.005
    assert abs(is_random.mean() - 0.1) < 0.005
    drawn = np.bincount(new[is_random], minlength=VOCAB_SIZE)[NUM_SPECIAL_TOKENS:]
    assert (drawn > 0).mean() > 0.99 and drawn.max() < 30  # mean 7.6 of each id
    assert (np.diff(is_mask.astype(int), axis=1) == 0).mean() < 0.8  # neighbours are independent: 0.68


def test_neighbouring_rows_share_no_pattern():
    """Positions of two rows coincide as often as independent choices do: 19 * 19 / 125 = 2.9 times."""
    positions = mask(random_rows(2000, 128))[1]
    chosen = np.zeros((2000, 128), int)
    np.put_along_axis(chosen, positions, 1, axis=1)
    shared = (chosen[1:] * chosen[:-1]).sum(axis=1)
    assert abs(shared.mean() - 19 * 19 / 126) < 0.15
    shifted = (chosen[1:, 1:] * chosen[:-1, :-1]).sum(axis=1)
    assert abs(shifted.mean() - 19 * 19 / 126) < 0.15
