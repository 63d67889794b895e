"""Each part measures what it says: that its figures belong together, not how large they are."""

import copy
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import time
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import checkpointing, host, loading, step, timing
from benchmarks.checkpointing import measure_checkpoint
from benchmarks.loading import batched, measure_loading
from benchmarks.peers import transformer_sizes
from benchmarks.reports import table
from benchmarks.run import main, measure_start_up
from benchmarks.step import PEERS, captured_products, fewest_bytes, kind_of, measure_step, products_of, shares
from gmlp_scale.distributed.world import start_world
from gmlp_scale.engine import ENGINES, SHARDED_ENGINES
from gmlp_scale.plan.describe import count_parameters
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train.trial import new_engine, random_batch
from tests.forked import CONTEXT, Script, fork, fork_server
from tests.gloo_ranks import run_ranks
from tests.hosts.hosts import has_ended, wait_until
from tests.whole_runs import SMOKE

BASE = SMOKE.parent / "gmlp_base.yaml"
ROOT = SMOKE.parents[2]


def tiny_run(folder: Path, *overrides: str) -> RunConfig:
    """A recipe that every part of the benchmark runs in seconds."""
    common = ["engine.kind=single", "train.compile=false", "train.device=cpu", f"output_dir={folder}"]
    return load_run_config(SMOKE, [*common, *overrides])


@pytest.fixture
def world():
    with start_world(60, "cpu", hear_stop_signals=False) as world:
        yield world


@pytest.fixture
def forked_contenders(monkeypatch):
    """Contenders in processes that need not import anything."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: CONTEXT)


def test_variants_begin_with_the_weights_that_they_are_given(tmp_path, world):
    run = tiny_run(tmp_path)
    weights = {name: 2 * weight for name, weight in new_engine(run, world).full_weights()}
    found = dict(new_engine(run, world, weights=weights).full_weights())
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_step_without_peers(tmp_path, world, monkeypatch):
    draw, drawn = Pretraining.initialise, []
    monkeypatch.setattr(Pretraining, "initialise", lambda task, model: drawn.append(draw(task, model)))
    first, _, report = map(copy.deepcopy, measure_step(tiny_run(tmp_path), world, 1, with_peers=False))
    assert first["ratios"].keys() == {"fraction_of_ceiling"}, "the recipe's own figure comes before all others"
    assert table({"recipes": {"smoke": {"step": first}}}).endswith(" | - |  |")
    assert sum(report["time_split"].values()) == pytest.approx(1)
    floor = report["operations_floor_seconds"] / report["step_seconds"]
    assert report["ratios"]["fraction_of_ceiling"] == pytest.approx(floor)
    assert report["ratios"].keys() == {"fraction_of_ceiling", "isolated_products_over_step"}  # the recipe is eager
    assert report["contenders"] == {}
    assert len(drawn) == 1


def test_a_peer_that_is_not_installed_is_said_so_and_the_others_come_in_order(
    tmp_path, world, monkeypatch, forked_contenders
):
    pytest.importorskip("g_mlp_pytorch")
    (tmp_path / "transformers.py").write_text("raise ImportError('there are no transformers here')")
    monkeypatch.syspath_prepend(tmp_path)  # the peers' processes take the path over
    monkeypatch.setattr(step, "PEERS", dict.fromkeys(["g_mlp_pytorch", "bert"]))  # their names; theirs is the real one
    *_, report = measure_step(tiny_run(tmp_path), world, 1, with_peers=True)
    assert report["contenders"].pop("bert") == "not installed: there are no transformers here"
    assert list(report["contenders"]) == ["g_mlp_pytorch"]
    assert list(report["ratios"])[2:] == ["over_g_mlp_pytorch"]
    assert report["contenders"]["g_mlp_pytorch"]["parameters"] > 0


def test_products_captured_from_a_step_have_its_flops(tmp_path, world):
    run = tiny_run(tmp_path)
    batch = random_batch(run, world.device)
    counts, calls = products_of(run, world, batch)
    flops = 0
    for name, call in calls.items():
        left, right = call.args
        assert call().shape[-2:] == (left.shape[-2], right.shape[-1])
        flops += counts[name] * 2 * left.numel() * right.shape[-1]
    assert flops == run.flops_per_step().last // run.train.global_batch_size * run.train.micro_batch_size


def test_fewest_bytes_of_gmlp_base():
    run = load_run_config(BASE, ["engine.kind=single", "train.micro_batch_size=1"])
    per_token_and_block = 2 * 2 * (512 + 3072 + 1536)  # 20.5 KB written and read in bfloat16
    assert fewest_bytes(run) == 512 * 48 * per_token_and_block + 30 * count_parameters(run)


@pytest.mark.parametrize("num_blocks", [6, 48])
@pytest.mark.parametrize("mlp_weights_per_width", [8, 4.5])
def test_a_transformer_of_equal_flops(num_blocks, mlp_weights_per_width):
    run = load_run_config(BASE, ["engine.kind=single", f"model.num_blocks={num_blocks}"])
    sizes, flops = transformer_sizes(run, mlp_weights_per_width=mlp_weights_per_width)
    assert abs(flops * run.train.global_batch_size / run.flops_per_step().last - 1) <= 0.1
    width = sizes["hidden_size"]
    assert width % 64 == 0 and 512 <= width <= 1024 and sizes["num_hidden_layers"] >= 1


@pytest.mark.parametrize("name", PEERS)
def test_a_peers_step_has_the_flops_that_are_stated_and_learns(name, world):
    pytest.importorskip("transformers" if "bert" in name else "g_mlp_pytorch")
    sizes = ["num_blocks=2", "d_model=128", "d_ffn=768", "sequence_length=32", "vocab_size=512"]
    overrides = [f"model.{size}" for size in sizes] + ["train.micro_batch_size=2", "train.precision=float32"]
    run = load_run_config(BASE, ["engine.kind=single", *overrides])
    batch = random_batch(run, world.device)
    torch.compiler.set_stance("force_eager")
    try:
        train, description = PEERS[name](run, world.device, batch)
        counts, calls = captured_products(train)
    finally:
        torch.compiler.set_stance("default")
    assert description["parameters"] > 0
    if "flops" in description:
        products = sum(counts[key] * 2 * c.args[0].numel() * c.args[1].shape[-1] for key, c in calls.items())
        tokens = 2 * 32
        attention = 3 * 4 * 32 * description["width"] * description["num_layers"] * tokens  # no mm on the CPU
        assert products + attention == pytest.approx(description["flops"], rel=1e-6)


def test_checkpoint(tmp_path, world):
    run = tiny_run(tmp_path)
    *_, report = measure_checkpoint(run, world, 1)
    assert report["bytes"] == 12 * count_parameters(run)
    assert report["costs"].keys() == {"stall_over_copy", "save_over_torch_save", "load_over_torch_load"}
    assert all(spent > 0 for spent in report["seconds"].values())
    assert list(tmp_path.iterdir()) == []


def _stalls(folder: Path) -> str:
    checkpointing.NUM_STALLS = 1
    with start_world(60, "cpu", init_group=True) as world:
        return checkpointing.measure_stalls(tiny_run(folder), world)


def test_stalls_of_every_engine_on_two_ranks(tmp_path):
    rows = [line.split(" | ") for line in run_ranks(_stalls, 2, tmp_path)[0].splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == list(SHARDED_ENGINES)
    for _, num_megabytes, copied, stall, ratio in rows:
        assert float(num_megabytes) == pytest.approx(6 * count_parameters(tiny_run(tmp_path)) / 1e6, abs=0.02)
        assert float(ratio.removesuffix(" |")) == pytest.approx(float(stall) / float(copied), rel=0.5)


def test_host_times_of_every_engine(monkeypatch, succeeds):
    monkeypatch.setattr(host, "NUM_ROUNDS", 1)
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    num_blocks = load_run_config(SMOKE).model.num_blocks
    printed = succeeds(host.main, "--config", SMOKE, "train.micro_batch_size=2").splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in printed]
    without_graphs = ("zero, stage 3", "fsdp2, reshard_after_forward")
    refused = {("zero, stage 3", "yes"), *itertools.product(without_graphs, ["CUDA graphs"])}
    timed = [(name, compiled) for name, compiled, *_ in rows]
    assert len(timed) == len(set(timed)) and set(timed) == {*itertools.product(ENGINES, host.COMPILED)} - refused
    for _, _, *figures in rows:
        forward, backward, update, of_block, step, device, over_device, _ = map(float, figures)
        assert of_block == pytest.approx((forward + backward) / num_blocks, rel=0.02)
        assert step == pytest.approx(forward + backward + update, rel=0.02)
        assert over_device == pytest.approx(step / device, rel=0.02)


def test_the_host_of_a_model_with_heads_is_timed(monkeypatch, succeeds):
    monkeypatch.setattr(host, "NUM_ROUNDS", 1)
    monkeypatch.setattr(host, "ENGINES", {"single": ENGINES["single"]})
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    printed = succeeds(host.main, "--config", SMOKE.parent / "bert_base.yaml", "model.num_blocks=1")
    assert "| single | no |" in printed


def test_loader(tmp_path, monkeypatch, forked_contenders):
    monkeypatch.setattr(loading, "C4_SHARDS", 50)
    monkeypatch.setattr(loading, "C4_ROWS_PER_SHARD", 300)
    monkeypatch.setattr(loading, "FAR_STEP", 40)
    report = measure_loading(tiny_run(tmp_path), 1)
    assert report["rows_per_core_second"].keys() == {"gmlp_scale", "gmlp_scale_unmasked", "webdataset"}
    assert report["ratios"].keys() == {"over_webdataset", "masked_over_webdataset"}
    assert report["first_batch"]["rows"] == 15_000


def test_a_loader_that_dies_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(loading, "LOADERS", {"unknown": None})  # to its new process it is unknown
    with pytest.raises(ChildProcessError, match="process of unknown died, of the error above"):
        loading.rows_per_core_second(tiny_run(tmp_path), 1, tmp_path)
    assert "KeyError: 'unknown'" in capfd.readouterr().err


def test_start_up_times_a_dry_run_that_works(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands, start = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    report = measure_start_up(str(SMOKE), ["engine.kind=single"], 1)
    assert report["seconds"].keys() == {"python", "import_torch", "dry_run"}
    command = next(command for command in commands if "--dry-run" in command)
    assert str(SMOKE) in command and "engine.kind=single" in command
    start(command, check=True, stdout=subprocess.DEVNULL)


def test_batches_hold_the_rows_in_order():
    first = next(batched(iter(torch.arange(1000).view(1000, 1).numpy())))
    assert first.tolist() == [[number] for number in range(256)]


def test_launcher_prints_json_and_compares(tmp_path, launched):
    recipe = ["--config", SMOKE, "--rounds", "1", "--parts", "checkpoint", f"output_dir={tmp_path}"]
    script = Script("benchmarks/run.py", [*recipe, "--output", tmp_path / "before.json"])
    code, printed, error = script.end()
    assert code == 0, error
    report = json.loads(printed)
    assert report == json.loads((tmp_path / "before.json").read_text())
    costs = report["recipes"]["smoke"]["checkpoint"]["costs"]
    costs.update({name: 1e-9 for name in costs})
    (tmp_path / "before.json").write_text(json.dumps(report))
    code, _, error = launched(main, *recipe, "--compare", tmp_path / "before.json")
    assert code == 1 and error.count("worse: smoke checkpoint") == 3, error


@pytest.mark.parametrize(
    "words, message",
    [
        (["--rounds", "0"], "--rounds: found 0"),
        (["--parts", "step,speed"], "--parts: found speed; known are step, loader, checkpoint, start_up"),
        (["--config", BASE], "train.device: found cpu in smoke and auto in gmlp_base, but a report is of one"),
        pytest.param(
            ["train.device=cuda"],
            "train.device is cuda, but torch finds no CUDA device here: set train.device to auto or cpu\n",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU"),
        ),
    ],
)
def test_launcher_refuses_what_it_cannot_measure(words, message, launched):
    code, _, error = launched(main, "--parts", "start_up", "--config", SMOKE, *words)
    assert code == 2 and message in error


def _sleep(pid_file: Path) -> None:
    pid_file.write_text(str(os.getpid()))
    time.sleep(1000)


def _own_a_contender(pid_file: Path) -> None:
    fork_server()
    multiprocessing.get_context = lambda method: CONTEXT
    timing.Contender("sleeper", _sleep, pid_file)


def test_a_contender_ends_with_the_benchmark_whatever_ends_that(tmp_path):
    numbers = (signal.SIGTERM, signal.SIGKILL)
    owners = {number: fork(_own_a_contender, tmp_path / str(int(number))) for number in numbers}
    for number, owner in owners.items():
        pid_file = tmp_path / str(int(number))
        wait_until(lambda file=pid_file: file.exists() and file.read_text(), "the contender's start")
        os.kill(owner.pid, number)
        wait_until(lambda file=pid_file: has_ended(int(file.read_text())), "the contender's end", seconds=20)
        assert has_ended(int(pid_file.read_text())) and has_ended(owner.pid)


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
