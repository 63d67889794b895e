"""pipeline("question-answering") of an export. It cuts windows and chooses the answer as finetuning does.

transformers itself has no such pipeline since version 5.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from transformers.pipelines.base import ChunkPipeline

from gmlp_scale.data.batch import longest_text
from gmlp_scale.tasks.windows import WindowScores, best_answer, summarize, window_rows


class QuestionAnsweringPipeline(ChunkPipeline):
    """answer(question=..., context=...) -> {"answer", "start", "end", "score"}, or a list of these for a list of dicts.

    start, end: the answer's characters in the context. score: the span's probability, compared with no answer.
    batch_size: windows, of any of the contexts, that the model reads at a time; 1 by default.
    document_stride: tokens from one window of a long context to the next; by default as in finetuning.
    handle_impossible_answer: the answer may be "", if that is likelier than every span.
    """

    def __call__(self, inputs=None, *, question: str | None = None, context: str | None = None, **parameters):
        inputs = {"question": question, "context": context} if inputs is None else inputs
        return super().__call__(inputs, **parameters)

    def _sanitize_parameters(self, document_stride: int | None = None, handle_impossible_answer: bool = False):
        return {"document_stride": document_stride}, {}, {"handle_impossible_answer": handle_impossible_answer}

    def preprocess(self, inputs: dict[str, str], document_stride: int | None) -> Iterator[dict]:
        config = self.model.config
        question, context = self._tokens(inputs["question"].strip()), self._tokens(inputs["context"])
        if not context["input_ids"]:
            raise ValueError("the context is empty: give a text that may hold the answer")
        row_length, stride = config.row_length or config.sequence_length, document_stride or config.document_stride
        position, rows = window_rows(question["input_ids"], context["input_ids"], row_length, stride)
        for number, (window, ids) in enumerate(rows, start=1):
            yield {
                "input_ids": torch.from_numpy(ids)[None],
                "window": window,
                "context_position": position,
                "ranges": context["offset_mapping"],
                "context": inputs["context"],
                "is_last": number == len(rows),
            }

    def _forward(self, inputs: dict) -> dict:
        input_ids = inputs.pop("input_ids")
        if self.model.model.masks_padding:
            input_ids = input_ids[:, : longest_text(input_ids)]
        output = self.model(input_ids)
        return {"summary": summarize(torch.stack([output.start_logits, output.end_logits], -1).float()), **inputs}

    def postprocess(self, outputs: list[dict], handle_impossible_answer: bool) -> dict:
        scores = [WindowScores(of["window"], of["context_position"], of["summary"][0].numpy()) for of in outputs]
        context = outputs[0]["context"]
        start, end, null_odds = best_answer(scores, context, np.array(outputs[0]["ranges"]))
        score = 1 / (1 + math.exp(min(null_odds, 700.0)))
        if handle_impossible_answer and score < 0.5:
            return {"answer": "", "start": 0, "end": 0, "score": 1 - score}
        return {"answer": context[start:end], "start": start, "end": end, "score": score}

    def _tokens(self, text: str) -> dict:
        return self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )
