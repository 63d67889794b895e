import torch
from torch.distributed.tensor import DTensor

from gmlp_scale.distributed.world import start_world
from gmlp_scale.engine import Fsdp2Config
from tests.engine.trained_engines import GMLP, start_engine, train


def test_a_step_records_nothing_for_autograd_and_lists_no_parameters(monkeypatch):
    """DTensor's share of both was two thirds of a step with 144 blocks."""
    recorded = []
    to_local = DTensor.to_local

    def watched(tensor, **options):
        recorded.append(torch.is_grad_enabled())
        return to_local(tensor, **options)

    with start_world(60, "cpu", init_group=True) as world:
        engine = start_engine(world, GMLP, Fsdp2Config())
        train(engine, world, 0, 1)
        monkeypatch.setattr(DTensor, "to_local", watched)
        monkeypatch.setattr(engine.module, "named_parameters", None)
        train(engine, world, 1, 2)
        engine.close()
    assert recorded and not any(recorded)
