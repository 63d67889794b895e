"""The paper's scores (arXiv 2105.08050, Tables 4 and 6), to show beside those of a run of the same model and data.

They are in percent: accuracy for SST-2 and for both development sets of MNLI, F1 for SQuAD.
"""

from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.inputs import Inputs
from gmlp_scale.models import AmlpConfig, GmlpConfig, ModelConfig, TransformerConfig, with_kernels

VOCAB_SIZE = 32_000
"""The paper's. A model with another vocabulary is still compared with the paper's scores."""


def _gmlp(num_blocks: int, d_model: int, d_ffn: int, sequence_length: int) -> GmlpConfig:
    sizes = {"d_ffn": d_ffn, "sequence_length": sequence_length, "vocab_size": VOCAB_SIZE}
    return GmlpConfig(num_blocks=num_blocks, d_model=d_model, **sizes)


def _amlp(num_blocks: int, d_model: int, d_attn: int) -> AmlpConfig:
    sizes = {"d_ffn": 3072, "sequence_length": 512, "vocab_size": VOCAB_SIZE}
    return AmlpConfig(num_blocks=num_blocks, d_model=d_model, d_attn=d_attn, **sizes)


def _bert(
    num_blocks: int, d_model: int, d_ffn: int, sequence_length: int, positions: str = "absolute"
) -> TransformerConfig:
    sizes = {"d_ffn": d_ffn, "sequence_length": sequence_length, "vocab_size": VOCAB_SIZE}
    heads = {"num_heads": d_model // 64, "positions": positions}
    return TransformerConfig(num_blocks=num_blocks, d_model=d_model, **sizes, **heads)


# model -> name, SST-2, MNLI matched and mismatched, SQuAD v1.1 and v2.0
_MODELS: dict[ModelConfig, tuple] = {
    _bert(12, 768, 3072, 512): ("BERT base", 93.8, 85.6, 85.7, 90.2, 78.6),
    _gmlp(48, 512, 3072, 512): ("gMLP base", 94.2, 83.7, 84.1, 86.7, 70.1),
    _amlp(36, 512, 64): ("aMLP base", 93.4, 85.9, 85.8, 90.7, 80.9),
    _bert(24, 1024, 4096, 512): ("BERT large", 94.3, 87.0, 87.4, 92.0, 81.0),
    _gmlp(96, 768, 3072, 512): ("gMLP large", 94.8, 86.2, 86.5, 89.5, 78.3),
    _amlp(72, 768, 128): ("aMLP large", 94.8, 88.4, 88.4, 92.2, 85.4),
    _gmlp(144, 1024, 4096, 512): ("gMLP xlarge", 95.6, 87.7, 87.7, 90.9, 82.1),
    _bert(6, 768, 3072, 128, "relative"): ("Transformer, 6+6 layers", 90.4, 81.5, None, None, None),
    _bert(12, 768, 3072, 128, "relative"): ("Transformer, 12+12 layers", 91.3, 83.3, None, None, None),
    _bert(24, 768, 3072, 128, "relative"): ("Transformer, 24+24 layers", 92.1, 85.2, None, None, None),
    _bert(48, 768, 3072, 128, "relative"): ("Transformer, 48+48 layers", 92.8, 86.3, None, None, None),
    _gmlp(18, 512, 3072, 128): ("gMLP, 18 layers", 91.2, 77.7, None, None, None),
    _gmlp(36, 512, 3072, 128): ("gMLP, 36 layers", 92.3, 80.9, None, None, None),
    _gmlp(72, 512, 3072, 128): ("gMLP, 72 layers", 93.5, 82.8, None, None, None),
    _gmlp(144, 512, 3072, 128): ("gMLP, 144 layers", 95.1, 84.6, None, None, None),
}
# task, score -> its place in the tuples above
_COLUMNS = {
    ("sst2", "accuracy"): 1,
    ("mnli", "accuracy"): 2,
    ("mnli", "accuracy_mismatched"): 3,
    ("squad_v1", "f1"): 4,
    ("squad_v2", "f1"): 5,
}


def published(run: FinetuneConfig, inputs: Inputs) -> tuple[str, dict[str, float]] | None:
    """The paper's name of the model and its scores on the task. None unless model and data are those of the paper."""
    config = with_kernels(inputs.pretrained.config, "auto").model_copy(update={"vocab_size": VOCAB_SIZE})
    model = _MODELS.get(config)
    sizes = run.task_row.official_sizes
    found = {part: rows.num_examples for part, rows in inputs.rows.items() if part in sizes}
    is_official = all(found[part] == sizes[part] for part in found)
    if model is None or not is_official or not run.pretrained:
        return None
    scores = {score: model[column] for (task, score), column in _COLUMNS.items() if task == run.task}
    known = {score: value for score, value in scores.items() if value is not None}
    return (model[0], known) if known else None
