"""Writes a run's model as a Hugging Face folder: for finetuning, and for transformers without this package.

python launch/export.py --run outputs/gmlp_base --output exports/gmlp_base
"""

import argparse
import sys
from pathlib import Path

from gmlp_scale.export.folder import export_pretrained
from gmlp_scale.files import print_error
from gmlp_scale.finetune.finetuning import USER_ERRORS
from gmlp_scale.run import exit_code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, metavar="RUN_DIR_OR_URL")
    parser.add_argument("--step", type=int, help="the checkpoint after this step (default: the newest good one)")
    parser.add_argument("--output", type=Path, required=True, metavar="HF_DIR", help="a new folder")
    options = parser.parse_args()
    try:
        checkpoint_path = export_pretrained(options.run, options.step, options.output)
    except (*USER_ERRORS, ValueError, OSError) as error:
        print_error(error)
        return exit_code(error)
    print(f"{options.output} holds {checkpoint_path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
