"""Writes an image classifier as a Hugging Face folder or with timm's names, from a run or from timm's weights.

python launch/export_images.py --run outputs/gmlp_s --output exports/gmlp_s
python launch/export_images.py --run outputs/gmlp_s --output-timm gmlp_s16_224.safetensors
python launch/export_images.py --timm gmlp_s16_224.safetensors --output exports/gmlp_s
"""

import argparse
import sys

from gmlp_scale.distributed.logs import command
from gmlp_scale.export.folder import check_is_free
from gmlp_scale.export.image_models import read_image_run, read_timm, write_image_export, write_timm
from gmlp_scale.storage.files import local_path


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", metavar="RUN_DIR_OR_URL", help="a run of a recipe with task: images")
    source.add_argument("--timm", type=local_path, metavar="FILE.safetensors", help="the weights of a gMLP of timm")
    parser.add_argument("--step", type=int, help="the run's checkpoint after this step (default: the newest good one)")
    parser.add_argument("--output", type=local_path, metavar="HF_DIR", help="a new folder")
    parser.add_argument(
        "--output-timm", type=local_path, metavar="FILE.safetensors", help="a file that timm's model loads"
    )
    options = parser.parse_args()
    if not options.output and not options.output_timm:
        parser.error("give --output, --output-timm or both")
    if options.step is not None and options.timm:
        parser.error("--step needs --run")
    if options.output:
        check_is_free(options.output)
    trained = read_timm(options.timm) if options.timm else read_image_run(options.run, options.step)
    if options.output_timm:
        write_timm(trained, options.output_timm)
        print(options.output_timm)
    if options.output:
        write_image_export(trained, options.output)
        print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
