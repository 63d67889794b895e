"""What rank 0 decides where a recipe says auto: the precision, and the largest micro-batch that fits."""

from types import SimpleNamespace

import pytest
import torch
import yaml

from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.checkpoint.stores import newest_checkpoint
from gmlp_scale.data.batch import num_masked_positions
from gmlp_scale.errors import OtherRankError
from gmlp_scale.models import build_model
from gmlp_scale.plan import auto
from gmlp_scale.plan.auto import largest_micro_batch_size
from gmlp_scale.plan.describe import describe
from gmlp_scale.plan.rank_bytes import count_vectors_and_others
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train import resolve
from gmlp_scale.train.resolve import with_decided_precision
from gmlp_scale.train.run import pretrain
from gmlp_scale.train.sinks import read_metrics
from tests.gloo_ranks import run_ranks
from tests.models.every_kind import FAMILIES, tiny_config
from tests.whole_runs import RECIPE, SMOKE
from tests.written_shards import VOCAB_SIZE

PRECISION = "train.precision=auto"
MICRO_BATCH = ["train.micro_batch_size=auto", "train.device=auto"]


def smoke(*overrides: str):
    return load_run_config(SMOKE, [*RECIPE, "data.shards=not/there", *overrides])


def world_on(device: str) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device), is_main=True, on_main=lambda action: action())


@pytest.mark.parametrize("faster", ["float32", "bf16"])
def test_the_faster_block_decides_on_a_busy_machine_too(faster, monkeypatch, tmp_path):
    clocks, passes = {"process_time": 0.0, "perf_counter": 0.0}, []

    def training_pass(run, of):
        def tick() -> None:
            clocks["process_time"] += 0.1 if of == faster else 0.2
            clocks["perf_counter"] += 0.3 if of == faster else 0.2  # other programs had the core
            passes.append(of)

        return tick

    monkeypatch.setattr(auto, "_training_pass", training_pass)
    for name in clocks:
        monkeypatch.setattr(auto.time, name, lambda name=name: clocks[name])
    run = with_decided_precision(smoke(PRECISION, f"output_dir={tmp_path}"), world_on("cpu"))
    assert run.train.precision == faster
    assert passes == ["float32", "bf16"] * 3, "one pass of each that is not counted, then turns for 0.6 seconds"


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_kind_of_block_can_be_timed(kind, monkeypatch):
    run, models = smoke(PRECISION).model_copy(update={"model": tiny_config(kind)}), []
    monkeypatch.setattr(auto, "build_model", lambda config: models.append(build_model(config)) or models[-1])
    for of, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        auto._training_pass(run, of)()
        (block,) = models[-1].blocks
        matrices = [parameter for parameter in block.parameters() if parameter.ndim == 2]
        assert matrices and {matrix.grad.dtype for matrix in matrices} == {dtype}


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_is_asked_not_timed(has_bf16, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    run = with_decided_precision(smoke(PRECISION, f"output_dir={tmp_path}"), world_on("cuda"))
    assert run.train.precision == ("bf16" if has_bf16 else "float32")


def _train_in(answer: str | None, overrides: list[str]) -> int:
    """How often this rank measured. answer: what it finds; None if it must not measure."""
    measured = []

    def faster_precision(run, device) -> str:
        measured.append(answer)
        return answer

    resolve.faster_precision = faster_precision
    pretrain(smoke(PRECISION, *overrides))
    return len(measured)


def test_ranks_agree_and_a_resumed_run_keeps_it(forty_rows, tmp_path):
    places = [f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    recipe = ["train.num_steps=4", "optimizer.warmup_steps=2", "engine.kind=fsdp2", "name=auto", *places]
    assert run_ranks(_train_in, 2, "bf16", [*recipe, "train.stop_after_step=2"]) == [1, 0]
    assert run_ranks(_train_in, 2, None, recipe) == [0, 0]
    checkpoint, _ = newest_checkpoint(tmp_path / "auto" / "checkpoints")
    assert checkpoint.step == 4
    assert checkpoint.details["config"]["train"]["precision"] == "bf16"
    assert yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())["train"]["precision"] == "bf16"


def _train_beside_a_broken_file(overrides: list[str]) -> str:
    try:
        pretrain(smoke(PRECISION, *overrides))
    except (ConfigError, OtherRankError) as error:
        return type(error).__name__
    return "it trained"


def test_a_config_that_rank_0_cannot_read_ends_all_ranks(tmp_path):
    (tmp_path / "auto").mkdir()
    (tmp_path / "auto" / "config.yaml").write_text("{")
    recipe = ["engine.kind=fsdp2", "engine.timeout_seconds=300", "name=auto", f"output_dir={tmp_path}"]
    assert run_ranks(_train_beside_a_broken_file, 2, recipe) == ["ConfigError", "OtherRankError"]


def test_a_branch_has_the_precision_of_its_trunk(tmp_path):
    trunk = smoke("train.precision=bf16", "name=trunk", f"output_dir={tmp_path}")
    (tmp_path / "trunk").mkdir()
    (tmp_path / "trunk" / "config.yaml").write_text(trunk.to_yaml())
    branch = smoke(PRECISION, "name=branch", f"output_dir={tmp_path}", f"branch_from={tmp_path / 'trunk'}@2")
    assert with_decided_precision(branch, world_on("cpu")).train.precision == "bf16"
    assert "would resume from       " + f"{tmp_path / 'trunk'}@2" in describe(branch, world_size=1)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_on_a_gpu_the_attempts_decide(error, monkeypatch):
    """The device is a stand-in: of the GPU's part this holds the search, and below that the attempt runs at all."""
    attempts = []

    def run_micro_batches(run, world) -> None:
        attempts.append(run.train.micro_batch_size)
        if attempts[-1] > 2:
            raise error

    forgotten_peaks = []
    monkeypatch.setattr(auto, "_run_micro_batches", run_micro_batches)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: forgotten_peaks.append(attempts[-1]))
    assert largest_micro_batch_size(smoke(*MICRO_BATCH), stand_in_world()) == 2
    assert attempts == forgotten_peaks == [8, 4, 2]


def test_another_error_is_raised(monkeypatch):
    def run_micro_batches(run, world) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(auto, "_run_micro_batches", run_micro_batches)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        largest_micro_batch_size(smoke(*MICRO_BATCH), stand_in_world())


def stand_in_world() -> SimpleNamespace:
    """A world of one rank, on a GPU. World.on_all, of which this has the results alone, has tests of its own."""
    return SimpleNamespace(device=torch.device("cuda"), size=1, on_all=lambda action: [action()])


@pytest.mark.parametrize(
    "options, bytes_per_parameter, bytes_per_logit",
    [
        (["train.precision=float32"], (4 + 4 + 8) - 8, 0),
        (["train.precision=bf16"], (2 + 4 + 4 + 8) - 4, 0),
        (["train.precision=bf16", "train.compile=reduce-overhead", "train.device=auto"], (2 + 4 + 4 + 8) - 4, 12),
    ],
    ids=["float32", "bf16", "graphs"],
)
def test_an_attempt_trains_and_evaluates_beside_the_room_for_states(
    options, bytes_per_parameter, bytes_per_logit, monkeypatch
):
    run = smoke(*options, "train.micro_batch_size=2", "train.recompute=selective")
    room, empty = [], torch.empty

    def recording_empty(*size, **options):
        if options.get("dtype") == torch.uint8:
            room.extend(size)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", recording_empty)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    auto._run_micro_batches(run, SimpleNamespace(device=torch.device("cpu"), size=1))
    num_logits = 2 * num_masked_positions(32, run.data.masked_fraction) * VOCAB_SIZE
    num_in_vectors, num_others = count_vectors_and_others(build_model(run.model), run.train.precision)
    of_states = (16 - 8) * num_in_vectors + bytes_per_parameter * num_others
    assert room == [of_states + bytes_per_logit * num_logits + 50]


def test_nothing_fits_is_one_clear_message(monkeypatch):
    monkeypatch.setattr(auto, "_fits", lambda run, world, num_rows: False)
    with pytest.raises(ConfigError, match=r"train.micro_batch_size: found auto, but not one row fits; needed: "):
        resolve.with_decided_micro_batch(smoke(*MICRO_BATCH), stand_in_world())


def test_a_cpu_needs_a_number_and_nothing_else_is_taken():
    with pytest.raises(ConfigError, match=r"train.micro_batch_size: found auto with train.device = cpu; give a number"):
        smoke(*MICRO_BATCH, "train.device=cpu")
    with pytest.raises(ConfigError, match=r"train.micro_batch_size: found auto on a CPU; give a number"):
        largest_micro_batch_size(smoke(*MICRO_BATCH), SimpleNamespace(device=torch.device("cpu")))
    for value in ("0", "-1", "1.5", "many", "true", "null"):
        with pytest.raises(ConfigError, match=r"train.micro_batch_size: found .*; needed: a positive integer or auto"):
            smoke(f"train.micro_batch_size={value}")


def test_ranks_must_divide_the_global_batch():
    run = smoke(*MICRO_BATCH, "engine.kind=fsdp2")
    assert run.rows_per_rank(4).values == (2,)
    with pytest.raises(ConfigError, match=r"train.global_batch_size: found 8; must be a multiple .* ranks, 3"):
        run.rows_per_rank(3)


def test_a_dry_run_says_that_both_are_decided_later():
    text = describe(smoke(*MICRO_BATCH, PRECISION), world_size=1)
    assert "micro_batch_size: auto" in text and "precision: auto" in text
    assert "8 rows each, in micro-batches that are decided when the run starts" in text
    assert "decided when the run starts; below are float32's figures" in text


def _train(overrides: list[str]) -> None:
    resolve.largest_micro_batch_size = lambda run, world: 4  # there is no GPU to try it on
    pretrain(smoke(*overrides))


def test_a_run_is_the_same_but_for_rounding(forty_rows, tmp_path):
    recipe = [
        "train.num_steps=6", "optimizer.warmup_steps=2", "train.evaluate_every_steps=3", "engine.kind=fsdp2",
        f"data.shards={forty_rows}", f"output_dir={tmp_path}", "optimizer.gradient_clipping=0.5",
    ]  # fmt: skip
    run_ranks(_train, 2, [*recipe, "train.micro_batch_size=1", "name=number"])
    run_ranks(_train, 2, [*recipe, *MICRO_BATCH, "name=auto", "train.stop_after_step=3"])
    run_ranks(_train, 2, [*recipe, *MICRO_BATCH, "name=auto"])

    number, auto = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("number", "auto"))
    assert [row["step"] for row in auto] == [row["step"] for row in number] and len(auto) == 8
    for tag in ("train/loss", "train/grad_norm", "eval/loss"):
        found, wanted = ([row[tag] for row in rows if tag in row] for rows in (auto, number))
        assert found and found == pytest.approx(wanted, rel=1e-6), tag

    written = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())
    assert written["train"]["micro_batch_size"] == 4
    assert read_run(tmp_path / "auto").recipe.train.micro_batch_size == 4
