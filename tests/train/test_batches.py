"""The trace of a few steps, on rank 0 alone."""

import gzip
import json
import pickle
from types import SimpleNamespace

import pytest
import torch

from gmlp_scale.distributed.world import start_world
from gmlp_scale.train.batches import profiled


def loop(folder, profile_steps, world, start_step=0, stop_step=5) -> dict[str, set[str]]:
    """Each file of the profile, with the steps that it shows."""
    numbers = range(start_step + 1, 6)
    for number in profiled(numbers, start_step, profile_steps, folder, world):
        with torch.profiler.record_function(f"work of step {number}"):
            torch.ones(8, device=world.device).sum()
        if number == stop_step:
            break
    return {path.name: steps_of(path) for path in sorted(folder.glob("*.trace.json.gz"))}


def steps_of(path) -> set[str]:
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return {event["name"] for event in events if event["name"].startswith("work of")}


def test_the_chosen_steps_are_in_the_trace_and_no_others(tmp_path, world):
    both = {"steps_2_to_3.trace.json.gz": {"work of step 2", "work of step 3"}}
    assert loop(tmp_path / "whole", (2, 3), world) == both
    assert loop(tmp_path / "stopped", (2, 4), world, stop_step=3) == both
    resumed = loop(tmp_path / "resumed", (2, 3), world, start_step=2)
    assert resumed == {"steps_3_to_3.trace.json.gz": {"work of step 3"}}
    assert loop(tmp_path / "later", (2, 3), world, start_step=3) == {}
    assert loop(tmp_path / "none", None, world) == {}


def test_the_other_ranks_record_nothing(tmp_path):
    assert loop(tmp_path, (1, 2), SimpleNamespace(is_main=False, device=torch.device("cpu"))) == {}


def test_a_disk_that_refuses_the_trace_ends_no_training(tmp_path, world, caplog):
    (tmp_path / "profile").write_text("a file")
    assert loop(tmp_path / "profile", (1, 2), world) == {}
    assert "the profile of steps 1 to 2 cannot be written" in caplog.text


@pytest.mark.gpu
def test_a_gpu_has_a_memory_snapshot_too(tmp_path):
    with start_world(30, "cuda") as world:
        assert loop(tmp_path, (2, 3), world).keys() == {"steps_2_to_3.trace.json.gz"}
    snapshot = pickle.loads((tmp_path / "steps_2_to_3.memory.pickle").read_bytes())
    assert snapshot["segments"]
