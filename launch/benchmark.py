"""Times a recipe's training step beside the machine's matrix-product ceiling and other people's models, in one run.

python launch/benchmark.py --config configs/pretrain/gmlp_base.yaml model.num_blocks=6 train.micro_batch_size=2
python launch/benchmark.py --config configs/pretrain/gmlp_base.yaml --output docs/benchmarks/FILE.json   # on a GPU

A step is forward, backward and AdamW update of one micro-batch on one device, on random tokens. All contenders take
turns, round by round, and each figure is the median over the rounds: only ratios within one run are worth quoting.
`fraction_of_ceiling` divides the recipe's own FLOPs per second by the best matrix product measured in the same run at
the same precision; `mfu` divides by the data-sheet peak, where the device has one.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gmlp_scale.config import ConfigError, RunConfig, load_run_config
from gmlp_scale.data.batch import NUM_SPECIAL_TOKENS, MaskedBatch, num_masked_positions
from gmlp_scale.data.loader import Loader
from gmlp_scale.data.shards import MANIFEST_NAME, ROW_DTYPE, Manifest, ShardWriter, Splits, write_file
from gmlp_scale.engine import build_engine
from gmlp_scale.models import build_model
from gmlp_scale.plan import count_parameters
from gmlp_scale.train.metrics import peak_memory_bytes, peak_tflops
from gmlp_scale.train.optimizer import build_adamw, decayed_names
from gmlp_scale.world import World, start_world

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe; its micro-batch is the batch timed here")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each contender (default: %(default)s)")
    parser.add_argument("--no-peers", action="store_true", help="leave out g-mlp-pytorch and transformers' BERT")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    options = parser.parse_intermixed_args()
    try:
        run = load_run_config(options.config, ["engine.kind=single", *options.overrides])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    with start_world(run.engine.timeout_seconds, run.train.device, hear_stop_signals=False) as world:
        report = benchmark(run, world, options.rounds, with_peers=not options.no_peers)
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0


def benchmark(run: RunConfig, world: World, num_rounds: int, *, with_peers: bool) -> dict:
    batch = random_batch(run, world.device)
    steps = {"gmlp_scale": our_step(run, world, batch)}
    steps["gmlp_scale"].run_once()
    peak_memory_gib = peak_memory_bytes(world.device) / 2**30  # before anything else is there
    if with_peers:
        steps["g_mlp_pytorch"] = g_mlp_pytorch_step(run, world.device, batch)
        steps["transformers_bert"] = transformers_bert_step(run, world.device, batch)
    ceiling = {}
    seconds = time_in_turns(steps, num_rounds, world.device, ceiling, run)
    print("loader", file=sys.stderr, flush=True)
    num_masked = batch.labels_BM.shape[1]
    with torch.device("meta"):
        step_flops = 3 * build_model(run.model).flops_per_sample(num_masked) * run.train.micro_batch_size
    tokens = run.train.micro_batch_size * run.model.sequence_length
    ours = statistics.median(seconds["gmlp_scale"])
    loaded = loader_rows_per_second(run)
    peak = run.train.peak_tflops_per_device or peak_tflops(world.device, run.train.precision)
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(world.device),
        "recipe": run.name,
        "model": run.model.model_dump(mode="json"),
        "rows": run.train.micro_batch_size,
        "precision": run.train.precision,
        "compile": run.train.compile,
        "recompute": run.train.recompute,
        "parameters": count_parameters(run),
        "step_seconds": ours,
        "tokens_per_second": tokens / ours,
        "model_tflops": step_flops / ours / 1e12,
        "matrix_ceiling_tflops": max(ceiling.values()),
        "matrix_products_tflops": ceiling,
        "fraction_of_ceiling": step_flops / ours / 1e12 / max(ceiling.values()),
        "mfu": peak and step_flops / ours / 1e12 / peak,
        "peak_memory_gib": peak_memory_gib,
        "loader_rows_per_second": loaded,
        "loader_rows_over_trained_rows": loaded * ours / run.train.micro_batch_size,
        "peers": {},
    }
    for name in steps.keys() - {"gmlp_scale"}:
        theirs = statistics.median(seconds[name])
        report["peers"][name] = {
            "step_seconds": theirs,
            "tokens_per_second": tokens / theirs,
            "our_tokens_per_second_over_theirs": theirs / ours,
            **steps[name].description,
        }
    return report


class Step:
    """One training step of one contender, and what is to be known about it."""

    def __init__(self, run_once: Callable[[], None], **description):
        self.run_once, self.description = run_once, description


def random_batch(run: RunConfig, device: torch.device) -> MaskedBatch:
    rows, length = run.train.micro_batch_size, run.model.sequence_length
    num_masked = num_masked_positions(length, run.data.masked_fraction)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(NUM_SPECIAL_TOKENS, run.model.vocab_size, (rows, length), generator=generator)
    positions = torch.rand(rows, length, generator=generator).argsort(1)[:, :num_masked].sort(1).values
    return MaskedBatch(ids, positions, ids.gather(1, positions)).to(device)


def our_step(run: RunConfig, world: World, batch: MaskedBatch) -> Step:
    """The recipe's model under the `single` engine, exactly as pretraining runs it."""
    model = build_model(run.model)
    model.init_weights(torch.Generator().manual_seed(run.seed))
    engine = build_engine(
        model,
        run.engine,
        world,
        build_optimizer=partial(build_adamw, config=run.optimizer, decayed=decayed_names(model)),
        precision=run.train.precision,
        num_micro_batches=1,
        micro_batch_size=run.train.micro_batch_size,
        gradient_clipping=run.optimizer.gradient_clipping,
        compile=run.train.compile,
        recompute=run.train.recompute,
    )

    def run_once() -> None:
        engine.backward(engine.module(batch), is_last=True)
        engine.step(run.optimizer.peak_learning_rate)

    return Step(run_once)


def peer_step(
    model: nn.Module, run: RunConfig, device: torch.device, loss: Callable[[nn.Module], torch.Tensor], **known
) -> Step:
    """A peer's model as its users train it: eager, torch's fused AdamW, and autocast where the recipe says bf16."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    is_bf16 = run.train.precision == "bf16"

    def run_once() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            value = loss(model)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Step(run_once, parameters=sum(p.numel() for p in model.parameters()), compile=False, **known)


def g_mlp_pytorch_step(run: RunConfig, device: torch.device, batch: MaskedBatch) -> Step:
    """The g-mlp-pytorch package's gMLP of the recipe's blocks and widths, dense W, logits at all positions."""
    from g_mlp_pytorch import gMLP

    model = gMLP(
        num_tokens=run.model.vocab_size,
        dim=run.model.d_model,
        depth=run.model.num_blocks,
        seq_len=run.model.sequence_length,
        ff_mult=run.model.d_ffn // run.model.d_model,
    )

    def loss(model: nn.Module) -> torch.Tensor:
        logits_BNV = model(batch.token_ids_BN)
        return F.cross_entropy(logits_BNV.flatten(0, 1).float(), labels_everywhere(batch).flatten())

    return peer_step(model, run, device, loss)


def transformers_bert_step(run: RunConfig, device: torch.device, batch: MaskedBatch) -> Step:
    """transformers' BertForMaskedLM, with as many layers as give its trunk the parameters of the recipe's."""
    from transformers import BertConfig, BertForMaskedLM

    width = 64 * max(1, round(1.5 * run.model.d_model / 64)) if run.model.d_model <= 512 else 1024
    with torch.device("meta"):
        trunk = sum(p.numel() for p in build_model(run.model).blocks.parameters())
    num_layers = max(1, round(trunk / (12 * width * width)))
    config = BertConfig(
        vocab_size=run.model.vocab_size,
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        max_position_embeddings=run.model.sequence_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    def loss(model: nn.Module) -> torch.Tensor:
        return model(input_ids=batch.token_ids_BN, labels=labels_everywhere(batch)).loss

    return peer_step(BertForMaskedLM(config), run, device, loss, num_layers=num_layers, width=width)


def labels_everywhere(batch: MaskedBatch) -> torch.Tensor:
    """labels_BN with -100 at the positions that are not masked, as both peers want them."""
    labels_BN = torch.full_like(batch.token_ids_BN, -100)
    return labels_BN.scatter(1, batch.masked_positions_BM, batch.labels_BM)


def time_in_turns(
    steps: dict[str, Step], num_rounds: int, device: torch.device, ceiling: dict[str, float], run: RunConfig
) -> dict[str, list[float]]:
    """Seconds of each contender's steps; fills `ceiling` with the best TFLOP/s of each matrix product meanwhile."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    products = matrix_products(run, device)
    for round_ in range(-2, num_rounds):  # two rounds warm up: compilation, allocation, clocks
        for name, step in steps.items():
            elapsed = timed(step.run_once, device)
            if round_ >= 0:
                seconds[name].append(elapsed)
        for name, (product, flops) in products.items():
            ceiling[name] = max(ceiling.get(name, 0.0), flops / timed(product, device) / 1e12)
        print(f"round {round_ + 3} of {num_rounds + 2}", file=sys.stderr, flush=True)
    return seconds


def matrix_products(run: RunConfig, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """The products whose speed bounds the step: both projections at the recipe's shape, and a large square one."""
    tokens = run.train.micro_batch_size * run.model.sequence_length
    square = 8192 if device.type == "cuda" else 2048
    shapes = {
        "expand": (tokens, run.model.d_model, run.model.d_ffn),
        "contract": (tokens, run.model.d_ffn, run.model.d_model),
        "square": (square, square, square),
    }
    products = {}
    for name, (m, k, n) in shapes.items():
        a, b = (torch.randn(shape, device=device, dtype=DTYPES[run.train.precision]) for shape in ((m, k), (k, n)))
        products[name] = (partial(torch.mm, a, b), 2 * m * k * n)
    return products


def loader_rows_per_second(run: RunConfig) -> float:
    """Rows per second that the loader's one thread delivers, shuffled and masked, from local shards in memory."""
    length, vocab_size = run.model.sequence_length, run.model.vocab_size
    rows_RN = np.random.default_rng(0).integers(NUM_SPECIAL_TOKENS, vocab_size, (2**15, length)).astype(ROW_DTYPE)
    with tempfile.TemporaryDirectory() as folder:
        writer = ShardWriter(folder, "train", "train-00000", sequence_length=length, rows_per_shard=2**13)
        writer.add(rows_RN)
        manifest = Manifest(
            sequence_length=length,
            vocab_size=vocab_size,
            packing=run.data.packing,
            tokenizer_sha256="0" * 64,
            total_rows={"train": len(rows_RN), "heldout": 0},
            splits=Splits(train=tuple(writer.close()), heldout=()),
        )
        write_file(f"{folder}/{MANIFEST_NAME}", manifest.to_json().encode())
        loader = Loader(
            run.data.model_copy(update={"shards": folder}),
            sequence_length=length,
            vocab_size=vocab_size,
            seed=0,
            global_batch_size=256,
            micro_batch_size=256,
            rank=0,
            world_size=1,
            run_dir=Path(folder),
        )
        for step in range(len(rows_RN) // 256):  # opens and verifies every shard
            loader.micro_batches(step)
        seconds = [timed(partial(loader.micro_batches, step), torch.device("cpu")) for step in range(64)]
        loader.close()
    return 256 / statistics.median(seconds)


def timed(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def describe_machine(device: torch.device) -> dict:
    cpu = platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({cpu})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
