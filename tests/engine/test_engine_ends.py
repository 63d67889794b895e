import os
import subprocess
import sys
from pathlib import Path

from tests.engine.trained_engines import ENGINES

HERE = Path(__file__).parent


def test_twenty_starts_of_each_engine_end_cleanly():
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])
    finished = subprocess.run(
        [sys.executable, str(HERE / "start_and_end.py"), "20", *ENGINES],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    assert not finished.stderr
