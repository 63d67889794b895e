"""Pretrains on a changing number of hosts. When a host is lost or joins, the ranks restart from the newest checkpoint.

Start the same command on every host, and again on a host that comes back:

    python launch/elastic.py --hosts 1:2 --ranks-per-host 8 --rendezvous HOST:PORT --config configs/pretrain/gmlp_base.yaml train.micro_batch_size=8

The hosts meet at a store at HOST:PORT. If HOST is one of them, it opens the store, and the job ends when it is lost. To
survive the loss of any host, let HOST be another machine, which keeps the store of one job in a process of its own:

    python -c 'import torch, time; store = torch.distributed.TCPStore("0.0.0.0", PORT, is_master=True, wait_for_workers=False); time.sleep(1e9)'

After SIGTERM, SIGINT, SIGHUP or SIGUSR1 to this command on one host, all ranks save and the command leaves with 0 on
every host. With fewer hosts than the least number it waits 10 minutes for more.
"""  # noqa: E501

import argparse
import logging
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, NoReturn

import torch.distributed.launcher.api
import torch.distributed.run
from pydantic import Field
from torch.distributed.elastic.agent.server import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.multiprocessing.spawn import _prctl_pr_set_pdeathsig

import gmlp_scale
from gmlp_scale.checkpoint.stores import checkpoints_of, newest_of
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.process import STOP_SIGNALS
from gmlp_scale.distributed.rendezvous import first_line
from gmlp_scale.options import count, count_from_0, option
from gmlp_scale.recipe.config import PretrainingRecipe
from gmlp_scale.storage.files import print_error
from gmlp_scale.train.start import load_recipe
from gmlp_scale.train.time_budget import build_schedule

RENDEZVOUS = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3"
"""Seconds. A lost host is noticed after 6 instead of 15. Once there are enough hosts, others have 3 instead of 30 to
join; a host that comes later causes another start."""

FAILS_AGAIN = 2
"""The exit code of a rank after an error that another start would meet again: `exit_code` of gmlp_scale/errors.py."""
ENDED_ELSEWHERE = 3
"""The exit code of this command if another host ended the run. That host's code decides whether to start again."""
HEARD_AFTER_SECONDS = 15.0
"""How long until all hosts know of the end: a rank reports an error after 10 (logs.py), or misses others after 5."""


class _Agent(LocalElasticAgent):
    """torchrun's agent of torch 2.13, with three differences.

    Its ranks are forked from a server that has already imported the slow packages. A rank that leaves with FAILS_AGAIN
    ends the run. And ranks that left with 0 while a host waits to join are restarted: they have not finished, but saved
    and left because another host's agent was the first to stop its ranks for that restart.
    """

    here: "_Agent | None" = None
    start_method = "forkserver"

    def __init__(self, spec, *arguments, **options):
        super().__init__(spec, *arguments, **options | {"start_method": self.start_method})
        spec.entrypoint, spec.args = _run, spec.args[1:]  # in place of python -u
        _Agent.here = self

    def ranks(self) -> list[BaseProcess]:
        """The live processes of this host's ranks."""
        started = self._pcontext._pc.processes if self._pcontext else []
        return [process for process in started if process.is_alive()]

    def _shutdown(self, *arguments, **options) -> None:
        if self._pcontext:
            self._pcontext._worker_finished_event.set()  # a rank that has saved waits for it before it ends
        super()._shutdown(*arguments, **options)

    def _monitor_workers(self, worker_group) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if any(failure.exitcode == FAILS_AGAIN for failure in result.failures.values()):
            self._remaining_restarts = 0
        if result.state == WorkerState.SUCCEEDED:
            hosts = worker_group.spec.rdzv_handler
            hosts._state_holder._last_sync_time = -1.0  # forget its view, which may be older than a host that came
            if hosts.num_nodes_waiting() > 0:
                return RunResult(state=WorkerState.HEALTHY)
        return result


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", required=True, type=_bounds, metavar="LEAST:MOST", help="how many hosts there are")
    add("--ranks-per-host", required=True, type=count, metavar="N", help="one rank for each GPU of a host")
    add("--rendezvous", required=True, type=_address, metavar="HOST:PORT", help="where the hosts meet")
    add("--job", help="the job's name among those that meet at one store (default: the recipe's name)")
    add("--max-restarts", type=count_from_0, default=100, metavar="N", help="after failures (default: 100)")
    restarts = "exit code after a stop signal, for a cluster that restarts what leaves with N (default: 0)"
    add("--unfinished-code", type=option(Annotated[int, Field(ge=0, le=255)]), default=0, metavar="N", help=restarts)
    add("--config", required=True, help="a recipe, such as configs/pretrain/gmlp_base.yaml")
    add("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    least, most = options.hosts
    run = load_recipe(options.config, options.overrides)
    for num_hosts in range(least, most + 1):
        run.rows_per_rank(num_hosts * options.ranks_per_host)
    # Gives each start a store of its own. Without it rank 0 of the next start publishes no address, and all ranks end.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    torch.distributed.launcher.api.LocalElasticAgent = _Agent
    _start_rank_server()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)
    for number in STOP_SIGNALS:
        signal.signal(number, _stop_ranks)
    words = [
        "--nnodes", f"{least}:{most}", "--nproc-per-node", str(options.ranks_per_host),
        "--max-restarts", str(options.max_restarts), "--signals-to-handle", "SIGQUIT", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", options.rendezvous, "--rdzv-id", options.job or run.name, "--rdzv-conf", RENDEZVOUS,
        str(Path(__file__).with_name("pretrain.py")), "--config", options.config, *options.overrides,
    ]  # fmt: skip
    try:
        torch.distributed.run.main(words)
    except ChildFailedError as error:
        code = _print_failure(error)
        if code == FAILS_AGAIN and most > 1:  # this host may have the store, from which the others learn of the end
            time.sleep(HEARD_AFTER_SECONDS)
        return code
    except RendezvousClosedError:
        print_error(f"{run.name} has ended on another host, whose last lines say why")
        return ENDED_ELSEWHERE
    except RendezvousError as error:
        why = first_line(error.__cause__) if error.__cause__ else f"fewer than {least} hosts came in time"
        print_error(
            f"{run.name}: the hosts do not meet at {options.rendezvous}: {why}. Start this command on every host"
        )
        return 1
    except SignalException as error:
        print_error(error)
        return 128 + error.sigval
    return 0 if is_finished(run) else options.unfinished_code


def is_finished(run: PretrainingRecipe) -> bool:
    """Whether there is a checkpoint of the last step, which a time budget may have decided."""
    with checkpoints_of(run.run_folder) as checkpoints:
        newest, _ = newest_of(checkpoints, verify_files=False)
    return newest is not None and newest.step >= build_schedule(run.train, run.optimizer, newest.details).last_step


def _start_rank_server() -> None:
    """Starts the server that ranks are forked from. Returns once it has imported all that is slow: the other hosts wait
    for the ranks of a host that has joined."""
    for number in (signal.SIGUSR1, signal.SIGHUP):  # multiprocessing's tracker of resources inherits this
        signal.signal(number, signal.SIG_IGN)
    multiprocessing.set_forkserver_preload(["gmlp_scale.train.rank_server"])
    first = multiprocessing.get_context(_Agent.start_method).Process(target=int)
    first.start()
    first.join()


def _run(script: str, *arguments: str) -> NoReturn:
    """Runs a rank in the process that was forked for it."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # the rank ends with its launcher, however that ends
    for number in STOP_SIGNALS:  # the server ignores them
        signal.signal(number, signal.SIG_DFL)
    gmlp_scale.IMPORTED_AT_SECONDS = time.perf_counter()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _without_traceback(line: logging.LogRecord) -> bool:
    """Keeps torch's line on a rank that failed, without the traceback of torch's own code below it."""
    line.exc_info = None
    return True


def _print_failure(error: ChildFailedError) -> int:
    """Prints why the ranks failed and returns the exit code."""
    ended_it = [failure for failure in error.failures.values() if failure.exitcode == FAILS_AGAIN]
    messages = [failure.message["message"] for failure in ended_it if isinstance(failure.message, dict)]  # by logs.py
    print_error(messages[0] if messages else error)
    return FAILS_AGAIN if ended_it else 1


def _bounds(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"found {text}; needed: two numbers of hosts, as 2:4, or one, as 4")
    return least, most


def _address(text: str) -> str:
    found = re.fullmatch(r"(?:[^:\s]+|\[\S+\]):(\d{1,5})", text, re.ASCII)
    if not (found and 1 <= int(found[1]) < 2**16):
        raise argparse.ArgumentTypeError(f"found {text}; needed: HOST:PORT, as node1:29400")
    return text


def _stop_ranks(number: int, frame) -> None:
    """Stops this host's ranks, which inform the others. torchrun's own way would leave the other agents waiting."""
    ranks = _Agent.here.ranks() if _Agent.here else []
    if not ranks:
        _leave(number, frame)
    _Agent.here._remaining_restarts = 0  # a rank that cannot save yet dies of the signal; that is no failure to restart
    signal.signal(signal.SIGINT, _leave)  # a second Ctrl-C; Slurm may send other signals twice
    for rank in ranks:
        rank.terminate()


def _leave(number: int, frame) -> None:
    raise SignalException("stopped by a second Ctrl-C, or without a rank to signal", signal.Signals(number))


if __name__ == "__main__":
    sys.exit(main())
