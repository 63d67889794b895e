"""TrainConfig: the recipe's `train` section. Engines read how a step is computed, the loop what is due when."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator

from gmlp_scale.fields import MOST_COUNT, Count, FreeInBranch, FreeOnResume, Positive
from gmlp_scale.piecewise import Piecewise, number_or_pieces


def _is_positive(value: Any) -> bool:
    return type(value) is int and 0 < value <= MOST_COUNT


def _positive_or_auto(value: Any) -> Any:
    if value == "auto" or _is_positive(value):
        return value
    raise ValueError("a positive integer or auto")


class TrainConfig(BaseModel, frozen=True, extra="forbid"):
    num_steps: FreeInBranch[Count]
    """The length of the schedule in optimizer updates. [steps]"""
    time_budget_seconds: FreeInBranch[Positive | None] = None
    """About how long the run may take, over all its starts; the last evaluation and save come after. The learning rate
    falls over the last part of that time, as large a part as optimizer.decay_steps is of num_steps; how many steps that
    is follows from the speed until then, and is decided once. num_steps is then the most steps. Needs
    optimizer.schedule=stable. [seconds]"""
    stop_after_step: FreeOnResume[Count | None] = None
    """Stop after this step with a checkpoint, as on a signal; the same command without it goes on. [steps]"""
    global_batch_size: Annotated[
        int | tuple[tuple[int, int], ...], number_or_pieces(_is_positive, "a positive integer")
    ]
    """Rows per step over all ranks. Or, for a batch that grows, a list of [from_step, rows], such as [[0, 1024],
    [10000, 4096]]: after `from_step` finished steps each step has that many rows. [rows]"""
    micro_batch_size: FreeOnResume[Annotated[int | Literal["auto"], BeforeValidator(_positive_or_auto)]]
    """Rows per forward pass on one rank; a step accumulates as many passes as the global batch needs. auto: the most
    rows that fit into memory, found when the run starts. The number changes losses by rounding only. [rows]"""
    device: FreeOnResume[Literal["auto", "cpu", "cuda"]] = "auto"
    """auto: a GPU for each rank where there are any, else the CPU."""
    precision: Literal["auto", "float32", "bf16"] = "bf16"
    """bf16: parameters and products in bfloat16 with a float32 master; statistics, softmax and loss in float32. auto:
    bf16 on a GPU that has it, and on a CPU that trains a block of the model faster in it; decided when the run starts,
    and kept by its checkpoints."""
    compile: FreeOnResume[Literal[True, False, "reduce-overhead"]] = True
    """torch.compile for each block, on a GPU for each group of them. reduce-overhead also replays CUDA graphs, which
    pays where a rank has so few tokens that its GPU waits for the host to start kernels."""
    recompute: FreeOnResume[Literal["none", "selective", "full"]] = "none"
    """What the backward pass computes again to save memory. selective: all but the results of matrix products; full:
    the whole block from its input."""
    on_not_finite: FreeOnResume[Literal["stop", "skip"]] = "stop"
    """A step whose loss or gradient norm is not finite: stop the run, or go on without its update."""
    on_spike: FreeOnResume[Literal["log", "skip", "stop"]] = "log"
    """A step whose loss is far above those before it (train/step_guard.py says how far): log it, go on without its
    update, or stop the run."""
    recheck_every_steps: FreeOnResume[Count | None] = None
    """Each rank computes a micro-batch twice this often, and the ranks compare their weights; a difference stops the
    run with the rank's number. It finds chips and memory that give wrong numbers. On a GPU the whole run then uses
    torch's deterministic algorithms and no fused attention. [steps]"""
    log_every_steps: FreeOnResume[Count] = 50
    """How often a line comes in the log, metrics.jsonl and TensorBoard. [steps]"""
    evaluate_every_steps: FreeOnResume[Count] = 10_000
    """How often an evaluation on held-out rows comes. There is one at the end too. [steps]"""
    num_evaluation_rows: FreeOnResume[Count] = 10_000
    """Held-out rows per evaluation: the first ones, or as many as there are. [rows]"""
    profile_steps: FreeOnResume[tuple[Count, Count] | None] = None
    """The first and the last step to profile, counted from 1: what rank 0 does in them goes into the run's folder
    profile, as a Chrome trace and, on a GPU, a memory snapshot. [steps]"""
    tracker: FreeOnResume[Literal["wandb", "trackio"] | None] = None
    """Weights & Biases (WANDB_MODE=offline keeps it on the disk), or trackio, beside TensorBoard."""
    log_filters: FreeOnResume[bool] = False
    """Draw the spatial filters of a gMLP into TensorBoard at every evaluation. Gathers all weights on rank 0."""
    peak_tflops_per_device: FreeOnResume[Positive | None] = None
    """Data-sheet peak that perf/mfu divides by. null looks the device up; without a known peak there is no perf/mfu.
    [TFLOP/s]"""
    allow_changed_on_resume: FreeOnResume[list[str]] = []
    """Fields that may differ from the checkpoint's although they change the run, as optimizer.peak_learning_rate."""

    @property
    def batch_sizes(self) -> Piecewise:
        """Rows of each step over all ranks."""
        return Piecewise(self.global_batch_size)

    def num_micro_batches(self, world_size: int) -> Piecewise:
        """Micro-batches of each step on a rank. Recipe.rows_per_rank has checked that the division is exact."""
        return self.batch_sizes.map(lambda rows: rows // (world_size * self.micro_batch_size))
