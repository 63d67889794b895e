"""Masked-language-model pretraining and finetuning of gMLP, aMLP and the encoders they are compared with.

As a library it gives the models and their batches; see README.md, "In your own code".
"""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gmlp_scale.models import (
        AmlpConfig,
        GmlpConfig,
        LabelledBatch,
        MaskedBatch,
        MaskedLanguageModel,
        MixerConfig,
        MlpAttentionConfig,
        SequenceClassifier,
        SpanBatch,
        SpanPredictor,
        SpatialGatingUnit,
        TransformerConfig,
        build_model,
    )

__all__ = [
    "AmlpConfig",
    "GmlpConfig",
    "LabelledBatch",
    "MaskedBatch",
    "MaskedLanguageModel",
    "MixerConfig",
    "MlpAttentionConfig",
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


def __getattr__(name: str) -> Any:
    """The names of __all__, imported with torch when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'gmlp_scale' has no attribute {name!r}")
    from gmlp_scale import models

    return getattr(models, name)
