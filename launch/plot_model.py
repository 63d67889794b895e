"""Pictures of what trained models learned, as in "Pay Attention to MLPs", as PNG and in TensorBoard.

python launch/plot_model.py filters --run outputs/gmlp_base --output filters.png
python launch/plot_model.py matrices --run outputs/gmlp_base --blocks 0 5 11 --output matrices.png
python launch/plot_model.py attention --export exports/amlp_base --text-a "He ran." --text-b "He sat." --output a.png
python launch/plot_model.py image-filters --run outputs/gmlp_s --blocks 0 14 29 --output image_filters.png
python launch/plot_model.py scaling --runs outputs/small outputs/base outputs/large --output scaling.png

filters: what W gives the middle position, for each block (Figure 4).
matrices: the whole W of some blocks (Figure 9).
attention: for each pair of tokens the maximum of the tiny attentions in the first half of the blocks (appendix D), or
    the attention of the --blocks.
image-filters: what W gives some patches of an image (Figure 3), of a run with task: images.
scaling: the last held-out perplexity of runs against their parameters, with a power law (Figure 8).
"""

import argparse
import sys
from typing import TYPE_CHECKING

from gmlp_scale.analysis import pictures
from gmlp_scale.analysis.run_records import open_writer
from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.checkpoint.trained import TrainedModel, read_export
from gmlp_scale.distributed.logs import command
from gmlp_scale.errors import InputError
from gmlp_scale.export.image_models import read_image_run
from gmlp_scale.storage.files import local_path, plain_place
from gmlp_scale.train.filters import draw_filters, middle_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@command
def main() -> int:
    options = _parser().parse_args()
    figure, step = _draw(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=120, format="png")
    if folder := options.tensorboard or (options.run and f"{options.run}/tensorboard/pictures"):
        with open_writer(folder) as writer:
            writer.add_figure(options.picture, figure, step)
    print(options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--output", type=local_path, required=True, metavar="FILE.png")
    board = "TensorBoard's folder for the picture (default: in the --run)"
    output.add_argument("--tensorboard", metavar="DIR_OR_URL", help=board)
    model = argparse.ArgumentParser(add_help=False, parents=[output])
    place = model.add_mutually_exclusive_group(required=True)
    place.add_argument("--run", type=plain_place, metavar="RUN_DIR_OR_URL", help="a run of launch/pretrain.py")
    place.add_argument("--export", metavar="HF_DIR_OR_URL", help="an export, pretrained or finetuned")
    model.add_argument("--step", type=int, help="the run's checkpoint after this step (default: the newest good one)")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = parser.add_subparsers(dest="picture", required=True)
    names.add_parser("filters", parents=[model])
    matrices = names.add_parser("matrices", parents=[model])
    attention = names.add_parser("attention", parents=[model])
    attention.add_argument("--text-a", required=True)
    attention.add_argument("--text-b", required=True)
    attention.add_argument("--blocks", type=int, nargs="+", help="numbers of blocks, from 0 (default: the first half)")
    images = names.add_parser("image-filters", parents=[output])
    images.add_argument(
        "--run", required=True, type=plain_place, metavar="RUN_DIR_OR_URL", help="a run of a recipe with task: images"
    )
    images.add_argument("--step", type=int, help="the checkpoint after this step (default: the newest good one)")
    for picture in (matrices, images):
        picture.add_argument("--blocks", type=int, nargs="+", required=True, help="numbers of blocks, from 0")
    scaling = names.add_parser("scaling", parents=[output])
    scaling.set_defaults(run=None)
    scaling.add_argument("--runs", nargs="+", required=True, type=plain_place, metavar="RUN_DIR_OR_URL")
    return parser


def _draw(options: argparse.Namespace) -> tuple["Figure", int]:
    """The picture, and the step that it shows."""
    if options.picture == "scaling":
        sizes = pictures.run_sizes(options.runs)
        law, table = pictures.scaling_law(sizes)
        print(table)
        return pictures.draw_scaling(sizes, law), 0
    trained = _read(options)
    match options.picture:
        case "filters":
            figure = draw_filters([middle_row(matrix_NN) for matrix_NN in pictures.spatial_matrices(trained)])
        case "matrices" | "image-filters":
            matrices = pictures.chosen_blocks(pictures.spatial_matrices(trained), options.blocks)
            draw = pictures.draw_matrices if options.picture == "matrices" else pictures.draw_image_filters
            figure = draw(matrices)
        case "attention":
            ids, tokens = pictures.sentence_pair(trained, options.text_a, options.text_b)
            figure = pictures.draw_attention(pictures.attention_by_title(trained, ids, options.blocks), tokens)
    return figure, trained.step or 0


def _read(options: argparse.Namespace) -> TrainedModel:
    if options.picture == "image-filters":
        return read_image_run(options.run, options.step)
    if options.run:
        return read_run(options.run, options.step)
    if options.step is not None:
        raise InputError("--step needs --run: an export has only one step")
    return read_export(options.export)


if __name__ == "__main__":
    sys.exit(main())
