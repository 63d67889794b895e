"""What a run would take on a cluster under each engine: memory, communication, time and disk.

All of it is computed. Nothing was measured on a GPU; the times rest on `Assumptions`.
"""

from dataclasses import dataclass
from math import gcd, inf
from typing import NamedTuple

from torch import nn

from gmlp_scale.data.batch import num_masked_positions
from gmlp_scale.engine import ENGINES, SHARDED_ENGINES, EngineConfig, Fsdp2Config
from gmlp_scale.plan.auto import HEAD_BYTES_PER_LOGIT, MEMORY_MARGIN
from gmlp_scale.plan.describe import count_parameters, meta_model, short
from gmlp_scale.plan.rank_bytes import (
    activation_bytes_per_token,
    carried_bytes,
    count_in_matrices,
    state_bytes,
    wire_bytes,
)
from gmlp_scale.recipe.config import ConfigError, PretrainingRecipe, RunConfig

ROW_BYTES_PER_TOKEN = 2


@dataclass(frozen=True)
class Gpu:
    """The figures of NVIDIA's data sheet."""

    part_of_name: str
    """A part of the name that CUDA gives the device."""
    bf16_tflops: float
    """For dense matrix products."""
    float32_tflops: float
    memory_gb: float
    """In 10**9 bytes."""
    link_gb_per_second: float
    """To the node's other GPUs, one way: half of the data sheet's NVLink figure, or PCIe."""
    network_gb_per_second: float
    """To other nodes, one way and per GPU: as in NVIDIA's DGX if there is one with this GPU, else 100 Gb/s."""


GPUS = {  # an entry whose part_of_name contains another's comes first
    "b200": Gpu("B200", 2250, 80, 180, 900, 50),
    "h200": Gpu("H200", 989, 67, 141, 450, 50),
    "h100-pcie": Gpu("H100 PCIe", 756, 51, 80, 64, 12.5),
    "h100": Gpu("H100", 989, 67, 80, 450, 50),
    "a100-80g": Gpu("A100", 312, 19.5, 80, 300, 25),
    "a100-40g": Gpu("A100", 312, 19.5, 40, 300, 25),
    "l40s": Gpu("L40S", 362, 91.6, 48, 32, 12.5),
    "rtx4090": Gpu("RTX 4090", 165, 82.6, 24, 32, 12.5),
    "rtx3090": Gpu("RTX 3090", 71, 35.6, 24, 32, 12.5),
}
"""By the name that launch/plan.py takes."""


class HostTime(NamedTuple):
    """Milliseconds of a rank's host per block, as benchmarks/host.py prints them for gmlp_base (docs/many-nodes.md)."""

    eager: float
    """For the forward and the backward pass of a micro-batch."""
    compiled: float
    """The same, with compiled blocks."""
    graphs: float
    """The same, with CUDA graphs and without their launches."""
    update: float

    def of_micro_batch(self, compile: bool | str) -> float:
        if compile == "reduce-overhead":
            return self.graphs
        return self.compiled if compile else self.eager


HOST_TIMES = {
    "single": HostTime(0.48, 0.30, 0.11, 0.05),
    "fsdp2": HostTime(0.66, 0.51, 0.34, 0.04),
    "fsdp2, reshard_after_forward": HostTime(0.81, 0.58, 0.58, 0.04),
    "zero, stage 1": HostTime(0.56, 0.43, 0.17, 0.05),
    "zero, stage 2": HostTime(0.67, 0.48, 0.28, 0.09),
    "zero, stage 3": HostTime(1.79, 1.79, 1.79, 0.23),
}
"""By the names of ENGINES."""


@dataclass(frozen=True)
class Assumptions:
    """What the times rest on."""

    gpu: Gpu
    num_gpus: int
    num_nodes: int
    fraction_of_peak: float = 0.4
    """Model FLOP/s over the data sheet's. Published runs of like size at length 512 on H100 have 0.40 to 0.43."""
    fraction_of_link: float = 0.8
    """The bytes per second of a collective's ring over the data sheet's."""

    @property
    def ring_bytes_per_second(self) -> float:
        """Of a ring through all ranks. Between nodes it has all network cards of a node: NCCL makes a ring for each."""
        gb_per_second = self.gpu.link_gb_per_second
        if self.num_nodes > 1:
            all_cards = self.num_gpus / self.num_nodes * self.gpu.network_gb_per_second
            gb_per_second = min(gb_per_second, all_cards)
        return self.fraction_of_link * gb_per_second * 1e9

    def flops_per_second(self, precision: str) -> float:
        peak = self.gpu.float32_tflops if precision == "float32" else self.gpu.bf16_tflops
        return self.num_gpus * self.fraction_of_peak * peak * 1e12


@dataclass(frozen=True)
class Layout:
    """One engine on the cluster, with the largest micro-batch that fits."""

    name: str
    engine: EngineConfig
    micro_batch_size: int
    """Rows. 0 if not even one fits; the other fields are then for one row."""
    memory: dict[str, float]
    """Bytes per rank by part at a step's peak, activations in plain PyTorch."""
    compute_seconds: float
    """Per step, on average over the run; communication_seconds and host_seconds too."""
    communication_seconds: float
    host_seconds: float
    """What the host takes to start the device's work."""

    @property
    def step_seconds(self) -> float:
        """FSDP2 sends while it computes, so the longer of the two counts. ZeRO does so only with overlap_comm. If the
        host takes longer, the device waits for it."""
        both = self.compute_seconds, self.communication_seconds
        device_seconds = max(both) if isinstance(self.engine, Fsdp2Config) else sum(both)
        return max(device_seconds, self.host_seconds)


def layouts(run: RunConfig, assumed: Assumptions) -> list[Layout]:
    """Every engine that can run on `num_gpus` ranks: those that fit come first, the fastest before the others.

    Raises:
        ConfigError: the ranks do not divide the global batch.
    """
    num_gpus = assumed.num_gpus
    if any(rows % num_gpus for rows in run.train.batch_sizes.values):
        found = f"found {run.train.batch_sizes.shown(str)}; must be a multiple of the number of GPUs, {num_gpus}"
        raise ConfigError(run.name, [f"train.global_batch_size: {found}"])
    engines = ENGINES if num_gpus == 1 else SHARDED_ENGINES
    runs = {name: run.model_copy(update={"engine": engine}) for name, engine in engines.items()}
    found = [_layout(name, run, meta_model(run), assumed) for name, run in runs.items()]
    return sorted(found, key=lambda one: (not one.micro_batch_size, one.step_seconds, one.communication_seconds))


def _layout(name: str, run: RunConfig, model: nn.Module, assumed: Assumptions) -> Layout:
    train, engine, num_gpus = run.train, run.engine, assumed.num_gpus
    fitting = most_rows(run, model, num_gpus, assumed.gpu.memory_gb)
    mean_rows = train.batch_sizes.before(train.num_steps) / train.num_steps
    num_micro_batches = mean_rows / num_gpus / max(1, fitting)
    carried = carried_bytes(engine, model, run.optimizer, train.precision, num_micro_batches, num_gpus)
    wire = wire_bytes(carried) * (num_gpus - 1) / num_gpus
    # Recomputing a block is one more forward pass: 4 instead of 3. `selective` computes no matrix product again.
    work = run.flops_per_step().before(train.num_steps) / train.num_steps
    work *= 4 / 3 if train.recompute == "full" else 1
    host, num_blocks = HOST_TIMES[name], run.model.num_blocks
    passes = num_micro_batches * host.of_micro_batch(train.compile)
    return Layout(
        name,
        engine,
        micro_batch_size=fitting,
        memory=rank_memory(run, model, num_gpus, max(1, fitting)),
        compute_seconds=work / assumed.flops_per_second(train.precision),
        communication_seconds=wire / assumed.ring_bytes_per_second,
        host_seconds=num_blocks * (passes + host.update) / 1000,
    )


def rank_memory(run: RunConfig, model: nn.Module, num_ranks: int, num_rows: int) -> dict[str, float]:
    """Bytes by part that one of `num_ranks` holds at a step's peak, with micro-batches of `num_rows`.

    model: the run's, on the meta device.
    """
    accumulates = num_rows < max(run.train.batch_sizes.values) // num_ranks
    per_token = activation_bytes_per_token(run.model, run.train.precision, run.train.recompute)
    num_masked = num_masked_positions(run.model.sequence_length, max(run.data.masked_fractions.values))
    return state_bytes(run.engine, model, run.optimizer, run.train.precision, num_ranks, accumulates=accumulates) | {
        "activations": num_rows * per_token * run.model.sequence_length,
        "head": num_rows * HEAD_BYTES_PER_LOGIT * num_masked * run.model.vocab_size,
    }


def most_rows(run: RunConfig, model: nn.Module, num_ranks: int, memory_gb: float) -> int:
    """The most rows that divide a rank's rows of every step and fit; 0 if not even one row does."""
    rows = gcd(*run.train.batch_sizes.values) // num_ranks
    room = (1 - MEMORY_MARGIN) * memory_gb * 1e9
    divisors = (number for number in range(rows, 0, -1) if rows % number == 0)
    return next((number for number in divisors if sum(rank_memory(run, model, num_ranks, number).values()) <= room), 0)


def describe_fit(run: PretrainingRecipe, num_ranks: int, memory_gb: float) -> str:
    """Whether the recipe's engine and micro-batch fit into GPUs of `memory_gb`, and the largest micro-batch that does.

    Raises:
        ConfigError: the recipe does not fit the ranks, or is of another task.
    """
    if not isinstance(run, RunConfig):
        raise ConfigError(run.name, [f"task: found {run.task}; --gpu-memory is for recipes of text"])
    run = run.with_train(precision="bf16") if run.train.precision == "auto" else run
    run.rows_per_rank(num_ranks)
    model = meta_model(run)
    most = most_rows(run, model, num_ranks, memory_gb)
    found = f"at most {most} rows fit in a micro-batch" if most else "not even a micro-batch of one row fits"
    if (rows := run.train.micro_batch_size) != "auto":
        takes = sum(rank_memory(run, model, num_ranks, rows).values()) / 1e9
        verdict = "fits" if rows <= most else "does not fit"
        found = f"the recipe's {rows} rows take {takes:.1f} GB, which {verdict}; {found}"
    used = f"{1 - MEMORY_MARGIN:.2f} of it is used; activations in plain PyTorch"
    return f"{f'GPUs of {memory_gb:g} GB':<23} {found} ({used})"


def table(run: RunConfig, assumed: Assumptions) -> str:
    """The figures of `layouts` as a Markdown table, below the assumptions that they rest on."""
    gpu, train, found = assumed.gpu, run.train, layouts(run, assumed)
    parts, num_steps, kept = list(found[0].memory), f"{train.num_steps:,} steps", f"{run.checkpoint.keep_last}"
    if train.time_budget_seconds is not None:
        num_steps += f", or the {steps_within_budget(run, assumed):,} that fit into {train.time_budget_seconds:,.0f} s"
        num_steps += ", communication and the host not counted"
    if run.checkpoint.keep_every_steps is not None:
        kept += f" and at the end {train.num_steps // run.checkpoint.keep_every_steps} more"
    # of all steps, also of those that a time budget leaves out
    data_bytes = run.tokens_per_step.before(train.num_steps) * ROW_BYTES_PER_TOKEN
    lines = [
        f"{run.name}: {count_parameters(run):,} parameters, {run.flops_per_step().shown(short)} FLOPs per step of "
        f"{run.tokens_per_step.shown()} tokens, {num_steps}",
        f"disk: data {short(data_bytes)}B if no row is read twice; checkpoints "
        f"{short(checkpoint_bytes(run))}B each, {kept} kept and one being written",
        f"assumed: {assumed.num_gpus} GPUs on {assumed.num_nodes} nodes, each {assumed.fraction_of_peak:.2f} of "
        f"{gpu.float32_tflops if train.precision == 'float32' else gpu.bf16_tflops:g} TFLOP/s ({train.precision}) and "
        f"{1 - MEMORY_MARGIN:.2f} of {gpu.memory_gb:g} GB; a ring of {assumed.ring_bytes_per_second / 1e9:.3g} GB/s "
        f"({assumed.fraction_of_link:.2f} of the data sheet's); fsdp2 sends while it computes, zero afterwards",
        f"computed, not measured; activations in plain PyTorch with train.recompute={train.recompute}: torch.compile "
        "and fused kernels keep less",
        "rows: the largest micro-batch that fits; head: logits; sent: bytes of a rank's collectives on the wire; host: "
        "what a rank's host takes to start a step's work, measured for gMLP on a CPU; no step is shorter",
        "",
        f"| engine | rows | {' | '.join(parts)} | GB per rank | sent GB | sending ms | host ms | step ms | days "
        "| GPU-hours |",
        "| --- " * (len(parts) + 9) + "|",
    ]
    for layout in found:
        memory = [f"{size / 1e9:.2f}" for size in (*layout.memory.values(), sum(layout.memory.values()))]
        sent = layout.communication_seconds * assumed.ring_bytes_per_second / 1e9
        hours = run_seconds(run, layout) / 3600
        times = (layout.communication_seconds, layout.host_seconds, layout.step_seconds)
        milliseconds = [f"{1000 * seconds:.1f}" for seconds in times]
        cells = [layout.name, str(layout.micro_batch_size or "does not fit"), *memory, f"{sent:.2f}", *milliseconds]
        lines.append(f"| {' | '.join(cells)} | {hours / 24:.2f} | {hours * assumed.num_gpus:,.0f} |")
    for layout in found:
        lines += [f"{layout.name} needs: {mistake}" for mistake in layout.engine.mistakes(train)]
    return "\n".join(lines)


def checkpoint_bytes(run: PretrainingRecipe) -> int:
    """The float32 masters, AdamW's two moments and Muon's momentum."""
    return 12 * count_parameters(run) - 4 * count_in_matrices(meta_model(run), run.optimizer)


def steps_within_budget(run: RunConfig, assumed: Assumptions) -> int:
    """How many steps a run with a time budget computes in that time."""
    num_flops = run.train.time_budget_seconds * assumed.flops_per_second(run.train.precision)
    return min(run.flops_per_step().steps_within(num_flops), run.train.num_steps)


def run_seconds(run: RunConfig, layout: Layout) -> float:
    """The time of all steps, or the time budget if they would take longer."""
    return min(layout.step_seconds * run.train.num_steps, run.train.time_budget_seconds or inf)
