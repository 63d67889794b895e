"""launch/export.py --push-to-hub against a stand-in of the Hub: revisions, cards that run when pasted, and refusals."""

import json
import re
import subprocess
import sys
import time

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load, save

from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.checkpoint.trained import read_export
from gmlp_scale.train.sinks import read_metrics
from tests.export.hub_stand_in import TOKEN, HubStandIn

NAME = "me/tiny"
PASTED = """
import os, sys
for folder, block in zip(sys.argv[1::2], sys.argv[2::2]):
    os.chdir(folder)
    exec(block)
"""


@pytest.fixture
def hub(monkeypatch):
    """The stand-in; huggingface_hub has its address and its token, as if read from the environment."""
    hub = HubStandIn()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield hub
    hub.close()


def usage_block(card: str) -> str:
    return re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]


def test_every_checkpoint_is_a_revision_and_main_is_the_newest(hub, run_dir, tmp_path, launched_export, exported):
    pushing = ["--run", run_dir, "--push-to-hub", NAME]
    printed = exported(*pushing, "--every-step")
    places = [f"{run_dir}/checkpoints/step_00000000{step}" for step in (3, 4)]
    revisions = [f"step_00000000{step}" for step in (3, 4)]
    assert printed.splitlines() == [f"{NAME} at {r} holds {p}" for r, p in zip(revisions, places, strict=True)]
    branches = hub.branches[NAME]
    assert branches.keys() == {"main", *revisions}
    assert branches["main"] == branches[revisions[1]]
    for step, revision in zip((3, 4), revisions, strict=True):
        folder = tmp_path / revision
        for name, content in branches[revision].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        export, trained = read_export(folder), read_run(run_dir, step)
        assert all((export.weights[name] == weight).all() for name, weight in trained.weights.items())
        assert f'model="{NAME}", revision="{revision}"' in usage_block((folder / "README.md").read_text())
    pushes = [
        (branch, f"The checkpoint after step {step}") for step in (3, 4) for branch in (revisions[step - 3], "main")
    ]
    assert hub.messages == pushes
    assert launched_export(*pushing, "--every-step")[0] == 0
    assert hub.messages == pushes  # the same again commits nothing
    exported(*pushing, "--step", 3, "--license", "mit")
    assert b"license: mit" in branches[revisions[0]]["README.md"]
    assert branches["main"] == branches[revisions[1]]


def test_the_card_s_metadata(run_dir, export_of_run):
    facts = ["--license", "apache-2.0", "--language", "en", "de", "--dataset", "allenai/c4"]
    card = ModelCard.load(export_of_run(*facts) / "README.md")
    assert (card.data.license, card.data.language, card.data.datasets) == ("apache-2.0", ["en", "de"], ["allenai/c4"])
    evaluated = [line for line in read_metrics(run_dir / "metrics.jsonl") if "eval/loss" in line][-1]
    results = {result.metric_type: result for result in card.data.eval_results}
    assert results.keys() == {"perplexity", "accuracy"}
    for name, result in results.items():
        assert result.metric_value == evaluated[f"eval/{name}"]
        assert (result.dataset_name, result.dataset_split) == ("allenai/c4", "heldout")
        assert result.dataset_args == {"num_rows": 4}
    for row in ("| steps | 4 of 4 |", "| tokens read | 512 |", "| rows | 16 for training, 4 held out, of 32 tokens"):
        assert row in card.text


def test_the_usage_blocks_run_as_they_stand(hub, run_dir, tiny_export, tmp_path, launched_export):
    for folder, pushing in (("local", []), ("pushed", ["--push-to-hub", "tiny"])):
        code, printed, error = launched_export("--run", run_dir, "--output", tmp_path / folder, *pushing)
        assert code == 0 and f"{tmp_path / folder} holds" in printed, error
    tiny_export("gmlp", tmp_path / "classifier", "sequence_classification", ("no", "yes"), sequence_length=128)
    tiny_export("gmlp", tmp_path / "spans", "question_answering", sequence_length=128, document_stride=32)
    folders = [tmp_path / name for name in ("local", "pushed", "classifier", "spans")]
    blocks = [usage_block((folder / "README.md").read_text()) for folder in folders]
    assert 'model="."' in blocks[0] and f'model="{NAME}", revision="step_000000004"' in blocks[1]
    (tmp_path / "pushed").rename(tmp_path / "away")  # its block needs no folder
    folders[1] = tmp_path
    process = subprocess.run(
        [sys.executable, "-c", PASTED, *(word for pair in zip(folders, blocks, strict=True) for word in pair)],
        env={"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    of_folder, of_hub, of_classifier, of_spans = process.stdout.splitlines()
    assert of_folder == of_hub and of_hub.count("'token_str'") == 5
    assert "'label': 'no'" in of_classifier or "'label': 'yes'" in of_classifier
    assert "'answer': " in of_spans


def test_no_exported_file_names_a_local_place_and_what_nobody_said_is_unknown(run_dir, tmp_path, export_of_run):
    folder = export_of_run()
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for place in (str(run_dir.parent), str(tmp_path)):
        assert [name for name, content in files.items() if place.encode() in content] == []
    assert json.loads(files["config.json"])["details"]["config"]["data"]["shards"] == "shards"
    assert read_export(folder).recipe.data.masked_fraction == 0.15
    card = ModelCard.load(folder / "README.md")
    assert (card.data.license, card.data.get("language"), card.data.get("datasets")) == ("unknown", None, None)
    for name in ("training text", "language", "license of the model"):
        assert f"| {name} | unknown: whoever exported the model did not say |" in card.text


def test_refusals_and_a_hub_out_of_reach_are_one_message(hub, run_dir, launched_export, monkeypatch):
    def push(name: str) -> tuple[int, str, str]:
        return launched_export("--run", run_dir, "--push-to-hub", name)

    for name, message in (
        ("other/tiny", "the Hub does not let this token write other/tiny (403: You don't have the rights to create"),
        ("me/tiny/x", "me/tiny/x"),
    ):
        code, printed, error = push(name)
        assert (code, printed) == (2, "") and message in error and "Traceback" not in error
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    code, _, error = push(NAME)
    assert code == 2 and "the Hub does not let this token write me/tiny (401: Invalid credentials" in error
    assert "hf_wrong" not in error
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    code, _, error = push(NAME)
    assert code == 2 and "no token for the Hub, to write me/tiny: set HF_TOKEN, or run `hf auth login`" in error
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.fails_at = "/api/repos/create"
    code, _, error = push(NAME)
    assert code == 1 and "the Hub failed to take me/tiny (500: Internal Error)" in error
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    code, _, error = push(NAME)
    assert code == 1 and "the Hub was not reached to write me/tiny (ConnectError" in error
    assert hub.branches == {}


@pytest.mark.parametrize(
    ("place", "failures"),
    [
        ("/commits/", (500, "cut")),
        ("/branch/step_000000004", (403, "lost")),
        ("/refs", (503, "cut")),
        ("/preupload/step_000000004", (429, "lost")),
        ("/info/lfs/objects/batch", (413, "cut")),
        ("/upload/", (413, "cut")),
        ("/commit/step_000000004", (500, "lost")),
        ("/commit/main", (503, "lost")),
    ],
)
def test_the_same_command_finishes_what_failed_anywhere(
    hub, run_dir, launched_export, monkeypatch, place, failures, trials
):
    """Where it failed, no revision holds another step's weights."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the tries of huggingface_hub
    pushing = ["--run", run_dir, "--push-to-hub", NAME, "--every-step"]
    weights = [save({f"model.{name}": w for name, w in read_run(run_dir, step).weights.items()}) for step in (3, 4)]
    expected = dict(zip(("step_000000003", "step_000000004"), weights, strict=True))
    for failure in failures:
        hub.branches.clear(), hub.large_files.clear()
        hub.fails_at, hub.failure = place, failure
        code, _, error = launched_export(*pushing)
        assert code == (2 if failure in (403, 413) else 1) and "Traceback" not in error
        message = error.splitlines()[-1]
        found = "RemoteProtocolError: Server disconnected" if failure in ("cut", "lost") else f"{failure}: Internal"
        assert re.match(rf"the Hub .* me/tiny \({found}", message), message
        for revision, files in hub.branches[NAME].items():
            written = files.get("model.safetensors")
            assert written is None or load(written).keys() == load(weights[0]).keys()
            if written and revision != "main":
                torch.testing.assert_close(load(written), load(expected[revision]))
        hub.fails_at = None
        assert launched_export(*pushing)[0] == 0
        branches = hub.branches[NAME]
        assert branches.keys() == {"main", *expected} and branches["main"] == branches["step_000000004"]
        for revision, of_step in expected.items():
            torch.testing.assert_close(load(branches[revision]["model.safetensors"]), load(of_step))
    trials("a push to the Hub that fails in the middle", len(failures))


def test_a_mistake_of_the_run_reaches_no_hub(hub, run_dir, tmp_path, launched_export):
    code, _, error = launched_export("--run", tmp_path / "nowhere", "--push-to-hub", NAME)
    assert code == 2 and "no run at" in error and hub.branches == {}
    code, _, error = launched_export("--run", run_dir)
    assert code == 2 and "give --output, --push-to-hub or both" in error
    code, _, error = launched_export("--run", run_dir, "--push-to-hub", NAME, "--modernbert")
    assert code == 2 and "only a modern_transformer" in error and hub.branches == {}
    code, _, error = launched_export("--run", run_dir, "--push-to-hub", NAME, "--modernbert", "--license", "mit")
    assert code == 2 and "--modernbert writes no model card" in error
