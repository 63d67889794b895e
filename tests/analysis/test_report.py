"""launch/report.py: its numbers, its errors, and its page in a real browser."""

import html
import json
import math
import re
import shutil
import sys
from itertools import combinations, pairwise
from pathlib import Path

import fsspec
import numpy as np
import pytest
import yaml

from gmlp_scale.analysis import run_report
from gmlp_scale.analysis.curves import BOTTOM, MOST_POINTS, TOP, short, stretches, y_axis
from gmlp_scale.checkpoint.saved_run import read_recipe
from gmlp_scale.plan.describe import count_parameters
from gmlp_scale.train.sinks import EventsFile, read_metrics
from launch.report import main
from tests.analysis.browser import chromium

HOSTILE = '"><script>document.title = "taken"</script>'
TEMPLATE = Path(run_report.__file__).with_name("run_report.html").read_text()
NUM_LINES = 1000


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    """A run of 1000 logged steps and three resumes, whose name, config and metrics would be a script if not escaped."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    (folder / "tensorboard").mkdir(parents=True)
    config = {"name": HOSTILE, "model": {"kind": "transformer"}, "train": {"num_steps": 2000}}
    config["data"] = {"shards": "s3://key:secret@bucket/shards", "note": HOSTILE}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [
        {"step": step, "train/loss": 9 - step / NUM_LINES, "train/perplexity": math.exp(9 - step / NUM_LINES)}
        for step in range(1, NUM_LINES + 1)
    ]
    lines[4]["train/perplexity"] = math.inf
    lines[-1] |= {"eval/perplexity": 2981.0, f"eval/{HOSTILE}": 0.5}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "skipped_steps.jsonl").write_text('{"step": 7, "why": "spike"}\n{"step": 9, "why": "not finite"}\n')
    for start_step in (0, 400, 600, NUM_LINES):  # the last start found nothing left to do
        events = EventsFile(folder / "tensorboard", start_step)
        events.close()
        events.path.rename(events.path.with_name(f"events.out.tfevents.{start_step}"))  # one name in one second
    return folder


@pytest.fixture(scope="module")
def page(runs, hostile, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv", ["report", *map(str, (runs / "gmlp", runs / "transformer", hostile, "--output", path))]
        )
        assert main() == 0
    return path


def cells(page: Path, heading: str) -> list[str]:
    """What stands below a heading of one of the tables with a row for each run."""
    for table in re.findall(r"<table>.*?</table>", page.read_text(), re.DOTALL):
        headings = re.findall(r'<th scope="col">(.*?)</th>', table)
        if heading in headings:
            rows = re.findall(r'<tr><th scope="row">.*?</tr>', table)
            column = headings.index(heading) - 1
            return [html.unescape(re.findall(r"<td[^>]*>(.*?)</td>", row)[column]) for row in rows]
    raise AssertionError(f"no column {heading}")


def test_the_tables_have_the_numbers_of_the_runs(runs, page):
    last = [line for line in read_metrics(runs / "gmlp" / "metrics.jsonl") if "eval/perplexity" in line][-1]
    assert cells(page, "step") == ["4 of 4", "4 of 4", "1,000 of 2,000"]
    assert float(cells(page, "held-out perplexity")[0]) == pytest.approx(last["eval/perplexity"], rel=1e-4)
    assert float(cells(page, "held-out accuracy")[0]) == pytest.approx(last["eval/accuracy"], rel=1e-4)
    assert cells(page, "parameters") == [
        *(f"{count_parameters(read_recipe(runs / kind)):,}" for kind in ("gmlp", "transformer")), "–",
    ]  # fmt: skip
    assert cells(page, "restarts") == ["0", "0", "2: after step 400, 600"]
    assert cells(page, "updates left out") == ["0", "0", "2: step 7 (spike), 9 (not finite)"]
    assert cells(page, "newest checkpoint") == ["step 4", "step 4", "none"]
    assert cells(page, "peak memory")[2] == "–" and cells(page, "peak memory")[0].endswith(" GiB")


def test_the_page_names_the_fields_that_differ(page):
    differing = re.findall(r'<tr><th scope="row"><code>(.*?)</code></th>(.*?)</tr>', page.read_text())
    values = {field: re.findall(r"<td[^>]*>(.*?)</td>", row) for field, row in differing}
    assert values["model.kind"] == ["gmlp", "transformer", "transformer"]
    assert values["model.num_heads"] == ["absent", "2", "absent"]
    assert values["train.num_steps"] == ["4", "4", "2000"]
    assert values["train.compile"] == ["false", "false", "absent"]
    assert "name" not in values and "train.log_every_steps" in values and values["seed"] == ["0", "0", "absent"]


def test_no_text_of_a_run_is_taken_for_html_and_no_password_is_shown(page):
    text = page.read_text()
    assert "<script>document" not in text and text.count("<script>") == 1
    assert html.escape("<script>document") in text and "secret" not in text
    assert not re.search(r"(src|href)=|@import|url\(", text), "the page loads nothing"


def test_the_page_in_a_browser(page, hostile, tmp_path):
    """At the width of a phone and of a desktop, in both colour schemes."""
    grounds = set()
    (tmp_path / "profile").mkdir()
    with chromium(tmp_path / "profile") as browser:
        for width, scheme in ((390, "dark"), (390, "light"), (1280, "light"), (1280, "dark")):
            browser.open(page, width, scheme)
            assert browser.requests == [page.as_uri()]
            assert browser.evaluate("[innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [width, True]
            assert browser.evaluate("document.title") == f"gmlp · transformer · {HOSTILE}"
            by_title = browser.evaluate(CURVES)
            for title in ("Training loss", "Training perplexity"):
                of_run = by_title[title]
                assert len(of_run) == 3 and len({color for _, _, color in of_run}) == 3
                assert [num_points for num_points, _, _ in of_run] == [4, 4, MOST_POINTS]
                assert of_run[2][1] > 200, "units of length"
            assert by_title["Held-out perplexity"][2][0] == 1
            assert browser.evaluate("document.querySelectorAll('.filters .curve').length") == 2, "blocks of the gMLP"
            assert browser.evaluate(OVERLAPS) == []
            grounds.add((scheme, browser.evaluate("getComputedStyle(document.body).backgroundColor")))
            browser.move_pointer(*browser.evaluate(PLACE_OF_THE_LAST_STEP))
            shown = browser.evaluate("document.querySelector('.values:not([hidden])').innerText").split("\n")
            assert shown[0] == "step 1,000" and shown[-2:] == [HOSTILE, "8.002"], "the mean of the last five values"
            assert browser.errors == []
    assert len(grounds) == 2


CURVES = """Object.fromEntries([...document.querySelectorAll("figure")].map(figure => [
    figure.querySelector("h3").textContent,
    [...figure.querySelectorAll("path.curve[data-points]")].map(path => [
        path.getAttribute("d").split("L").length, path.getTotalLength(), getComputedStyle(path).stroke]),
]))"""
OVERLAPS = """[...document.querySelectorAll("svg.chart")].flatMap(svg => {
    const boxes = [...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect()).filter(a => a.width);
    return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b =>
        a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom
    ).map(b => [a.x, a.y, b.x, b.y]));
})"""
PLACE_OF_THE_LAST_STEP = """(() => {
    const figures = [...document.querySelectorAll("figure")];
    const figure = figures.find(figure => figure.querySelector("h3").textContent == "Training loss");
    figure.scrollIntoView({block: "center"});
    const frame = figure.querySelector("svg").getBoundingClientRect();
    return [frame.right - 4, frame.top + frame.height / 2];
})()"""


def test_a_run_at_a_url_has_the_same_page(runs, launched, tmp_path):
    folder = runs / "gmlp"
    store = fsspec.filesystem("memory")
    store.put(str(folder), "memory://reported/gmlp", recursive=True)
    texts = []
    for place, name in ((folder, "local.html"), ("memory://reported/gmlp", "remote.html")):
        code, printed, error = launched(main, place, "--output", tmp_path / name)
        assert (code, printed) == (0, f"{tmp_path / name}\n"), error
        texts.append(re.sub(r"read 20.*? UTC", "", (tmp_path / name).read_text()).replace(str(place), "RUN"))
    assert texts[0] == texts[1] and "block 1" in texts[0]


def test_a_damaged_checkpoint_leaves_the_rest_of_the_page(runs, launched, tmp_path, succeeds):
    shutil.copytree(runs / "gmlp", tmp_path / "gmlp")
    for path in (tmp_path / "gmlp").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes() + b"\0")
    succeeds(main, tmp_path / "gmlp", "--output", tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    assert "Held-out perplexity" in text and "no checkpoint in" in text and "block 1" not in text
    code, _, error = launched(main, tmp_path / "gmlp", "--no-filters", "--output", tmp_path / "a.html")
    assert code == 0 and "Spatial filters" not in (tmp_path / "a.html").read_text(), error


def test_mistakes_are_one_message_and_leave_with_2(runs, launched, tmp_path):
    shutil.copytree(runs / "gmlp", tmp_path / "new")
    (tmp_path / "new" / "metrics.jsonl").write_text("")
    shutil.copytree(runs / "gmlp", tmp_path / "damaged")
    (tmp_path / "damaged" / "metrics.jsonl").write_text('{"step": 1}\n{"ste\x00p"}\n')
    shutil.copytree(runs / "gmlp", tmp_path / "other")
    (tmp_path / "other" / "metrics.jsonl").write_text("[1]\n")
    for names, messages in (
        (["absent", "new"], ["no run at", "has no metrics yet"]),
        (["damaged"], ["metrics.jsonl: line 2 is damaged", "mend or remove it"]),
        (["other"], ["line 1 has no step"]),
        ([], ["arguments are required: RUN_DIR_OR_URL"]),
    ):
        folders = [tmp_path / name for name in names]
        code, printed, error = launched(main, *folders, "--output", tmp_path / "a.html")
        assert (code, printed) == (2, ""), error
        assert all(message in error for message in messages) and "Traceback" not in error
    assert not (tmp_path / "a.html").exists()


def test_colours_stay_apart_for_every_kind_of_colour_blindness():
    """Machado, Oliveira and Fernandes 2009, at full severity. Distances are 100 x those of Oklab (Ottosson 2020)."""
    light, dark = re.findall(r":root \{(.*?)\}", TEMPLATE, re.DOTALL)
    for theme in (light, dark):
        colors = [_linear(color) for color in re.findall(r"--run-\d: (#\w{6})", theme)]
        assert len(colors) == run_report.NUM_COLORS
        for sight in SIGHTS:
            seen = [_oklab(np.clip(np.array(sight) @ color, 0, 1)) for color in colors]
            assert min(100 * np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 11


SIGHTS = (
    [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
)


def _linear(color: str) -> np.ndarray:
    c = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def _oklab(rgb: np.ndarray) -> np.ndarray:
    to_lms = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_lms) @ rgb)


def test_long_curves_keep_their_ends_and_their_extremes():
    values = [(step, math.sin(step / 50) + (9 if step == 777 else 0)) for step in range(1, 1002)]
    points = stretches(values)
    assert len(points) <= MOST_POINTS and points[-1].step == 1001
    assert max(point.high for point in points) == values[776][1]
    assert min(point.low for point in points) == min(value for _, value in values)
    assert all(point.low <= point.mean <= point.high for point in points)
    assert [tuple(point) for point in stretches(values[:2])] == [(s, v, v, v) for s, v in values[:2]]


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (3.02, 3.05), (20, 30000), (1e-9, 4e8), (7e-4, 2e-3)])
def test_axes_have_round_numbers_within_them(low, high, is_log):
    axis = y_axis([low, high], is_log=is_log, from_zero=False)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 8 and all(axis.low <= tick <= axis.high for tick in ticks)
    assert all(TOP <= axis.at(value) <= BOTTOM for value in (low, high, *ticks))
    assert len({short(tick) for tick in ticks}) == len(ticks)
    assert all(a < b for a, b in pairwise(ticks))
