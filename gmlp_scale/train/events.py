"""What TensorBoard shows beside scalars: the recipe as text and as hparams, a layout of its scalars, pictures."""

import io
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tensorboard.compat.proto.summary_pb2 import Summary

LAYOUT = {
    "Training": {
        "loss": ["train/loss", "eval/loss"],
        "perplexity": ["train/perplexity", "eval/perplexity"],
        "gradient norm": ["train/grad_norm"],
        "learning rate": ["train/learning_rate"],
    },
    "Speed": {
        "tokens per second": ["perf/tokens_per_second"],
        "share of the peak": ["perf/mfu"],
        "seconds per step": ["perf/step_seconds"],
        "waiting for data and checkpoints": ["perf/data_wait_fraction", "perf/checkpoint_stall_seconds"],
        "memory": ["memory/peak_gib"],
    },
}
"""Charts of the tab Custom Scalars: their tags, by category and title."""

PICTURE_DPI = 100


def recipe_summaries(fields: dict[str, Any]) -> "list[Summary]":
    """The recipe's fields, by their names with dots, as text and as hparams; and the layout."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    rows = "\n".join(f"| {name} | `{text}` |" for name, text in texts.items())
    table = f"| field | value |\n| --- | --- |\n{rows}"
    # TensorBoard takes numbers, booleans and texts.
    hparams = {name: value if isinstance(value, bool | int | float) else texts[name] for name, value in fields.items()}
    return [
        _text_summary("config/text_summary", "text", table.encode()),
        hparams_pb(hparams, trial_id=fields["name"]),
        _text_summary("custom_scalars__config__", "custom_scalars", _layout()),
    ]


def picture_summary(tag: str, figure: "Figure") -> "Summary":
    from tensorboard.compat.proto.summary_pb2 import Summary

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=PICTURE_DPI)
    width, height = (int(inches * PICTURE_DPI) for inches in figure.get_size_inches())
    image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=file.getvalue())
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _text_summary(tag: str, plugin: str, content: bytes) -> "Summary":
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
    tensor = TensorProto(dtype="DT_STRING", string_val=[content], tensor_shape=TensorShapeProto())
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def _layout() -> bytes:
    from tensorboard.plugins.custom_scalar import layout_pb2

    layout = layout_pb2.Layout()
    for category, charts in LAYOUT.items():
        of_category = layout.category.add(title=category)
        for title, tags in charts.items():
            of_category.chart.add(title=title, multiline={"tag": [f"^{tag}$" for tag in tags]})
    return layout.SerializeToString()
