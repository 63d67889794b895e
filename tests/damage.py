"""Damage as disks and copies do it."""

import random


def flipped(good: bytes, position: int, bit: int = 0) -> bytes:
    """One bit flipped in the byte at `position`."""
    bad = bytearray(good)
    bad[position] ^= 1 << bit
    return bytes(bad)


def damaged(draw: random.Random, good: bytes, position: int) -> bytes:
    """One bit flipped or one byte zeroed at `position`, the rest from there cut off, or a byte too many at the end."""
    bad = bytearray(good)
    kind = draw.choice(["flip", "zero", "cut", "append"])
    if kind == "cut":
        del bad[position:]
    elif kind == "append":
        bad += bytes(1)
    elif kind == "zero" and bad[position]:
        bad[position] = 0
    else:
        bad[position] ^= 1 << draw.randrange(8)
    return bytes(bad)
