import importlib
import json
import re
import shutil
import sys

import pytest

from data_prep.gather_docs import docstrings, prose_paragraphs
from data_prep.train_tokenizer import training_seconds
from gmlp_scale.data.manifest import Splits
from gmlp_scale.data.shards import Manifest
from gmlp_scale.data.tokenizer import Tokenizer
from tests.damage import flipped
from tests.data_prep.corpora import REPOSITORY, run
from tests.written_shards import change_manifest

SCRIPTS = sorted(path.stem for path in (REPOSITORY / "data_prep").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_file_is_a_script_whose_help_explains_each_option_and_default(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"data_prep.{name}").main()
    assert end.value.code == 0
    usage, _, options = capsys.readouterr().out.partition("\noptions:\n")
    optional = set(re.findall(r"\[(--[a-z-]+) ", usage.replace("\n", " ")))  # those that take a value
    entries = [re.split(r"\s{2,}", entry, maxsplit=1) for entry in re.split(r"\n  (?=-)", "\n" + options)[1:]]
    help_of = {words.split()[0]: " ".join(help.split()) for words, help in entries}  # fails for one without help
    assert optional <= help_of.keys() and f"python data_prep/{name}.py" in usage
    assert not [option for option in optional if "(default: " not in help_of[option]]


@pytest.fixture
def shards(shards_to_read, tmp_path):
    """A copy to damage."""
    return shutil.copytree(shards_to_read, tmp_path / "out")


def test_verify_shards_names_each_bad_shard(shards):
    manifest = Manifest.load(shards)
    names = [shard.name for shard in manifest.splits.train]
    assert len(names) >= 5
    (shards / names[0]).write_bytes(flipped((shards / names[0]).read_bytes(), 3000, bit=2))
    (shards / names[1]).write_bytes((shards / names[1]).read_bytes()[:-512])
    (shards / names[2]).unlink()
    (shards / names[3]).write_bytes(b"")
    printed = run("verify_shards.py", shards, code=1)
    for name in names[:4]:
        assert f"BAD {name}: " in printed
    assert f"BAD {names[4]}" not in printed and "4 problems" in printed
    train, held = manifest.splits.train, manifest.splits.heldout[0]
    renamed = train[-1].model_copy(update={"name": "heldout/heldout-00009-000000.tar"})
    (shards / train[-1].name).rename(shards / renamed.name)
    splits = Splits(train=train[:-2], heldout=(*manifest.splits.heldout, renamed))
    change_manifest(shards, splits=splits, total_rows=splits.total_rows, vocab_size=300, tokenizer_sha256="1" * 64)
    printed = run("verify_shards.py", shards, code=1)
    assert f"BAD {train[-2].name}: is there, but the manifest does not list it" in printed
    assert f"BAD {renamed.name}: shard {renamed.name} is corrupt: member 'train-" in printed
    assert "the vocabulary has 300" in printed and f"BAD {held.name}: " in printed
    assert "tokenizer/tokenizer.model: has sha256" in printed and "the manifest says 1111" in printed
    assert "manifest.json is a file: give the folder" in run("verify_shards.py", shards / "manifest.json", code=2)
    text = (shards / "manifest.json").read_text()
    (shards / "manifest.json").write_text(text.replace('"vocab_size": 300', '"vocab_size": 400'))
    assert "its own checksum does not hold" in run("verify_shards.py", shards, code=2)
    (shards / "manifest.json").unlink()
    assert "no shards at" in run("verify_shards.py", shards, code=2)


def test_train_tokenizer_is_deterministic_and_seeded(corpus, tmp_path):
    models = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1), ("b", 0)):
        printed = run("train_tokenizer.py", "--input", f"{corpus}/*.gz", "--vocab-size", 350, "--output",
                      tmp_path / name, "--sample-bytes", 60_000, "--seed", seed)  # fmt: skip
        models[name] = Tokenizer(tmp_path / name).sha256
        details = json.loads((tmp_path / name / "training.json").read_text())
        assert 50_000 < details["sampled_bytes"] <= 60_000 and details["sha256"] == models[name]
        assert f"documents, {details['sampled_bytes']:,} bytes: about 0 s if" in printed
        (tmp_path / name / "tokenizer.model").unlink()  # as a kill before its end, or a full disk, leaves the folder
    assert models["a"] == models["b"] != models["c"]


@pytest.mark.parametrize(
    ("megabytes", "vocab_size", "measured"),
    [(2.5, 4096, (1.1, 4.7)), (20, 4096, (7.7, 39.7)), (20, 32_000, (7.7, 21.3)), (40, 8192, (15.8, 63.8))],
)
def test_the_estimated_time_of_training_meets_what_was_measured(megabytes, vocab_size, measured):
    """measured: CPU seconds of the main thread, and of all others, which share the cores."""
    alone, shared = measured
    for num_cores in (1, 2, 4):
        seconds = training_seconds(megabytes * 1e6, vocab_size, num_cores)
        assert seconds == pytest.approx(alone + shared / num_cores, rel=0.2)


def test_train_tokenizer_mistakes(corpus, tmp_path):
    script = ("train_tokenizer.py", "--input", f"{corpus}/*.gz", "--output")
    assert "--vocab-size: found 100" in run(*script, tmp_path / "a", "--vocab-size", 100, code=2)
    assert "cannot be trained" in run(*script, tmp_path / "a", "--vocab-size", 30_000, code=2)
    assert "--sample-bytes: found 0" in run(*script, tmp_path / "a", "--sample-bytes", 0, code=2)
    for seed in (-1, 1 << 64):
        assert f"--seed: found {seed}" in run(*script, tmp_path / "a", "--seed", seed, code=2)
    assert "holds no text in field 'body'" in run(*script, tmp_path / "a", "--text-field", "body", code=2)
    assert not (tmp_path / "a").exists()
    broken = corpus / "part-1.jsonl.gz"
    broken.write_bytes(broken.read_bytes()[:-1])
    assert f"broken files: 1, --max-bad-files is 0: {broken}" in run(*script, tmp_path / "a", code=2)
    for place in (corpus, f"file://{corpus}"):
        assert "is there already" in run(*script, place, "--vocab-size", 400, code=2)


def test_inspect_batch_prints_the_rows_that_training_sees(shards):
    overrides = ["model.sequence_length=32", "model.vocab_size=400", f"data.shards={shards}",
                 "train.global_batch_size=4", "train.micro_batch_size=2"]  # fmt: skip
    command = ("inspect_batch.py", "--config", REPOSITORY / "configs/pretrain/smoke.yaml", "--step")
    printed = run(*command, 2, *overrides)
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("position")] == ["8", "9", "10", "11"]
    assert printed.count("<mask>") > 4 and "train/train-0000" in printed
    growing = run(
        *command, 2, *overrides, "train.global_batch_size=[[0,4],[1,2]]", "data.masked_fraction=[[0,0.5],[1,0.2]]"
    )
    assert [line.split()[1] for line in growing.splitlines() if line.startswith("position")] == ["6", "7"]
    overrides[2] = f"data.shards=[{{shards: {shards}, weight: 1}}]"
    (in_mixture,) = re.findall(r"position 8 .*", run(*command, 2, "--rows", 1, *overrides))
    assert f"source {shards.name}  " in in_mixture
    assert in_mixture.replace(f"source {shards.name}  ", "") in printed
    for rows in (0, -2):
        assert f"--rows: found {rows}; needed: greater than or equal to 1" in run(
            *command, 2, "--rows", rows, *overrides, code=2
        )
    overrides[1] = "model.vocab_size=999"
    assert "vocab_size is 999, the shards have 400" in run(*command, 0, *overrides, code=2)


def test_gather_docs(tmp_path):
    package = tmp_path / "packages/pkg"
    package.mkdir(parents=True)
    sentence = "This sentence describes in plain words what the first of these functions does to its input."
    (package / "a.py").write_text(
        f'"""{sentence}\n\n>>> code here\n\nAnother {sentence.lower()}\n"""\ndef f():\n    "{sentence}"\n'
    )
    (package / "README.md").write_text(
        f"# Title\n\nUsing [the `tool`](http://x) one can *easily* write several kinds of long sentences. "
        f"{sentence}\n\n```\ncode that is not prose at all but is quite long and ends with a dot.\n```\n\n{sentence}\n"
        "\nOnce more there are enough words in this paragraph to be kept as a part of the corpus.\n"
    )
    (package / "LICENSE.txt").write_text(sentence)
    (package / "gone.py").symlink_to("nowhere.py")
    for name in ("a", "b"):
        run("gather_docs.py", "--folder", tmp_path / "packages", "--output", tmp_path / f"{name}.jsonl")
    documents = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    (readme,) = documents
    assert readme["source"] == "pkg/README.md"
    assert readme["text"].startswith("Using the tool one can easily write") and "code that" not in readme["text"]


def test_prose_and_docstrings():
    assert docstrings('class A:\n    """One."""\n    def f(self):\n        """Two."""\n        "not this"') == [
        "One.",
        "Two.",
    ]
    assert docstrings("this is not python") == []
    text = (
        "Parameters\n----------\nx : int\n    The number of things to be counted by this function.\n\nA plain sentence "
        "that has more than eight words in it.\n\nShort one.\n\n    a = b + c * d / e ** f and g or h not in i."
    )
    assert list(prose_paragraphs(text)) == ["A plain sentence that has more than eight words in it."]
