"""DeepSpeed's JSON: our defaults, the user's file and what the recipe decides."""

import json
from collections.abc import Iterator
from pathlib import Path

from gmlp_scale.engine.optimizer import MuonConfig, OptimizerConfig
from gmlp_scale.engine.train_config import TrainConfig
from gmlp_scale.errors import InputError

REDUCE_BUCKET_ELEMENTS = 50_000_000


def deepspeed_settings(
    own_file: Path | None,
    *,
    stage: int,
    num_parameters: int,
    world_size: int,
    train: TrainConfig,
    optimizer: OptimizerConfig,
) -> dict:
    """Our defaults, then the user's file, then what the recipe decides; the later ones win.

    Raises:
        InputError: naming every field of the file that contradicts the recipe.
    """
    defaults = {
        "zero_optimization": {
            # DeepSpeed's users report wrong gradients with it; a file may turn it on.
            "overlap_comm": False,
            # In elements. DeepSpeed allocates the reduce bucket whole, however small the model is.
            "reduce_bucket_size": min(num_parameters, REDUCE_BUCKET_ELEMENTS),
            "allgather_bucket_size": 50_000_000,
            # Stage 2 else sends every rank the sums of all gradients, of which it keeps its own part.
            "use_multi_rank_bucket_allreduce": False,
        },
    }
    required = {
        "train_batch_size": max(train.batch_sizes.values),
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": max(train.num_micro_batches(world_size).values),
        "gradient_clipping": optimizer.gradient_clipping or 0.0,  # its default is 1.0 since 0.19.3
        "bf16": {
            "enabled": train.precision == "bf16",
            "check_grad_overflow": False,  # the host would wait for it; we do it
            # Stage 1 would leave a gradient in the memory of a CUDA graph, which the next micro-batch overwrites.
            "immediate_grad_update": True,
            # Masters and moments are float32.
            "bf16_master_weights_and_grads": False,
            "bf16_optimizer_states": False,
        },
        "torch_autocast": {"enabled": False},  # bf16 above decides it
        "timers": {"throughput": {"enabled": False}},  # the host would wait for the device in every micro-batch
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        # With round_robin_gradients DeepSpeed says of masters that they are other parameters'.
        "zero_optimization": {"stage": stage, "round_robin_gradients": False},
    }
    own = read_own(own_file) if own_file else {}
    if mistakes := [*_mistakes(own, optimizer), *_contradictions(own, required)]:
        raise InputError(f"{own_file} contradicts the recipe; take out:\n  " + "\n  ".join(mistakes))
    return _merged(_merged(defaults, own), required)


def read_own(file: Path) -> dict:
    """The user's file. InputError if it is none, or not JSON as DeepSpeed takes it."""
    try:
        own = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} cannot be read as JSON: {error}") from error
    zero = own.get("zero_optimization", {}) if isinstance(own, dict) else None
    if not isinstance(zero, dict) or not isinstance(zero.get("offload_optimizer", {}), dict | None):
        needed = "an object of DeepSpeed's fields; zero_optimization and its offload_optimizer are objects too"
        raise InputError(f"{file}: needed is {needed}")
    return own


def _mistakes(own: dict, optimizer: OptimizerConfig) -> Iterator[str]:
    for section in ("optimizer", "scheduler", "fp16"):
        if section in own:
            yield f"{section}: the recipe's own sections decide it"
    place = (own.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device", "none")
    if place != "none" and isinstance(optimizer, MuonConfig):
        yield (
            f"zero_optimization.offload_optimizer: it offloads the optimizer to {place}, but Muon computes on the "
            "device; or set optimizer.kind=adamw"
        )


def _contradictions(own: dict, required: dict, prefix: str = "") -> Iterator[str]:
    for key in own.keys() & required.keys():
        if isinstance(own[key], dict) and isinstance(required[key], dict):
            yield from _contradictions(own[key], required[key], f"{prefix}{key}.")
        elif own[key] != required[key]:
            yield f"{prefix}{key}: found {own[key]!r}; the recipe says {required[key]!r}"


def _merged(under: dict, over: dict) -> dict:
    both = under.keys() & over.keys()
    nested = {k: _merged(under[k], over[k]) for k in both if isinstance(under[k], dict) and isinstance(over[k], dict)}
    return under | over | nested
