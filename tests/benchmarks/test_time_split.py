"""What counts as busy time, and which kind each kernel is of."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.step import kind_of, shares

KERNELS = {
    "matrix products": [
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(...)",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "ampere_sgemm_128x64_nn",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>(...)",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "triton_tem_fused_mm_3",
    ],
    "attention": [
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t, ...)",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, cutlass::bfloat16_t>>",
        "cudnn_generated_fort_native_sdpa_sm90_knob_3_64x128x128_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_128x64x128_4x1x1_cga1x1x1_kernel0_0",
    ],
    "optimizer and gradient norm": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, "
        "FusedAdamMathFunctor<float, 4, ADAM_MODE::ADAMW, false>>(...)",
        "Optimizer.step#AdamW.step",
        "aten::_fused_adamw_",
        "aten::_foreach_norm",
    ],
    "fused": [
        "triton_poi_fused_add_addmm_gelu_1",
        "triton_per_fused_native_layer_norm_backward_mm_sum_4",
        "_spatial_gate_kernel",
        "_spatial_weight_gradient_kernel",
        "_spatial_diagonals_kernel",
        "_layer_norm_of_gelu_backward_kernel",
    ],
    "head and loss": [
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, float>(...)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(...)",
    ],
    "embedding": [
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2>(...)",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<c10::BFloat16, float, long>(...)",
    ],
    "other": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>(...)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float>(...)",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
    ],
}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in KERNELS.items() for name in names])
def test_kind_of(kind, name):
    assert kind_of(name) == kind


def event(key: str, where: DeviceType, on_device: float, on_cpu: float = 0.0, is_user_annotation: bool = False):
    times = {"self_device_time_total": on_device, "self_cpu_time_total": on_cpu}
    return SimpleNamespace(key=key, device_type=where, is_user_annotation=is_user_annotation, **times)


def test_on_cuda_each_kernel_counts_once_and_on_a_cpu_operations_count():
    operations = [event("aten::mm", DeviceType.CPU, 60.0, 1.0), event("aten::embedding", DeviceType.CPU, 40.0, 3.0)]
    on_the_device = [
        event("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", DeviceType.CUDA, 60.0),
        event("indexSelectLargeIndex", DeviceType.CUDA, 40.0),
        event("## Call CompiledFxGraph fabc ##", DeviceType.CUDA, 100.0, is_user_annotation=True),
    ]
    assert shares(operations + on_the_device, torch.device("cuda")) == {"matrix products": 0.6, "embedding": 0.4}
    assert shares(operations, torch.device("cpu")) == {"embedding": 0.75, "matrix products": 0.25}
