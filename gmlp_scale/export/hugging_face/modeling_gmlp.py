"""gmlp_scale's encoders for transformers: each class holds one of the package's own models and returns its logits.

A batch does not change the logits of its rows. If config.masks_padding, no position reads padding, and a text takes the
time of its own length. A model made before that field reads it: its rows are padded to the length that rows had in
training, and what was added is cut off again. Padding is on the right: <pad> in `input_ids`, or any token where
`attention_mask`, [B, N], is 0. `inputs_embeds`, [B, N, D], may stand in for `input_ids`; then `attention_mask` alone
says what is padding. `token_type_ids` and other names are accepted, because tokenizers and trainers may give them, and
not used. `position_ids` must be the places in the row, 0, 1, 2 ...

Every class's `forward` takes these and the labels as int64 or float tensors, and `output_hidden_states` and
`output_attentions` as names. It returns on request
    hidden_states   what each block read, and the last state after the final LayerNorm: [B, N, D], one more than blocks
    attentions      [B, H, N, N] for each block that has attention; an aMLP's tiny attention has one head. A row of an
                    aMLP that reads padding sums to less than 1 where a part fell on what the model added.

Shape suffixes: B batch, N positions, R positions with the padding that the model added, D width, V vocabulary,
C classes, H heads.
"""

import shutil
from functools import partial
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import cached_file, can_return_tuple, is_peft_available, logging

from gmlp_scale.export.hugging_face.configuration_gmlp import GmlpScaleConfig
from gmlp_scale.models import FAMILIES, ModelConfig, build_model
from gmlp_scale.models.backbone import Backbone
from gmlp_scale.models.task_heads import SequenceClassifier, SpanPredictor, TokenTagger

logger = logging.get_logger(__name__)

if is_peft_available():
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    # Not those over positions, W and the Mixer's: they are multiplied from the left, which LoRA does not know.
    TARGETS["gmlp_scale"] = ["qkv", "value", "hidden", "out", "expand", "project", "offsets"]


def model_config(config: GmlpScaleConfig) -> ModelConfig:
    family = FAMILIES[config.kind]
    fields = signature(family).parameters  # of which a config written by an older version lacks the newest
    return family(**{name: getattr(config, name) for name in fields if hasattr(config, name)})


class GmlpScaleBlocks(PreTrainedModel):
    """`self.model` is the package's model, so every class has that model's parameter names after "model."."""

    config_class = GmlpScaleConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # the blocks call it themselves, whatever attn_implementation says
    accepts_loss_kwargs = False  # whether Trainer gives `forward` num_items_in_batch

    def __init__(self, config: GmlpScaleConfig, head, **settings):
        super().__init__(config)
        self.model = build_model(model_config(config), head=head, seed=None, **settings)
        self.gradient_checkpointing = False  # transformers sets it, and the function that recomputes a block
        self._no_split_modules = list({type(block).__name__ for block in self.model.blocks})

    def run_blocks(
        self, x_BRD: Tensor, is_token_BR: Tensor | None, output_hidden_states: bool | None, output_attentions=False
    ) -> tuple[list[Tensor], list[Tensor]]:
        """x_BRD after the last LayerNorm, behind what each block read if that is asked for; and attentions_BHRR."""
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states, attentions = [], []
        for block in self.model.blocks:
            if output_hidden_states:
                states.append(x_BRD)
            if output_attentions:
                attentions.append(block.attention_weights(x_BRD, is_token_BR))
            if self.gradient_checkpointing and self.training:
                x_BRD = self._gradient_checkpointing_func(block.__call__, x_BRD, is_token_BR)
            else:
                x_BRD = block(x_BRD, is_token_BR)
        return [*states, self.model.norm(x_BRD)], attentions


class GmlpScalePreTrainedModel(GmlpScaleBlocks):
    """An encoder of text."""

    def save_pretrained(self, save_directory, *arguments, **options) -> None:
        """Also copies tokenizer.model from where the model came from: finetuning with gmlp_scale needs it."""
        super().save_pretrained(save_directory, *arguments, **options)
        try:
            shutil.copy(cached_file(self.name_or_path, "tokenizer.model"), save_directory)
        except (OSError, TypeError) as error:  # TypeError: a model from scratch came from nowhere
            logger.warning("no tokenizer.model in %s, so gmlp_scale cannot finetune it: %s", save_directory, error)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding

    def set_input_embeddings(self, embedding: nn.Embedding) -> None:
        self.model.embedding = embedding

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # N(0, 0.02), zero biases and LayerNorms of 1 and 0, as the package does
        if hasattr(module, "init_special_weights"):
            module.init_special_weights(torch.default_generator)

    def _encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **ignored,
    ) -> tuple[Tensor, int, dict[str, tuple[Tensor, ...] | None]]:
        """x_BRD after the last LayerNorm, N, and the output's hidden_states and attentions.

        Raises:
            ValueError: not one of input_ids and inputs_embeds was given, the rows are too long, padded on the left or
                have positions of their own, or attentions are asked of a model without any.
        """
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_attentions and getattr(self.model.blocks[0], "attention", None) is None:
            raise ValueError(f"a model of kind {self.config.kind} has no attention: leave output_attentions out")
        embedded_BRD, is_token_BR, num_positions = self._rows(input_ids, attention_mask, inputs_embeds)
        _check_places(is_token_BR[:, :num_positions], position_ids)
        x_BRD, is_token_BR = self.model.first_states(embedded_BRD), self.model.tokens(is_token_BR)
        states, attentions = self.run_blocks(x_BRD, is_token_BR, output_hidden_states, output_attentions)
        shown = tuple(self._cut(x_BRD, num_positions) for x_BRD in states)
        cut = tuple(self._cut(self._cut(of, num_positions, 2), num_positions, 3) for of in attentions)
        extras = {"hidden_states": shown if len(shown) > 1 else None, "attentions": cut or None}
        return states[-1], num_positions, extras

    def _rows(self, input_ids, attention_mask, inputs_embeds) -> tuple[Tensor, Tensor, int]:
        """embedded_BRD, is_token_BR and N. All padding has the embedding of <pad>.

        R is the length of rows in training where that matters, else N.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, and not both")
        pad_id = self.config.pad_token_id
        if inputs_embeds is not None:  # then the ids only divide padding from tokens
            input_ids = torch.full(inputs_embeds.shape[:2], self.config.cls_token_id, device=inputs_embeds.device)
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(attention_mask == 0, pad_id)
        num_positions = input_ids.shape[1]
        if not self.model.masks_padding:
            row_length = self.config.row_length or self.config.sequence_length
            if num_positions > row_length:
                raise ValueError(
                    f"the rows hold {num_positions} tokens but in training they held {row_length}: cut the rows, as "
                    f"the tokenizer does with truncation=True, max_length={row_length}"
                )
            # Padding by R - N would be no operation where N is R, and so fix N in a program that torch.export writes.
            input_ids = F.pad(input_ids, (0, row_length), value=pad_id)[:, :row_length]
            if inputs_embeds is not None:
                inputs_embeds = F.pad(inputs_embeds, (0, 0, 0, row_length))[:, :row_length]
        embedded_BRD, is_token_BR = self.model.embedding(input_ids), input_ids != pad_id
        if inputs_embeds is not None:
            embedded_BRD = torch.where(is_token_BR.unsqueeze(-1), inputs_embeds, embedded_BRD)
        return embedded_BRD, is_token_BR, num_positions

    def _mean_loss(self, logits: Tensor, labels: Tensor | None, classes, given: dict) -> Tensor | None:
        """The mean over all labels, of the batch or, where Trainer accumulates batches, of all of them."""
        num_items = {"num_items_in_batch": given.get("num_items_in_batch")}
        return None if labels is None else self.loss_function(logits, labels.contiguous(), classes, **num_items)

    def _cut(self, padded: Tensor, num_positions: int, axis: int = 1) -> Tensor:
        """The first N positions of `padded`, without the padding that the model added."""
        if self.model.masks_padding:
            return padded
        # A slice is contiguous only where N is R, and a program that torch.export writes would be for one of the cases.
        return padded.index_select(axis, torch.arange(num_positions, device=padded.device))


def _check_places(is_token_BN: Tensor, position_ids: Tensor | None) -> None:
    """Raises ValueError for padding on the left, or positions other than the places in a row: both would give wrong
    answers. Traced programs and the meta device have no values to look at."""
    if torch.compiler.is_compiling() or is_token_BN.is_meta:
        return
    if (~is_token_BN[:, 0] & is_token_BN.any(1)).any():
        raise ValueError('a row begins with padding; needed: padding on the right, tokenizer.padding_side = "right"')
    places_N = torch.arange(is_token_BN.shape[1], device=is_token_BN.device)
    if position_ids is not None and ((position_ids != places_N) & is_token_BN).any():
        raise ValueError("position_ids are other than 0, 1, 2 ...: a token's position is its place in the row")


class GmlpScaleModel(GmlpScalePreTrainedModel):
    """The hidden states after the last LayerNorm, [B, N, D]."""

    def __init__(self, config: GmlpScaleConfig):
        super().__init__(config, head=Backbone, dropout=config.dropout)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, *, position_ids=None, inputs_embeds=None, **kwargs):
        x_BRD, num_positions, extras = self._encode(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        return BaseModelOutput(last_hidden_state=self._cut(x_BRD, num_positions), **extras)


class GmlpScaleForMaskedLM(GmlpScalePreTrainedModel):
    """Logits [B, N, V] at every position. The output matrix is the token embedding, which the weights hold once."""

    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: GmlpScaleConfig):
        super().__init__(config, head=Backbone, dropout=0.0)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, lm_head: nn.Linear) -> None:
        self.lm_head = lm_head

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, *, position_ids=None, inputs_embeds=None, labels=None, **kwargs
    ):
        """labels: int64 [B, N], -100 where nothing is to be predicted; the loss is the mean over all others."""
        x_BRD, num_positions, extras = self._encode(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        logits_BNV = self.lm_head(self._cut(x_BRD, num_positions)).float()
        loss = self._mean_loss(logits_BNV, labels, self.config.vocab_size, kwargs)
        return MaskedLMOutput(loss=loss, logits=logits_BNV, **extras)


class GmlpScaleForSequenceClassification(GmlpScalePreTrainedModel):
    """Logits [B, C] from the last layer's <cls>."""

    def __init__(self, config: GmlpScaleConfig):
        head = partial(SequenceClassifier, num_classes=config.num_labels)
        super().__init__(config, head=head, dropout=config.dropout)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, *, position_ids=None, inputs_embeds=None, labels=None, **kwargs
    ):
        """config.problem_type says what the labels are, and which loss is their mean. If None, it follows from them.

        | regression                  | float [B] or [B, C], squared error; without a problem_type if num_labels is 1
        | single_label_classification | int64 [B], cross-entropy
        | multi_label_classification  | float [B, C] of zeros and ones, binary cross-entropy
        """
        x_BRD, _, extras = self._encode(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        logits_BC = self.model.logits(x_BRD[:, 0])
        loss = None if labels is None else self.loss_function(labels, logits_BC, self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits_BC, **extras)


class GmlpScaleForTokenClassification(GmlpScalePreTrainedModel):
    """Logits [B, N, C] at every position."""

    accepts_loss_kwargs = True

    def __init__(self, config: GmlpScaleConfig):
        head = partial(TokenTagger, num_classes=config.num_labels)
        super().__init__(config, head=head, dropout=config.dropout)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, *, position_ids=None, inputs_embeds=None, labels=None, **kwargs
    ):
        """labels: int64 [B, N], -100 where nothing is to be predicted; the loss is the mean over all others."""
        x_BRD, num_positions, extras = self._encode(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        logits_BNC = self.model.logits(self._cut(x_BRD, num_positions))
        loss = self._mean_loss(logits_BNC, labels, self.config, kwargs)
        return TokenClassifierOutput(loss=loss, logits=logits_BNC, **extras)


class GmlpScaleForQuestionAnswering(GmlpScalePreTrainedModel):
    """Logits [B, N] for the answer to begin and to end at each position; <cls> stands for no answer."""

    def __init__(self, config: GmlpScaleConfig):
        # A pretraining export has no such entry, or pipeline(model=...) without a task would answer questions.
        of_answers = {"impl": "answering_pipeline.QuestionAnsweringPipeline", "pt": ["AutoModelForQuestionAnswering"]}
        config.custom_pipelines = {"question-answering": of_answers}
        super().__init__(config, head=SpanPredictor, dropout=config.dropout)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        *,
        position_ids=None,
        inputs_embeds=None,
        start_positions=None,
        end_positions=None,
        **kwargs,
    ):
        """start_positions, end_positions: int64 [B]; the loss is the mean of both cross-entropies over positions."""
        x_BRD, num_positions, extras = self._encode(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        start_logits_BR, end_logits_BR = self.model.logits(x_BRD).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits_BR, end_logits_BR, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=self._cut(start_logits_BR, num_positions),
            end_logits=self._cut(end_logits_BR, num_positions),
            **extras,
        )
