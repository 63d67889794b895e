"""What --compare names, and the table."""

import copy
import json

import pytest

from benchmarks.reports import read_report, report_as_measured, table, worsened

STEP = {
    "rows": 32,
    "precision": "bf16",
    "step_seconds": 0.25,
    "mfu": 0.5,
    "operations_floor_seconds": 0.15,
    "bytes_floor_seconds": 0.05,
    "time_split": {"matrix products": 0.7, "fused": 0.295, "other": 0.005},
    "ratios": {"fraction_of_ceiling": 0.60, "over_bert": 2.0},
}
STEP["ratios"]["isolated_products_over_step"] = 0.75
REPORT = {
    "recipes": {"a": {"step": STEP, "checkpoint": {"costs": {"stall_over_copy": 1.0}}}, "b": {"step": {"ratios": {}}}}
}


def changed(part: str, kind: str, name: str, factor: float) -> dict:
    report = copy.deepcopy(REPORT)
    report["recipes"]["a"][part][kind][name] *= factor
    return report


@pytest.mark.parametrize(
    "part, kind, name, factor, lines",
    [
        ("step", "ratios", "over_bert", 0.94, ["a step over_bert: 2 before, 1.88 now (-6.0%)"]),
        ("step", "ratios", "over_bert", 0.96, []),
        ("step", "ratios", "over_bert", 1.5, []),
        ("checkpoint", "costs", "stall_over_copy", 1.06, ["a checkpoint stall_over_copy: 1 before, 1.06 now (+6.0%)"]),
        ("checkpoint", "costs", "stall_over_copy", 1.04, []),
        ("checkpoint", "costs", "stall_over_copy", 0.5, []),
    ],
)
def test_a_ratio_is_worse_when_it_falls_and_a_cost_when_it_rises(part, kind, name, factor, lines):
    assert worsened(REPORT, changed(part, kind, name, factor)) == lines


def test_every_worse_one_is_named_and_absolute_times_are_not_compared():
    report = changed("step", "ratios", "over_bert", 0.5)
    report["recipes"]["a"]["step"]["ratios"]["fraction_of_ceiling"] *= 0.9
    report["recipes"]["a"]["step"]["step_seconds"] *= 100
    assert [line.split(":")[0] for line in worsened(REPORT, report)] == [
        "a step fraction_of_ceiling",
        "a step over_bert",
    ]


def test_only_what_both_have_is_compared():
    before = copy.deepcopy(REPORT)
    before["recipes"]["a"]["step"]["ratios"]["over_a_peer_that_is_gone"] = 1.0
    assert worsened(before, REPORT) == []
    with pytest.raises(ValueError, match="no ratio is in both"):
        worsened({"recipes": {"c": REPORT["recipes"]["a"]}}, REPORT)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"recipes": {"a": 1}}'])
def test_what_is_no_report_is_refused(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"x\.json is no report of benchmarks/run\.py"):
        read_report(path)


def test_the_file_has_each_figure_as_soon_as_it_is_measured(tmp_path, capsys):
    def parts():
        for number in range(3):
            yield {"recipes": number}
            assert json.loads((tmp_path / "x.json").read_text())["recipes"] == number

    report_as_measured("cpu", parts(), tmp_path / "x.json")
    assert capsys.readouterr().out == (tmp_path / "x.json").read_text()


def test_table(tmp_path):
    path = tmp_path / "x.json"
    report = {"recipes": {"gmlp_base": REPORT["recipes"]["a"], "b": {"loader": {}}}}
    path.write_text(json.dumps(report))
    header, _, *rows = table(read_report(path)).splitlines()
    assert rows == ["| gmlp_base | 32 in bf16 | 250 | 0.60 | 0.50 | 150 | 50 | 0.75 | matrix products 70%, fused 30% |"]
    assert header.count("|") == rows[0].count("|")
