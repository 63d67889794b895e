import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.trained_engines import ENGINES

HERE = Path(__file__).parent


@pytest.mark.parametrize("engine", ENGINES)
def test_twenty_starts_end_cleanly(engine):
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])
    finished = subprocess.run(
        [sys.executable, str(HERE / "start_and_end.py"), engine, "20"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    assert not finished.stderr
