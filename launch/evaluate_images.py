"""Evaluates an image classifier on the held-out images of shards: loss, top-1 and top-5 accuracy on the centre crop.

python launch/evaluate_images.py --run outputs/gmlp_s --shards data/imagenet
python launch/evaluate_images.py --timm gmlp_s16_224.safetensors --shards data/imagenet --output scores.json
"""

import argparse
import json
import sys
from contextlib import closing

import torch

from gmlp_scale.analysis.heldout import single_process
from gmlp_scale.checkpoint.trained import TrainedModel
from gmlp_scale.data.augmentation import AugmentationConfig
from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.image_loader import ImageDataConfig, ImageLoader
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.world import World
from gmlp_scale.errors import InputError
from gmlp_scale.export.image_models import add_model_options, read_chosen
from gmlp_scale.options import count, count_from_0
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.storage.files import write_text
from gmlp_scale.tasks.images import evaluate_images


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--shards", required=True, metavar="SHARDS_DIR", help="a folder that prepare_images.py wrote")
    parser.add_argument("--cache-dir", metavar="DIR", help="keeps copies of the shards; needed for shards at a URL")
    parser.add_argument("--batch-size", type=count, default=64, help="images in a forward pass (default: %(default)s)")
    parser.add_argument(
        "--workers", type=count_from_0, default=2, help="processes that decode images (default: %(default)s)"
    )
    parser.add_argument("--output", metavar="FILE_OR_URL.json", help="also write the scores to this file")
    options = parser.parse_args()
    trained = read_chosen(options)
    with single_process("launch/evaluate_images.py") as world:
        scores = _evaluate(trained, options, world)
    text = json.dumps(scores, indent=1)
    print(text)
    if options.output:
        write_text(options.output, text + "\n")
    return 0


@torch.no_grad()
def _evaluate(trained: TrainedModel, options: argparse.Namespace, world: World) -> dict[str, float]:
    model = trained.build().to(world.device)
    loader = ImageLoader(
        ImageDataConfig(shards=options.shards, cache_dir=options.cache_dir, num_workers=options.workers),
        AugmentationConfig(),
        BatchPlan(seed=0, batch_sizes=Piecewise(options.batch_size), micro_batch_size=options.batch_size),
        image_size=model.image_size,
        num_classes=len(trained.labels),
    )
    with closing(loader):
        for label, (name, other) in enumerate(zip(trained.labels, loader.manifest.classes, strict=True)):
            if options.run and name != other:
                raise InputError(
                    f"class {label} is {name!r} in the run and {other!r} in the shards at {options.shards}, so labels "
                    "mean other things: write shards of the run's classes, in their order"
                )
        num_images = loader.manifest.num_rows("heldout")
        return {"images": num_images, **evaluate_images(model.predict, loader.heldout_batches(num_images), world)}


if __name__ == "__main__":
    sys.exit(main())
