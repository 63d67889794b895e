"""GPUs by the figures of NVIDIA's data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
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
