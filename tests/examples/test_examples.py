"""Other people's trainers on our rows: killed and resumed on other numbers of ranks, their models see the rows of a run
that was never disturbed."""

import functools
import hashlib
import importlib
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

import pytest

from tests.forked import ROOT, fork
from tests.gloo_ranks import rank_variables
from tests.written_shards import write_tiny_shards

LIBRARIES = {
    "transformers_trainer": "transformers.trainer", "fsdp2": "transformers", "deepspeed_engine": "deepspeed",
    "lightning_trainer": "lightning.pytorch",
}  # fmt: skip
NUM_STEPS, SAVE_STEPS, GLOBAL_BATCH = 12, 2, 16
STARTS = [(2, 0, 5), (1, 4, 9), (4, 8, None)]
"""Ranks, the step that they begin with, and the one in which all of them are killed."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "shards"
    write_tiny_shards(folder, [40, 30, 27], [4], sequence_length=16)
    return folder


def _start_all(example: str, starts: list[tuple[int, list[str], Path, int | None]]) -> None:
    """Runs an example with one list of arguments after another. The processes are forked from this one, which has
    imported the libraries.

    starts: ranks, arguments, a new folder for what the ranks see, and after how many steps all of them are killed; None
        for never.
    """
    import deepspeed
    from transformers import BertForMaskedLM, LlamaForCausalLM  # noqa: F401

    importlib.import_module(LIBRARIES[example])
    deepspeed.ops.__compatible_ops__ = {}  # it would compile one for the CPU
    for world_size, arguments, seen, num_steps in starts:
        seen.mkdir()
        pids = []
        for variables in rank_variables(world_size):
            pids.append(os.fork())
            if not pids[-1]:
                os.environ |= variables | {"LOCAL_WORLD_SIZE": str(world_size), "CUDA_VISIBLE_DEVICES": ""}
                sys.argv = [f"{example}.py", *arguments]
                _run(example, seen / variables["RANK"], num_steps and num_steps * GLOBAL_BATCH // world_size)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if codes != [0 if num_steps is None else -signal.SIGKILL] * world_size:
            sys.exit(f"{world_size} ranks ended with {codes}")


def _run(example: str, seen: Path, kill_after_rows: int | None) -> None:
    """Runs an example as one rank and ends the process. Writes the digest of each row that the model sees, in order."""
    import torch
    from transformers import BertForMaskedLM, LlamaForCausalLM

    signal.alarm(300)  # ends a process that hangs
    torch.set_num_threads(1)
    lines, num_seen = seen.open("w", buffering=1), 0

    def watched(forward):
        @functools.wraps(forward)
        def watched_forward(model, input_ids, labels=None, **others):
            nonlocal num_seen
            if num_seen == kill_after_rows:
                os.kill(os.getpid(), signal.SIGKILL)
            for row in input_ids if labels is None else torch.cat([input_ids, labels], dim=1):
                lines.write(hashlib.sha256(row.numpy().tobytes()).hexdigest() + "\n")
                num_seen += 1
            return forward(model, input_ids=input_ids, labels=labels, **others)

        return watched_forward

    for model_class in (BertForMaskedLM, LlamaForCausalLM):
        model_class.forward = watched(model_class.forward)
    try:
        runpy.run_path(str(ROOT / f"examples/{example}.py"), run_name="__main__")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def global_batches(seen: Path) -> list[list[str]]:
    """The digests of the rows of each step's global batch, those of all ranks in their order."""
    digests = [path.read_text().splitlines() for path in sorted(seen.iterdir())]
    assert len({len(of_rank) for of_rank in digests}) == 1
    own = GLOBAL_BATCH // len(digests)
    firsts = range(0, len(digests[0]), own)
    return [[digest for of_rank in digests for digest in of_rank[first : first + own]] for first in firsts]


@pytest.mark.parametrize("example", LIBRARIES)
def test_killed_and_resumed_on_other_ranks_a_trainer_sees_the_rows_of_one_never_disturbed(example, shards, tmp_path):
    pytest.importorskip(LIBRARIES[example])
    assert len((ROOT / f"examples/{example}.py").read_text().splitlines()) < 80
    options = ["--shards", shards, "--steps", NUM_STEPS, "--save-steps", SAVE_STEPS, "--global-batch", GLOBAL_BATCH]
    options += ["--width", 16, *(["--micro-batch", 2] if example != "lightning_trainer" else []), "--output"]
    undisturbed, disturbed = ([*map(str, options), f"{tmp_path}/{name}"] for name in ("whole", "disturbed"))
    starts = [(1, undisturbed, tmp_path / "seen", None)]
    for world_size, first, killed_in in STARTS:
        starts.append((world_size, disturbed, tmp_path / f"seen-{first}", killed_in and killed_in - first))
    process = fork(_start_all, example, starts)
    process.join()
    assert process.exitcode == 0
    expected = global_batches(tmp_path / "seen")
    assert [len(rows) for rows in expected] == [GLOBAL_BATCH] * NUM_STEPS
    assert len({digest for rows in expected for digest in rows}) > 90
    for _, first, killed_in in STARTS:
        assert global_batches(tmp_path / f"seen-{first}") == expected[first : killed_in or NUM_STEPS]
