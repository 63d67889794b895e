"""Compares our loader with other people's on the same rows of tokens, and writes FILE.json and its table, FILE.md.

python benchmarks/loaders.py --shards data/own_512 --output FILE.json

docs/data.md says what the figures mean and how the other loaders are installed. Compare figures within one run only.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import numpy as np
import psutil
import torch

from benchmarks.reports import markdown, report_as_measured
from benchmarks.timing import say
from benchmarks.token_loaders import LOADERS, Library, Reading
from gmlp_scale.data.shards import ROW_DTYPE, Manifest, ShardRows
from gmlp_scale.distributed.logs import command
from gmlp_scale.errors import UserError
from gmlp_scale.storage.files import local_path

ROWS_PER_SHARD, CORRUPT_ROWS = 2**13, 4096
EXACT_STEPS, EXACT_BATCH = 20, 32
SORTED_ROWS, SORTED_LENGTH, SORTED_BATCH = 2**18, 16, 256
FIRST_BATCH_STEPS, FIRST_BATCH_SIZE = (1_000, 20_000), 8
RATE_BATCH, RATE_STEPS, RATE_ROUNDS = 256, 32, 5
WARM_UP_STEPS = 20  # none reads further ahead, so they use up what was read while the clock stood
LIMIT_SECONDS = 240  # a process that takes longer counts as hung


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=local_path, required=True, help="tokenize_corpus.py's, of 512 tokens a row")
    parser.add_argument("--output", type=local_path, required=True, metavar="FILE.json", help="the report")
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.loaders"])
    manifest = Manifest.load(str(options.shards))
    length, train = manifest.sequence_length, manifest.splits.train
    parts = [ShardRows(options.shards / one.name, one, length).read(np.arange(one.rows)) for one in train]
    report = report_as_measured("cpu", measure(np.concatenate(parts)), options.output)
    options.output.with_suffix(".md").write_text(table(report["loaders"]) + "\n")
    return 0


def measure(rows_RN: np.ndarray) -> Iterator[dict]:
    """The report so far, again after each part of each loader. The rows are repeated until they are enough."""
    rows_RN = np.resize(rows_RN, (FIRST_BATCH_SIZE * (FIRST_BATCH_STEPS[-1] + 100), rows_RN.shape[1]))
    try:
        loaders = {name: {"version": {one: version(one) for one in LOADERS[name].packages}} for name in LOADERS}
    except PackageNotFoundError as error:
        raise UserError(f"{error.name} is not installed. docs/data.md says how to install all loaders") from None
    with tempfile.TemporaryDirectory() as temporary:
        for name, library in LOADERS.items():
            library.write(rows_RN, folder := Path(temporary, name, "rows"), ROWS_PER_SHARD)
            for part in (exact, corrupt, size, shuffle, first_batch, rates):
                say(f"{name}: {part.__name__}")
                try:
                    loaders[name][part.__name__] = part(library, folder, rows_RN)
                except Exception as error:  # of the library; the other parts go on
                    loaders[name][part.__name__] = {"failed": last_line(error)}
                yield {"loaders": loaders}


def result(work: Callable, *arguments: Any) -> Any:
    """What work(*arguments) returns in a new process. BrokenProcessPool if that dies or takes LIMIT_SECONDS."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"), _begin, (LIMIT_SECONDS,))
    try:
        return pool.submit(work, *arguments).result()
    finally:
        pool.shutdown(wait=False)


def _begin(limit_seconds: int) -> None:
    multiprocessing.set_start_method("fork", force=True)  # of workers, as in a user's process
    signal.alarm(limit_seconds)


def last_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def seen(library: Library, how: Reading, num_steps: int, start: Path | None = None, **ending: Any) -> list[np.ndarray]:
    """The rows of each global batch, rank after rank, as the ranks give them out from their states in `start`.

    On more ranks than saved the states, a rank's number modulo theirs says whose it loads. `ending` is _rank_steps's.
    """
    states = [torch.load(path, weights_only=True) for path in sorted(start.iterdir())] if start else [None]
    how = replace(how, meeting=Path(tempfile.mkdtemp(dir=how.folder.parent), "store"))
    ranks = [(replace(how, rank=rank), states[rank % len(states)]) for rank in range(how.world_size)]
    with ThreadPoolExecutor(how.world_size) as threads:
        runs = [threads.submit(result, _rank_steps, library, *rank, num_steps, ending) for rank in ranks]
    return [np.concatenate(parts) for parts in zip(*[run.result() for run in runs], strict=True)]


def _rank_steps(library: Library, how: Reading, state: Any, num_steps: int, ending: dict) -> list[np.ndarray]:
    """ending: `saves` has the folder that gets the ranks' states after a step; `is_killed`: by SIGKILL at the end."""
    os.environ |= {"RANK": str(how.rank), "WORLD_SIZE": str(how.world_size), "LOCAL_RANK": str(how.rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(how.world_size)}
    if how.world_size > 1:
        method = f"file://{how.meeting}"  # another process may take a port
        torch.distributed.init_process_group("gloo", method, rank=how.rank, world_size=how.world_size)
    batches, state_dict = library.opened(how, state)
    rows = []
    for step, batch in enumerate(islice(batches, num_steps), start=1):
        rows.append(batch.numpy().astype(ROW_DTYPE))
        if folder := ending.get("saves", {}).get(step):
            folder.mkdir(exist_ok=True)
            torch.save(state_dict(), folder / str(how.rank))
    if ending.get("is_killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    return rows


def exact(library: Library, folder: Path, rows_RN: np.ndarray) -> dict[str, Any]:
    """Whether runs that go on from the states of step EXACT_STEPS see what the undisturbed run sees."""
    two = Reading(folder, EXACT_BATCH, rows_RN.shape[1], library.num_workers[0], world_size=2)
    saved, later, killed = (folder.with_name(f"states-{number}") for number in range(3))
    whole = [sorted(batch.tolist()) for batch in seen(library, two, 3 * EXACT_STEPS, saves={EXACT_STEPS: saved})]

    def again(world_size: int, start: Path, first: int, **ending: Any) -> str:
        batches = seen(library, replace(two, world_size=world_size), EXACT_STEPS, start, **ending)
        num_same = sum(sorted(batch.tolist()) == wanted for batch, wanted in zip(batches, whole[first:], strict=False))
        return "exact" if num_same == EXACT_STEPS else f"{num_same} of {EXACT_STEPS} batches"

    cells = {"on 2 ranks again": again(2, saved, EXACT_STEPS)}
    cells["on 1 rank"] = again(1, saved, EXACT_STEPS, saves={EXACT_STEPS: later})
    cells["then on 4"] = again(4, later, 2 * EXACT_STEPS)
    with contextlib.suppress(BrokenProcessPool):
        seen(library, two, EXACT_STEPS + 3, saves={EXACT_STEPS: killed}, is_killed=True)
    return cells | {"after SIGKILL": again(2, killed, EXACT_STEPS)}


def corrupt(library: Library, folder: Path, rows_RN: np.ndarray) -> dict[str, Any]:
    """What an epoch gives if a byte in the middle of one shard is another, or the shard ends there."""
    rows_RN, cells = rows_RN[:CORRUPT_ROWS], {}
    for case in ("a byte flipped", "a file cut"):
        library.write(rows_RN, damaged := folder.with_name(case), len(rows_RN) // 16)
        path = max(filter(Path.is_file, sorted(damaged.rglob("*"))), key=lambda path: path.stat().st_size)
        content = bytearray(path.read_bytes())
        middle = len(content) // 2 + 10
        content[middle] ^= 0xFF
        path.write_bytes(content if case == "a byte flipped" else content[:middle])
        how = Reading(damaged, EXACT_BATCH, rows_RN.shape[1], library.num_workers[0])
        try:
            cells[case] = outcome(np.concatenate(seen(library, how, len(rows_RN) // EXACT_BATCH)), rows_RN)
        except Exception as error:  # each library has its own
            cells[case] = f"refused: {last_line(error)}"
    return cells


def outcome(given_RN: np.ndarray, rows_RN: np.ndarray) -> str:
    given, right = (Counter(map(tuple, rows.tolist())) for rows in (given_RN, rows_RN))
    num_wrong, num_lost = sum(given[row] for row in given if row not in right), (right - given).total()
    return f"silent: {num_wrong} wrong rows given, {num_lost} rows lost" if num_wrong or num_lost else "no effect"


def size(library: Library, folder: Path, rows_RN: np.ndarray) -> dict[str, Any]:
    """On disk, with the index."""
    return {"bytes per token": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / rows_RN.size}


def shuffle(library: Library, folder: Path, _: Any) -> dict[str, Any]:
    """How an epoch mixes rows that are sorted by a key, their number in the first two tokens; by buffer."""
    rows = np.full((SORTED_ROWS, SORTED_LENGTH), 5, ROW_DTYPE)
    rows[:, 0], rows[:, 1] = np.divmod(np.arange(SORTED_ROWS), 2**14)
    library.write(rows, folder.with_name("sorted"), ROWS_PER_SHARD)
    how = Reading(folder.with_name("sorted"), SORTED_BATCH, SORTED_LENGTH, library.num_workers[0])
    cells = {}
    for buffer in (None, library.buffer) if library.buffer else (None,):
        given = np.concatenate(seen(library, replace(how, buffer=buffer), SORTED_ROWS // SORTED_BATCH)).astype(int)
        quality = shuffle_quality(given[:, 0] * 2**14 + given[:, 1])
        cells |= {
            f"{figure}, {f'buffer of {buffer:,}' if buffer else 'default'}": quality[figure] for figure in quality
        }
    return cells


def shuffle_quality(numbers: np.ndarray) -> dict[str, float]:
    """numbers: the rows' places in the file, in the order of an epoch. Both figures are 1 for a uniform permutation.

    travel: the mean distance between the two places, over a third of the set.
    variance: of the batches' means of the numbers, over what independent rows give; above 1, batches are alike inside.
    """
    travel = np.abs(numbers - np.arange(len(numbers))).mean() / (len(numbers) / 3)
    means = numbers.reshape(-1, SORTED_BATCH).mean(axis=1)
    return {"travel": float(travel), "variance": float(means.var() / (numbers.var() / SORTED_BATCH))}


def first_batch(library: Library, folder: Path, rows_RN: np.ndarray) -> dict[str, Any]:
    """Seconds from opening the loader with a step's state to the first batch."""
    how = Reading(folder, FIRST_BATCH_SIZE, rows_RN.shape[1], library.num_workers[0])
    saves = {step: folder.with_name(f"step-{step}") for step in FIRST_BATCH_STEPS}
    seen(library, how, max(saves), saves=saves)
    return {f"at step {step:,}": result(_first_batch, library, how, saved / "0") for step, saved in saves.items()}


def _first_batch(library: Library, how: Reading, saved: Path) -> float:
    """The median of 3, after a batch of step 0, which pays for the imports."""
    seconds = []
    for state in (None, *(torch.load(saved, weights_only=True) for _ in range(3))):
        started = time.perf_counter()
        batches, _ = library.opened(how, state)
        next(batches)
        seconds.append(time.perf_counter() - started)
        del batches, _  # workers end here, off the clock
    return float(np.median(seconds[1:]))


def rates(library: Library, folder: Path, rows_RN: np.ndarray) -> dict[str, Any]:
    """Rows per second of CPU time of a process and its workers."""
    how = Reading(folder, RATE_BATCH, rows_RN.shape[1], 0)
    return {f"{num} workers": result(_rate, library, replace(how, workers=num)) for num in library.num_workers}


def _rate(library: Library, how: Reading) -> float:
    batches, _ = library.opened(how, None)
    seconds = []
    for _ in range(RATE_ROUNDS):
        for num_steps in (WARM_UP_STEPS, RATE_STEPS):
            before = cpu_seconds()
            for _ in islice(batches, num_steps):
                pass
        seconds.append(cpu_seconds() - before)
    return RATE_BATCH * RATE_STEPS / float(np.median(seconds))


def cpu_seconds() -> float:
    """Of this process and its workers, the ended ones too."""
    ended, running = os.times()[2:4], psutil.Process().children(recursive=True)
    return time.process_time() + sum(ended) + sum(sum(worker.cpu_times()[:2]) for worker in running)


def table(loaders: dict[str, dict[str, dict]]) -> str:
    """In Markdown: a column for each loader, a row for each figure. Errors are cut; the report has all of them."""
    heads = dict.fromkeys((part, head) for parts in loaders.values() for part, cells in parts.items() for head in cells)
    rows = []
    for part, head in heads:
        values = [parts.get(part, {}).get(head, "-") for parts in loaders.values()]
        shown = [f"{value:,.2f}" if isinstance(value, float) else value[:80] for value in values]
        rows.append([f"{part}: {head}", *shown])
    return markdown(["", *loaders], rows)


if __name__ == "__main__":
    sys.exit(main())
