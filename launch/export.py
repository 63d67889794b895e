"""Writes a run's model as a Hugging Face folder: for finetuning, and for transformers without this package.

python launch/export.py --run outputs/gmlp_base --output exports/gmlp_base
python launch/export.py --run outputs/modern_transformer_base --output exports/modernbert --modernbert
python launch/export.py --run outputs/gmlp_base --push-to-hub OWNER/gmlp_base --every-step \\
    --license apache-2.0 --language en --dataset allenai/c4

--push-to-hub uploads it with the token in HF_TOKEN or of `hf auth login`. On the Hub each checkpoint is a revision,
such as step_000012000, and main is the newest. A repository that does not exist is created, and is public.
"""

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from gmlp_scale.checkpoint.format import folder_name
from gmlp_scale.checkpoint.saved_run import read_all_steps, read_run
from gmlp_scale.distributed.logs import command
from gmlp_scale.export.card import Publication
from gmlp_scale.export.folder import check_is_free, export_checkpoint, write_modernbert
from gmlp_scale.export.hub import open_repository, push
from gmlp_scale.storage.files import local_path, plain_place


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run", required=True, type=plain_place, metavar="RUN_DIR_OR_URL", help="a run of launch/pretrain.py"
    )
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--step", type=int, help="the checkpoint after this step (default: the newest good one)")
    steps.add_argument("--every-step", action="store_true", help="every complete checkpoint, each in HF_DIR/step_...")
    parser.add_argument("--output", type=local_path, metavar="HF_DIR", help="a new folder")
    modernbert = "as transformers' own ModernBERT, for a run of a modern_transformer"
    parser.add_argument("--modernbert", action="store_true", help=modernbert)
    parser.add_argument("--push-to-hub", metavar="OWNER/NAME", help="a model repository of the Hugging Face Hub")
    card = parser.add_argument_group("for the model card, which says unknown where nothing is given")
    card.add_argument("--license", help="the model's license by its name on the Hub, such as apache-2.0")
    card.add_argument("--language", nargs="+", default=(), metavar="CODE", help="of the training text, such as en")
    card.add_argument("--dataset", metavar="NAME", help="the training text by its name on the Hub, such as allenai/c4")
    options = parser.parse_args()
    if not options.output and not options.push_to_hub:
        parser.error("give --output, --push-to-hub or both")
    if options.modernbert and (options.license or options.language or options.dataset):
        parser.error("--modernbert writes no model card: leave --license, --language and --dataset out")
    with TemporaryDirectory() as temporary:
        _export(options, options.output or Path(temporary, "export"))
    return 0


def _export(options: argparse.Namespace, output: Path) -> None:
    publication = Publication(options.license, tuple(options.language), options.dataset)
    check_is_free(output)
    for trained in read_all_steps(options.run) if options.every_step else [read_run(options.run, options.step)]:
        revision = folder_name(trained.step)
        folder = output / revision if options.every_step else output
        if options.modernbert:  # before the Hub makes a repository: not every model can be one
            write_modernbert(trained, folder)
        if options.push_to_hub and not publication.repository:
            publication = replace(publication, repository=open_repository(options.push_to_hub))
        if not options.modernbert:
            export_checkpoint(trained, options.run, folder, replace(publication, revision=revision))
        if options.output:
            print(f"{folder} holds {trained.place}")
        if publication.repository:
            push(folder, publication.repository, trained.step)
            print(f"{publication.repository} at {revision} holds {trained.place}")
        if not options.output:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
