"""What TensorBoard reads beside the scalars."""

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

from gmlp_scale.train.filters import draw_filters
from gmlp_scale.train.sinks import EventsFile, picture_summary, recipe_summaries

FIELDS = {
    "name": "smoke",
    "train.num_steps": 9,
    "train.compile": True,
    "optimizer.betas": [0.9, 0.999],
    "data.cache_dir": None,
}


def test_tensorboard_reads_the_recipe_the_layout_and_a_picture_and_drops_those_after_a_resume(tmp_path):
    for start_step in (0, 5):
        events = EventsFile(tmp_path, start_step)
        for summary in recipe_summaries(FIELDS):
            events.add_summary(start_step, summary)
        for step in (start_step + 4, start_step + 8):
            events.add_summary(step, picture_summary("filters", draw_filters([np.arange(8.0), np.ones(8)])))
        events.close()
    read = EventAccumulator(str(tmp_path)).Reload()

    text = read.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "| train.num_steps | `9` |" in text and "| optimizer.betas | `[0.9, 0.999]` |" in text
    assert read.SummaryMetadata("config/text_summary").plugin_data.plugin_name == "text"

    session = parse_session_start_info_plugin_data(read.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content)
    assert session.hparams["train.num_steps"].number_value == 9 and session.hparams["train.compile"].bool_value
    assert session.hparams["data.cache_dir"].string_value == "null"

    layout = Layout.FromString(read.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["Training", "Speed"]
    assert list(layout.category[0].chart[0].multiline.tag) == ["^train/loss$", "^eval/loss$"]

    pictures = read.Images("filters")
    assert [picture.step for picture in pictures] == [4, 9, 13]
    png = pictures[-1].encoded_image_string
    assert png.startswith(b"\x89PNG")
    width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))
    assert (pictures[-1].width, pictures[-1].height) == (width, height)
