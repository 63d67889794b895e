import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.trained_engines import ENGINES

HERE = Path(__file__).parent


@pytest.mark.parametrize("num_starts", [4, pytest.param(20, marks=pytest.mark.faults)])
def test_every_start_of_each_engine_ends_cleanly(num_starts, trials):
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
