"""launch/finetune.py --glue: a sweep for every task, the usual table, the submission, and what is refused."""

import json

import pytest

from gmlp_scale.finetune import sweep as sweep_module
from gmlp_scale.finetune.glue import FOLDERS, build_glue_table, to_markdown
from launch import finetune as launcher
from tests.finetune.conftest import RECIPES
from tests.tasks.official_glue import write_glue

TINY = (
    "data.sequence_length=16", "train.num_epochs=null", "train.num_steps=2",
    "train.micro_batch_size=4", "train.device=cpu", "train.precision=float32", "train.evaluate_every_steps=2",
    "optimizer.warmup_fraction=0", "name=tiny",
)  # fmt: skip
BATCH = "train.global_batch_size=4"


@pytest.fixture
def launch(tmp_path, export, launched):
    """launch(*arguments) -> (exit code, standard output, standard error), on small files of GLUE's forms."""
    glue = write_glue(tmp_path / "glue", num_rows=8)
    own = ["--config", RECIPES / "glue.yaml", "--glue", glue, f"model={export}", *TINY, f"output_dir={tmp_path}"]
    return lambda *arguments: launched(launcher.main, *own, *arguments)


def test_all_of_glue_and_nothing_twice(launch, tmp_path, monkeypatch):
    trained, real = [], sweep_module.finetune

    def finetune(run, inputs, world):
        trained.append((run.output_dir, run.model))
        return real(run, inputs, world)

    monkeypatch.setattr(sweep_module, "finetune", finetune)
    code, out, error = launch("--from-mnli", BATCH)
    assert code == 0, error
    folder = tmp_path / "tiny"
    (member,) = [path for path in (folder / "mnli").iterdir() if path.is_dir()]
    others = [task for task in FOLDERS if task != "mnli"]
    assert [place for place, _ in trained] == [str(folder / task) for task in ("mnli", *others)]
    from_mnli = {place.rpartition("/")[2] for place, model in trained if model == str(member / "last")}
    assert from_mnli == {"mrpc", "stsb", "rte"}

    content = json.loads((folder / "table.json").read_text())
    assert out == (folder / "table.md").read_text() and "test" not in content
    scores = json.loads((folder / "stsb" / member.name / "scores.json").read_text())["scores"]["dev"]
    assert content["dev"]["scores"]["stsb"] == {name: scores[name] for name in ("pearson", "spearman")}
    assert list(content["dev"]["scores"]["mnli"]) == ["accuracy", "accuracy_mismatched"]
    exported = json.loads((folder / "stsb" / member.name / "last" / "config.json").read_text())
    assert (exported["problem_type"], exported["id2label"]) == ("regression", {"0": "similarity"})
    submitted = {path.name: path.read_text().splitlines() for path in (folder / "submission").iterdir()}
    names = {name for name in FOLDERS.values() if name != "MNLI"} | {"MNLI-m", "MNLI-mm"}
    assert set(submitted) == {f"{name}.tsv" for name in names}
    for lines in submitted.values():
        assert [line.split("\t")[0] for line in lines] == ["index", "0", "1", "2", "3"]

    trained.clear()
    assert launch("--from-mnli", BATCH)[:2] == (0, out) and trained == []

    def best_later(run, inputs, world):
        content = finetune(run, inputs, world)
        content["scores"]["dev"][run.task_row.main_score] = 1.0
        return content

    monkeypatch.setattr(sweep_module, "finetune", best_later)
    code, _, error = launch("--from-mnli", BATCH, "--seeds", "2")
    assert code == 0, error
    assert [place for place, _ in trained] == [str(folder / task) for task in ("mnli", *others)]
    assert from_mnli == {place.rpartition("/")[2] for place, model in trained if model == str(member / "last")}


def test_the_usual_table():
    medians = {
        "cola": {"matthews": 0.521}, "sst2": {"accuracy": 0.935}, "mrpc": {"accuracy": 0.848, "f1": 0.889},
        "stsb": {"pearson": 0.871, "spearman": 0.858}, "qqp": {"accuracy": 0.892, "f1": 0.712},
        "mnli": {"accuracy": 0.846, "accuracy_mismatched": 0.834}, "qnli": {"accuracy": 0.905},
        "rte": {"accuracy": 0.664, "accuracy_test": 0.5},
    }  # fmt: skip
    facts = {"model": "m", "pretrained": True, "seeds": [0, 1, 2]}
    tables = {
        task: {**facts, "scores": {name: {"median": value} for name, value in {**scores, "loss": 9.0}.items()}}
        for task, scores in medians.items()
    }
    content = build_glue_table(tables, from_mnli=False)
    average = (52.1 + 93.5 + 86.85 + 86.45 + 80.2 + 84.0 + 90.5 + 66.4) / 8
    assert content["dev"]["average"] == pytest.approx(average / 100)
    dev, test = to_markdown(content).splitlines()[-2:]
    assert dev == "| dev | 52.1 | 93.5 | 84.8/88.9 | 87.1/85.8 | 89.2/71.2 | 84.6/83.4 | 90.5 | 66.4 | 80.0 |"
    assert test == "| test |  |  |  |  |  |  |  | 50.0 |  |"  # only RTE's test file had labels: no average


def test_what_is_missing_or_given_twice_is_named_at_once(launch, tmp_path):
    (tmp_path / "glue" / "RTE" / "dev.tsv").unlink()
    (tmp_path / "glue" / "CoLA" / "train.tsv").unlink()
    (tmp_path / "glue" / "QQP" / "test.tsv").unlink()  # test files are optional
    code, _, error = launch()
    assert code == 2 and "CoLA/train.tsv is missing" in error and "RTE/dev.tsv is missing" in error
    assert "QQP" not in error
    code, _, error = launch("--glue", str(tmp_path / "wrong"))
    assert code == 2 and error.count(" is missing\n") == 17 and ": 17 mistakes\n" in error
    assert "\nneeded: GLUE's folders as they are downloaded, CoLA to RTE" in error
    code, _, error = launch("data.train=x.tsv")
    assert code == 2 and "data.train=x.tsv: --glue decides this; leave it out" in error


def test_dry_run_reads_every_task(launch, tmp_path):
    code, out, _ = launch("--dry-run", "--grid", "--seeds", "2", "grid.global_batch_size=[4]")
    assert code == 0 and not (tmp_path / "tiny").exists()
    assert [line for line in out.splitlines() if line.startswith("task:")] == [f"task: {task}" for task in FOLDERS]
    assert out.count("runs                    5: ") == 8 and "test_mismatched         4 examples" in out
