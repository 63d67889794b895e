"""The README's commands one after the other, as a user types them, on a small corpus."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from gmlp_scale.analysis.run_records import read_run_records
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.tasks.pretraining import build_loader
from tests.forked import Script

ROOT = Path(__file__).parent.parent.parent
WORDS = ["the", "a", "of", "and", "stone", "river", "bird", "house", "small", "old", "sees", "finds", "under", "near"]


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Every command's output by name, in a folder that ends as a user's would."""
    folder = tmp_path_factory.mktemp("story")
    draw = random.Random(0)
    documents = [" ".join(draw.choices(WORDS, k=draw.randrange(30, 90))).capitalize() + "." for _ in range(300)]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    smoke = [
        f"--config={ROOT}/configs/pretrain/smoke.yaml", f"output_dir={folder}/outputs", f"data.shards={folder}/shards",
        "model.vocab_size=300", "train.log_every_steps=2", "train.num_steps=40",
    ]  # fmt: skip
    commands = {
        "tokenizer": [
            "data_prep/train_tokenizer.py", "--input", corpus, "--vocab-size", 300, "--output", folder / "tokenizer",
        ],
        "shards": [
            "data_prep/tokenize_corpus.py", "--input", corpus, "--tokenizer", folder / "tokenizer",
            "--sequence-length", 64, "--heldout-fraction", 0.1, "--output", folder / "shards",
        ],
        "verify": ["data_prep/verify_shards.py", folder / "shards"],
        "inspect": ["data_prep/inspect_batch.py", "--step", 3, *smoke],
        "dry run": ["launch/pretrain.py", *smoke, "--dry-run"],
        "half": ["launch/pretrain.py", *smoke, "train.stop_after_step=20"],
        "rest": ["launch/pretrain.py", *smoke],
        "again": ["launch/pretrain.py", *smoke],
        "evaluate": ["launch/evaluate.py", "--run", folder / "outputs/smoke", "--shards", folder / "shards"],
        "fill": ["launch/fill_mask.py", "--run", folder / "outputs/smoke", "The old <mask> sees the river."],
        "plot": [
            "launch/plot_metrics.py", "--runs", folder / "outputs/smoke", "--tag", "train/loss",
            "--output", folder / "loss.png",
        ],
    }  # fmt: skip
    outputs, started = {}, set()
    for name, (file, *arguments) in commands.items():
        if file in started:
            code, printed, errors = Script(file, arguments).end()
        else:  # once, a script is started as a user starts it
            command = [sys.executable, file, *map(str, arguments)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
            code, printed, errors = done.returncode, done.stdout, done.stderr
        assert code == 0, f"{name}\n{printed}\n{errors}"
        outputs[name] = printed + errors
        started.add(file)
    return folder, outputs


def test_training_stops_resumes_and_ends(story):
    _, outputs = story
    assert "stopped after step 20 of 40; the same command resumes" in outputs["half"]
    assert "resuming from" in outputs["rest"] and "finished at step 40" in outputs["rest"]
    assert "step 22/40" in outputs["rest"] and "step 20/40" not in outputs["rest"]
    assert "finished at step 40" in outputs["again"] and "loss" not in outputs["again"]


def test_a_report_knows_where_the_run_was_resumed(story):
    folder, _ = story
    (record,) = read_run_records([str(folder / "outputs/smoke")])
    assert record.restarts == [20], "the third start found nothing left to do"
    assert (record.last_step, record.newest.step, record.skipped) == (40, 40, [])


def test_evaluation_prints_both_perplexities(story):
    _, outputs = story
    _, columns, unigram, model = [line.split() for line in outputs["evaluate"].splitlines()]
    assert columns == ["step", "loss", "perplexity", "accuracy"]
    assert unigram[0] == "unigram" and 1 < float(unigram[2]) < 300
    assert model[0] == "40" and 1 < float(model[2]) < 300


def test_masks_are_filled_and_the_picture_is_drawn(story):
    folder, outputs = story
    (candidates,) = [line for line in outputs["fill"].splitlines() if "%" in line]
    assert candidates.count("%") == 5
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_inspected_batch_is_that_of_training(story):
    """The loader's own rows of that step, as text."""
    folder, outputs = story
    run = load_run_config(folder / "outputs/smoke/config.yaml")
    tokenizer = Tokenizer(folder / "shards/tokenizer")
    loader = build_loader(run, rank=0, world_size=1)
    rows = [ids for batch in loader.micro_batches(3) for ids in batch.token_ids_BN.tolist()]
    loader.close()
    assert len(rows) == 8
    for ids in rows:
        assert tokenizer.decode(ids[1:12]) in outputs["inspect"]


@pytest.mark.parametrize(
    "words, needle",
    [
        (["launch/evaluate.py", "--run", "absent", "--shards", "absent"], "no run at absent"),
        (["launch/fill_mask.py", "--run", "absent", "no mask here"], "no <mask> in"),
        (["launch/plot_metrics.py", "--runs", "absent", "--output", "x.png"], "no metrics.jsonl"),
        (["launch/plot_metrics.py", "--runs", "absent", "--output", "s3://bucket/x.png"], "needed: a path of this"),
        (
            ["launch/pretrain.py", "--config", "configs/pretrain/smoke.yaml", "data.shards=absent"],
            "no shards at absent",
        ),
        (["launch/pretrain.py", "--config", "absent.yaml"], "cannot be read"),
    ],
)
def test_mistakes_are_one_clear_message(words, needle, tmp_path):
    file, *arguments = words
    output_dir = [f"output_dir={tmp_path}"] if "smoke.yaml" in " ".join(words) else []
    code, _, errors = Script(file, [*arguments, *output_dir]).end()
    assert code in (1, 2) and needle in errors and "Traceback" not in errors
