"""Staging buffers: the copies in host memory that a save writes from while training goes on."""

import torch
from torch import Tensor

from gmlp_scale.engine import Engine, Piece


class StagingBuffers:
    """One rank's, allocated at its first save. Later saves use them again."""

    def __init__(self):
        self._buffers: dict[str, Tensor] = {}

    def copy(self, engine: Engine) -> dict[str, Piece]:
        """Copies this rank's pieces of the engine's state, and returns once that is done.

        The buffers of pieces on a GPU are pinned.
        """
        pieces, gpu = {}, None
        for key, piece in engine.state():
            source = piece.tensor.detach()
            assert source.dtype == torch.float32 and source.shape[1:] == piece.shape[1:], key
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != source.shape:
                buffer = torch.empty(source.shape, dtype=torch.float32, device="cpu", pin_memory=source.is_cuda)
                self._buffers[key] = buffer
            buffer.copy_(source, non_blocking=True)
            gpu = source.device if source.is_cuda else gpu
            pieces[key] = Piece(buffer, piece.shape, piece.first)
        if gpu is not None:
            torch.cuda.current_stream(gpu).synchronize()
        return pieces
