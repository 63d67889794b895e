"""BERT's masks as a pure function of (seed, epoch, row, position).

Shape legend: B batch, N positions, M masked positions.
"""

import numpy as np
import torch

from gmlp_scale.data.batch import IGNORED, MASK_ID, NUM_SPECIAL_TOKENS, MaskedBatch
from gmlp_scale.data.hashing import hash64

_MASKS = 3  # first word of the keys of masks; 1 and 2 are the order's
_MASK_BELOW = np.uint64(round(0.8 * 2**32))
_RANDOM_BELOW = np.uint64(round(0.9 * 2**32))
_LOW_32_BITS = np.uint64(2**32 - 1)
_ROWS_AT_A_TIME = 64


def mask_rows(
    rows_BN: np.ndarray, epochs_B: np.ndarray, global_rows_B: np.ndarray, *, seed: int, num_masked: int, vocab_size: int
) -> MaskedBatch:
    """Choose `num_masked` positions of each row and mask them.

    Special tokens are never chosen. Of the chosen, 80 % become <mask>, 10 % a uniformly random ordinary token and 10 %
    stay (Devlin et al. 2018, which the paper follows); the labels cover all of them. A row with fewer than `num_masked`
    ordinary tokens fills the other slots with positions of special tokens, unchanged and labelled IGNORED.

    rows_BN: uint16 [B, N]. epochs_B, global_rows_B: integers [B].
    """
    num_rows, num_positions = rows_BN.shape
    row_keys_B = hash64(_MASKS, seed, epochs_B, global_rows_B)
    positions_BM = _choose_positions(rows_BN, row_keys_B, num_masked)
    flat_positions_BM = positions_BM + np.arange(num_rows)[:, None] * num_positions

    token_ids_BN = rows_BN.astype(np.int64)
    originals_BM = token_ids_BN.reshape(-1)[flat_positions_BM]
    ordinary_BM = originals_BM >= NUM_SPECIAL_TOKENS

    draws_BM = hash64(row_keys_B[:, None], positions_BM)
    kinds_BM = draws_BM >> np.uint64(32)
    num_ordinary_ids = np.uint64(vocab_size - NUM_SPECIAL_TOKENS)
    random_ids_BM = NUM_SPECIAL_TOKENS + (((draws_BM & _LOW_32_BITS) * num_ordinary_ids) >> np.uint64(32)).astype(int)
    replaced_BM = np.where(kinds_BM < _RANDOM_BELOW, random_ids_BM, originals_BM)
    replaced_BM[kinds_BM < _MASK_BELOW] = MASK_ID
    token_ids_BN.reshape(-1)[flat_positions_BM] = np.where(ordinary_BM, replaced_BM, originals_BM)

    labels_BM = np.where(ordinary_BM, originals_BM, IGNORED)
    return MaskedBatch(torch.from_numpy(token_ids_BN), torch.from_numpy(positions_BM), torch.from_numpy(labels_BM))


def _choose_positions(rows_BN: np.ndarray, row_keys_B: np.ndarray, num_masked: int) -> np.ndarray:
    """The `num_masked` positions of each row with the smallest hashes, ascending, int64 [B, M]; special tokens last.

    A key holds a flag for special tokens in its top bit, the position in its low bits, which makes keys distinct, and a
    hash between. 32 bits, worked on in place and a few rows at a time, because this is the loader's whole cost.
    """
    num_rows, num_positions = rows_BN.shape
    position_mask = np.uint32((1 << (num_positions - 1).bit_length()) - 1)
    positions_N = np.arange(num_positions, dtype=np.uint32)
    first_keys_B1 = (row_keys_B & _LOW_32_BITS).astype(np.uint32)[:, None]
    second_keys_B1 = (row_keys_B >> np.uint64(32)).astype(np.uint32)[:, None]
    chosen_BM = np.empty((num_rows, num_masked), np.int64)
    for start in range(0, num_rows, _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        keys_BN = _hash32(positions_N, first_keys_B1[rows], second_keys_B1[rows])
        keys_BN >>= np.uint32(1)
        keys_BN &= ~position_mask
        keys_BN |= positions_N
        keys_BN |= (rows_BN[rows] < NUM_SPECIAL_TOKENS).astype(np.uint32) << np.uint32(31)
        smallest_BM = np.partition(keys_BN, num_masked - 1, axis=1)[:, :num_masked] & position_mask
        chosen_BM[rows] = np.sort(smallest_BM, axis=1)
    return chosen_BM


def _hash32(words_N: np.ndarray, first_keys_B1: np.ndarray, second_keys_B1: np.ndarray) -> np.ndarray:
    """uint32 [B, N]: Wellons' lowbias32 of a word spread by the golden ratio, with a second key between its rounds."""
    state = (words_N * np.uint32(0x9E3779B9)) ^ first_keys_B1
    shifted = state >> np.uint32(16)
    state ^= shifted
    state *= np.uint32(0x7FEB352D)
    np.right_shift(state, np.uint32(15), out=shifted)
    state ^= shifted
    state += second_keys_B1
    state *= np.uint32(0x846CA68B)
    np.right_shift(state, np.uint32(16), out=shifted)
    state ^= shifted
    return state
