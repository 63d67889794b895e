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
from pathlib import Path
from typing import TYPE_CHECKING

from gmlp_scale.analysis import arrays, pictures
from gmlp_scale.analysis.tensorboard import add_picture
from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.checkpoint.trained import TrainedModel, read_export
from gmlp_scale.distributed.logs import command
from gmlp_scale.errors import InputError
from gmlp_scale.export.image_models import read_image_run
from gmlp_scale.storage.files import local_path
from gmlp_scale.train.filters import draw_filters

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@command
def main() -> int:
    options = _parser().parse_args()
    if options.picture == "scaling":
        figure, step = _scaling(options.runs), 0
    elif options.picture == "image-filters":
        trained = read_image_run(options.run, options.step)
        matrices = arrays.chosen_blocks(arrays.image_matrices(trained), options.blocks)
        figure, step = pictures.draw_image_filters(matrices), trained.details["step"]
    else:
        if options.export and options.step is not None:
            raise InputError("--step needs --run: an export has only one step")
        trained = read_run(options.run, options.step) if options.run else read_export(options.export)
        figure, step = _draw(trained, options), trained.step or 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=120, format="png")
    if folder := options.tensorboard or (options.run and f"{options.run}/tensorboard/pictures"):
        add_picture(folder, options.picture, figure, step)
    print(options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--output", type=local_path, required=True, metavar="FILE.png")
    output.add_argument(
        "--tensorboard", metavar="DIR_OR_URL", help="TensorBoard's folder for the picture (default: in the --run)"
    )
    model = argparse.ArgumentParser(add_help=False, parents=[output])
    place = model.add_mutually_exclusive_group(required=True)
    place.add_argument("--run", metavar="RUN_DIR_OR_URL", help="a run of launch/pretrain.py")
    place.add_argument("--export", metavar="HF_DIR_OR_URL", help="an export, pretrained or finetuned")
    model.add_argument("--step", type=int, help="the run's checkpoint after this step (default: the newest good one)")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pictures_by_name = parser.add_subparsers(dest="picture", required=True)
    pictures_by_name.add_parser("filters", parents=[model])
    matrices = pictures_by_name.add_parser("matrices", parents=[model])
    matrices.add_argument("--blocks", type=int, nargs="+", required=True, help="numbers of blocks, from 0")
    attention = pictures_by_name.add_parser("attention", parents=[model])
    attention.add_argument("--text-a", required=True)
    attention.add_argument("--text-b", required=True)
    attention.add_argument("--blocks", type=int, nargs="+", help="numbers of blocks, from 0 (default: the first half)")
    image_filters = pictures_by_name.add_parser("image-filters", parents=[output])
    image_filters.add_argument("--run", required=True, metavar="RUN_DIR_OR_URL")
    image_filters.add_argument("--step", type=int, help="the checkpoint after this step (default: the newest good one)")
    image_filters.add_argument("--blocks", type=int, nargs="+", required=True, help="numbers of blocks, from 0")
    scaling = pictures_by_name.add_parser("scaling", parents=[output])
    scaling.set_defaults(run=None)
    scaling.add_argument("--runs", nargs="+", required=True, metavar="RUN_DIR_OR_URL")
    return parser


def _draw(trained: TrainedModel, options: argparse.Namespace) -> "Figure":
    match options.picture:
        case "filters":
            return draw_filters(arrays.filters_of(trained))
        case "matrices":
            return pictures.draw_matrices(arrays.chosen_blocks(arrays.spatial_matrices(trained), options.blocks))
        case "attention":
            ids, tokens = arrays.sentence_pair(trained, options.text_a, options.text_b)
            return pictures.draw_attention(arrays.attention_by_title(trained, ids, options.blocks), tokens)


def _scaling(run_dirs: list[Path]) -> "Figure":
    sizes = arrays.run_sizes(run_dirs)
    law = arrays.scaling_law(sizes)
    print(arrays.scaling_table(sizes, law))
    return pictures.draw_scaling(sizes, law)


if __name__ == "__main__":
    sys.exit(main())
