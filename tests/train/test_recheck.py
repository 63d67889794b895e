"""A rank that computes wrongly is found, and a run that rechecks is the run that does not."""

import itertools
import socket

import pytest
import torch

from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.engine.computing import compute_repeatably
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train import loop
from gmlp_scale.train.recheck import RecheckError, checksum, recheck
from gmlp_scale.train.run import pretrain
from tests.engine.trained_engines import (
    AMLP,
    BERT,
    ENGINES,
    SHARDED_BUT_ZERO_3,
    SINGLE,
    micro_batches_of,
    start_engine,
    train,
)
from tests.gloo_ranks import run_ranks
from tests.whole_runs import RECIPE, SMOKE, losses

BITS = (0, 5, 15)  # of a 2-byte or 4-byte number: also the one that changes it least


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def weights(request):
    return [torch.randn(7, 5).to(request.param), torch.randn(3).to(request.param)]


def _flip(tensor: torch.Tensor, index: int, bit: int) -> None:
    integers = tensor.detach().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).view(-1)
    integers[index] ^= (1 << bit) if bit < 15 else -(1 << 15)


def test_every_single_bit_changes_the_checksum(weights):
    before = checksum(weights)
    for tensor in weights:
        for index, bit in itertools.product(range(tensor.numel()), range(16)):
            _flip(tensor, index, bit)
            assert checksum(weights) != before
            _flip(tensor, index, bit)
    assert checksum(weights) == before


def _train_with_rechecks(engine_configs: dict) -> dict:
    """By engine and precision: the norms without and with rechecks, and the messages of injected faults."""
    results = {}
    with start_world(60, "cpu", init_group=True) as world:
        for name, precision in itertools.product(engine_configs, ("float32", "bf16")):
            plain = start_engine(world, AMLP, engine_configs[name], precision)
            norms = train(plain, world, 0, 4).norms
            plain.close()
            engine = start_engine(world, AMLP, engine_configs[name], precision)
            rechecked = []
            for step in range(4):
                recheck(engine, world, micro_batches_of(step, world)[-1], seed=step, step=step + 1)
                rechecked += train(engine, world, step, step + 1).norms
            found = [_fault_in_gradients(engine, world, bit) for bit in BITS]
            if name != "single":
                found += [_fault_in_weights(engine, world, bit) for bit in BITS]
            engine.close()
            results[name, precision] = norms, rechecked, found
    return results


def _fault_in_gradients(engine, world: World, bit: int) -> str:
    """Flips a bit of the last rank's second gradients."""
    right, calls = engine.differentiate, []

    def differentiate(batch):
        loss, weights, gradients = right(batch)
        calls.append(batch)
        if len(calls) == 2 and world.rank == world.size - 1:
            _flip(gradients[3], 2, bit)
        return loss, weights, gradients

    return _message(engine, world, differentiate)


def _fault_in_weights(engine, world: World, bit: int) -> str:
    """Flips a bit in what the last rank computes with, and back."""
    right = engine.differentiate

    def differentiate(batch):
        loss, weights, gradients = right(batch)
        if world.rank == world.size - 1:
            weights = [weight.detach().clone() for weight in weights]
            _flip(weights[3], 2, bit)
        return loss, weights, gradients

    return _message(engine, world, differentiate)


def _message(engine, world: World, differentiate) -> str:
    right, engine.differentiate = engine.differentiate, differentiate
    try:
        recheck(engine, world, micro_batches_of(9, world)[0], seed=9, step=10)
    except RecheckError as error:
        return str(error)
    finally:
        engine.differentiate = right
    return "nothing was found"


@pytest.mark.parametrize(("world_size", "engines"), [(1, SINGLE), (2, SHARDED_BUT_ZERO_3)])
def test_rechecks_find_a_rank_that_computes_wrongly_and_change_nothing(world_size, engines):
    for results in run_ranks(_train_with_rechecks, world_size, engines):
        for key, (norms, rechecked, found) in results.items():
            assert norms == rechecked, key
            for message in found[: len(BITS)]:
                name = f"rank {world_size - 1} (host {socket.gethostname()})"
                assert f"before step 10 {name} computed one micro-batch twice" in message, key
            for message in found[len(BITS) :]:
                assert "before step 10 rank 0 (host" in message and "do not all hold the same weights" in message, key


def _fused_attention(backend: str) -> tuple[set[str], set[str]]:
    """Fused operations of aMLP and BERT, before and after compute_repeatably."""
    before = _fused_operations(backend)
    compute_repeatably()
    torch.compiler.reset()
    return before, _fused_operations(backend)


def _fused_operations(backend: str) -> set[str]:
    with start_world(60, "cpu") as world, torch.profiler.profile() as profile:
        for config in (AMLP, BERT):
            engine = start_engine(world, config, ENGINES["single"])
            for block in engine.module.blocks if backend != "eager" else ():
                block.compile(backend=backend)
            engine.differentiate(micro_batches_of(0, world)[0])
    return {event.name for event in profile.events() if "_flash_attention" in event.name}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_no_attention_is_fused_where_results_must_repeat(backend):
    ((before, after),) = run_ranks(_fused_attention, 1, backend)
    assert len(before) >= 2 and not after


class _Ranks:
    """A world in which each rank's number is known."""

    def __init__(self, weights: list[int]):
        self.size, self.weights = len(weights), weights

    def names_of(self, ranks: list[int]) -> str:
        return ", ".join(f"rank {rank} (host node)" for rank in ranks)

    def gather(self, value: int) -> list[int]:
        return [0] * self.size if value == 0 else self.weights


def test_the_rank_with_other_weights_than_most_is_named():
    class Engine:
        def differentiate(self, batch):
            return torch.zeros(()), [torch.ones(3)], [torch.ones(3)]

    with pytest.raises(RecheckError, match=r"rank 2 \(host node\) holds other weights than most ranks"):
        recheck(Engine(), _Ranks([5, 5, 6, 5]), None, seed=0, step=1)


def test_a_run_rechecks_as_often_as_asked_and_is_the_same_run(forty_rows, tmp_path, monkeypatch):
    steps = []

    def recorded(*arguments):
        steps.append(arguments[-1])
        recheck(*arguments)

    monkeypatch.setattr(loop, "recheck", recorded)
    for every in ("null", "2"):
        fields = ["train.num_steps=5", f"train.recheck_every_steps={every}", f"output_dir={tmp_path / every}"]
        pretrain(load_run_config(SMOKE, [*RECIPE, *fields, f"data.shards={forty_rows}"]))
    assert steps == [2, 4]
    without, rechecked = (losses(tmp_path / every / "smoke") for every in ("null", "2"))
    assert len(without) == 5 and rechecked == without
