"""The tasks of finetuning. To add one, add a row to TASKS, and a function to scores.py if its score is new.

A task of each class has
    name, data_set          the data set also names its parts
    official_sizes          examples of the published parts, where finetune/sweep.py has scores of the paper
    main_score              the score by which the best weights are picked, the higher the better
    head_name, class_names  what an export says of its head (export.folder)
    has_windows             whether its rows may be windows of longer texts, cut with a stride
    head(**backbone)        the model
    read(source, part, tokenizer, sequence_length, document_stride)
                            the rows of one part; raises FileNotFoundError or DataError if they cannot be read
    shown(score, value)     a score as a table shows it

The rows of a part have
    num_rows, num_examples, fingerprint (a SHA-256 of the rows and what is to be predicted)
    has_labels              False in a test part whose labels are secret
    token_ids_RN            all rows, padded to sequence_length
    batch(row_indices)      a micro-batch of these rows, padded to sequence_length
    summarize(logits)       what scoring needs of a micro-batch's logits, [B, summary_size], on their device
    scores(summaries)       the scores by name, given the summaries of all rows
    write_predictions(summaries, folder)
                            writes the predictions in their official form
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.distributed.world import World
from gmlp_scale.models.task_heads import LabelledBatch, SpanBatch, TaggedBatch
from gmlp_scale.tasks.classification import ClassificationRows, ClassificationTask, RegressionTask
from gmlp_scale.tasks.evaluate import evaluation_batches
from gmlp_scale.tasks.question_answering import QuestionRows, QuestionTask
from gmlp_scale.tasks.records import DataSet
from gmlp_scale.tasks.scores import accuracy, f1, matthews, pearson, spearman
from gmlp_scale.tasks.tagging import TaggedRows, TaggingTask

FinetuneTask = ClassificationTask | QuestionTask | TaggingTask
TaskRows = ClassificationRows | QuestionRows | TaggedRows

_GLUE, _ENTAILMENT = "nyu-mll/glue", ("entailment", "not_entailment")
_SQUAD_SPLITS = {"train": "train", "dev": "validation"}
_MNLI_SPLITS = {
    "train": "train",
    "dev": "validation_matched",
    "dev_mismatched": "validation_mismatched",
    "test": "test_matched",
    "test_mismatched": "test_mismatched",
}

_ROWS = (
    ClassificationTask(
        name="cola", text_columns=(("sentence",),), class_names=("unacceptable", "acceptable"), scores=(matthews,),
        data_set=DataSet(_GLUE, "cola", glue_folder="CoLA", tsv_columns=("source", "label", "mark", "sentence")),
    ),
    ClassificationTask(
        name="sst2", text_columns=(("sentence",),), class_names=("negative", "positive"),
        data_set=DataSet(_GLUE, "sst2", glue_folder="SST-2"), official_sizes={"train": 67_349, "dev": 872},
    ),
    ClassificationTask(
        name="mrpc", text_columns=(("#1 String", "#2 String"), ("sentence1", "sentence2")),
        label_columns=("Quality", "label"), class_names=("not_equivalent", "equivalent"),
        data_set=DataSet(_GLUE, "mrpc", glue_folder="MRPC"), scores=(accuracy, f1),
    ),
    RegressionTask(
        name="stsb", text_columns=(("sentence1", "sentence2"),),
        label_columns=("score", "label"), class_names=("similarity",),
        data_set=DataSet(_GLUE, "stsb", glue_folder="STS-B"), scores=(pearson, spearman),
    ),
    ClassificationTask(  # some questions of QQP's train.tsv hold a line break
        name="qqp", text_columns=(("question1", "question2"),),
        label_columns=("is_duplicate", "label"), class_names=("not_duplicate", "duplicate"),
        data_set=DataSet(_GLUE, "qqp", glue_folder="QQP", train_has_broken_lines=True), scores=(accuracy, f1),
    ),
    ClassificationTask(
        name="mnli", text_columns=(("sentence1", "sentence2"), ("premise", "hypothesis")),
        label_columns=("gold_label", "label"), labels=("entailment", "neutral", "contradiction"),
        class_names=("entailment", "neutral", "contradiction"),
        data_set=DataSet(_GLUE, "mnli", _MNLI_SPLITS, glue_folder="MNLI"),
        official_sizes={"train": 392_702, "dev": 9_815, "dev_mismatched": 9_832},
    ),
    ClassificationTask(
        name="qnli", text_columns=(("question", "sentence"),),
        labels=_ENTAILMENT, class_names=_ENTAILMENT, data_set=DataSet(_GLUE, "qnli", glue_folder="QNLI"),
    ),
    ClassificationTask(
        name="rte", text_columns=(("sentence1", "sentence2"),),
        labels=_ENTAILMENT, class_names=_ENTAILMENT, data_set=DataSet(_GLUE, "rte", glue_folder="RTE"),
    ),
    QuestionTask(
        name="squad_v1", has_unanswerable=False, data_set=DataSet("rajpurkar/squad", "plain_text", _SQUAD_SPLITS),
        official_sizes={"train": 87_599, "dev": 10_570},
    ),
    QuestionTask(
        name="squad_v2", has_unanswerable=True, data_set=DataSet("rajpurkar/squad_v2", "squad_v2", _SQUAD_SPLITS),
        official_sizes={"train": 130_319, "dev": 11_873},
    ),
    TaggingTask(name="tagging", data_set=DataSet("", "")),
)  # fmt: skip
TASKS: dict[str, FinetuneTask] = {task.name: task for task in _ROWS}


def summarize_all(
    rows: TaskRows,
    predict: Callable[[LabelledBatch | SpanBatch | TaggedBatch], Tensor],
    world: World,
    plan: BatchPlan,
    *,
    cuts_padding: bool = False,
) -> np.ndarray:
    """What scoring needs from every row's logits, float32 [num_rows, summary_size], on every rank.

    The ranks take batches in turn, as many as `plan.heldout` says, since an engine may need all ranks to predict. The
    rows that fill up the last batches are left out. A stop signal raises StopSignalled.

    cuts_padding: as in EpochLoader.
    """
    summaries = np.zeros((rows.num_rows, rows.summary_size))
    for row_indices in evaluation_batches(plan.heldout(rows.num_rows), world):
        batch = rows.batch(np.minimum(row_indices, rows.num_rows - 1))
        batch = batch.cut_padding() if cuts_padding else batch
        with torch.no_grad():
            result = rows.summarize(predict(batch.to(world.device))).cpu().numpy()
        is_row = row_indices < rows.num_rows
        summaries[row_indices[is_row]] = result[is_row]
    if world.size > 1:
        summaries = np.array(world.sum(summaries.ravel().tolist())).reshape(summaries.shape)
    return summaries.astype(np.float32)
