"""config.json of an encoder that gmlp_scale trained."""

from transformers import PretrainedConfig


class GmlpScaleConfig(PretrainedConfig):
    """The fields of the recipe's `model` section, and

    dropout: the probability of dropout while a classification or question answering model is trained: of the
        embedding, of every residual branch and of attention weights. Masked language modelling has no dropout.
    row_length: the greatest length of rows in finetuning. None: sequence_length, the length of rows in pretraining. A
        model without masks_padding would give other logits for the same text with other padding, so it pads shorter
        rows to this length.
    document_stride: tokens from one window of a long context to the next, as in finetuning; for question answering.
    tie_word_embeddings: the output matrix of masked language modelling is the token embedding, as in pretraining.
    """

    model_type = "gmlp_scale"
    kernels = "torch"  # an export does not hold the fused kernels
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "intermediate_size": "d_ffn",
        "num_hidden_layers": "num_blocks",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "sequence_length",
    }

    def __init__(
        self,
        kind: str = "gmlp",
        dropout: float = 0.1,
        row_length: int | None = None,
        document_stride: int = 128,
        tie_word_embeddings: bool = True,
        **fields,
    ):
        self.kind = kind
        self.dropout = dropout
        self.row_length = row_length
        self.document_stride = document_stride
        # By default not sdpa, with which transformers refuses config.output_attentions.
        fields["attn_implementation"] = fields.get("attn_implementation") or "eager"
        super().__init__(tie_word_embeddings=tie_word_embeddings, **fields)
