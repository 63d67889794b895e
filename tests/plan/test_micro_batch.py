"""train.micro_batch_size=auto: the largest micro-batch that fits, and a run that is the same but for it."""

from types import SimpleNamespace

import pytest
import torch
import yaml

from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.data.batch import num_masked_positions
from gmlp_scale.models import build_model
from gmlp_scale.plan import micro_batch
from gmlp_scale.plan.describe import describe
from gmlp_scale.plan.engine_bytes import count_vectors_and_others
from gmlp_scale.plan.micro_batch import largest_micro_batch_size
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train import resolve
from gmlp_scale.train.run import pretrain
from gmlp_scale.train.sinks import read_metrics
from tests.gloo_ranks import run_ranks
from tests.whole_runs import RECIPE, SMOKE
from tests.written_shards import VOCAB_SIZE, write_tiny_shards

AUTO = ["train.micro_batch_size=auto", "train.device=auto"]


def smoke(*overrides: str):
    return load_run_config(SMOKE, [*RECIPE, "data.shards=not/there", *overrides])


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
    monkeypatch.setattr(micro_batch, "_run_micro_batches", run_micro_batches)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: forgotten_peaks.append(attempts[-1]))
    assert largest_micro_batch_size(smoke(*AUTO), stand_in_world()) == 2
    assert attempts == forgotten_peaks == [8, 4, 2]


def test_another_error_is_raised(monkeypatch):
    def run_micro_batches(run, world) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(micro_batch, "_run_micro_batches", run_micro_batches)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        largest_micro_batch_size(smoke(*AUTO), stand_in_world())


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
    micro_batch._run_micro_batches(run, SimpleNamespace(device=torch.device("cpu"), size=1))
    num_logits = 2 * num_masked_positions(32, run.data.masked_fraction) * VOCAB_SIZE
    num_in_vectors, num_others = count_vectors_and_others(build_model(run.model), run.train.precision)
    of_states = (16 - 8) * num_in_vectors + bytes_per_parameter * num_others
    assert room == [of_states + bytes_per_logit * num_logits + 50]


def test_nothing_fits_is_one_clear_message(monkeypatch):
    monkeypatch.setattr(micro_batch, "_fits", lambda run, world, num_rows: False)
    with pytest.raises(ConfigError, match=r"train.micro_batch_size: found auto, but not one row fits; needed: "):
        resolve.with_decided_micro_batch(smoke(*AUTO), stand_in_world())


def test_a_cpu_needs_a_number_and_nothing_else_is_taken():
    with pytest.raises(ConfigError, match=r"train.micro_batch_size: found auto with train.device = cpu; give a number"):
        smoke(*AUTO, "train.device=cpu")
    with pytest.raises(ConfigError, match=r"train.micro_batch_size: found auto on a CPU; give a number"):
        largest_micro_batch_size(smoke(*AUTO), SimpleNamespace(device=torch.device("cpu")))
    for value in ("0", "-1", "1.5", "many", "true", "null"):
        with pytest.raises(ConfigError, match=r"train.micro_batch_size: found .*; needed: a positive integer or auto"):
            smoke(f"train.micro_batch_size={value}")


def test_ranks_must_divide_the_global_batch():
    run = smoke(*AUTO, "engine.kind=fsdp2")
    assert run.rows_per_rank(4).values == (2,)
    with pytest.raises(ConfigError, match=r"train.global_batch_size: found 8; must be a multiple .* ranks, 3"):
        run.rows_per_rank(3)


def test_dry_run_says_what_it_can():
    text = describe(smoke(*AUTO), world_size=1)
    assert "micro_batch_size: auto" in text
    assert "8 rows each, in micro-batches that are decided when the run starts" in text


def _train(overrides: list[str]) -> None:
    resolve.largest_micro_batch_size = lambda run, world: 4  # there is no GPU to try it on
    pretrain(smoke(*overrides))


def test_a_run_is_the_same_but_for_rounding(tmp_path):
    world_size = 2
    write_tiny_shards(tmp_path / "shards", [17, 23], [12], sequence_length=32)
    recipe = [
        "train.num_steps=6", "optimizer.warmup_steps=2", "train.evaluate_every_steps=3", "engine.kind=fsdp2",
        f"data.shards={tmp_path / 'shards'}", f"output_dir={tmp_path}", "optimizer.gradient_clipping=0.5",
    ]  # fmt: skip
    run_ranks(_train, world_size, [*recipe, "train.micro_batch_size=1", "name=number"])
    run_ranks(_train, world_size, [*recipe, *AUTO, "name=auto", "train.stop_after_step=3"])
    run_ranks(_train, world_size, [*recipe, *AUTO, "name=auto"])

    number, auto = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("number", "auto"))
    assert [row["step"] for row in auto] == [row["step"] for row in number] and len(auto) == 8
    for tag in ("train/loss", "train/grad_norm", "eval/loss"):
        found, wanted = ([row[tag] for row in rows if tag in row] for rows in (auto, number))
        assert found and found == pytest.approx(wanted, rel=1e-6), tag

    written = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())
    assert written["train"]["micro_batch_size"] == 4
    assert read_run(tmp_path / "auto").recipe.train.micro_batch_size == 4
