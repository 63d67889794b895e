"""Writes an image classifier as a Hugging Face folder or with timm's names, from a run or from timm's weights.

python launch/export_images.py --run outputs/gmlp_s --output exports/gmlp_s
python launch/export_images.py --run outputs/gmlp_s --output-timm gmlp_s16_224.safetensors
python launch/export_images.py --timm gmlp_s16_224.safetensors --output exports/gmlp_s
"""

import argparse
import sys

from gmlp_scale.distributed.logs import command
from gmlp_scale.export.folder import check_is_free
from gmlp_scale.export.image_models import add_model_options, read_chosen, write_image_export, write_timm
from gmlp_scale.storage.files import local_path


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--output", type=local_path, metavar="HF_DIR", help="a new folder")
    timm = "a file that timm's model loads"
    parser.add_argument("--output-timm", type=local_path, metavar="FILE.safetensors", help=timm)
    options = parser.parse_args()
    if not options.output and not options.output_timm:
        parser.error("give --output, --output-timm or both")
    if options.output:
        check_is_free(options.output)
    trained = read_chosen(options)
    for output, write in ((options.output_timm, write_timm), (options.output, write_image_export)):
        if output:
            write(trained, output)
            print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
