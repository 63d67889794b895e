"""gmlp_scale's image classifiers for transformers.

`pixel_values`, float [B, 3, H, W], are what the export's image processor gives: from -1 to 1.

Shape suffixes: B batch, C classes.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils import can_return_tuple

from gmlp_scale.export.hugging_face.configuration_gmlp import GmlpScaleConfig
from gmlp_scale.export.hugging_face.modeling_gmlp import GmlpScaleBlocks
from gmlp_scale.models.image_classifier import ImageClassifier


class GmlpScaleForImageClassification(GmlpScaleBlocks):
    """Logits [B, C]; on request the hidden states, as those of text."""

    main_input_name = "pixel_values"

    def __init__(self, config: GmlpScaleConfig):
        super().__init__(config, head=partial(ImageClassifier, patch_size=config.patch_size))
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, output_hidden_states: bool | None = None, **kwargs
    ):
        """labels: int64 [B]; the loss is the mean cross-entropy."""
        patches_BND = self.model.embedding((pixel_values + 1) * 127.5)  # the model reads pixels from 0 to 255
        states, _ = self.run_blocks(patches_BND, None, output_hidden_states)
        logits_BC = self.model.logits(states[-1])
        loss = None if labels is None else F.cross_entropy(logits_BC, labels)
        return ImageClassifierOutput(
            loss=loss, logits=logits_BC, hidden_states=tuple(states) if len(states) > 1 else None
        )
