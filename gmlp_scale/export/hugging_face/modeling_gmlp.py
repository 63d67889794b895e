"""gmlp_scale's encoders for transformers: each class holds one of the package's own models and returns its logits.

A batch does not change the logits of its rows. The Transformers mask padding. The others mask nothing, so their rows
are padded to the length that rows had in training, and what was added is cut off again. Padding is on the right: <pad>
in `input_ids`, or any token where `attention_mask`, [B, N], is 0. `token_type_ids` is accepted, because tokenizers may
give it, and not used.

Shape suffixes: B batch, N positions, D width, V vocabulary, C classes.
"""

from functools import partial
from inspect import signature
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple

from gmlp_scale.export.hugging_face.configuration_gmlp import GmlpScaleConfig
from gmlp_scale.models import ModelConfig, build_model
from gmlp_scale.models.backbone import Backbone
from gmlp_scale.models.heads import LabelledBatch, SequenceClassifier, SpanBatch, SpanPredictor, label_loss


def model_config(config: GmlpScaleConfig) -> ModelConfig:
    families = {signature(family).parameters["kind"].default: family for family in get_args(get_args(ModelConfig)[0])}
    family = families[config.kind]
    return family(**{name: getattr(config, name) for name in signature(family).parameters})


class GmlpScalePreTrainedModel(PreTrainedModel):
    """`self.model` is the package's model, so every class has that model's parameter names after "model."."""

    config_class = GmlpScaleConfig
    base_model_prefix = "model"

    def __init__(self, config: GmlpScaleConfig, head, dropout: float):
        super().__init__(config)
        self.model = build_model(model_config(config), head=head, dropout=dropout, seed=None)
        self._no_split_modules = list({type(block).__name__ for block in self.model.blocks})
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding

    def set_input_embeddings(self, embedding: nn.Embedding) -> None:
        self.model.embedding = embedding

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # N(0, 0.02), zero biases and LayerNorms of 1 and 0, as the package does
        if hasattr(module, "init_special_weights"):
            module.init_special_weights(torch.default_generator)

    def _rows(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The token ids with <pad> for all that is padding, and in rows of training's length where that matters.

        Raises:
            ValueError: the rows are longer than that.
        """
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(attention_mask == 0, self.config.pad_token_id)
        if self.model.masks_padding:
            return input_ids
        num_positions, row_length = input_ids.shape[1], self.config.row_length or self.config.sequence_length
        if num_positions > row_length:
            raise ValueError(
                f"the rows hold {num_positions} tokens but in training they held {row_length}: cut the rows, as the "
                f"tokenizer does with truncation=True, max_length={row_length}"
            )
        return F.pad(input_ids, (0, row_length - num_positions), value=self.config.pad_token_id)

    def _hidden_states(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        rows = self._rows(input_ids, attention_mask)
        return self.model.norm(self.model.encode(rows))[:, : input_ids.shape[1]]


class GmlpScaleModel(GmlpScalePreTrainedModel):
    """The hidden states after the last LayerNorm, [B, N, D]."""

    def __init__(self, config: GmlpScaleConfig):
        super().__init__(config, head=Backbone, dropout=config.dropout)

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask=None, token_type_ids=None):
        return BaseModelOutput(last_hidden_state=self._hidden_states(input_ids, attention_mask))


class GmlpScaleForMaskedLM(GmlpScalePreTrainedModel):
    """Logits [B, N, V] at every position. The output matrix is the token embedding, so it has no parameter here."""

    def __init__(self, config: GmlpScaleConfig):
        super().__init__(config, head=Backbone, dropout=0.0)

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask=None, token_type_ids=None, labels: Tensor | None = None):
        """labels: int64 [B, N], -100 where nothing is to be predicted; the loss is the mean over all others."""
        logits_BNV = F.linear(self._hidden_states(input_ids, attention_mask), self.model.embedding.weight).float()
        loss = None if labels is None else F.cross_entropy(logits_BNV.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits_BNV)


class GmlpScaleForSequenceClassification(GmlpScalePreTrainedModel):
    """Logits [B, C] from the last layer's <cls>."""

    def __init__(self, config: GmlpScaleConfig):
        super().__init__(
            config, head=partial(SequenceClassifier, num_classes=config.num_labels), dropout=config.dropout
        )

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask=None, token_type_ids=None, labels: Tensor | None = None):
        """labels: int64 [B]; the loss is the mean cross-entropy. With one class, float [B] and the squared error."""
        logits_BC = self.model.predict(LabelledBatch(self._rows(input_ids, attention_mask), labels))
        loss = None if labels is None else label_loss(logits_BC, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits_BC)


class GmlpScaleForQuestionAnswering(GmlpScalePreTrainedModel):
    """Logits [B, N] for the answer to begin and to end at each position; <cls> stands for no answer."""

    def __init__(self, config: GmlpScaleConfig):
        super().__init__(config, head=SpanPredictor, dropout=config.dropout)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask=None,
        token_type_ids=None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
    ):
        """start_positions, end_positions: int64 [B]; the loss is the mean of both cross-entropies over positions."""
        batch = SpanBatch(self._rows(input_ids, attention_mask), start_positions, end_positions)
        start_logits_BN, end_logits_BN = self.model.predict(batch).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = F.cross_entropy(start_logits_BN, start_positions) + F.cross_entropy(end_logits_BN, end_positions)
            loss = loss / 2
        num_positions = input_ids.shape[1]
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits_BN[:, :num_positions], end_logits=end_logits_BN[:, :num_positions]
        )
