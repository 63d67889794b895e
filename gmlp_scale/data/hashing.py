"""The pseudo-random numbers behind the order and the masks. No release of NumPy can change them, or a run."""

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1


def mix64(values: np.ndarray) -> np.ndarray:
    """The bijection that ends each step of splitmix64 (Steele, Lea and Flood 2014): uint64 to uint64, elementwise."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def hash64(*words: int | np.ndarray) -> np.ndarray:
    """A uint64 hash of integers, each a number or an array, in their broadcast shape (at least one dimension)."""
    state = np.zeros(1, np.uint64)
    for word in words:
        if isinstance(word, int):
            word = np.array([word & _WORD], np.uint64)
        state = mix64((state ^ word.astype(np.uint64, copy=False)) + _GAMMA)
    return state


def permutation(num_items: int, *key: int) -> np.ndarray:
    """A permutation of range(num_items), int64, which the integers of `key` decide."""
    return np.argsort(hash64(*key, np.arange(num_items)), kind="stable")
