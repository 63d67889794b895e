"""Fused GPU kernels in Triton behind the same functions as the plain PyTorch ones.

`spatial_gating_unit` is all that a model sees: one operator, torch.ops.gmlp_scale.spatial_gating_unit. Importing that
module needs no Triton; running the operator does. Kernels accumulate in float32 in one fixed order and never add
atomically, so that two runs are bit-equal. A kernel's pointers bear the shape suffixes of gmlp_scale/models; R stands
for all rows B * N, P for parts that a second pass adds up.
"""
