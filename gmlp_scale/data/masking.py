"""BERT's masks, a pure function of (seed, epoch, row index, position). Shapes: B batch, N positions, M masked ones."""

import numpy as np
import torch

from gmlp_scale.data.batch import IGNORED, OUR_SPECIAL_IDS, MaskedBatch, SpecialIds
from gmlp_scale.data.hashing import hash64, mix64

_MASKS = 3  # the first word of a mask's key; order.py begins its keys with 1 and 2
# A draw is one of 2**32 numbers: those below _MASK_BELOW mask, the next _RANDOM_DRAWS put a random token.
_MASK_BELOW, _RANDOM_DRAWS, _LAST_DRAW = (np.uint32(round(share * (2**32 - 1))) for share in (0.8, 0.1, 1))
_TOP_BIT = np.uint32(1 << 31)
_LOW_32_BITS = np.uint64(2**32 - 1)
_ROWS_AT_A_TIME = 128  # keeps the temporary arrays in the processor's cache


def mask_rows(
    rows_BN: np.ndarray,
    epochs_B: np.ndarray,
    row_indices_B: np.ndarray,
    *,
    seed: int | np.ndarray,
    num_masked: int,
    vocab_size: int,
    special: SpecialIds = OUR_SPECIAL_IDS,
) -> MaskedBatch:
    """Choose `num_masked` positions of each row and mask them.

    Special tokens are never chosen. 80 % of the chosen tokens become <mask>, 10 % a uniformly random ordinary token,
    and 10 % stay (Devlin et al. 2018, which the paper follows); all have labels. A row with fewer than `num_masked`
    ordinary tokens fills the other slots with positions of special tokens, unchanged and labelled IGNORED.

    rows_BN: uint16 or uint32 [B, N]. epochs_B, row_indices_B (in the whole split): integers [B]. seed: one for all
    rows, or uint64 [B].
    """
    num_rows, num_positions = rows_BN.shape
    token_ids_BN = np.empty((num_rows, num_positions), np.int64)
    positions_BM, labels_BM = np.empty((2, num_rows, num_masked), np.int64)
    row_keys_B = hash64(_MASKS, seed, epochs_B, row_indices_B)
    for start in range(0, num_rows, _ROWS_AT_A_TIME):
        some = slice(start, start + _ROWS_AT_A_TIME)
        token_ids_BN[some] = rows_BN[some]
        positions_BM[some] = chosen_BM = _choose_positions(rows_BN[some], row_keys_B[some], num_masked, special)
        labels_BM[some] = _replace(token_ids_BN[some], chosen_BM, row_keys_B[some], vocab_size, special)
    return MaskedBatch(torch.from_numpy(token_ids_BN), torch.from_numpy(positions_BM), torch.from_numpy(labels_BM))


def _choose_positions(rows_BN: np.ndarray, row_keys_B: np.ndarray, num_masked: int, special: SpecialIds) -> np.ndarray:
    """The `num_masked` positions of each row with the smallest hashes, ascending, uint32 [B, M]; special tokens last.

    A key has a flag for special tokens in its top bit, a hash below it, and the position in its lowest bits, which
    makes keys distinct. Keys have only 32 bits because sorting them is most of the loader's work.
    """
    num_positions = rows_BN.shape[1]
    position_mask = np.uint32((1 << (num_positions - 1).bit_length()) - 1)
    positions_N = np.arange(num_positions, dtype=np.uint32)
    keys_BN = _hash32(positions_N, row_keys_B[:, None])
    keys_BN &= ~(position_mask | _TOP_BIT)
    keys_BN |= positions_N
    keys_BN[special.among(rows_BN)] |= _TOP_BIT
    smallest_BM = np.partition(keys_BN, num_masked - 1, axis=1)[:, :num_masked] & position_mask
    return np.sort(smallest_BM, axis=1)


def _replace(
    token_ids_BN: np.ndarray, positions_BM: np.ndarray, row_keys_B: np.ndarray, vocab_size: int, special: SpecialIds
) -> np.ndarray:
    """Put masks and random tokens into `token_ids_BN` at the chosen positions, uint32 [B, M]; return the labels."""
    flat_positions_BM = positions_BM + np.arange(len(token_ids_BN))[:, None] * token_ids_BN.shape[1]
    labels_BM = token_ids_BN.reshape(-1)[flat_positions_BM]
    draws_BM = _hash32(positions_BM, mix64(row_keys_B)[:, None])
    is_special_BM = special.among(labels_BM)
    draws_BM[is_special_BM] = _LAST_DRAW  # a draw that changes nothing
    replaced_BM = np.where(draws_BM < _MASK_BELOW, special.mask, labels_BM)
    # For a draw below _MASK_BELOW the unsigned difference is huge, so one comparison tests both ends of the range.
    is_random_BM = draws_BM - _MASK_BELOW < _RANDOM_DRAWS
    random_draws = (draws_BM[is_random_BM] - _MASK_BELOW).astype(np.int64)
    num_ordinary_ids = vocab_size - sum(stop - first for first, stop in special.ranges)
    ordinary = random_draws * num_ordinary_ids // int(_RANDOM_DRAWS)
    for first, stop in special.ranges:
        ordinary += (stop - first) * (ordinary >= first)
    replaced_BM[is_random_BM] = ordinary
    token_ids_BN.reshape(-1)[flat_positions_BM] = replaced_BM
    labels_BM[is_special_BM] = IGNORED
    return labels_BM


def _hash32(words_N: np.ndarray, keys_B1: np.ndarray) -> np.ndarray:
    """uint32 [B, N]: Wellons' lowbias32 of each word times 2**32 over the golden ratio.

    One half of the uint64 key is mixed in before the first round, the other half between the rounds.
    """
    state = (words_N * np.uint32(0x9E3779B9)) ^ (keys_B1 & _LOW_32_BITS).astype(np.uint32)
    shifted = state >> np.uint32(16)
    state ^= shifted
    state *= np.uint32(0x7FEB352D)
    np.right_shift(state, np.uint32(15), out=shifted)
    state ^= shifted
    state += (keys_B1 >> np.uint64(32)).astype(np.uint32)
    state *= np.uint32(0x846CA68B)
    np.right_shift(state, np.uint32(16), out=shifted)
    state ^= shifted
    return state
