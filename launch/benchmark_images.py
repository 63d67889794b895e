"""Counts the images per second and core of the loader, beside a plain torch DataLoader with the same transforms.

python launch/benchmark_images.py --config configs/images/gmlp_s.yaml

It makes JPEG pictures of 500 x 375 itself. Prints JSON; only the ratio is worth quoting.
"""

import argparse
import json
import sys

from gmlp_scale.benchmark.image_loading import BATCH_SIZE, measure_image_loading
from gmlp_scale.recipe_file import load_config
from gmlp_scale.tasks.images import ImagesConfig
from gmlp_scale.telling import command


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe with task: images")
    parser.add_argument("--images", type=int, default=256, help=f"a multiple of {BATCH_SIZE} (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each loader (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    options = parser.parse_intermixed_args()
    if options.images < 1 or options.images % BATCH_SIZE or options.rounds < 1:
        parser.error(f"--images must be a multiple of {BATCH_SIZE}, and --rounds at least 1")
    run = load_config(ImagesConfig, options.config, options.overrides)
    print(json.dumps(measure_image_loading(run, options.images, options.rounds), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
