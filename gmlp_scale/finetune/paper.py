"""The paper's scores (arXiv 2105.08050, Tables 4 and 6), to show beside those of a run of the same model and data.

They are in percent: accuracy for SST-2 and for both development sets of MNLI, F1 for SQuAD.
"""

from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.inputs import Inputs
from gmlp_scale.models import AmlpConfig, GmlpConfig, ModelConfig, TransformerConfig, with_kernels

VOCAB_SIZE = 32_000
"""The paper's. A model with another vocabulary is still compared with the paper's scores."""


_LONG = {"d_ffn": 3072, "sequence_length": 512, "vocab_size": VOCAB_SIZE}
_WIDE = _LONG | {"d_ffn": 4096}
_SHORT = _LONG | {"sequence_length": 128}
_SHORT_BERT = _SHORT | {"d_model": 768, "num_heads": 12, "positions": "relative"}

_COLUMNS = (
    ("sst2", "accuracy"),
    ("mnli", "accuracy"),
    ("mnli", "accuracy_mismatched"),
    ("squad_v1", "f1"),
    ("squad_v2", "f1"),
)
"""The task and the score of each of the numbers below. Of the short models only the first two are known."""
_MODELS: dict[ModelConfig, tuple[str, tuple[float, ...]]] = {
    TransformerConfig(num_blocks=12, d_model=768, num_heads=12, positions="absolute", **_LONG): (
        "BERT base", (93.8, 85.6, 85.7, 90.2, 78.6)),
    GmlpConfig(num_blocks=48, d_model=512, **_LONG): ("gMLP base", (94.2, 83.7, 84.1, 86.7, 70.1)),
    AmlpConfig(num_blocks=36, d_model=512, d_attn=64, **_LONG): ("aMLP base", (93.4, 85.9, 85.8, 90.7, 80.9)),
    TransformerConfig(num_blocks=24, d_model=1024, num_heads=16, positions="absolute", **_WIDE): (
        "BERT large", (94.3, 87.0, 87.4, 92.0, 81.0)),
    GmlpConfig(num_blocks=96, d_model=768, **_LONG): ("gMLP large", (94.8, 86.2, 86.5, 89.5, 78.3)),
    AmlpConfig(num_blocks=72, d_model=768, d_attn=128, **_LONG): ("aMLP large", (94.8, 88.4, 88.4, 92.2, 85.4)),
    GmlpConfig(num_blocks=144, d_model=1024, **_WIDE): ("gMLP xlarge", (95.6, 87.7, 87.7, 90.9, 82.1)),
    TransformerConfig(num_blocks=6, **_SHORT_BERT): ("Transformer, 6+6 layers", (90.4, 81.5)),
    TransformerConfig(num_blocks=12, **_SHORT_BERT): ("Transformer, 12+12 layers", (91.3, 83.3)),
    TransformerConfig(num_blocks=24, **_SHORT_BERT): ("Transformer, 24+24 layers", (92.1, 85.2)),
    TransformerConfig(num_blocks=48, **_SHORT_BERT): ("Transformer, 48+48 layers", (92.8, 86.3)),
    GmlpConfig(num_blocks=18, d_model=512, **_SHORT): ("gMLP, 18 layers", (91.2, 77.7)),
    GmlpConfig(num_blocks=36, d_model=512, **_SHORT): ("gMLP, 36 layers", (92.3, 80.9)),
    GmlpConfig(num_blocks=72, d_model=512, **_SHORT): ("gMLP, 72 layers", (93.5, 82.8)),
    GmlpConfig(num_blocks=144, d_model=512, **_SHORT): ("gMLP, 144 layers", (95.1, 84.6)),
}  # fmt: skip


def published(run: FinetuneConfig, inputs: Inputs) -> tuple[str, dict[str, float]] | None:
    """The paper's name of the model and its scores on the task. None unless model and data are those of the paper."""
    config = with_kernels(inputs.pretrained.config, "auto").model_copy(update={"vocab_size": VOCAB_SIZE})
    sizes = run.task_row.official_sizes
    is_official = all(rows.num_examples == sizes.get(part, rows.num_examples) for part, rows in inputs.rows.items())
    if config not in _MODELS or not is_official or not run.pretrained:
        return None
    name, numbers = _MODELS[config]
    scores = {score: number for (task, score), number in zip(_COLUMNS, numbers, strict=False) if task == run.task}
    return (name, scores) if scores else None
