"""The recipe's training step beside the machine's ceilings, its own variants and other people's models.

A step is forward, backward and update of one micro-batch on one device, on random tokens. Other people's models
run in their own processes. The ceilings are how fast this machine multiplies matrices and copies memory, each alone.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers import bert_step, g_mlp_pytorch_step, modernbert_step
from benchmarks.timing import Contender, Turn, say, time_in_turns, turns_of
from gmlp_scale.data.batch import MaskedBatch
from gmlp_scale.distributed.world import World
from gmlp_scale.engine.optimizer import AdamwConfig, MuonConfig
from gmlp_scale.models import AmlpConfig, GmlpConfig, with_kernels
from gmlp_scale.plan.describe import count_parameters, meta_model
from gmlp_scale.plan.rank_bytes import count_in_matrices
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.train.metrics import peak_memory_bytes, peak_tflops
from gmlp_scale.train.trial import forget_other_recipes, new_engine, random_batch, train_step, wait_for

PEERS = {"g_mlp_pytorch": g_mlp_pytorch_step, "bert": bert_step, "modernbert": modernbert_step}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
NUM_PROFILED_STEPS = 3
# An operation belongs to the first kind that has a word in its lower-case name. On CUDA the names are the kernels'.
# Inductor's kernels come first, because their names list all they fuse. Attention comes before matrix products, because
# its kernels' names have "cutlass" too.
KINDS = {
    "fused": ("triton_poi", "triton_red", "triton_per", "compiledfxgraph", "spatial", "layer_norm_of_gelu"),
    "attention": ("scaled_dot_product", "sdpa", "flash", "fmha"),
    "matrix products": ("::mm", "addmm", "bmm", "gemm", "cutlass", "nvjet", "splitk", "triton_tem", "mkldnn_linear"),
    "optimizer and gradient norm": ("adam", "multi_tensor", "_foreach", "linalg", "norm_l2"),
    "head and loss": ("softmax", "nll_loss"),
    "embedding": ("embedding", "index", "gather", "scatter"),
}


def measure_step(run: RunConfig, world: World, num_rounds: int, *, with_peers: bool) -> Iterator[dict]:
    """The figures so far, each time with more: first the recipe beside the ceilings, then where its time goes, then the
    variants and peers. The recipe takes its turn each time, so a ratio is always of neighbouring turns."""
    device = world.device
    forget_other_recipes(device)
    batch = random_batch(run, device)
    engine = new_engine(run, world)
    recipe = partial(train_step, engine, run, batch)
    recipe()
    peak_memory_gib = peak_memory_bytes(device) / 2**30  # before anything else takes memory
    matrix_flops, (copy, copied_bytes) = matrix_calls(run, device), copy_call(device)
    ceilings = {name: call for name, (call, _) in matrix_flops.items()} | {"copy": copy}
    seconds = time_in_turns(turns_of({"recipe": recipe} | ceilings, device), num_rounds)

    flops, ours = run.flops_per_row().last * run.train.micro_batch_size, seconds["recipe"]
    matrix_tflops = {name: count / seconds[name] / 1e12 for name, (_, count) in matrix_flops.items()}
    copy_rate = copied_bytes / seconds["copy"]
    tflops = flops / ours / 1e12
    peak = run.train.peak_tflops_per_device or peak_tflops(device, run.train.precision)
    bytes_moved = fewest_bytes(run)
    ratios, contenders = {"fraction_of_ceiling": tflops / max(matrix_tflops.values())}, {}
    figures = {
        "rows": run.train.micro_batch_size,
        "precision": run.train.precision,
        "parameters": count_parameters(run),
        "step_seconds": ours,
        "tokens_per_second": run.train.micro_batch_size * run.model.sequence_length / ours,
        "model_tflops": tflops,
        "mfu": peak and tflops / peak,
        "peak_memory_gib": peak_memory_gib,
        "matrix_ceiling_tflops": matrix_tflops,
        "copy_bytes_per_second": copy_rate,
        "operations_floor_seconds": flops / max(matrix_tflops.values()) / 1e12,
        "bytes_floor_seconds": bytes_moved and bytes_moved / copy_rate,
        "ratios": ratios,
        "contenders": contenders,
    }
    yield figures

    weights = dict(engine.full_weights())  # for all variants: a core draws gmlp_xlarge's in 9 s
    counts, calls = products_of(run, world, batch, weights)
    seconds = time_in_turns(turns_of({"recipe": recipe} | calls, device), num_rounds)
    spent = sum(times * seconds[name] for name, times in counts.items())
    ratios["isolated_products_over_step"] = spent / seconds["recipe"]
    figures["isolated_products"] = {name: {"per_step": n, "seconds": seconds[name]} for name, n in counts.items()}
    figures["time_split"] = time_split(recipe, device)
    yield figures

    forms = variants(run, device)
    steps = {
        name: partial(train_step, new_engine(form, world, weights=weights), form, batch) for name, form in forms.items()
    }
    peers, missing = start_peers(run, device) if with_peers else ({}, {})
    turns = turns_of({"recipe": recipe} | steps, device) | {name: peer.take_turn for name, peer in peers.items()}
    seconds = time_in_turns(turns, num_rounds)
    contenders |= missing
    described = {name: {"compile": form.train.compile} for name, form in forms.items()}
    for name, description in (described | {name: peer.description for name, peer in peers.items()}).items():
        contenders[name] = {"step_seconds": seconds[name], **description}
        ratios[f"over_{name}"] = seconds[name] / seconds["recipe"] / (description.get("flops", flops) / flops)
    yield figures


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
    is_fused = isinstance(run.model, GmlpConfig) and run.model.has_kernels and run.model.kernels != "torch"
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


def matrix_calls(run: RunConfig, device: torch.device) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """(call, FLOPs) by name: both channel projections at the recipe's shape, and a large square product."""
    tokens = run.train.micro_batch_size * run.model.sequence_length
    square = 8192 if device.type == "cuda" else 2048
    shapes = {"square": (square, square, square)}
    if isinstance(run.model, GmlpConfig):
        shapes["expand"] = (tokens, run.model.d_model, run.model.d_ffn)
        shapes["contract"] = (tokens, run.model.d_gated, run.model.d_model)
    calls = {}
    for name, (m, k, n) in shapes.items():
        a, b = (torch.randn(shape, device=device, dtype=DTYPES[run.train.precision]) for shape in ((m, k), (k, n)))
        calls[name] = (partial(torch.mm, a, b), 2 * m * k * n)
    return calls


def copy_call(device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """(call, bytes read and written): a copy within the device's memory, too large for its caches."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source), 2 * source.numel()


def captured_products(step: Callable[[], object]) -> tuple[Counter[str], dict[str, Callable[[], Tensor]]]:
    """The matrix products of an eager step, backward pass included: how often each occurs, and a call of it alone.

    Both are by the product's name. A call multiplies random operands of the same shapes and strides.
    """
    with _Products() as products:
        step()
    return products.counts, products.calls


class _Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.calls: dict[str, Callable[[], Tensor]] = {}

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function.overloadpacket.__name__
        if name in PRODUCTS:
            left, right = arguments[-2:]
            kind, shapes = "bmm" if left.ndim == 3 else "mm", tuple((tuple(x.shape), x.stride()) for x in (left, right))
            key = f"product {kind} {sum(shapes, ())}"
            self.counts[key] += 1
            if key not in self.calls:
                self.calls[key] = partial(getattr(torch, kind), _random_like(left), _random_like(right))
        return function(*arguments, **(named or {}))


def _random_like(operand: Tensor) -> Tensor:
    alike = torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype, device=operand.device)
    (alike[0] if 0 in alike.stride() else alike).normal_()  # 0: the whole batch shares the spatial matrix
    return alike


def fewest_bytes(run: RunConfig) -> int | None:
    """Bytes that a gMLP or aMLP step must move, however its operations are fused; None for other models.

    Per token and block the forward pass writes once, and the backward pass reads once: the block's input, the expanded
    channels before GELU, the spatial projection's result (and the attention's q, k, v). Per parameter AdamW reads and
    writes the master weight and both moments, reads the float32 gradient and, in bf16, writes the bf16 copy. Muon has
    one state where AdamW has two; its products are not counted.
    """
    if not isinstance(run.model, GmlpConfig):
        return None
    model, itemsize = run.model, DTYPES[run.train.precision].itemsize
    kept = model.d_model + model.d_ffn + model.d_gate + (3 * model.d_attn if isinstance(model, AmlpConfig) else 0)
    tokens = run.train.micro_batch_size * model.sequence_length
    per_parameter = 24 + 4 + (2 if run.train.precision == "bf16" else 0)
    one_state = 8 * count_in_matrices(meta_model(run), run.optimizer)
    return 2 * tokens * model.num_blocks * kept * itemsize + per_parameter * count_parameters(run) - one_state


def time_split(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Fractions of the device's busy time by kind of operation, the largest first; they sum to one."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiled:
        for _ in range(NUM_PROFILED_STEPS):
            step()
        wait_for(device)
    return shares(profiled.key_averages(), device)


def shares(events: Iterable, device: torch.device) -> dict[str, float]:
    """`time_split` from a profile's events."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        # Events of the host count their kernels' time again, and annotations the time of everything inside them.
        events = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    times: dict[str, float] = {}
    for event in events:
        kind = kind_of(event.key)
        spent = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        times[kind] = times.get(kind, 0.0) + spent
    total = sum(times.values())
    return {kind: spent / total for kind, spent in sorted(times.items(), key=lambda item: -item[1])}


def kind_of(name: str) -> str:
    """The kind of an operation or kernel, by its name; "other" if no kind has a word in it."""
    name = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
