"""Several hosts on one machine: each has processes, a network address, mounts and a name of its own.

The hosts are Linux namespaces, and a bridge joins them. The bridge stands in the namespace of the host `login`. The
kernel ends every process of a host with its first one, and removes its network with its last. So nothing is left behind
once the first processes are killed, which also happens when the tests end without a word (PR_SET_PDEATHSIG).
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NET = "10.77.0"
WAIT_SECONDS = 300
"""Until something must have happened. Far longer than it takes, as other work may slow the machine down."""
FIRST_PROCESS = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nprint('up', flush=True)\nsignal.pause()"
"""It leaves no zombies, and hears no signal but SIGKILL."""


def missing(programs: list[str]) -> str | None:
    """Why there can be no hosts with these programs here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    absent = [name for name in ("ip", "unshare", "nsenter", "setpriv", *programs) if not shutil.which(name)]
    if absent:
        return f"{', '.join(absent)} not found; docs/many-nodes.md has the packages"
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
    return f"namespaces are refused: {tried.stderr.decode().strip()}" if tried.returncode else None


def wait_until(is_true: Callable[[], object], what: str | Callable[[], str], seconds: float = WAIT_SECONDS):
    """Returns what `is_true` returns as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (found := is_true()):
        assert time.monotonic() < deadline, f"not after {seconds:.0f} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.05)
    return found


def has_ended(pid: int) -> bool:
    """Also if nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Job:
    """A program on a host. Both its outputs go to the file `log`."""

    def __init__(self, command: list[str], log: Path):
        self.log = log
        with log.open("ab") as file:
            self._entering = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self.pid = wait_until(lambda: _child_of(self._entering), self.printed, 30)
        """As this machine counts, like those of Host.ranks()."""

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str) -> re.Match:
        """Until it has printed what matches."""

        def found() -> re.Match | None:
            has_ended = self.code is not None
            match = re.search(pattern, self.printed(), re.MULTILINE)
            assert match or not has_ended, f"ended without {pattern!r}: {self.printed()}"
            return match

        return wait_until(found, lambda: f"{pattern!r} in {self.printed()}")

    @property
    def code(self) -> int | None:
        """Its exit code, that of a signal as a shell shows it. None while it runs."""
        code = self._entering.poll()
        return code if code is None or code >= 0 else 128 - code

    def end(self) -> int:
        """Waits for its end and returns its exit code."""
        wait_until(lambda: self.code is not None, lambda: f"the end of {self.printed()}")
        return self.code


class Host:
    """One host. `boot` starts it, also again after `lose`."""

    def __init__(self, name: str, number: int, folder: Path):
        self.name, self.address, self.folder = name, f"{NET}.{number}", folder
        self._number, self._num_boots, self._num_jobs = number, 0, 0
        self._first: subprocess.Popen | None = None

    def boot(self, switch: "Host | None") -> None:
        """`switch` has the bridge. None: this host has it itself."""
        spaces = ["--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"]
        self._first = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, sys.executable, "-S", "-c", FIRST_PROCESS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._first.stdout.readline() == b"up\n"
        self.pid = _child_of(self._first)
        self._num_boots += 1
        for line in (
            f"hostname {self.name}",
            f"mount --bind {self.folder}/etc_hosts /etc/hosts",
            "mount -t tmpfs tmpfs /run",
            "ip link set lo up",
        ):
            self.call(*line.split())
        if switch is None:
            # An address of its own. Else a bridge takes a port's: where that left, packets to the old one were lost.
            self.call(*f"ip link add br0 address 02:00:00:00:00:{self._number:02x} type bridge".split())
            device = "br0"
        else:
            device, self._switch, self._port = "eth0", switch, f"{self.name}.{self._num_boots}"
            # The same hardware address after each boot, as a real card has it: the others remember it for a while.
            words = f"ip link add {self._port} type veth peer name eth0 address 02:00:00:00:00:{self._number:02x} netns"
            switch._in_network(*words.split(), str(self.pid))
            switch._in_network("ip", "link", "set", self._port, "master", "br0", "up")
        self.call("ip", "address", "add", f"{self.address}/24", "dev", device)
        self.call("ip", "link", "set", device, "up")

    def set_link(self, is_up: bool) -> None:
        """Plugs the host's network cable in, or pulls it out: nobody hears of it, packets no longer come."""
        self._switch._in_network("ip", "link", "set", self._port, "up" if is_up else "down")

    def lose(self) -> None:
        """Kills every process of the host at once. The kernel closes their connections."""
        if self._first is not None:
            with suppress(ProcessLookupError):  # Ctrl-C reaches it too
                os.kill(self.pid, signal.SIGKILL)
            self._first.wait()
            self._first.stdout.close()
            self._first = None

    def start(self, *command: object, environment: dict[str, str] | None = None) -> Job:
        """Starts a program in the repository's root."""
        self._num_jobs += 1
        return Job(self._words(command, environment), self.folder / f"{self.name}.{self._num_jobs}.log")

    def call(self, *command: object, environment: dict[str, str] | None = None) -> str:
        """What a short program prints. It must leave with 0."""
        words = self._words(command, environment)
        done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_SECONDS)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def processes(self, pattern: str) -> list[int]:
        """The processes of this host whose command line matches."""
        if self._first is None:
            return []
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == space:
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found += [int(entry.name)] if re.search(pattern, words) else []
            except OSError:
                continue  # it has ended
        return found

    def ranks(self) -> dict[int, int]:
        """The process of each rank that runs here."""
        numbers = {}
        for pid in self.processes(r"python\S* (-u )?\S*launch/pretrain\.py "):
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ranks = [int(line[5:]) for line in variables if line.startswith(b"RANK=")]
            if ranks:
                numbers.setdefault(ranks[0], pid)
        return numbers

    def _words(self, command: tuple, environment: dict[str, str] | None) -> list[str]:
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--ipc", "--pid", "--mount"]
        return [*enter, "env", f"--chdir={ROOT}", *variables, *map(str, command)]

    def _in_network(self, *command: str) -> None:
        # Not in the namespace of its processes: `ip ... netns PID` counts as this machine does.
        words = ["nsenter", f"--target={self.pid}", "--net", *command]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"


@contextmanager
def booted_hosts(num_hosts: int, folder: Path) -> Iterator[tuple[Host, list[Host]]]:
    """The host `login`, where jobs are submitted, and n1, n2 ... Their files, logs among them, go into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    login = Host("login", 254, folder)
    hosts = [Host(f"n{number}", number, folder) for number in range(1, num_hosts + 1)]
    names = [f"{host.address} {host.name}" for host in (login, *hosts)]
    (folder / "etc_hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    try:
        login.boot(None)
        for host in hosts:
            host.boot(login)
        yield login, hosts
    finally:
        for host in (*hosts, login):
            host.lose()


def _child_of(process: subprocess.Popen) -> int | None:
    """Its only child; of a program that has ended already, the process itself."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        children = []
    if children:
        return int(children[0])
    return process.pid if process.poll() is not None else None
