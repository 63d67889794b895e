"""config.json of a gMLP, aMLP, Transformer or MLP-Mixer encoder that gmlp_scale trained."""

from transformers import PretrainedConfig


class GmlpScaleConfig(PretrainedConfig):
    """The `model` section of the training recipe, field by field, and

    dropout: probability while a classification or question answering model is trained: of the embedding, of every
        residual branch and of attention weights. Masked language modelling is without.
    row_length: rows shorter than this are padded to it within the model, as they were when the model was finetuned.
        Only the Transformers mask padding: with the others the same text padded otherwise would give other logits.
        None: rows stay.
    document_stride: tokens from one window of a long context to the next, as in finetuning; for question answering.
    """

    model_type = "gmlp_scale"
    kernels = "torch"  # the fused kernels stay in the package
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "intermediate_size": "d_ffn",
        "num_hidden_layers": "num_blocks",
        "max_position_embeddings": "sequence_length",
    }

    def __init__(
        self,
        kind: str = "gmlp",
        dropout: float = 0.1,
        row_length: int | None = None,
        document_stride: int = 128,
        **fields,
    ):
        self.kind = kind
        self.dropout = dropout
        self.row_length = row_length
        self.document_stride = document_stride
        super().__init__(**fields)
