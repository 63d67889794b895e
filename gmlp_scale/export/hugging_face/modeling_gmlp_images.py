"""gmlp_scale's image classifiers for transformers.

`pixel_values`, float [B, 3, H, W], are what the export's image processor gives: from -1 to 1.

Shape suffixes: B batch, C classes.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils import can_return_tuple

from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.export.hugging_face.configuration_gmlp import GmlpScaleConfig
from gmlp_scale.export.hugging_face.modeling_gmlp import model_config
from gmlp_scale.models import build_model
from gmlp_scale.models.image_classifier import ImageClassifier


class GmlpScaleForImageClassification(PreTrainedModel):
    """Logits [B, C]. `self.model` is the package's model, with its parameter names after "model."."""

    config_class = GmlpScaleConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"

    def __init__(self, config: GmlpScaleConfig):
        super().__init__(config)
        head = partial(ImageClassifier, patch_size=config.patch_size)
        self.model = build_model(model_config(config), head=head, seed=None)
        self._no_split_modules = list({type(block).__name__ for block in self.model.blocks})
        self.post_init()

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None):
        """labels: int64 [B]; the loss is the mean cross-entropy."""
        images_B3HW = (pixel_values + 1) * 127.5  # the model reads pixels from 0 to 255
        logits_BC = self.model.predict(ImageBatch(images_B3HW, labels, labels, None))
        loss = None if labels is None else F.cross_entropy(logits_BC, labels)
        return ImageClassifierOutput(loss=loss, logits=logits_BC)
