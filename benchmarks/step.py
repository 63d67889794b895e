"""The recipe's training step beside the machine's ceilings, its own variants and other people's models.

A step is forward, backward and update of one micro-batch on one device, on random tokens. Other people's models
run in their own processes.
"""

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.ceilings import captured_products, copy_call, fewest_bytes, matrix_calls
from benchmarks.peers import bert_step, g_mlp_pytorch_step, modernbert_step
from benchmarks.time_split import time_split
from benchmarks.timing import Contender, Turn, say, time_in_turns, turns_of
from gmlp_scale.data.batch import MaskedBatch
from gmlp_scale.distributed.world import World
from gmlp_scale.engine.optimizer import AdamwConfig, MuonConfig
from gmlp_scale.models import GmlpConfig, with_kernels
from gmlp_scale.models.gmlp import FUSED_GATING
from gmlp_scale.plan.describe import count_parameters
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.train.metrics import peak_memory_bytes, peak_tflops
from gmlp_scale.train.trial import forget_other_recipes, new_engine, random_batch, train_step

PEERS = {"g_mlp_pytorch": g_mlp_pytorch_step, "bert": bert_step, "modernbert": modernbert_step}


def measure_step(run: RunConfig, world: World, num_rounds: int, *, with_peers: bool) -> dict:
    device = world.device
    forget_other_recipes(device)
    batch = random_batch(run, device)
    engine = new_engine(run, world)
    recipe = partial(train_step, engine, run, batch)
    recipe()
    peak_memory_gib = peak_memory_bytes(device) / 2**30  # before anything else takes memory
    weights = dict(engine.full_weights())  # for all variants: a core draws gmlp_xlarge's in 9 s
    products, product_calls = products_of(run, world, batch, weights)
    forms = variants(run, device)
    calls: dict[str, Callable[[], object]] = {"recipe": recipe}
    calls |= {
        name: partial(train_step, new_engine(form, world, weights=weights), form, batch) for name, form in forms.items()
    }
    peers, contenders = start_peers(run, device) if with_peers else ({}, {})
    matrix_flops, (copy, copied_bytes) = matrix_calls(run, device), copy_call(device)
    calls |= {f"matrix {name}": call for name, (call, _) in matrix_flops.items()} | {"copy": copy} | product_calls
    turns = turns_of(calls, device) | {name: peer.take_turn for name, peer in peers.items()}
    seconds = time_in_turns(turns, num_rounds)

    flops, ours = run.flops_per_row().last * run.train.micro_batch_size, seconds["recipe"]
    ceilings = {name: count / seconds[f"matrix {name}"] / 1e12 for name, (_, count) in matrix_flops.items()}
    copy_rate = copied_bytes / seconds["copy"]
    tflops = flops / ours / 1e12
    peak = run.train.peak_tflops_per_device or peak_tflops(device, run.train.precision)
    bytes_moved = fewest_bytes(run)
    ratios = {
        "fraction_of_ceiling": tflops / max(ceilings.values()),
        "isolated_products_over_step": sum(times * seconds[name] for name, times in products.items()) / ours,
    }
    described = {name: {"compile": form.train.compile} for name, form in forms.items()}
    for name, description in (described | {name: peer.description for name, peer in peers.items()}).items():
        contenders[name] = {"step_seconds": seconds[name], **description}
        ratios[f"over_{name}"] = seconds[name] / ours / (description.get("flops", flops) / flops)
    return {
        "rows": run.train.micro_batch_size,
        "precision": run.train.precision,
        "parameters": count_parameters(run),
        "step_seconds": ours,
        "tokens_per_second": run.train.micro_batch_size * run.model.sequence_length / ours,
        "model_tflops": tflops,
        "mfu": peak and tflops / peak,
        "peak_memory_gib": peak_memory_gib,
        "matrix_ceiling_tflops": ceilings,
        "copy_bytes_per_second": copy_rate,
        "operations_floor_seconds": flops / max(ceilings.values()) / 1e12,
        "bytes_floor_seconds": bytes_moved and bytes_moved / copy_rate,
        "isolated_products": {name: {"per_step": n, "seconds": seconds[name]} for name, n in products.items()},
        "time_split": time_split(recipe, device),
        "ratios": ratios,
        "contenders": contenders,
    }


def start_peers(run: RunConfig, device: torch.device) -> tuple[dict[str, Contender], dict[str, str]]:
    """The peers that started, by name, and the reason for each that did not."""
    peers, missing = {}, {}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # their processes need the memory
    for name in PEERS:
        say(f"building {name}")
        try:
            peers[name] = Contender(name, prepare_peer, name, run, device)
        except (ImportError, ChildProcessError) as error:
            missing[name] = str(error)
    return peers, missing


def prepare_peer(name: str, run: RunConfig, device: torch.device) -> tuple[Turn, dict]:
    """A turn. After each one it gives the GPU memory in torch's cache back to the other processes."""
    step, description = PEERS[name](run, device, random_batch(run, device))
    step()  # a model that does not fit dies here, and the others are still measured
    timed = turns_of({name: step}, device)[name]

    def turn() -> float:
        if device.type == "cpu":
            return timed()
        step()  # takes the memory again
        seconds = timed()
        torch.cuda.empty_cache()
        return seconds

    return turn, description


def variants(run: RunConfig, device: torch.device) -> dict[str, RunConfig]:
    """Variants of the recipe: not compiled; with AdamW if it has Muon; without fused kernels if it would use them."""
    forms = {"eager": run.with_train(compile=False)}
    if isinstance(run.optimizer, MuonConfig):
        fields = run.optimizer.model_dump(include=set(AdamwConfig.model_fields) - {"kind"})
        forms["adamw"] = run.model_copy(update={"optimizer": AdamwConfig(**fields)})
    is_fused = isinstance(run.model, GmlpConfig) and run.model.gating == FUSED_GATING and run.model.kernels != "torch"
    if is_fused and device.type == "cuda":
        forms["plain_compiled"] = plain(run, compile=True)
    return {name: form for name, form in forms.items() if form != run}


def plain(run: RunConfig, *, compile: bool) -> RunConfig:
    """The recipe in plain PyTorch operations."""
    return run.with_train(compile=compile).model_copy(update={"model": with_kernels(run.model, "torch")})


def products_of(
    run: RunConfig, world: World, batch: MaskedBatch, weights: Mapping[str, Tensor] | None = None
) -> tuple[Counter[str], dict[str, Callable[[], Tensor]]]:
    """`captured_products` of one step in plain PyTorch operations. Its model is then deleted."""
    form = plain(run, compile=False)
    found = captured_products(lambda: train_step(new_engine(form, world, weights=weights), form, batch))
    gc.collect()
    return found
