"""The table of models beside their time: steps that run, and losses at points of time by hand."""

import json

from benchmarks.mixers import lines_of, losses_at
from gmlp_scale.science.runs import Table

TINY = (
    "model.num_blocks=2", "model.d_model=8", "model.d_ffn=16", "model.sequence_length=16", "model.vocab_size=40",
    "train.micro_batch_size=4", "train.global_batch_size=4", "train.precision=float32",
)  # fmt: skip


def test_every_model_of_the_part_is_timed_beside_the_first(tmp_path):
    table = Table(str(tmp_path), ("d",), 3, TINY)
    for rate in (3e-3, 6e-3):
        run = table.run("gmlp", rate, 0)
        content = {
            "config": run.to_json(),
            "loss": 4.0 + rate,
            "shards_sha256": "",
            "evaluations": [[1, 6.0], [2, 5.0]],
        }
        (tmp_path / "results").mkdir(exist_ok=True)
        (tmp_path / f"results/{run.name}.json").write_text(json.dumps(content))
    rows = [line.strip("| ").split(" | ") for line in lines_of(table, 1)]
    names, gmlp, dense = rows[0], *rows[2:]
    assert [gmlp[0], dense[0]] == ["gmlp", "gmlp_dense"] and len(names) == len(gmlp) == len(dense)
    assert gmlp[4] == "1.00" and float(dense[4]) > 0 and dense[5:] == ["not run", "not run"]


def test_losses_are_read_between_evaluations_and_end_with_the_run():
    result = {"evaluations": [[1000, 5.0], [2000, 4.0], [4000, 3.0]]}
    assert losses_at(result, 1.0) == "5.000, 4.000, 3.500, 3.000"
    assert losses_at(result, 2.0) == "-, 5.000, 4.500, 4.000"
    assert losses_at(result, 0.8) == "4.750, 3.750, 3.125, -"
    assert losses_at({"loss": 1.0}, 1.0) == "not kept" and losses_at(None, 1.0) == "not run"
