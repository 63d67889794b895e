import os
import subprocess
import sys
from pathlib import Path

from tests.engine.trained_engines import ENGINES

HERE = Path(__file__).parent


def test_every_start_of_each_engine_ends_cleanly(trials, pytestconfig):
    num_starts = 20 if pytestconfig.getoption("--faults") else 4
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])
    finished = subprocess.run(
        [sys.executable, str(HERE / "start_and_end.py"), str(num_starts), *ENGINES],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    assert not finished.stderr
    trials("starts of each engine end cleanly", num_starts * len(ENGINES))
