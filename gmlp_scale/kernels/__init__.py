"""Fused GPU kernels in Triton behind the same functions as the plain PyTorch ones.

A model calls one function, fused_gating.fused_gating. Importing this package registers the operator that it runs,
torch.ops.gmlp_scale.spatial_gating_unit, so that torch.compile knows it; that needs no Triton, running it does.

The kernels accumulate in float32 in one fixed order and never add atomically, so two runs are equal bit for bit. Their
pointers bear the shape suffixes of gmlp_scale/models; T stands for all tokens B * N of a micro-batch, P for partial
sums that a second pass adds up.
"""

from gmlp_scale.kernels import spatial_gating_unit as spatial_gating_unit
