"""Writes text with a trained model of next characters.

python launch/generate.py --run outputs/mlp_attention --prompt 'ROMEO:' --length 500
"""

import argparse
import sys

from gmlp_scale.analysis.predictions import generate, read_model
from gmlp_scale.distributed.logs import command
from gmlp_scale.options import count_from_0
from gmlp_scale.storage.files import plain_place


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recipe = "a run of a recipe with task: characters"
    parser.add_argument("--run", required=True, type=plain_place, metavar="RUN_DIR_OR_URL", help=recipe)
    parser.add_argument("--step", type=int, help="the checkpoint after this step (default: the newest good one)")
    parser.add_argument("--prompt", default="\n", help="what the text begins with (default: a line break)")
    parser.add_argument("--length", type=count_from_0, default=500, help="characters to write (default: %(default)s)")
    temperature = "0 always takes the likeliest character (default: %(default)s)"
    parser.add_argument("--temperature", type=float, default=1.0, help=temperature)
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same text (default: %(default)s)")
    options = parser.parse_args()
    model, alphabet = read_model(options.run, options.step)
    characters = generate(
        model,
        alphabet,
        options.prompt,
        num_characters=options.length,
        temperature=options.temperature,
        seed=options.seed,
    )
    print(options.prompt, end="")
    for character in characters:
        print(character, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
