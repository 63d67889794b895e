"""Grid and seeds: which runs are trained, picked or skipped, and the table."""

import json
import math
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import fsspec
import pytest

from gmlp_scale.checkpoint.stores import saved_steps
from gmlp_scale.checkpoint.trained import read_export
from gmlp_scale.errors import InputError
from gmlp_scale.finetune import sweep as sweep_module
from gmlp_scale.finetune.finetuning import read_inputs
from gmlp_scale.finetune.sweep import build_table, describe, members, published, sweep, to_markdown
from gmlp_scale.models import AmlpConfig, GmlpConfig, TransformerConfig
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.storage.files import read_file, upload_file
from gmlp_scale.tasks.classification import ClassificationRows
from gmlp_scale.train import resolve
from gmlp_scale.train.step_guard import NotFiniteError
from tests.finetune.conftest import sentiment_run, write_sentiment
from tests.whole_runs import losses


def small(tmp_path, export, *overrides):
    return sentiment_run(tmp_path, export, "train.num_steps=2", "train.evaluate_every_steps=2", *overrides)


def count_runs(monkeypatch) -> list[str]:
    """A list to which every run that is trained from now on adds its name."""
    trained = []

    def finetune(run, inputs, world):
        trained.append(run.name)
        return real(run, inputs, world)

    real = sweep_module.finetune
    monkeypatch.setattr(sweep_module, "finetune", finetune)
    return trained


def test_grid_then_seeds_and_nothing_twice(tmp_path, export, world, monkeypatch):
    trained = count_runs(monkeypatch)
    run = small(tmp_path, export)
    inputs = read_inputs(run)
    table = sweep(run, inputs, world, num_seeds=3, grid=True)
    points = ["batch_8_rate_0.001_seed_0", "batch_16_rate_0.001_seed_0"]
    accuracies = [point["scores"]["accuracy"] for point in table["grid"]]
    picked = (8, 16)[accuracies.index(max(accuracies))]
    assert table["global_batch_size"] == picked
    assert trained == [*points, f"batch_{picked}_rate_0.001_seed_1", f"batch_{picked}_rate_0.001_seed_2"]
    folders = [run.run_dir / f"batch_{picked}_rate_0.001_seed_{seed}" for seed in range(3)]
    scores = [json.loads((folder / "scores.json").read_text()) for folder in folders]
    by_seed = [content["scores"]["dev"]["accuracy"] for content in scores]
    found = table["scores"]["accuracy"]
    assert found["by_seed"] == by_seed and [content["seed"] for content in scores] == [0, 1, 2]
    assert [found[name] for name in ("minimum", "median", "maximum")] == sorted(by_seed)
    assert json.loads((run.run_dir / "table.json").read_text()) == table
    text = (run.run_dir / "table.md").read_text()
    assert f"| accuracy | {100 * found['median']:.2f} |" in text and "| 16 | 0.001 |" in text and "paper" not in text

    trained.clear()
    assert sweep(run, inputs, world, num_seeds=3, grid=True) == table and trained == []
    with pytest.raises(ConfigError, match=r"scores.json belongs to another run"):
        sweep(small(tmp_path, export, "dropout=0.3"), inputs, world, num_seeds=1, grid=True)


def test_a_finished_run_of_another_recipe_or_other_data_is_never_in_the_table(tmp_path, export, world):
    first = small(tmp_path, export)
    sweep(first, read_inputs(first), world, num_seeds=1, grid=False)
    longer = small(tmp_path, export, "train.num_steps=3", "train.allow_changed_on_resume=[train.num_steps]")
    with pytest.raises(ConfigError, match=r"num_steps: .* with 2; the run says 3\n.*cannot go on: give name="):
        sweep(longer, read_inputs(longer), world, num_seeds=2, grid=False)
    write_sentiment(tmp_path / "train.tsv", 50)
    with pytest.raises(ConfigError, match="data train_sha256: "):
        sweep(first, read_inputs(first), world, num_seeds=2, grid=False)
    assert json.loads((first.run_dir / "table.json").read_text())["seeds"] == [0]


def test_a_point_that_diverges_counts_as_the_worst(tmp_path, export, world, monkeypatch, caplog):
    trained = count_runs(monkeypatch)
    monkeypatch.setattr("gmlp_scale.finetune.sweep.log.propagate", True)
    run = small(tmp_path, export, "grid.global_batch_size=[8]", "grid.peak_learning_rate=[1e30, 1e-3]")
    inputs = read_inputs(run)
    table = sweep(run, inputs, world, num_seeds=2, grid=True)
    assert trained == ["batch_8_rate_1e+30_seed_0", "batch_8_rate_0.001_seed_0", "batch_8_rate_0.001_seed_1"]
    assert "batch_8_rate_1e+30_seed_0 counts as the worst point: step 2: " in caplog.text
    assert table["peak_learning_rate"] == 1e-3 and table["grid"][0]["scores"] == {}
    assert "| 8 | 1e+30 | diverged |" in (run.run_dir / "table.md").read_text()
    trained.clear()
    assert sweep(run, inputs, world, num_seeds=2, grid=True) == table and trained == []

    run = small(tmp_path, export, "grid.global_batch_size=[8]", "grid.peak_learning_rate=[1e30, 1e31]")
    with pytest.raises(NotFiniteError, match=r"sst2: all points .* give a lower grid\.peak_learning_rate"):
        sweep(run, inputs, world, num_seeds=1, grid=True)
    run = small(tmp_path, export, "train.global_batch_size=8", "optimizer.peak_learning_rate=1e30")
    with pytest.raises(NotFiniteError, match=r"^batch_8_rate_1e\+30_seed_0: step 2: .*\.gradient_clipping\.$"):
        sweep(run, inputs, world, num_seeds=2, grid=False)


def test_a_score_that_is_not_finite_is_null_in_files_and_the_worst(tmp_path, export, world, monkeypatch):
    trained, of_rows = count_runs(monkeypatch), ClassificationRows.scores

    def scores(rows, logits_RC):
        is_first = trained == ["batch_8_rate_0.001_seed_0"]
        return of_rows(rows, logits_RC) | ({"accuracy": math.nan, "loss": math.inf} if is_first else {})

    monkeypatch.setattr(ClassificationRows, "scores", scores)
    run = small(tmp_path, export)
    inputs = read_inputs(run)
    assert sweep(run, inputs, world, num_seeds=1, grid=True)["global_batch_size"] == 16
    for name in ("table.json", "batch_8_rate_0.001_seed_0/scores.json", "batch_8_rate_0.001_seed_0/best/config.json"):
        text = (run.run_dir / name).read_text()
        assert "NaN" not in text and "Infinity" not in text and '"accuracy": null' in text
    trained.clear()
    assert sweep(run, inputs, world, num_seeds=1, grid=True)["global_batch_size"] == 16 and trained == []
    assert "| 8 | 0.001 | nan |" in (run.run_dir / "table.md").read_text()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("{", r"scores\.json is damaged \(Expecting"),
        ("[1]", r"scores\.json is damaged: remove it, and the run writes it again"),
        ('{"scores": {}, "config": null, "data": {}}', r"scores\.json is damaged: remove it"),
    ],
)
def test_damaged_scores_are_refused(content, found, tmp_path, export, world):
    run = small(tmp_path, export)
    member = members(run, grid=False)[0]
    member.run_dir.mkdir(parents=True)
    (member.run_dir / "scores.json").write_text(content)
    with pytest.raises(InputError, match=found):
        sweep(run, read_inputs(run), world, num_seeds=1, grid=False)


def test_auto_precision_is_decided_once_and_kept(tmp_path, export, world, monkeypatch):
    def decide(precision: str) -> list[str]:
        asked = []
        monkeypatch.setattr(resolve, "faster_precision", lambda run, device: asked.append(run.model.kind) or precision)
        return asked

    asked, run = decide("bf16"), small(tmp_path, export, "train.precision=auto")
    assert "\nprecision               decided when the run starts" in describe([run], 1, read_inputs(run), 1)
    sweep(run, read_inputs(run), world, num_seeds=2, grid=True)
    assert asked == ["gmlp"]
    asked = decide("float32")
    table = sweep(run, read_inputs(run), world, num_seeds=3, grid=True)
    assert len(table["seeds"]) == 3 and asked == []
    for path in run.run_dir.glob("*/scores.json"):
        assert json.loads(path.read_text())["config"]["train"]["precision"] == "bf16"


def test_a_stopped_sweep_goes_on_where_it_was(tmp_path, export, world, monkeypatch):
    trained, stopped = count_runs(monkeypatch), small(tmp_path, export, "train.stop_after_step=1")
    assert sweep(stopped, read_inputs(stopped), world, num_seeds=2, grid=False) is None
    assert trained == ["batch_8_rate_0.001_seed_0"] and not (stopped.run_dir / "table.json").exists()
    run = small(tmp_path, export)
    table = sweep(run, read_inputs(run), world, num_seeds=2, grid=False)
    assert trained[1:] == ["batch_8_rate_0.001_seed_0", "batch_8_rate_0.001_seed_1"]
    assert len(table["grid"]) == 1 and table["seeds"] == [0, 1]


def test_a_test_file_that_comes_later_is_scored_without_training_again(tmp_path, export, world):
    run = small(tmp_path, export)
    first = sweep(run, read_inputs(run), world, num_seeds=1, grid=False)
    losses = (run.run_dir / "batch_8_rate_0.001_seed_0" / "metrics.jsonl").read_text()
    (tmp_path / "test.tsv").write_text("sentence\tlabel\nthe good film\t1\nthe bad film\t0\n")
    run = small(tmp_path, export, f"data.test={tmp_path / 'test.tsv'}")
    table = sweep(run, read_inputs(run), world, num_seeds=1, grid=False)
    assert set(table["scores"]) - set(first["scores"]) == {"accuracy_test", "loss_test"}
    assert table["scores"]["accuracy"] == first["scores"]["accuracy"]
    assert (run.run_dir / "batch_8_rate_0.001_seed_0" / "metrics.jsonl").read_text() == losses
    assert "| accuracy_test |" in (run.run_dir / "table.md").read_text()


def test_members_differ_in_their_point_alone(tmp_path, export):
    run = small(tmp_path, export, "grid.peak_learning_rate=[1e-5, 3e-5]", "seed=4")
    named = {member.name: member for member in members(run, grid=True)}
    assert list(named) == [f"batch_{batch}_rate_{rate}_seed_4" for batch in (8, 16) for rate in ("1e-05", "3e-05")]
    one = named["batch_16_rate_3e-05_seed_4"]
    assert (one.train.global_batch_size, one.optimizer.peak_learning_rate, one.seed) == (16, 3e-5, 4)
    assert one.run_dir == run.run_dir / one.name
    assert one.train.num_steps == run.train.num_steps and one.data == run.data


def scores_of(seed: int, accuracy: float, mismatched: float) -> dict:
    return {
        "seed": seed,
        "scores": {"dev": {"accuracy": accuracy}, "dev_mismatched": {"accuracy": mismatched}},
        "num_examples": {"train": 392_702, "dev": 9_815, "dev_mismatched": 9_832},
        "config": {"train": {"global_batch_size": 32}, "optimizer": {"peak_learning_rate": 2e-5}},
    }


def test_table_stands_beside_the_papers_numbers(tmp_path, export, monkeypatch):
    run = small(tmp_path, export)
    inputs = read_inputs(run)
    assert published(run, inputs) is None  # neither model nor data are the paper's
    monkeypatch.setattr(sweep_module, "published", lambda run, inputs: ("gMLP base", {"accuracy": 83.7}))
    seeds = [scores_of(seed, *pair) for seed, pair in enumerate([(0.83, 0.85), (0.85, 0.82), (0.81, 0.83)])]
    table = build_table(run, inputs, seeds[:1], seeds)
    assert table["scores"]["accuracy_mismatched"]["median"] == 0.83
    lines = to_markdown(table).splitlines()
    assert "| score | median | minimum | maximum | paper, gMLP base |" in lines
    assert "| accuracy | 83.00 | 81.00 | 85.00 | 83.7 |" in lines
    assert "| accuracy_mismatched | 83.00 | 82.00 | 85.00 |  |" in lines


def test_papers_numbers_need_the_papers_model_and_data(tmp_path, export):
    run = small(tmp_path, export)
    inputs = read_inputs(run)
    base = GmlpConfig(num_blocks=48, d_model=512, d_ffn=3072, sequence_length=512, vocab_size=32_000)

    def found(model, train=67_349) -> tuple[str, dict] | None:
        rows = {"train": SimpleNamespace(num_examples=train), "dev": SimpleNamespace(num_examples=872)}
        return published(run, replace(inputs, pretrained=replace(inputs.pretrained, config=model), rows=rows))

    assert found(base) == ("gMLP base", {"accuracy": 94.2})
    assert found(base, train=67_348) is None
    assert found(base.model_copy(update={"gating": "linear"})) is None
    assert found(base.model_copy(update={"num_blocks": 47})) is None
    free = {"vocab_size": 500, "kernels": "torch", "masks_padding": True}
    assert found(base.model_copy(update=free))[0] == "gMLP base"
    sizes = {"d_ffn": 3072, "sequence_length": 512, "vocab_size": 32_000}
    for d_attn, name in ((64, "aMLP base"), (512, None)):
        of_model = found(AmlpConfig(num_blocks=36, d_model=512, d_attn=d_attn, **sizes))
        assert (of_model and of_model[0]) == name
    for positions, name in (("absolute", "BERT base"), ("relative_only", None)):
        bert = {"num_blocks": 12, "d_model": 768, "num_heads": 12, "positions": positions}
        of_model = found(TransformerConfig(**bert, **sizes))
        assert (of_model and of_model[0]) == name


def test_a_sweep_at_a_url_from_an_export_at_a_url(tmp_path, export, world, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for path in export.iterdir():
        upload_file(path, f"memory://exports/tiny/{path.name}")
    run = small(tmp_path, "memory://exports/tiny", "output_dir=memory://runs", "train.stop_after_step=1")
    assert sweep(run, read_inputs(run), world, num_seeds=1, grid=False) is None
    run = small(tmp_path, "memory://exports/tiny", "output_dir=memory://runs")
    table = sweep(run, read_inputs(run), world, num_seeds=1, grid=False)
    assert json.loads(read_file("memory://runs/sst2/table.json")) == table and table["model"] == "memory://exports/tiny"
    member = f"memory://runs/sst2/{members(run, grid=False)[0].name}"
    assert [*losses(member)] == [1, 2]
    assert read_export(f"{member}/last").tokenizer().vocab_size == 400
    assert json.loads(read_file(f"{member}/scores.json"))["step"] == saved_steps(member)[-1] == 2
    trained = count_runs(monkeypatch)
    assert sweep(run, read_inputs(run), world, num_seeds=1, grid=False) == table and trained == []
    with pytest.raises(FileNotFoundError, match=f"it is a finetuning run, so give its export {member}/last"):
        read_export(member)
    with pytest.raises(FileNotFoundError, match=r"no export at memory://exports/nothing: .*config.json does not exist"):
        read_export("memory://exports/nothing")
    fsspec.filesystem("memory").rm("/", recursive=True)
