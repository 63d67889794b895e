"""The ceilings of a training step: how fast this machine multiplies matrices and copies memory, each alone."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gmlp_scale.models import AmlpConfig, GmlpConfig
from gmlp_scale.plan.describe import count_parameters, meta_model
from gmlp_scale.plan.rank_bytes import count_in_matrices
from gmlp_scale.recipe.config import RunConfig

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def matrix_calls(run: RunConfig, device: torch.device) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """(call, FLOPs) by name: both channel projections at the recipe's shape, and a large square product."""
    tokens = run.train.micro_batch_size * run.model.sequence_length
    square = 8192 if device.type == "cuda" else 2048
    shapes = {"square": (square, square, square)}
    if isinstance(run.model, GmlpConfig):
        shapes["expand"] = (tokens, run.model.d_model, run.model.d_ffn)
        shapes["contract"] = (tokens, run.model.d_gate, run.model.d_model)
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
    return products.counts, {name: _alone(*product) for name, product in products.first.items()}


class _Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.first: dict[str, tuple] = {}

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function.overloadpacket.__name__
        if name in PRODUCTS:
            left, right = arguments[-2:]
            described = (tuple(left.shape), left.stride(), tuple(right.shape), right.stride(), left.dtype, left.device)
            key = f"product {'bmm' if left.ndim == 3 else 'mm'} {described[:4]}"
            self.counts[key] += 1
            self.first.setdefault(key, described)
        return function(*arguments, **(named or {}))


def _alone(
    left_shape: tuple, left_stride: tuple, right_shape: tuple, right_stride: tuple, dtype: torch.dtype, device
) -> Callable[[], Tensor]:
    left, right = (
        torch.empty_strided(shape, stride, dtype=dtype, device=device)
        for shape, stride in ((left_shape, left_stride), (right_shape, right_stride))
    )
    for operand in (left, right):
        if 0 in operand.stride():  # the whole batch shares the spatial matrix
            operand = operand[0]
        operand.normal_()
    return partial(torch.bmm if left.ndim == 3 else torch.mm, left, right)


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
