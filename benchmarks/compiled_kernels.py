"""What each kernel takes of an H100 or H200, found without a GPU: launches are noted and compiled for sm_90, and their
binaries are read.

It does not work in Triton's interpreter, where nothing is compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import KernelInterface

from gmlp_scale.kernels import gate, layer_norm, spatial_gating_unit, spatial_weight

HOPPER = GPUTarget("cuda", 90, 32)
REGISTERS_PER_QUARTER = 16384
"""A multiprocessor has four quarters, and each warp its registers in one of them, in units of eight for a thread."""
SHARED_BYTES_PER_MULTIPROCESSOR, RESERVED_SHARED_BYTES = 228 * 1024, 1024
EDGES = {
    "BLOCK_T": "num_tokens", "BLOCK_N": "num_positions", "BLOCK_G": "d_gate", "CHUNK_G": "d_gate",
    "BLOCK_I": "n", "BLOCK_J": "n", "BLOCK_D": "n",
}  # fmt: skip
"""Which argument holds the size that a block divides. It is n where a kernel has no such argument."""
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", int: "i32", float: "fp32"}


class Launch(NamedTuple):
    kernel: triton.JITFunction
    arguments: dict[str, object]
    """By name; a tile's sizes are among them."""
    options: dict[str, int]
    """num_warps, num_stages and maxnreg, as far as they are given."""


class Usage(NamedTuple):
    registers: int
    """Per thread."""
    spilled_bytes: int
    """Per thread, in its local memory."""
    shared_bytes: int
    """Per program."""
    programs_per_multiprocessor: int
    """How many run at once."""
    instructions: int
    """In its code (SASS), and those of them in its longest loop; 0 if it has none."""
    loop_instructions: int
    barriers: int
    """Of its instructions, those that wait for all threads of the program; in the loop, if there is one."""


class Lanes(NamedTuple):
    masked_lanes: float
    """The share of its lanes that are beyond the edge of a tensor and compute in vain."""
    instructions_per_element: float
    """Of all lanes together, for each element of the tensor: of its loop if there is one, or of the whole kernel. Of a
    product those outside its loop."""


@contextmanager
def without_kernels(note: Callable[[KernelInterface, tuple, dict], None]) -> Iterator[None]:
    """Calls `note` with the kernel, its arguments and its options instead of each launch, on any device."""

    class Noted:
        def __init__(self, kernel: KernelInterface):
            self.kernel = kernel

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, **options: note(self.kernel, arguments, options)

    replaced = [
        (module, name, value, Noted(value))
        for module in (gate, layer_norm, spatial_weight)
        for name, value in vars(module).items()
        if name.endswith("_kernel")
    ]
    replaced.append((spatial_gating_unit, "_check_can_run", spatial_gating_unit._check_can_run, lambda z_BNF: None))
    for module, name, _, instead in replaced:
        setattr(module, name, instead)
    try:
        yield
    finally:
        for module, name, value, _ in replaced:
            setattr(module, name, value)


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """What `call` would launch; a tuned kernel in each of its tiles."""
    launches = []

    def note(kernel: KernelInterface, arguments: tuple, options: dict) -> None:
        tiles = [options]
        if isinstance(kernel, triton.runtime.Autotuner):
            kernel, tiles = kernel.fn, [{**options, **config.all_kwargs()} for config in kernel.configs]
        for tile in tiles:
            named = dict(zip(kernel.arg_names, arguments, strict=False))
            named |= {name: value for name, value in tile.items() if name in kernel.arg_names}
            options_of_launch = {name: tile[name] for name in ("num_warps", "num_stages", "maxnreg") if name in tile}
            launches.append(Launch(kernel, named, options_of_launch))

    with without_kernels(note):
        call()
    return launches


def compile_for_hopper(launch: Launch) -> CompiledKernel:
    """Compiles as Triton would: a None or a 1 in the arguments is a constant, and multiples of 16 are known as such."""
    kernel, arguments = launch.kernel, launch.arguments
    is_one = {name: isinstance(value, int) and value == 1 for name, value in arguments.items()}
    is_constant = {p.name: p.is_constexpr or arguments[p.name] is None or is_one[p.name] for p in kernel.params}
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if is_constant[name] else _type(arguments[name]) for name in kernel.arg_names},
        constexprs={(i,): arguments[name] for i, name in enumerate(kernel.arg_names) if is_constant[name]},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if not is_constant[name] and _is_multiple_of_16(arguments[name])
        },
    )
    return triton.compile(source, target=HOPPER, options=launch.options)


def usage_of(compiled: CompiledKernel) -> Usage:
    """Reads the binary with the disassembler that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "--dump-sass", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled_bytes = (int(re.search(rf"{name}:(\d+)", printed)[1]) for name in ("REG", "STACK"))
    shared_bytes, num_warps = compiled.metadata.shared, compiled.metadata.num_warps
    by_registers = 4 * (REGISTERS_PER_QUARTER // (32 * 8 * -(-registers // 8))) // num_warps
    by_shared_bytes = SHARED_BYTES_PER_MULTIPROCESSOR // (shared_bytes + RESERVED_SHARED_BYTES)
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?!NOP)(\S.*?) *;", printed)
    code = {int(address, 16): instruction for address, instruction in code}
    # A loop ends in a conditional jump backwards. (An unconditional one leads back from code that rarely runs.)
    loops = [[]]
    for address, instruction in code.items():
        jump = re.fullmatch(r"@.* BRA (0x[0-9a-f]+)", instruction)
        if jump and int(jump[1], 16) < address:
            loops.append([code[inside] for inside in code if int(jump[1], 16) <= inside <= address])
    loop = max(loops, key=len)
    barriers = sum("BAR.SYNC" in instruction for instruction in loop or code.values())
    programs = min(by_registers, by_shared_bytes)
    return Usage(registers, spilled_bytes, shared_bytes, programs, len(code), len(loop), barriers)


def lanes_of(launch: Launch, usage: Usage) -> Lanes:
    arguments, used, lanes_per_thread = launch.arguments, 1.0, 1 / (32 * launch.options.get("num_warps", 4))
    for name in EDGES.keys() & arguments.keys():
        size, block = arguments.get(EDGES[name], arguments.get("n")), arguments[name]
        if name == "CHUNK_G":  # a program holds all channels
            block *= arguments["NUM_CHUNKS"]
        lanes_per_thread *= block
        used *= size / (ceil(size / block) * block)
    if "BLOCK_D" in arguments:  # a line of the matrix crosses half of the diagonals
        used /= 2
    counted = usage.loop_instructions or usage.instructions
    if "BLOCK_K" in arguments:
        counted = usage.instructions - usage.loop_instructions
    return Lanes(1 - used, counted / lanes_per_thread / used)


def _type(value: object) -> str:
    return TYPES[value.dtype if isinstance(value, Tensor) else type(value)]


def _is_multiple_of_16(value: object) -> bool:
    number = value.data_ptr() if isinstance(value, Tensor) else value
    return isinstance(number, int) and number % 16 == 0
