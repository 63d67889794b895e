import json
import os
import random
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from gmlp_scale.data.shards import Manifest, ShardRows
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.errors import InputError
from gmlp_scale.prepare.job import JobOptions
from gmlp_scale.prepare.report import estimate
from gmlp_scale.prepare.write_shards import is_heldout
from tests.damage import flipped
from tests.data_prep.corpora import REPOSITORY, contents, make_texts, run, write_jsonl
from tests.forked import fork


@pytest.fixture
def tokenize(tokenizer_dir):
    """tokenize(input, output, options...) -> what the script printed."""

    def tokenize(source, output, *options, **settings):
        return run(
            "tokenize_corpus.py", "--input", source, "--tokenizer", tokenizer_dir, "--sequence-length", 32,
            "--output", output, "--heldout-fraction", 0.1, "--shard-bytes", 20_000, *options,
            **settings,
        )  # fmt: skip

    return tokenize


def all_rows(folder, split):
    manifest = Manifest.load(folder)
    shards = getattr(manifest.splits, split)
    form = manifest.sequence_length, manifest.row_dtype
    rows = [ShardRows(folder / shard.name, shard, *form) for shard in shards]
    return np.concatenate([one.read(np.arange(shard.rows)) for one, shard in zip(rows, shards, strict=True)])


def report_of(folder) -> dict:
    return json.loads((folder / "report.json").read_text())


def estimates_in(printed: str) -> dict[str, str]:
    return dict(line.strip().rsplit(maxsplit=1) for line in printed.replace(",", "").splitlines() if line)


def test_shards_hold_the_corpus(corpus, tokenize, tokenizer_dir, tmp_path):
    printed = tokenize(f"{corpus}/*.gz", tmp_path / "out", "--tasks", 3, "--workers", 2)
    out = tmp_path / "out"
    tokenizer = Tokenizer(out / "tokenizer")
    manifest = Manifest.load(out)
    assert manifest.tokenizer_sha256 == tokenizer.sha256 == Tokenizer(tokenizer_dir).sha256
    assert (manifest.sequence_length, manifest.vocab_size, manifest.packing) == (32, 400, "packed")
    texts = [text for number in range(3) for text in make_texts(300, number)]
    for split, held in (("train", False), ("heldout", True)):
        expected = [text for text in texts if is_heldout(text.encode(), 0.1) == held]
        tokens = all_rows(out, split)[:, 1:].reshape(-1)
        *documents, _ = np.split(tokens, np.flatnonzero(tokens == 3) + 1)
        assert sorted(tokenizer.decode(ids[ids > 3]) for ids in documents) == sorted(expected) and expected
    report = report_of(out)
    assert report["documents"] == 900 and report["bad_records"] == 0
    assert report["bytes"] == sum(len(text.encode()) for text in texts)
    assert report["tokens"] == sum(len(tokenizer.encode(text)) for text in texts)
    assert report["train_rows"] == manifest.num_rows("train")
    assert "tokens per byte" in printed
    assert "0 problems" in run("verify_shards.py", out)
    before = contents(out)
    tokenize(f"{corpus}/*.gz", out, "--tasks", 3)
    assert contents(out) == before


def test_other_settings_on_one_output_are_refused(corpus, tokenize, tmp_path):
    tokenize(f"{corpus}/*.gz", tmp_path / "out")
    message = tokenize(f"{corpus}/*.gz", tmp_path / "out", "--tasks", 2, "--packing", "document", code=2)
    assert 'packing was "packed", is "document"' in message and "tasks was 3, is 2" in message
    hub = tokenize("hf:c4:en:train", tmp_path / "out", "--tasks", 3, code=2)
    assert 'is ["hf:c4:en:train"]' in hub
    first, second, third = sorted(corpus.iterdir())
    size = third.stat().st_size
    message = tokenize(f"{corpus}/part-[12]*", tmp_path / "out", "--tasks", 3, code=2)
    assert f"settings ({first} is no longer in inputs): give another --output, or the old" in message
    message = tokenize(first, tmp_path / "out", "--input", first, third, second, code=2)
    assert "(the inputs are in another order)" in message
    write_jsonl(corpus / "part-3.jsonl.gz", make_texts(9))
    message = tokenize(f"{corpus}/*.gz", tmp_path / "out", "--tasks", 3, code=2)
    assert f"{corpus}/part-3.jsonl.gz is new in inputs" in message
    (corpus / "part-3.jsonl.gz").unlink()
    write_jsonl(third, make_texts(9))
    message = tokenize(f"{corpus}/*.gz", tmp_path / "out", code=2)
    assert f"({third} had {size:,} bytes, has {third.stat().st_size:,}): give another --output" in message
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("mine")
    assert "is not the output of a job" in tokenize(f"{corpus}/*.gz", tmp_path / "other", code=2)


def test_bad_records_are_counted_and_quarantined(corpus, tokenize, tmp_path):
    bad = corpus / "bad.jsonl"
    bad.write_bytes(b'{"text": "fine"}\n{"text": \n{"other": 1}\n{"text": " "}\n')
    printed = tokenize(f"{corpus}/*", tmp_path / "out", "--tasks", 2)
    assert "broken JSON 1" in printed and "empty text 1" in printed
    report = report_of(tmp_path / "out")
    assert report["documents"] == 901 and report["bad_records"] == 3
    quarantined = [path.read_text().splitlines() for path in (tmp_path / "out/job/quarantine").iterdir()]
    entries = [json.loads(line) for lines in quarantined for line in lines]
    assert [(entry["line"], entry["file"]) for entry in entries] == [(line, str(bad)) for line in (2, 3, 4)]
    message = tokenize(f"{corpus}/*", tmp_path / "strict", "--max-bad-fraction", 0.001, code=2)
    assert "3 of 904 records are bad (1 " in message and "1 no text in field 'text'" in message
    assert "), more than --max-bad-fraction 0.001; they are listed in" in message
    assert not (tmp_path / "strict/manifest.json").exists()
    bad.write_bytes(b"{}\n" * 10_001)
    message = tokenize(bad, tmp_path / "early", code=2)
    assert "10000 of 10000 records are bad (10000 no text in field 'text'), more than --max-bad-fraction" in message
    assert f"; the first is {bad}, line 1: no text in field 'text'" in message


def test_a_broken_file_ends_the_job_unless_it_is_allowed(corpus, tokenize, tokenizer_dir, tmp_path, trials):
    """Three tasks share two files, so that one file has its fault in two tasks."""
    broken, whole = corpus / "part-0.jsonl.gz", corpus / "part-1.jsonl.gz"
    content = broken.read_bytes()
    broken.write_bytes(content[: len(content) // 2])
    command = (f"{corpus}/part-[01].jsonl.gz", tmp_path / "out", "--tasks", 3)
    message = tokenize(*command, code=2)
    assert f"broken files: 1, --max-bad-files is 0: {broken} after " in message
    assert "Fetch them again (a job that has begun then needs another --output), or raise" in message
    assert not (tmp_path / "out/manifest.json").exists()
    assert f"bad files                            {broken} it ends in the middle" in tokenize(
        *command, "--max-bad-files", 1
    )
    report = report_of(tmp_path / "out")
    assert list(report["bad_files"]) == [str(broken)] and 300 < report["documents"] < 600
    assert report["bad_files_bytes_read"] == len(content) // 2 and report["bad_files_bytes_lost"] == 0
    whole.write_bytes(flipped(whole.read_bytes(), whole.stat().st_size // 2))
    options = JobOptions(
        input=(f"{corpus}/part-[01].jsonl.gz",), tokenizer=str(tokenizer_dir), sequence_length=32, output="out",
        max_bad_files=1,
    )  # fmt: skip
    with pytest.raises(InputError, match="broken files: 2, --max-bad-files is 1"):
        estimate(options, Tokenizer(tokenizer_dir))
    trials("corpus files cut or damaged", 2)


def test_duplicates_are_dropped_and_counted(corpus, tokenize, tmp_path):
    words = ["".join(chr(97 + number * 7919 // 26**k % 26) for k in range(5)) for number in range(400)]
    near = [" ".join(words), " ".join([*words[:200], "changed", *words[201:]])]
    texts = make_texts(300, 0)
    write_jsonl(corpus / "again.jsonl", [texts[5].upper(), texts[5] + "  ", texts[9], *near])
    printed = tokenize(f"{corpus}/*", tmp_path / "out", "--dedup", "exact", "minhash", "--workers", 2)
    found = report_of(tmp_path / "out")
    assert found["exact"] == {"read": 905, "kept": 902, "dropped": 3}
    assert found["minhash"]["read"] == 902 and found["minhash"]["dropped"] >= 1
    assert "dropped 3" in printed
    assert found["documents"] == found["minhash"]["kept"]
    tokens = all_rows(tmp_path / "out", "train")[:, 1:].reshape(-1)
    assert Tokenizer(tmp_path / "out/tokenizer").decode(tokens).count(" ".join(words[:100])) == 1


def test_contaminated_documents_are_dropped_and_counted(corpus, tokenize, tmp_path):
    dev = " ".join(f"Eval{number}," for number in range(30))
    write_jsonl(corpus / "leak.jsonl", ["Before. " + dev.lower() + " after", " ".join(dev.split()[:12])])
    (tmp_path / "dev.tsv").write_text(f"sentence\tlabel\n{dev}\t1\n")
    tokenize(f"{corpus}/*", tmp_path / "out", "--decontaminate", tmp_path / "dev.tsv")
    assert report_of(tmp_path / "out")["decontaminate"] == {"read": 902, "kept": 901, "dropped": 1}


def test_files_to_avoid_that_change_or_hold_no_text_are_refused(corpus, tokenize, tmp_path):
    long = " ".join(f"Eval{number}," for number in range(30))
    write_jsonl(tmp_path / "dev.jsonl", [long])
    tokenize(f"{corpus}/*", tmp_path / "out", "--decontaminate", tmp_path / "dev.jsonl")
    write_jsonl(tmp_path / "dev.jsonl", [long, "more " + long])
    found = tokenize(f"{corpus}/*", tmp_path / "out", "--decontaminate", tmp_path / "dev.jsonl", code=2)
    assert f"settings ({tmp_path}/dev.jsonl had " in found
    (tmp_path / "wrapped.txt").write_text(long.replace("Eval10,", "Eval10,\n").replace("Eval20,", "Eval20,\n"))
    found = tokenize(f"{corpus}/*", tmp_path / "new", "--decontaminate", tmp_path / "wrapped.txt", code=2)
    assert "has nothing that a document could share; needed: a text of 13 words or more" in found


def test_a_data_set_of_the_hub_is_streamed(corpus, tokenize, tmp_path):
    """From a folder, which `datasets` reads by the same path as a name on the hub."""
    write_jsonl(corpus / "bad.jsonl", ["", " fine "])
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    printed = tokenize(f"hf:{corpus}:default:train", tmp_path / "out", "--workers", 2, environment=offline)
    assert "empty text 1" in printed
    wrong = tokenize(f"hf:{corpus}:default:dev", tmp_path / "wrong", environment=offline, code=2)
    assert f"--input hf:{corpus}:default:dev: Bad split: dev" in wrong
    tokenize(f"{corpus}/*", tmp_path / "files", "--max-bad-fraction", 0.1)
    for split in ("train", "heldout"):
        hub, files = (all_rows(tmp_path / name, split) for name in ("out", "files"))
        assert sorted(hub.reshape(-1)) == sorted(files.reshape(-1))


def test_an_estimate_samples_a_data_set_of_the_hub(corpus, tokenizer_dir, tmp_path):
    """It knows the size if it has read all, or if the data set's card has it."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    fork(_estimate_three_times, corpus, tokenizer_dir, tmp_path / "found.json", environment=offline).join()
    whole, without_card, with_card, message = json.loads((tmp_path / "found.json").read_text())
    assert whole["sampled_documents"] == whole["estimated_documents"] == 900 and whole["estimated_rows"] > 900
    assert without_card["estimated_documents"].startswith("unknown") and "estimated_rows" not in without_card
    sampled = with_card["sampled_documents"]
    assert 600 < sampled < 2600 and with_card["estimated_documents"] == round(50_000 * sampled / (sampled + 1))
    assert message == "--text-field is 'body'; the data set has text, url"


def _estimate_three_times(corpus, tokenizer_dir, output):
    """A whole data set, a long one, a long one with a card; then one without the text field."""
    options = {"input": [f"hf:{corpus}:default:train"], "tokenizer": str(tokenizer_dir), "output": "o"}
    options, tokenizer, draw = JobOptions(**options, sequence_length=32), Tokenizer(tokenizer_dir), random.Random(0)
    found = [estimate(options, tokenizer)]
    write_jsonl(corpus / "part-0.jsonl.gz", ["", *(draw.randbytes(300).hex() for _ in range(2000))])
    found.append(estimate(options, tokenizer))
    card = "---\ndataset_info:\n  splits:\n  - name: train\n    num_examples: 50000\n    num_bytes: 1\n---\n"
    (corpus / "README.md").write_text(card)
    found.append(estimate(options, tokenizer))
    with pytest.raises(ValueError) as error:
        estimate(replace(options, text_field="body"), tokenizer)
    output.write_text(json.dumps([*found, str(error.value)]))


def write_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_slurm_job_array_does_the_same_work(corpus, tokenize, tmp_path):
    """Against stand-ins for Slurm's programs: what is submitted is read, and run by hand for each array index."""
    tokenize(f"{corpus}/*.gz", tmp_path / "local", "--dedup", "exact")
    write_program(
        tmp_path / "bin/sbatch", f'cp "${{@: -1}}" {tmp_path}/$(date +%s%N).slurm; echo Submitted batch job 17'
    )
    write_program(tmp_path / "bin/srun", 'while [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done; exec "$@"')
    write_program(tmp_path / "bin/scontrol", "echo localhost")
    write_program(tmp_path / "bin/squeue", f'[[ "$*" == *" 17" ]] && cat {tmp_path}/queue')
    (tmp_path / "queue").write_text("17 cpu tokenizing R\n")
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    slurm = ("--dedup", "exact", "--executor", "slurm", "--slurm-partition", "cpu", "--workers", 2)
    assert "submitted to Slurm" in tokenize(f"{corpus}/*.gz", tmp_path / "out", *slurm, environment=environment)
    scripts = sorted(path for path in tmp_path.glob("*.slurm") if "launch_pickled_pipeline" in path.read_text())
    assert len(scripts) == 3  # signatures, find, tokenizing
    assert "#SBATCH --partition=cpu" in scripts[2].read_text() and "#SBATCH --array=0-2%2" in scripts[2].read_text()
    message = tokenize(f"{corpus}/*.gz", tmp_path / "out", *slurm, environment=environment, code=1)
    assert "Slurm job 17 still works on" in message
    (tmp_path / "queue").write_text("")
    for script, num_tasks in zip(scripts, (3, 1, 3), strict=True):
        for index in range(num_tasks):
            inside = {"SLURM_ARRAY_TASK_ID": str(index), "SLURM_NODELIST": "localhost"}
            subprocess.run(["bash", script], env=os.environ | environment | inside, check=True, capture_output=True)
    tokenize(f"{corpus}/*.gz", tmp_path / "out", *slurm, environment=environment)
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


def test_document_packing_is_recorded(corpus, tokenize, tmp_path):
    tokenize(f"{corpus}/*.gz", tmp_path / "out", "--packing", "document")
    assert Manifest.load(tmp_path / "out").packing == "document"
    assert ((all_rows(tmp_path / "out", "train") == 3).sum(axis=1) == 1).all()


def test_a_text_file_is_one_document_and_a_job_that_held_nothing_out_says_so(tokenize, tmp_path):
    (tmp_path / "a.txt").write_text("".join(make_texts(300)))
    message = "none of the 1 documents is held out, so launch/pretrain.py will refuse these shards: give more documents"
    printed = tokenize(tmp_path / "a.txt", tmp_path / "out", "--heldout-fraction", 0)
    assert message in printed and "one document, or one for each MB" in printed
    report = report_of(tmp_path / "out")
    assert report["documents_read"] == 1 and report["heldout_rows"] == 0
    write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    printed = tokenize(tmp_path / "a.jsonl", tmp_path / "of_json")
    assert "held out" not in printed and "text file" not in printed


def test_mistakes_are_one_clear_error(corpus, tokenize, tokenizer_dir, tmp_path):
    out = tmp_path / "out"
    assert "matches no file" in tokenize(f"{corpus}/*.txt", out, code=2)
    assert "--workers is 0" in tokenize(f"{corpus}/*.gz", out, "--workers", 0, code=2)
    assert "not of the form hf:NAME:CONFIG:SPLIT" in tokenize("hf:c4", out, code=2)
    message = run("tokenize_corpus.py", "--input", f"{corpus}/*.gz", "--tokenizer", tmp_path, "--sequence-length", 32,
                  "--output", out, code=2)  # fmt: skip
    assert "no tokenizer at" in message
    assert not out.exists()
    slurm = ("--executor", "slurm", "--slurm-partition", "cpu")
    message = tokenize(f"{corpus}/*.gz", out, *slurm, environment={"PATH": str(tmp_path)}, code=2)
    assert "--executor slurm finds no sbatch" in message
    options = {"input": ("http://user:password@host/a.jsonl",), "tokenizer": "t", "sequence_length": 32, "output": "o"}
    with pytest.raises(ValueError, match="--executor slurm keeps the job's options in a file"):
        JobOptions(**options, executor="slurm", slurm_partition="cpu")


@pytest.mark.parametrize("packing", ["packed", "document"])
def test_dry_run_estimates_and_writes_nothing(packing, corpus, tokenize, tmp_path):
    options = ("--packing", packing, "--tasks", 4)
    printed = tokenize(f"{corpus}/*.gz", tmp_path / "out", *options, "--dry-run")
    assert not (tmp_path / "out").exists()
    estimates = estimates_in(printed)
    assert estimates["estimated documents"] == "900"
    tokenize(f"{corpus}/*.gz", tmp_path / "out", *options)
    report = report_of(tmp_path / "out")
    rows = report["train_rows"] + report["heldout_rows"]
    assert abs(int(estimates["estimated rows"]) - rows) <= (8 if packing == "packed" else 0)
    splits = Manifest.load(tmp_path / "out").splits
    assert abs(int(estimates["estimated shards"]) - len(splits.train) - len(splits.heldout)) <= 2


def test_dry_run_estimates_from_the_beginning_of_long_files(tokenize, tmp_path):
    draw = random.Random(0)
    write_jsonl(tmp_path / "long.jsonl.gz", [draw.randbytes(300).hex() for _ in range(4000)])
    printed = tokenize(tmp_path / "long.jsonl.gz", tmp_path / "out", "--dry-run")
    estimates = estimates_in(printed)
    assert int(estimates["sampled documents"]) < 1000
    assert abs(int(estimates["estimated documents"]) - 4000) < 500


def test_real_c4_documents(tokenize, tmp_path):
    sample = REPOSITORY.parent / "shared/data/c4_sample/c4-en-sample-300.jsonl.gz"
    if not sample.exists():
        pytest.skip(f"{sample} is not there")
    printed = tokenize(sample, tmp_path / "out", "--tasks", 2)
    report = report_of(tmp_path / "out")
    assert report["documents"] == 300 and report["bad_records"] == 0, printed
