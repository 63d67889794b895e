import contextlib
import logging
import os
import platform
import re
import resource
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gmlp_scale import telling
from gmlp_scale.config import ConfigError
from gmlp_scale.errors import InputError, LostRankError, UserError
from gmlp_scale.files import PlaceError
from gmlp_scale.process import DeviceError
from gmlp_scale.telling import command, set_up_logging, tell
from gmlp_scale.world import launched_world_size, start_world
from tests.gloo_ranks import run_ranks

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _agree() -> dict:
    with start_world(30, "cpu") as world:
        return {
            "sum": world.sum([world.rank + 0.5, 1.0]),
            "sum_on_device": world.sum_on_device(torch.tensor([world.rank + 0.5, 1.0])).tolist(),
            "gather": world.gather(world.rank * 2**40),
            "broadcast": world.broadcast({"from": world.rank, "text": "é" * 100}),
            "size": (world.rank, world.size, world.is_main, world.device),
        }


def test_all_ranks_get_the_same_values():
    for rank, result in enumerate(run_ranks(_agree, 3)):
        assert result["sum"] == result["sum_on_device"] == [0.5 + 1.5 + 2.5, 3.0]
        assert result["gather"] == [0, 2**40, 2**41]
        assert result["broadcast"] == {"from": 0, "text": "é" * 100}
        assert result["size"] == (rank, 3, rank == 0, torch.device("cpu"))


def _traces(folder: Path) -> str:
    os.environ.pop("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", None)  # of a run that this process was forked after
    with start_world(30, "cpu", traces_in=folder):
        return os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]


def test_the_flight_recorder_dumps_into_the_runs_folder(tmp_path):
    assert run_ranks(_traces, 2, tmp_path) == [f"{tmp_path}/nccl_trace_rank_"] * 2


def _main_fails() -> str:
    with start_world(30, "cpu") as world:
        done = []
        world.on_main(lambda: done.append(world.rank))
        assert done == ([0] if world.is_main else [])
        try:
            world.on_main(_refuse)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _refuse() -> None:
    raise FileExistsError("another run holds the folder")


def test_what_fails_on_the_main_rank_fails_on_all():
    main, other = run_ranks(_main_fails, 2)
    assert main == "FileExistsError: another run holds the folder"
    assert other.startswith("OtherRankError: rank 0 could not go on")


def _one_rank_fails() -> str:
    try:
        with start_world(600, "cpu") as world:
            world.sum_on_device(torch.zeros(1))
            if world.is_main:
                raise KeyError("something broke")
            world.barrier()
    except KeyError:
        return "KeyError"
    except RuntimeError:  # of the store or of the barrier, whichever meets the loss first
        return "RuntimeError"


def test_a_rank_that_fails_leaves_at_once_and_the_others_notice():
    # Well within the timeout of the collectives.
    assert run_ranks(_one_rank_fails, 2, timeout_seconds=300) == ["KeyError", "RuntimeError"]


def _wait_for_nobody(timeout_seconds: float) -> float | None:
    world = start_world(timeout_seconds, "cpu")
    store = torch.distributed.distributed_c10d._get_default_store()
    if world.rank == 1:  # there, but not at the barrier
        with contextlib.suppress(RuntimeError):  # rank 0 may be gone before its answer is here
            store.wait(["done"], timedelta(seconds=120))
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        world.barrier()
    waited = time.monotonic() - start
    store.set("done", "")
    return waited


def test_a_collective_raises_after_the_timeout():
    waited = run_ranks(_wait_for_nobody, 2, 2.0)[0]
    assert 1.5 < waited < 60  # far from the default of half an hour, also on a busy machine


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1], ids=lambda number: number.name
)
def test_one_process_needs_no_launcher(monkeypatch, number):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    before = signal.getsignal(number)
    with start_world(30, "cpu") as world:
        assert (world.rank, world.size, world.is_main) == (0, 1, True)
        assert not torch.distributed.is_initialized()
        assert world.sum([2.5]) == [2.5]
        assert world.gather(3) == [3]
        assert world.broadcast("x") == "x"
        world.barrier()
        assert world.sum_on_device(torch.ones(2)).tolist() == [1.0, 1.0]
        assert not world.is_stop_signalled
        os.kill(os.getpid(), number)
        assert world.is_stop_signalled
    assert signal.getsignal(number) == before


def test_an_ignored_signal_stays_ignored(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with start_world(30, "cpu") as world:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not world.is_stop_signalled
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_does_not_wait_for_the_end_of_the_step(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with start_world(30, "cpu") as world:
        os.kill(os.getpid(), signal.SIGINT)
        assert world.is_stop_signalled
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def _open_files(hard_limit: int) -> tuple[int, list[str]]:
    """The soft limit that a run has, and its warnings."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard_limit))
    warnings = []
    logging.getLogger("gmlp_scale.process").warning = lambda message, *values: warnings.append(message % values)
    with start_world(30, "cpu"):
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0], warnings


def test_a_run_may_open_as_many_files_as_the_hard_limit_lets_it():
    assert run_ranks(_open_files, 1, 1000) == [(1000, [])]
    ((limit, warnings),) = run_ranks(_open_files, 1, 200)
    assert limit == 200
    assert warnings[0].startswith("a process may open 200 files here, and 1 ranks may need 260: raise ulimit -Hn")


def _one_visible_gpu(uuids: list[str]) -> tuple[int, str] | str:
    """The device of a process that sees one GPU, with this UUID by rank, and the LOCAL_RANK that DeepSpeed reads."""
    rank, init_process_group = int(os.environ["RANK"]), torch.distributed.init_process_group
    torch.cuda.is_available, torch.cuda.device_count, torch.cuda.set_device = lambda: True, lambda: 1, lambda gpu: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuids[rank])
    torch.distributed.init_process_group = lambda backend, **options: init_process_group("gloo", **options)
    try:
        with start_world(30) as world:
            return world.device.index, os.environ["LOCAL_RANK"]
    except DeviceError as error:
        return str(error)


def test_a_process_takes_the_only_gpu_that_it_sees_unless_another_has_it():
    one, other = "6f1f4a52-0d5e-3b1c-9a57-1c2d3e4f5a6b", "6f1f4a53-0d5e-3b1c-9a57-1c2d3e4f5a6b"
    assert run_ranks(_one_visible_gpu, 2, [one, other]) == [(0, "0"), (0, "0")]
    for error in run_ranks(_one_visible_gpu, 2, [one, one]):
        assert error.startswith("ranks [0, 1] do not have a GPU each; start as many processes on a node as it has GPUs")


def _page_faults_of_freed_tensors(starts: bool) -> list[int]:
    if starts:
        start_world(30, "cpu")
    num_faults = []
    for mebibytes in (48, 46, 44, 42):  # each fits where the one before was; glibc itself keeps up to 32
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(mebibytes * 2**18)
        num_faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return num_faults[1:]


def _huge_pages_kib() -> int:
    start_world(30, "cpu")
    _ = torch.ones(2**23)
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps") if line.startswith("AnonHugePages"))


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="needs glibc 2.35, which may keep more than 32 MiB")
def test_a_cpu_process_keeps_the_memory_that_its_tensors_free(monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # huge pages need few faults, kept or not
    (faults,), (kept_faults,) = (run_ranks(_page_faults_of_freed_tensors, 1, starts) for starts in (False, True))
    assert min(faults) > 5000 and max(kept_faults) < 500


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="there are no huge pages here"
)
def test_a_cpu_process_has_huge_pages(monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    assert run_ranks(_huge_pages_kib, 1) > [2**14]


def test_rank_0_tells_an_error_at_once_and_the_others_only_if_they_live_on(monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(telling.time, "sleep", slept.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        tell(ValueError("no shards at s3://me:secret@bucket/c4"))
    assert slept == [telling.OTHERS_TELL_AFTER_SECONDS]
    assert capsys.readouterr().err == "no shards at s3://***@bucket/c4\n" * 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("--step is 7"), 2),
        (UserError("another job holds outputs/a"), 1),
        (FileNotFoundError("no shards"), 2),
        (OSError("the disk is full"), 1),
        (PlaceError("foo://x cannot be opened"), 2),
        (PermissionError("recipe.yaml"), 2),
    ],
)
def test_a_command_tells_a_users_mistake_in_its_words_and_returns_its_code(error, code, capsys):
    @command
    def main() -> int:
        raise error

    assert main() == code and capsys.readouterr().err == f"{error}\n"


def test_a_command_lets_an_error_of_ours_keep_its_traceback(capsys):
    @command
    def main() -> int:
        (_,) = 1, 2

    with pytest.raises(ValueError, match="too many values to unpack"):
        main()
    assert capsys.readouterr().err == ""


def test_a_lost_rank_is_told_at_once_and_without_the_launcher(monkeypatch, capsys, tmp_path):
    """The launcher of a host that was cut off stands still, so its report never comes."""
    monkeypatch.setattr(telling.time, "sleep", lambda seconds: pytest.fail("it waits"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    tell(LostRankError("rank 0 (host n1) does not answer"))
    assert capsys.readouterr().err == "rank 0 (host n1) does not answer\n" and not list(tmp_path.iterdir())


def test_torchrun_ends_its_report_with_our_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    tell(ConfigError("smoke.yaml", ["seed: found 'x'; needed: a valid integer"]))
    assert capsys.readouterr().err == "", "it would be told twice"
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    report = str(ChildFailedError("launch/pretrain.py", {0: failure})).splitlines()
    assert report[-3] == "  traceback : smoke.yaml: 1 mistake"
    assert report[-2] == "    seed: found 'x'; needed: a valid integer"


def test_half_a_launcher_is_an_error_that_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert launched_world_size() == 2
    with pytest.raises(ValueError, match="torchrun or deepspeed"):
        start_world(30, "cpu")


def _join(runs: list[str], timeout_seconds: float = 3) -> str:
    try:
        start_world(timeout_seconds, "cpu", run=runs[int(os.environ["RANK"])])
    except (InputError, LostRankError) as error:
        return f"{type(error).__name__}: {error}"
    return "joined"


def test_a_rank_of_another_run_is_refused_and_the_rank_that_did_not_come_is_named():
    first, stranger = run_ranks(_join, 2, ["outputs/mine", "s3://key:secret@bucket/yours"])
    assert re.fullmatch(
        r"InputError: the ranks' key-value store at 127\.0\.0\.1:\d+ belongs to the run outputs/mine, and this rank "
        r"1 to s3://\*\*\*@bucket/yours; give each job on a host its own MASTER_PORT",
        stranger,
    ), stranger
    assert first.startswith("LostRankError: rank 1 did not come within 3 s"), first


def _open_a_port_that_is_taken() -> str:
    os.environ["WORLD_SIZE"] = "2"
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
        return _join(["outputs/mine"])


def test_a_port_of_another_job_is_an_error_that_says_so():
    (error,) = run_ranks(_open_a_port_that_is_taken, 1)
    assert re.match(r"InputError: the ranks' key-value store at 127\.0\.0\.1:\d+ cannot be opened \(.*in use", error)
    assert error.endswith("; give each job on a host its own MASTER_PORT")


def _reach_nobody() -> str:
    os.environ |= {"WORLD_SIZE": "2", "RANK": "1"}
    return _join(["", "outputs/mine"], timeout_seconds=0.5)


def test_a_rank_that_does_not_reach_the_first_says_so():
    (error,) = run_ranks(_reach_nobody, 1)
    assert error.startswith("LostRankError: rank 1 did not reach the ranks' key-value store at 127.0.0.1:"), error


def test_log_lines_name_the_rank_when_there_are_several(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    log = logging.getLogger("gmlp_scale")
    kept = log.handlers, log.propagate, log.level
    try:
        with start_world(30, "cpu") as world:
            set_up_logging(world)
            set_up_logging(world)  # twice must not double the lines
            logging.getLogger("gmlp_scale.train").info("step 1")
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO step 1", lines[0])
    finally:
        log.handlers, log.propagate = kept[:2]
        log.setLevel(kept[2])
