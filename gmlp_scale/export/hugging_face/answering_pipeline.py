"""pipeline("question-answering") of an export. It cuts windows and chooses the answer as finetuning does.

transformers itself has no such pipeline since version 5.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from transformers.pipelines.base import ChunkPipeline

from gmlp_scale.models.task_heads import cut_padding
from gmlp_scale.tasks.windows import MAX_QUESTION_TOKENS, NUM_BEST, Window, WindowScores, cut_windows, spans


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
        row_length = config.row_length or config.sequence_length
        question = self._tokens(inputs["question"].strip())["input_ids"][:MAX_QUESTION_TOKENS]
        context = self._tokens(inputs["context"])
        if not context["input_ids"]:
            raise ValueError("the context is empty: give a text that may hold the answer")
        stride = document_stride or config.document_stride
        start = [config.cls_token_id, *question, config.sep_token_id]
        windows = cut_windows(len(context["input_ids"]), row_length - len(start) - 1, stride)
        for window in windows:
            row = [*start, *context["input_ids"][window.first : window.stop], config.sep_token_id]
            row += [config.pad_token_id] * (row_length - len(row))
            yield {
                "input_ids": torch.tensor([row]),
                "window": window,
                "context_position": len(start),
                "ranges": context["offset_mapping"],
                "context": inputs["context"],
                "is_last": window is windows[-1],
            }

    def _forward(self, inputs: dict) -> dict:
        input_ids = inputs.pop("input_ids")
        output = self.model(cut_padding(input_ids) if self.model.model.masks_padding else input_ids)
        return {"first_logits_BN": output.start_logits, "last_logits_BN": output.end_logits, **inputs}

    def postprocess(self, outputs: list[dict], handle_impossible_answer: bool) -> dict:
        scores = []
        for output in outputs:
            logits_1N2 = torch.stack([output["first_logits_BN"], output["last_logits_BN"]], dim=-1).float().numpy()
            scores.append(_window_scores(logits_1N2[0], output["window"], output["context_position"]))
        ranges, context = outputs[0]["ranges"], outputs[0]["context"]
        null_logit = min(window.null_logit for window in scores)
        nothing = {"answer": "", "start": 0, "end": 0}
        for span in spans(scores):
            start, end = ranges[span.first][0], ranges[span.last][1]
            text = context[start:end]
            if text.strip():
                start += len(text) - len(text.lstrip())
                score = 1 / (1 + math.exp(min(null_logit - span.logit, 700.0)))
                if handle_impossible_answer and score < 0.5:
                    return nothing | {"score": 1 - score}
                return {"answer": text.strip(), "start": start, "end": start + len(text.strip()), "score": score}
        return nothing | {"score": 0.5}

    def _tokens(self, text: str) -> dict:
        return self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )


def _window_scores(logits_N2: np.ndarray, window: Window, context_position: int) -> WindowScores:
    best = [np.argsort(-logits_N, kind="stable")[:NUM_BEST] for logits_N in logits_N2.T]
    return WindowScores(
        window,
        context_position,
        best[0],
        logits_N2[best[0], 0],
        best[1],
        logits_N2[best[1], 1],
        null_logit=float(logits_N2[0].sum()),
    )
