"""Measures the images per second and core of the loader, beside a plain torch DataLoader with the same transforms.

python benchmarks/images.py --config configs/images/gmlp_b.yaml

It makes its own JPEG pictures of 500 x 375 pixels; each takes 0.2 MB of the temporary folder. Prints JSON; only the
ratios are worth quoting.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import torch

from benchmarks.image_loading import measure_image_loading
from benchmarks.parts import describe_machine
from gmlp_scale.distributed.logs import command
from gmlp_scale.recipe.reader import load_config
from gmlp_scale.storage.files import local_path, write_text
from gmlp_scale.tasks.images import ImagesConfig


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe with task: images")
    parser.add_argument("--images", type=int, default=4096, help="a multiple of the micro-batch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each loader (default: %(default)s)")
    parser.add_argument("--output", type=local_path, metavar="FILE.json", help="also write the report to this file")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    run = load_config(ImagesConfig, options.config, options.overrides)
    size = run.train.micro_batch_size
    if options.images < 1 or options.images % size or options.rounds < 1:
        parser.error(f"--images must be a multiple of train.micro_batch_size={size}, and --rounds at least 1")
    figures = measure_image_loading(run, options.images, options.rounds)
    machine = describe_machine(torch.device("cpu"))
    report = {"date": datetime.date.today().isoformat(), "machine": machine, "command": sys.argv[1:], run.name: figures}
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        write_text(options.output, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
