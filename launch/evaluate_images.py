"""Evaluates an image classifier on the held-out images of shards: loss, top-1 and top-5 accuracy on the centre crop.

python launch/evaluate_images.py --run outputs/gmlp_s --shards data/imagenet
python launch/evaluate_images.py --timm gmlp_s16_224.safetensors --shards data/imagenet --output scores.json
"""

import argparse
import json
import sys
from contextlib import closing

import torch

from gmlp_scale.data.augmentation import AugmentationConfig
from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.image_loader import ImageDataConfig, ImageLoader
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.errors import InputError
from gmlp_scale.export.image_models import TrainedClassifier, read_image_run, read_timm
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.storage.files import local_path, write_text
from gmlp_scale.tasks.images import evaluate_images


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", metavar="RUN_DIR_OR_URL", help="a run of a recipe with task: images")
    source.add_argument("--timm", type=local_path, metavar="FILE.safetensors", help="the weights of a gMLP of timm")
    parser.add_argument("--step", type=int, help="the run's checkpoint after this step (default: the newest good one)")
    parser.add_argument("--shards", required=True, metavar="SHARDS_DIR", help="a folder that prepare_images.py wrote")
    parser.add_argument("--cache-dir", metavar="DIR", help="keeps copies of the shards; needed for shards at a URL")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a forward pass (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that decode images (default: %(default)s)")
    parser.add_argument("--output", metavar="FILE_OR_URL.json", help="also write the scores to this file")
    options = parser.parse_args()
    if options.step is not None and options.timm:
        parser.error("--step needs --run")
    if options.batch_size < 1 or options.workers < 0:
        parser.error("--batch-size must be at least 1, and --workers not negative")
    trained = read_timm(options.timm) if options.timm else read_image_run(options.run, options.step)
    with start_world(timeout_seconds=600, hear_stop_signals=False) as world:
        if world.size > 1:
            raise InputError("launch/evaluate_images.py is one process: start it without torchrun or deepspeed")
        scores = _evaluate(trained, options, world)
    text = json.dumps(scores, indent=1)
    print(text)
    if options.output:
        write_text(options.output, text + "\n")
    return 0


@torch.no_grad()
def _evaluate(trained: TrainedClassifier, options: argparse.Namespace, world: World) -> dict[str, float]:
    loader = ImageLoader(
        ImageDataConfig(shards=options.shards, cache_dir=options.cache_dir, num_workers=options.workers),
        AugmentationConfig(),
        BatchPlan(seed=0, batch_sizes=Piecewise(options.batch_size), micro_batch_size=options.batch_size),
        image_size=trained.image_size,
        num_classes=len(trained.classes),
    )
    with closing(loader):
        if options.run:
            check_same_classes(trained.classes, loader.manifest.classes, options.shards)
        num_images = loader.manifest.num_rows("heldout")
        model = trained.build().to(world.device)
        return {"images": num_images, **evaluate_images(model.predict, loader.heldout_batches(num_images), world)}


def check_same_classes(of_run: tuple[str, ...], of_shards: tuple[str, ...], folder: str) -> None:
    """Raises InputError, which names the first class that differs. Both have equally many."""
    for label, (name, other) in enumerate(zip(of_run, of_shards, strict=True)):
        if name != other:
            raise InputError(
                f"class {label} is {name!r} in the run and {other!r} in the shards at {folder}, so labels mean "
                "other things: write shards of the run's classes, in their order"
            )


if __name__ == "__main__":
    sys.exit(main())
