"""A tiny model trained for some steps by any engine on any number of ranks: the same global batches everywhere."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gmlp_scale import engine as engines
from gmlp_scale.data.batch import PAD_ID, MaskedBatch
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import EngineConfig, Fsdp2Config, TrainConfig, build_engine
from gmlp_scale.engine.optimizer import AdamwConfig, MuonConfig
from gmlp_scale.models import (
    AmlpConfig,
    AveyConfig,
    GmlpConfig,
    ModernTransformerConfig,
    TransformerConfig,
    build_model,
)
from gmlp_scale.piecewise import Piecewise

# Sizes that two ranks do not divide (15, 31 and 37) are on purpose: shards are uneven and padded.
SIZES = {"num_blocks": 3, "d_model": 15, "d_ffn": 22, "sequence_length": 16, "vocab_size": 37, "masks_padding": True}
GMLP = GmlpConfig(**SIZES)
AMLP = AmlpConfig(**SIZES, d_attn=6)
BERT = TransformerConfig(**SIZES, num_heads=3, positions="relative")
MODERN = ModernTransformerConfig(**SIZES | {"d_model": 18}, num_heads=3, window=6)
AVEY = AveyConfig(**SIZES, chunk_length=8, ranked_chunks=1)  # a ranker with a choice would choose otherwise in bf16
OPTIMIZER = AdamwConfig(peak_learning_rate=0.01, weight_decay=0.1, gradient_clipping=0.5)
MUON = MuonConfig(**OPTIMIZER.model_dump(exclude={"kind"}), matrix_rate_ratio=2.0)
BATCH_SIZES, MICRO_BATCH_SIZE = [(0, 8), (1, 16), (2, 8), (4, 16), (5, 8)], 2
# FSDP2 with several groups, as large models have
ENGINES = {
    name: engine.model_copy(update={"blocks_per_group": 2}) if isinstance(engine, Fsdp2Config) else engine
    for name, engine in engines.ENGINES.items()
}
SINGLE = {"single": ENGINES["single"]}
SHARDED = {name: ENGINES[name] for name in engines.SHARDED_ENGINES}
SHARDED_BUT_ZERO_3 = {name: config for name, config in SHARDED.items() if name != "zero, stage 3"}
OPTIONS = {
    "float32": {},
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "bf16": {"precision": "bf16"},
    "bf16, recomputing": {"precision": "bf16", "recompute": "full"},
    "muon": {"optimizer": MUON},
}
"""Of start_engine()."""


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    """Of the global batch, step by step."""
    norms: list[float] = field(default_factory=list)


def start_engine(
    world: World, model_config, engine_config: EngineConfig, precision="float32", optimizer=OPTIMIZER, **fields
):
    """fields: of TrainConfig."""
    batch = {"global_batch_size": BATCH_SIZES, "micro_batch_size": MICRO_BATCH_SIZE}
    train_config = TrainConfig(num_steps=100, precision=precision, **batch | {"compile": False} | fields)
    return build_engine(build_model(model_config), world, engine=engine_config, train=train_config, optimizer=optimizer)


def train(engine, world: World, first_step: int, stop_step: int) -> Run:
    run = Run()
    for step in range(first_step, stop_step):
        micro_batches = micro_batches_of(step, world)
        loss_sum = 0.0
        for index, batch in enumerate(micro_batches, start=1):
            loss = engine.module(batch)
            engine.backward(loss / len(micro_batches), is_last=index == len(micro_batches))
            loss_sum += loss.item()
        run.norms.append(engine.step(0.01 / (1 + step)).item())
        run.losses.append(world.sum([loss_sum])[0] / len(micro_batches) / world.size)
    return run


def micro_batches_of(step: int, world: World) -> list[MaskedBatch]:
    generator = torch.Generator().manual_seed(step)
    num_rows = Piecewise(BATCH_SIZES).at(step)
    shape = (num_rows, SIZES["sequence_length"])
    token_ids_BN = torch.randint(5, SIZES["vocab_size"], shape, generator=generator)
    masked_positions_BM = torch.rand(shape, generator=generator).argsort(dim=1)[:, :4].sort(dim=1).values
    labels_BM = token_ids_BN.gather(1, masked_positions_BM)
    token_ids_BN[::2, -3:] = PAD_ID
    rows = torch.arange(num_rows).chunk(world.size)[world.rank]
    return [MaskedBatch(token_ids_BN[r], masked_positions_BM[r], labels_BM[r]) for r in rows.split(MICRO_BATCH_SIZE)]


def pieces_of(engine) -> dict[tuple[str, int], tuple[Tensor, tuple[int, ...]]]:
    """This rank's state(), copied: (key, first) -> (tensor, shape of the whole)."""
    return {(key, piece.first): (piece.tensor.clone(), piece.shape) for key, piece in engine.state()}


def reader(pieces_by_rank: list[dict]):
    """All ranks' pieces as load_state's `read`; every element must be there exactly once."""
    whole: dict[str, Tensor] = {}
    num_seen: dict[str, int] = {}
    for (key, first), (tensor, shape) in (item for pieces in pieces_by_rank for item in pieces.items()):
        values = whole.setdefault(key, torch.full(shape, torch.nan))
        values = values if tensor.ndim == len(shape) else values.view(-1)
        values[first : first + len(tensor)] = tensor
        num_seen[key] = num_seen.get(key, 0) + tensor.numel()
    assert all(num_seen[key] == tensor.numel() and tensor.isfinite().all() for key, tensor in whole.items())
    return lambda key, first, stop: whole[key][first:stop].clone()
