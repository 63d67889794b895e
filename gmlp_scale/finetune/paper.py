"""The paper's scores (arXiv 2105.08050, Tables 4 and 6), to show beside those of a run of the same model and data.

They are in percent: accuracy for SST-2 and for both development sets of MNLI, F1 for SQuAD.
"""

from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.inputs import Inputs
from gmlp_scale.models import ModelConfig

# kind, num_blocks, d_model, d_ffn, sequence_length -> name, SST-2, MNLI matched and mismatched, SQuAD v1.1 and v2.0
_MODELS = {
    ("transformer", 12, 768, 3072, 512): ("BERT base", 93.8, 85.6, 85.7, 90.2, 78.6),
    ("gmlp", 48, 512, 3072, 512): ("gMLP base", 94.2, 83.7, 84.1, 86.7, 70.1),
    ("amlp", 36, 512, 3072, 512): ("aMLP base", 93.4, 85.9, 85.8, 90.7, 80.9),
    ("transformer", 24, 1024, 4096, 512): ("BERT large", 94.3, 87.0, 87.4, 92.0, 81.0),
    ("gmlp", 96, 768, 3072, 512): ("gMLP large", 94.8, 86.2, 86.5, 89.5, 78.3),
    ("amlp", 72, 768, 3072, 512): ("aMLP large", 94.8, 88.4, 88.4, 92.2, 85.4),
    ("gmlp", 144, 1024, 4096, 512): ("gMLP xlarge", 95.6, 87.7, 87.7, 90.9, 82.1),
    ("transformer", 6, 768, 3072, 128): ("Transformer, 6+6 layers", 90.4, 81.5, None, None, None),
    ("transformer", 12, 768, 3072, 128): ("Transformer, 12+12 layers", 91.3, 83.3, None, None, None),
    ("transformer", 24, 768, 3072, 128): ("Transformer, 24+24 layers", 92.1, 85.2, None, None, None),
    ("transformer", 48, 768, 3072, 128): ("Transformer, 48+48 layers", 92.8, 86.3, None, None, None),
    ("gmlp", 18, 512, 3072, 128): ("gMLP, 18 layers", 91.2, 77.7, None, None, None),
    ("gmlp", 36, 512, 3072, 128): ("gMLP, 36 layers", 92.3, 80.9, None, None, None),
    ("gmlp", 72, 512, 3072, 128): ("gMLP, 72 layers", 93.5, 82.8, None, None, None),
    ("gmlp", 144, 512, 3072, 128): ("gMLP, 144 layers", 95.1, 84.6, None, None, None),
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
    model = _model(inputs.pretrained.config)
    sizes = run.task_row.official_sizes
    found = {part: rows.num_examples for part, rows in inputs.rows.items() if part in sizes}
    is_official = all(found[part] == sizes[part] for part in found)
    if model is None or not is_official or not run.pretrained:
        return None
    scores = {score: model[column] for (task, score), column in _COLUMNS.items() if task == run.task}
    return model[0], {score: value for score, value in scores.items() if value is not None}


def _model(config: ModelConfig) -> tuple | None:
    is_papers_gmlp = config.kind not in ("gmlp", "amlp") or (
        config.spatial == "toeplitz" and config.gating == "multiplicative_split"
    )
    key = (config.kind, config.num_blocks, config.d_model, config.d_ffn, config.sequence_length)
    return _MODELS.get(key) if is_papers_gmlp else None
