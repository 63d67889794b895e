"""Search by embeddings: exports learn to find the passage that answers a question, and are scored beside BM25.

Losses, trainer, checkpoints and scores are those of sentence-transformers; docs/search.md says why.

Shape suffixes: Q questions, P passages, K the best ten.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gmlp_scale.tasks.classification import read_examples
from gmlp_scale.tasks.question_answering import Question, read_questions
from gmlp_scale.tasks.records import DataError
from gmlp_scale.tasks.table import TASKS

SCORES = {"nDCG@10": "ndcg@k", "recall@10": "recall@k"}
"""What InformationRetrievalEvaluator calls them."""
Search = Callable[[list[str]], np.ndarray]
"""From Q questions to the scores of the P passages, [Q, P], the higher the better."""


def read_answered(source: str, part: str) -> list[Question]:
    """The questions of a file of SQuAD, v1.1 or v2.0, whose context holds an answer. DataError if there is none."""
    questions = read_questions(source, part, TASKS["squad_v2"].data_set, has_unanswerable=True)
    if answered := [question for question in questions if question.answers]:
        return answered
    raise DataError(source, ["no question has an answer"])


def read_triples(source: str) -> list[dict[str, str]]:
    """MNLI's first sentences with one that they entail and one that they contradict. DataError if there is none."""
    of_premise: dict[str, dict[int, str]] = {}
    for example in read_examples(TASKS["mnli"], source, "train"):
        of_premise.setdefault(example.texts[0], {}).setdefault(example.label, example.texts[1])
    entailed, contradicted = map(TASKS["mnli"].labels.index, ("entailment", "contradiction"))
    triples = [
        {"anchor": premise, "positive": of[entailed], "negative": of[contradicted]}
        for premise, of in of_premise.items()
        if entailed in of and contradicted in of
    ]
    if triples:
        return triples
    raise DataError(source, ["no first sentence has both an entailed and a contradicted one"])


def train_search(model: Path, pairs: str | None, triples: str | None, folder: Path, **settings: Any) -> Path:
    """Trains an export on pairs, triples or both, and returns the trained model's folder.

    If the folder was begun, training resumes from its newest whole checkpoint; if it was finished, nothing is done.

    Args:
        settings: fields of SentenceTransformerTrainingArguments.
    """
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    trained, checkpoints = folder / "model", folder / "checkpoints"
    if trained.exists():
        return trained
    data = {}
    if pairs:
        data["pairs"] = [{"anchor": one.question, "positive": one.context} for one in read_answered(pairs, "train")]
    if triples:
        data["triples"] = read_triples(triples)
    # Without no_duplicates, the passage of two questions in a batch would be a negative of both.
    arguments = Arguments(
        str(checkpoints),
        batch_sampler="no_duplicates",
        use_cpu=not torch.cuda.is_available(),  # else several ranks without a GPU would train alone
        report_to="none",
        **settings,
    )
    encoder = SentenceTransformer(str(model), trust_remote_code=True)
    trainer = SentenceTransformerTrainer(
        encoder,
        arguments,
        train_dataset={name: Dataset.from_list(rows) for name, rows in data.items()},
        loss=MultipleNegativesRankingLoss(encoder, gather_across_devices=arguments.world_size > 1),
    )
    whole = [path.parent for path in checkpoints.glob("checkpoint-*/trainer_state.json")]  # which is written last
    newest = max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    trainer.train(resume_from_checkpoint=newest and str(newest))
    if trainer.is_world_process_zero():
        encoder.save_pretrained(str(folder / ".unfinished"))
        (folder / ".unfinished").rename(trained)
    return trained


def search_by_words(passages: list[str]) -> Search:
    """BM25 of bm25s, with its defaults: English stop words are left out, and words are not stemmed."""
    import bm25s

    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)

    def search(questions: list[str]) -> np.ndarray:
        words = bm25s.tokenize(questions, return_ids=False, show_progress=False)
        none = np.zeros(len(passages))  # for a question of stop words alone
        return np.stack([index.get_scores(of_question) if of_question else none for of_question in words])

    return search


def search_by_embeddings(folder: str | Path, passages: list[str]) -> Search:
    """A passage's score is the cosine of its embedding and the question's."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), trust_remote_code=True)
    embedded = model.encode_document(passages)
    return lambda questions: model.similarity(model.encode_query(questions), embedded).numpy()


def search_scores(search: Search, passages: list[str], questions: list[Question]) -> dict[str, float]:
    """SCORES of what `search` finds for the questions, as InformationRetrievalEvaluator computes them."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    number_of = {passage: number for number, passage in enumerate(passages)}
    evaluator = InformationRetrievalEvaluator(
        {question.id: question.question for question in questions},
        dict(enumerate(passages)),
        {question.id: {number_of[question.context]} for question in questions},
    )
    scores_QP = search(evaluator.queries)
    best_QK = np.argsort(-scores_QP, axis=1, kind="stable")[:, :10]
    found = [
        [{"corpus_id": int(number), "score": float(scores_P[number])} for number in best_K]
        for scores_P, best_K in zip(scores_QP, best_QK, strict=True)
    ]
    metrics = evaluator.compute_metrics(found)
    return {name: float(metrics[key][10]) for name, key in SCORES.items()}
