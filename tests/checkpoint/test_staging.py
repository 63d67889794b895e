"""Staging buffers: what a save writes from."""

import torch

from gmlp_scale.checkpoint.pieces import StagingBuffers
from tests.checkpoint.fake_engine import SHAPES, FakeEngine


def test_buffers_hold_a_copy_and_are_used_again():
    staging, addresses = StagingBuffers(), []
    for step in (1, 2):
        engine = FakeEngine(seed=step)
        pieces = staging.copy(engine)
        assert pieces.keys() == SHAPES.keys()
        for key, piece in pieces.items():
            assert torch.equal(piece.tensor, engine.tensors[key]) and piece.shape == SHAPES[key]
            assert piece.tensor.data_ptr() != engine.tensors[key].data_ptr()
        addresses.append({key: piece.tensor.data_ptr() for key, piece in pieces.items()})
    assert addresses[0] == addresses[1]
