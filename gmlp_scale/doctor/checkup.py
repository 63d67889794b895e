"""The checks of launch/doctor.py, in their order, and its report.

All ranks do every check. A check returns what it found. Where a run would fail, it raises an error that says what to
change. Rank 0 prints what all ranks found.
"""

import contextlib
import os
import platform
import shutil
import socket
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from gmlp_scale import __version__
from gmlp_scale.checkpoint.stores import checkpoints_of, newest_of
from gmlp_scale.data.loader import Loader
from gmlp_scale.distributed.roll_call import shortened
from gmlp_scale.distributed.world import World
from gmlp_scale.doctor import measurements
from gmlp_scale.engine.collective_check import WIRE_SHARES, try_collective
from gmlp_scale.errors import USER_ERRORS, LostRankError, OtherRankError, UserError
from gmlp_scale.plan.describe import meta_model
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.storage.files import is_url, redacted
from gmlp_scale.storage.run_folder import claimed
from gmlp_scale.tasks.pretraining import build_loader
from gmlp_scale.train.resolve import with_decided_micro_batch, with_decided_precision, with_decided_start
from gmlp_scale.train.start import check_packages, starting_point
from gmlp_scale.train.stragglers import SLOW_FACTOR

SIZES_BYTES = {"cpu": (2**16, 2**20, 2**24), "cuda": (2**16, 2**20, 2**24, 2**28)}
OUTCOMES = ("ok", "slow", "FAILS")
MUST_BE_EQUAL = ("device", "driver", "gmlp_scale", "python", "torch", "cuda", "nccl", "deepspeed")
SMI = {"driver": "driver_version", "MHz": "clocks.sm", "of MHz": "clocks.max.sm", "C": "temperature.gpu"}
"""Columns of the table, and what nvidia-smi calls them."""
FREE_SHARE = 0.9
"""The share of a GPU's memory that must be free before the run begins."""


class Slow(str):
    """What a check found, if it does not end a run but makes it slower than it could be."""


class Checkup:
    """All checks of one recipe. Every rank has one; rank 0 prints each line as soon as it is known."""

    def __init__(self, run: RunConfig, world: World):
        self.run, self.world = run, world
        self.num_failed = 0
        """Checks that showed that a run would fail; the same on every rank."""
        self._loader: Loader
        self._step_seconds = 0.0

    def examine(self) -> None:
        with ExitStack() as self._stack:
            self._check("machines", self._compare_machines)
            self._check("collectives", self._try_collectives)
            self._check("room", lambda: measurements.check_room(self.run, measurements.place_of_checkpoints(self.run)))
            self._check("writing", self._try_url if is_url(self.run.output_dir) else self._try_folder)
            fits = self._check("ranks", self._fit_to_ranks)
            loads = self._check("shards", self._check_shards, given=fits)
            self._check("run folder", self._check_run_folder, given=loads)
            doing = f"two steps of {measurements.NUM_BLOCKS} blocks, by all ranks together and by each alone"
            is_right = self._check("gradients", self._compare_gradients, given=fits, doing=doing)
            doing = (
                f"the first {measurements.NUM_STEPS} steps of the whole recipe; many minutes for a large one on a CPU"
            )
            trains = self._check("steps", self._try_recipe, given=loads and is_right, doing=doing)
            self._check("loader", self._compare_loader, given=loads and trains)

    def _check(self, name: str, check: Callable[[], str], *, given: bool = True, doing: str = "") -> bool:
        """Does a check on every rank, prints its line, and returns whether no rank would fail.

        given: whether the checks that this one waits for have passed; the same on every rank.
        doing: what a check that may take minutes does; printed before it begins.
        """
        if not given:
            self._print(f"not run  {name:12} waits until what failed above is mended")
            return False
        if doing:
            self._print(f"trying   {name:12} {doing}")
        try:
            with self.world.naming_lost_ranks():
                found = check()
            outcome = 1 if isinstance(found, Slow) else 0
        except LostRankError:
            raise
        except OtherRankError:
            found, outcome = "", 0  # that rank says why
        except Exception as error:
            is_worded = isinstance(error, USER_ERRORS)
            found, outcome = str(error) if is_worded else f"{type(error).__name__}: {error}", 2
            found = " ".join(found.split())  # the report has one line for it
        findings = self.world.gather([outcome, found])
        worst = max(outcome for outcome, _ in findings)
        ranks_by_text: dict[str, list[int]] = {}
        for rank, (outcome, text) in enumerate(findings):
            if outcome == worst:
                ranks_by_text.setdefault(text, []).append(rank)
        texts = ranks_by_text if worst else list(ranks_by_text)[:1]  # all is well: rank 0 speaks for all
        for text in texts:
            who = f"{_named(ranks_by_text[text])}: " if worst and self.world.size > 1 else ""
            self._print(f"{OUTCOMES[worst]:8} {name:12} {who}{text}")
        self.num_failed += worst == 2
        return worst < 2

    def _print(self, text: str) -> None:
        if self.world.is_main:
            print(redacted(text), flush=True)

    def _compare_machines(self) -> str:
        rows = self.world.gather(_facts(self.world))
        self._print(_table(rows))
        if self.world.is_main and (problems := _problems(rows)):
            raise UserError("; ".join(problems))
        return f"{self.world.size} ranks with one set of versions"

    def _fit_to_ranks(self) -> str:
        self.run.rows_per_rank(self.world.size)
        check_packages(self.run.name, self.run.train)
        self.run = with_decided_micro_batch(with_decided_precision(self.run, self.world), self.world)
        train = self.run.train
        return (
            f"{self.world.size}; micro-batches of each in a step: {train.num_micro_batches(self.world.size).shown()} "
            f"of {train.micro_batch_size} rows, in {train.precision}"
        )

    def _try_collectives(self) -> str:
        if self.world.size == 1:
            return "none with one rank"
        parts, wrong = [], []
        for kind in WIRE_SHARES:
            rates = []
            for num_bytes in SIZES_BYTES[self.world.device.type]:
                tried = try_collective(kind, num_bytes, self.world)
                rates.append(f"{num_bytes // 2**10} KiB {tried.bytes_per_second / 1e9:.3g}")
                if tried.num_wrong:
                    wrong.append(f"{kind} of {num_bytes // 2**10} KiB has {tried.num_wrong} wrong numbers")
            parts.append(f"{kind} {', '.join(rates)}")
        if wrong:
            raise UserError(f"{'; '.join(wrong)}. Try other hosts, or another driver, NCCL or network interface")
        return f"right, GB/s sent by each rank: {'; '.join(parts)}"

    def _try_folder(self) -> str:
        place = measurements.place_of_checkpoints(self.run)
        with measurements.saying_what_to_change(place):
            folder = Path(self.world.on_main(lambda: tempfile.mkdtemp(prefix=".doctor-", dir=place)))
        try:
            slowest = max(self.world.on_all(lambda: measurements.write_into(folder, self.world)))
        finally:
            self.world.on_main(lambda: shutil.rmtree(folder))
        return f"{measurements.WRITTEN_BYTES / slowest / 1e6:.0f} MB/s by all ranks together into {place}"

    def _try_url(self) -> str:
        return measurements.try_bucket(self.run) if self.world.is_main else ""

    def _check_shards(self) -> str:
        # Corrupt shards that a run may skip are recorded in its folder, which is not to be touched.
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        elsewhere = self.run.model_copy(update={"output_dir": folder})
        self._loader = build_loader(elsewhere, rank=self.world.rank, world_size=self.world.size)
        self._stack.callback(self._loader.close)
        return measurements.check_shards(self.run, self._loader, self.world)

    def _check_run_folder(self) -> str:
        if not self.world.is_main:
            return ""
        folder = self.run.run_folder
        if not is_url(folder) and Path(folder).exists():
            with claimed(folder):  # fails if a job is at work there
                pass
        with checkpoints_of(folder) as checkpoints:
            newest, damaged = newest_of(checkpoints)
        alone = self.world.alone()
        run = with_decided_start(self.run, alone)
        start = starting_point(run, self._loader.fingerprint(), newest, meta_model(run), alone)
        if start is None:
            return f"{folder}: a new run"
        if newest is None:
            return f"{folder}: would begin from {run.branch_from}"
        return f"{folder}: would resume from step {newest.step}; {len(damaged)} newer checkpoints are damaged"

    def _compare_gradients(self) -> str:
        seconds, text = measurements.self_test(self.run, self.world)
        median = statistics.median_low(self.world.gather(seconds))
        if seconds > SLOW_FACTOR * median:
            return Slow(
                f"{seconds:.3g} s for the step that the median rank computes alone in {median:.3g} s: look at the "
                "clocks, the temperature and the other processes of its host"
            )
        return text

    def _try_recipe(self) -> str:
        self._step_seconds, text = measurements.try_recipe(self.run, self.world)
        return text

    def _compare_loader(self) -> str:
        loaded = measurements.loaded_rows_per_second(self._loader, self.run.train.num_steps)
        trained = self.run.rows_per_rank(self.world.size).at(0) / self._step_seconds
        text = f"{loaded:.3g} rows a second and rank, of which training takes {trained:.3g}"
        if loaded < trained:
            return Slow(f"{text}: give each rank more CPU cores, or set data.cache_dir to a faster disk")
        return text


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {shortened([str(rank) for rank in ranks])}"


def _facts(world: World) -> dict[str, str]:
    """This rank's row of the table. A fact that cannot be found out is the text None."""
    found = {"rank": world.rank, "host": socket.gethostname(), "cores": len(os.sched_getaffinity(0))}
    if world.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(world.device)
        free_bytes, all_bytes = torch.cuda.mem_get_info(world.device)
        found |= {"device": gpu.name, "free GiB": f"{free_bytes / 2**30:.1f}", "of GiB": f"{all_bytes / 2**30:.1f}"}
        query = f"--query-gpu={','.join(SMI.values())}"
        said = said_by("nvidia-smi", query, "--format=csv,noheader,nounits", f"--id=GPU-{gpu.uuid}")
        found |= dict(zip(SMI, said.split(", ") if said else [None] * len(SMI), strict=True))
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    else:
        found["device"] = f"cpu ({platform.machine()})"
    found |= {"gmlp_scale": __version__, "python": platform.python_version(), "torch": torch.__version__}
    found["deepspeed"] = version_of("deepspeed")
    return {column: str(value) for column, value in found.items()}


def version_of(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def said_by(*command: str) -> str | None:
    """What a short program prints; None if it fails or is not there."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    return None


def _table(rows: list[dict[str, str]]) -> str:
    lines = [list(rows[0]), *(row.values() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _problems(rows: list[dict[str, str]]) -> list[str]:
    """What in the table would make a run fail, and what to change."""
    lines = []
    for column in (column for column in MUST_BE_EQUAL if column in rows[0]):
        usual, _ = Counter(row.get(column) for row in rows).most_common(1)[0]
        others = [f"rank {row['rank']} on {row['host']} {row.get(column)}" for row in rows if row.get(column) != usual]
        if others:
            lines.append(
                f"{column}: most ranks have {usual}, {', '.join(others)}; start the run on equal machines with one "
                "environment"
            )
    for row in rows:
        if "free GiB" in row and float(row["free GiB"]) < FREE_SHARE * float(row["of GiB"]):
            lines.append(
                f"rank {row['rank']} on {row['host']}: only {row['free GiB']} of {row['of GiB']} GiB of its GPU's "
                "memory are free; end the other programs there (nvidia-smi lists them)"
            )
    return lines
