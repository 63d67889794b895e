"""Compares our loader with other people's on the same rows of tokens, and writes FILE.json and its tables, FILE.md.

python benchmarks/loaders.py --shards data/own_512 --output FILE.json

The shards are those of data_prep/tokenize_corpus.py, of 512 tokens a row; 40,000 rows are enough. Loaders that are not
installed are named so (docs/data.md has the commands). Each part of a loader runs in processes of its own. `exact`
starts ranks that save a state, end or are killed, and go on; the same rows in each global batch, in any order, are
exact. `rates` take turns, in CPU time of a process and its workers. Compare figures within one run only.
"""

import argparse
import contextlib
import copy
import hashlib
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import numpy as np
import psutil
import torch

from benchmarks.loading import FAR_STEP, first_batch_seconds
from benchmarks.reports import markdown, report_as_measured
from benchmarks.timing import Contender, Turn, say, time_in_turns
from benchmarks.token_loaders import LOADERS, Reading, recipe_of
from gmlp_scale.data.shards import ROW_DTYPE, Manifest, ShardRows
from gmlp_scale.distributed.logs import command
from gmlp_scale.storage.files import local_path

PARTS = ("exact", "bytes", "corrupt", "shuffle", "rates", "first_batch")
WORKERS = 2
EXACT_ROWS, EXACT_BATCH, EXACT_STEPS = 4096, 32, 20
FIRST_BATCH_STEPS, FIRST_BATCH_SIZE = (1_000, 20_000), 8
RATE_ROWS, RATE_BATCH, RATE_STEPS = 2**15, 256, 32
WARM_UP_STEPS = 20  # none reads further ahead
SORTED_ROWS, SORTED_LENGTH, SORTED_BATCH = 2**18, 16, 256
BUFFERS = {
    "gmlp_scale": 2**16,
    "webdataset": 10_000,
    "mosaicml-streaming": 2**16,
    "litdata": 2**13,
    "torchdata, datasets streamed": 10_000,
}
"""Rows of another shuffle buffer or block than the default, where there is one: for litdata a whole chunk."""
LIMIT_SECONDS = 300
"""A process that takes longer counts as hung."""


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=local_path, required=True, help="tokenize_corpus.py's, of 512 tokens a row")
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=list(LOADERS), help="(default: all)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="timed turns of each loader (default: %(default)s)")
    parser.add_argument("--output", type=local_path, required=True, metavar="FILE.json", help="the report")
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.loaders"])
    rows_RN = rows_of(options.shards)
    report = report_as_measured("cpu", measure(rows_RN, options.loaders, options.parts, options.rounds), options.output)
    options.output.with_suffix(".md").write_text(table(report) + "\n")
    return 0


def rows_of(shards: Path) -> np.ndarray:
    """All training rows, in the order of the files: uint16 [R, N]."""
    manifest = Manifest.load(str(shards))
    train = manifest.splits.train
    opened = [ShardRows(shards / shard.name, shard, manifest.sequence_length) for shard in train]
    return np.concatenate([rows.read(np.arange(shard.rows)) for rows, shard in zip(opened, train, strict=True)])


def measure(rows_RN: np.ndarray, names: list[str], parts: list[str], num_rounds: int) -> Iterator[dict]:
    """The report so far, again whenever there is more. `rows_RN` are repeated where a part needs more rows."""
    found: dict[str, dict[str, Any]] = {name: {"version": version_of(name)} for name in names}
    present = [name for name in names if "not installed" not in found[name]["version"]]
    with tempfile.TemporaryDirectory() as temporary:
        for part in parts:
            folder = Path(temporary) / part
            rows = {
                "exact": lambda: rows_RN[:EXACT_ROWS],
                "first_batch": lambda: repeated(rows_RN, FIRST_BATCH_SIZE * (FIRST_BATCH_STEPS[-1] + 100)),
                "rates": lambda: rows_RN[:RATE_ROWS],
                "shuffle": numbered_rows,
                "bytes": lambda: rows_RN,
                "corrupt": lambda: rows_RN[:EXACT_ROWS],
            }[part]()
            if part == "rates":
                for name, rates in measure_rates(present, rows, folder, num_rounds).items():
                    found[name][part] = rates
                yield {"tokens": rows_RN.size, "loaders": found}
            else:
                for name in present:
                    say(f"{part}: {name}")
                    found[name][part] = MEASURED[part](name, rows, folder / name)
                    shutil.rmtree(folder, ignore_errors=True)
                    yield {"tokens": rows_RN.size, "loaders": found}
        if "first_batch" in parts and "gmlp_scale" in present:
            far = first_batch_seconds(recipe_of(512), Path(temporary) / "c4")
            found["gmlp_scale"]["first_batch"] |= {str(FAR_STEP): far}
    yield {"tokens": rows_RN.size, "loaders": found}


def version_of(name: str) -> str:
    """Of the packages behind a loader, or that one is not installed."""
    packages = {"gmlp_scale": (), "torchdata, datasets streamed": ("torchdata", "datasets")}.get(name, name.split(", "))
    try:
        return ", ".join(version(package) for package in packages)
    except PackageNotFoundError as error:
        return f"not installed: {error.name}"


def repeated(rows_RN: np.ndarray, num_rows: int) -> np.ndarray:
    return np.resize(rows_RN, (num_rows, rows_RN.shape[1]))


def numbered_rows() -> np.ndarray:
    """Rows whose first two tokens are their own number: a set that is sorted by a key."""
    rows = np.full((SORTED_ROWS, SORTED_LENGTH), 5, ROW_DTYPE)
    rows[:, 0], rows[:, 1] = np.divmod(np.arange(SORTED_ROWS), 2**14)
    return rows


def written(name: str, rows_RN: np.ndarray, folder: Path, rows_per_shard: int) -> None:
    """Writes the rows in a process of its own, since some writers start others."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    np.save(path := folder.with_suffix(".rows.npy"), rows_RN)
    result(_write, LOADERS[name][0], str(path), folder, rows_per_shard)
    path.unlink()


def _write(write: Any, path: str, folder: Path, rows_per_shard: int) -> None:
    write(np.load(path), folder, rows_per_shard)


def result(work: Any, *arguments: Any) -> Any:
    """What work(*arguments) returns in a new process. ChildProcessError if it fails, dies or takes LIMIT_SECONDS."""
    value, mistake = Contender(work.__name__, _worked, work, arguments, method="forkserver").description
    if mistake:
        raise ChildProcessError(mistake)
    return value


def _worked(work: Any, arguments: tuple) -> tuple[Turn, Any]:
    _become_main()
    signal.alarm(LIMIT_SECONDS)
    try:
        return float, (work(*arguments), None)
    except Exception as error:
        return float, (None, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}")


def _become_main() -> None:
    """Workers of this process start as they do in a user's: by fork, and not refused because this one is a daemon."""
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    signal.signal(signal.SIGALRM, _end_with_workers)


def _end_with_workers(*_: Any) -> None:
    for worker in psutil.Process().children(recursive=True):
        worker.kill()
    os._exit(1)


def seen(name: str, how: Reading, num_steps: int, start: Path | None = None, **ending: Any) -> list[list[str]]:
    """The rows of each global batch, as sorted hashes, as so many ranks give them out from the states in `start`.

    A rank has its own state; on more ranks than saved one, its number modulo theirs says whose.
    """
    states = [torch.load(path, weights_only=True) for path in sorted(start.iterdir())] if start else [None]
    with ThreadPoolExecutor(how.world_size) as threads:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = [replace(how, rank=rank) for rank in range(how.world_size)]
        runs = [
            threads.submit(result, _steps_of_rank, LOADERS[name][1], one, port, num_steps, state, ending)
            for one, state in zip(ranks, cycle(states), strict=False)
        ]
        return [sorted(chain(*parts)) for parts in zip(*[run.result() for run in runs], strict=True)]


def _steps_of_rank(opened: Any, how: Reading, port: int, num_steps: int, state: Any, ending: dict) -> list[list[str]]:
    """ending: after `save_at` steps the folder `save` gets the state; `is_killed`: by SIGKILL at the end."""
    os.environ |= {"RANK": str(how.rank), "WORLD_SIZE": str(how.world_size), "LOCAL_RANK": str(how.rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(how.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if how.world_size > 1:
        torch.distributed.init_process_group("gloo")
    batches, state_dict = opened(how, state)
    hashes = []
    for step, batch in enumerate(islice(batches, num_steps), start=1):
        hashes.append(hashes_of(batch.numpy()))
        if step == ending.get("save_at"):
            ending["save"].mkdir(exist_ok=True)
            torch.save(state_dict(), ending["save"] / str(how.rank))
    if ending.get("is_killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    return hashes


def hashes_of(rows: np.ndarray) -> list[str]:
    return [hashlib.blake2b(row.astype(ROW_DTYPE).tobytes(), digest_size=8).hexdigest() for row in rows]


def measure_exact(name: str, rows_RN: np.ndarray, folder: Path) -> dict[str, str]:
    """Whether a run that goes on from the states of step EXACT_STEPS sees what the undisturbed run sees."""
    written(name, rows_RN, folder, rows_per_shard=len(rows_RN) // 16)
    two, steps = Reading(folder, EXACT_BATCH, rows_RN.shape[1], world_size=2, num_workers=WORKERS), EXACT_STEPS
    state, later = folder.with_suffix(".state"), folder.with_suffix(".later")
    try:
        whole = seen(name, two, 3 * steps, save_at=steps, save=state)
    except ChildProcessError as error:
        return {"resume": f"failed: {error}"}

    def again(world_size: int, saved: Path, first: int, **ending: Any) -> str:
        try:
            how = replace(two, world_size=world_size)
            batches = seen(name, how, steps, saved, **ending)
        except (ChildProcessError, OSError) as error:
            return f"failed: {error}"
        return compared(batches, whole[first : first + steps], whole[:first])

    found = {"resume": again(2, state, steps)}
    found["on 1 rank"] = again(1, state, steps, save_at=steps, save=later)
    found["then on 4"] = again(4, later, 2 * steps)
    shutil.rmtree(state)
    with contextlib.suppress(ChildProcessError):
        seen(name, two, steps + 3, save_at=steps, save=state, is_killed=True)
    found["after a kill"] = again(2, state, steps)
    return found


def compared(batches: list[list[str]], wanted: list[list[str]], before: list[list[str]]) -> str:
    """`exact`, or how many batches are the undisturbed run's and how many rows had been seen before."""
    num_same = sum(map(list.__eq__, batches, wanted))
    if num_same == len(wanted) == len(batches):
        return "exact"
    known = {row for batch in before for row in batch}
    rows = [row for batch in batches for row in batch]
    share_known = sum(row in known for row in rows) / max(1, len(rows))
    return f"{num_same} of {len(wanted)} batches, {share_known:.0%} seen before"


def measure_first_batch(name: str, rows_RN: np.ndarray, folder: Path) -> dict[str, dict[str, float]]:
    """Seconds from opening the loader with a step's state to the first batch, without imports; a median of 3."""
    written(name, rows_RN, folder, rows_per_shard=2**13)
    how = Reading(folder, FIRST_BATCH_SIZE, rows_RN.shape[1], num_workers=workers_of(name))
    states = result(_states, LOADERS[name][1], how, FIRST_BATCH_STEPS)
    return {
        str(step): {"seconds": statistics.median(result(_first_batch, LOADERS[name][1], how, state) for _ in range(3))}
        for step, state in states.items()
    }


def workers_of(name: str) -> int:
    """Ours and grain read with threads unless they are asked for processes."""
    return 0 if name in ("gmlp_scale", "grain") else WORKERS


def _states(opened: Any, how: Reading, steps: tuple[int, ...]) -> dict[int, Any]:
    batches, state_dict = opened(how, None)
    counted, states = enumerate(batches, start=1), {}
    for step in steps:
        next(number for number, _ in counted if number == step)
        states[step] = copy.deepcopy(state_dict())  # some change it as they go on
    return states


def _first_batch(opened: Any, how: Reading, state: Any) -> float:
    next(opened(how, None)[0])  # imports
    started = time.perf_counter()
    next(opened(how, state)[0])
    return time.perf_counter() - started


def measure_rates(names: list[str], rows_RN: np.ndarray, folder: Path, num_rounds: int) -> dict[str, dict[str, float]]:
    """Rows per second of CPU time of a process and its workers, without workers and with them; and over ours."""
    turns, rates = {}, {name: {} for name in names}
    for name in names:
        written(name, rows_RN, folder / name, rows_per_shard=2**11)
        for num_workers in (0, WORKERS) if name != "gmlp_scale" else (0,):
            how = Reading(folder / name, RATE_BATCH, rows_RN.shape[1], num_workers=num_workers)
            turns[name, num_workers] = Contender(
                name, _prepare_rate, LOADERS[name][1], how, RATE_STEPS, method="forkserver"
            ).take_turn
    for (name, num_workers), seconds in time_in_turns(turns, num_rounds).items():
        rates[name][f"{num_workers} workers"] = RATE_BATCH * RATE_STEPS / seconds
    return rates


def _prepare_rate(opened: Any, how: Reading, num_steps: int) -> tuple[Turn, dict]:
    _become_main()
    batches, _ = opened(how, None)

    def turn() -> float:
        for _ in islice(batches, WARM_UP_STEPS):
            pass  # what was read ahead since the last turn
        before = cpu_seconds()
        for _ in islice(batches, num_steps):
            pass
        return cpu_seconds() - before

    return turn, {}


def cpu_seconds() -> float:
    """Of this process and its workers, the ended ones too."""
    ended, running = os.times()[2:4], psutil.Process().children(recursive=True)
    return time.process_time() + sum(ended) + sum(sum(worker.cpu_times()[:2]) for worker in running)


def measure_shuffle(name: str, rows_RN: np.ndarray, folder: Path) -> dict[str, dict[str, float]]:
    """How far rows travel from their place in the file, and how mixed the batches are, by buffer."""
    written(name, rows_RN, folder, rows_per_shard=2**13)
    how = Reading(folder, SORTED_BATCH, rows_RN.shape[1], num_workers=workers_of(name))
    return {
        f"{buffer:,} rows" if buffer else "default": result(
            _shuffled, LOADERS[name][1], replace(how, buffer=buffer), len(rows_RN)
        )
        for buffer in (None, BUFFERS.get(name))[: 1 + (name in BUFFERS)]
    }


def _shuffled(opened: Any, how: Reading, num_rows: int) -> dict[str, float]:
    batches = islice(opened(how, None)[0], num_rows // how.batch_size)
    return shuffle_quality(torch.cat([batch[:, 0] * 2**14 + batch[:, 1] for batch in batches]).numpy(), how.batch_size)


def shuffle_quality(numbers: np.ndarray, batch_size: int) -> dict[str, float]:
    """numbers: the rows' places in the file, in the order of an epoch. Both figures are 1 for a uniform permutation.

    travel: the mean distance between the two places, over a third of the set.
    variance: of the batches' means of the numbers, over what independent rows give; above 1, batches are alike inside.
    """
    travel = np.abs(numbers - np.arange(len(numbers))).mean() / (len(numbers) / 3)
    means = numbers[: len(numbers) // batch_size * batch_size].reshape(-1, batch_size).mean(axis=1)
    return {"travel": float(travel), "variance": float(means.var() / (numbers.var() / batch_size))}


def measure_bytes(name: str, rows_RN: np.ndarray, folder: Path) -> float:
    """On disk per token, with the index."""
    written(name, rows_RN, folder, rows_per_shard=2**13)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / rows_RN.size


def measure_corrupt(name: str, rows_RN: np.ndarray, folder: Path) -> dict[str, str]:
    """What an epoch gives if a byte in the middle of one shard is another, or the shard ends there."""
    found = {}
    for is_checked in (False, True)[: 1 + (name == "mosaicml-streaming")]:
        for damage in ("flipped", "cut"):
            for old in (folder, f"{folder}-local"):
                shutil.rmtree(old, ignore_errors=True)
            written(name, rows_RN, folder, rows_per_shard=len(rows_RN) // 16)
            spoil(sorted(folder.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)[-1], damage)
            how = Reading(folder, EXACT_BATCH, rows_RN.shape[1], num_workers=WORKERS, is_checked=is_checked)
            try:
                given = outcome(result(_epoch_of, LOADERS[name][1], how, len(rows_RN)), rows_RN)
            except ChildProcessError as error:
                given = f"refused: {error}"
            found[damage + ", checked" * is_checked] = given
    return found


def spoil(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 + 10
    content[middle] ^= 0xFF
    path.write_bytes(content if damage == "flipped" else content[:middle])


def _epoch_of(opened: Any, how: Reading, num_rows: int) -> list[str]:
    signal.alarm(60)  # some wait for ever
    batches = islice(opened(how, None)[0], num_rows // how.batch_size)
    return [row for batch in batches for row in hashes_of(batch.numpy())]


def outcome(given: list[str], rows_RN: np.ndarray) -> str:
    right = Counter(hashes_of(rows_RN))
    num_wrong = sum((Counter(given) - Counter(dict.fromkeys(right, len(rows_RN)))).values())
    num_lost = sum((right - Counter(given)).values())
    return f"silent: {num_wrong} wrong rows given, {num_lost} rows lost" if num_wrong or num_lost else "no effect"


MEASURED = {
    "exact": measure_exact,
    "first_batch": measure_first_batch,
    "shuffle": measure_shuffle,
    "bytes": measure_bytes,
    "corrupt": measure_corrupt,
}


def table(report: dict) -> str:
    """A Markdown table of each part."""
    tables = []
    for part in PARTS:
        measured = {name: found[part] for name, found in report["loaders"].items() if part in found}
        cells = {name: value if isinstance(value, dict) else {part: value} for name, value in measured.items()}
        columns = list(dict.fromkeys(column for row in cells.values() for column in row))
        rows = [[name, *(_cell(row.get(column, "-")) for column in columns)] for name, row in cells.items()]
        tables += [markdown([part, *columns], rows)] if rows else []
    versions = [[name, found["version"] or "this version"] for name, found in report["loaders"].items()]
    return "\n\n".join([markdown(["loader", "version"], versions), *tables])


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(inner)}" for key, inner in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
