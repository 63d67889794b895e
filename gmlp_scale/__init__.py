"""Masked-language-model pretraining and finetuning of gMLP, aMLP and the encoders they are compared with."""

import time

__version__ = "0.1.0"

IMPORTED_AT_SECONDS = time.perf_counter()
"""About when this process started: the log's start-up times count from here."""
