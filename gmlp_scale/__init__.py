"""Masked-language-model pretraining and finetuning of gMLP, aMLP and the encoders they are compared with.

As a library it gives the models and their batches; see README.md, "In your own code".
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gmlp_scale.models import (
        AmlpConfig,
        AveyConfig,
        GmlpConfig,
        LabelledBatch,
        MaskedBatch,
        MaskedLanguageModel,
        MixerConfig,
        MlpAttentionConfig,
        ModernTransformerConfig,
        SequenceClassifier,
        SpanBatch,
        SpanPredictor,
        SpatialGatingUnit,
        TransformerConfig,
        build_model,
    )

__all__ = [
    "AmlpConfig",
    "AveyConfig",
    "GmlpConfig",
    "LabelledBatch",
    "MaskedBatch",
    "MaskedLanguageModel",
    "MixerConfig",
    "MlpAttentionConfig",
    "ModernTransformerConfig",
    "SequenceClassifier",
    "SpanBatch",
    "SpanPredictor",
    "SpatialGatingUnit",
    "TransformerConfig",
    "build_model",
]
__version__ = "0.1.0"

IMPORTED_AT_SECONDS = time.perf_counter()
"""About when this process started: the log's start-up times count from here. A forked rank
of launch/elastic.py sets it."""


def leave_at_once(number: int, frame: Any) -> None:
    """Ends this process at Ctrl-C without a traceback, while it holds nothing yet."""
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


# A command's imports take seconds; @command hears the signal after them. A program of somebody else keeps its own.
_main = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
_scripts = [Path(__file__).parents[1] / folder for folder in ("launch", "data_prep")]
_is_command = _main.parent in _scripts or _main.name.startswith("gmlp-")
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave_at_once)


def __getattr__(name: str) -> Any:
    """The names of __all__, imported with torch when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'gmlp_scale' has no attribute {name!r}")
    from gmlp_scale import models

    return getattr(models, name)
