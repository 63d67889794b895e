"""Trains an export to find the passages that answer questions, and scores it beside BM25. Run again, it resumes.

python launch/search.py --model exports/gmlp_base --pairs SQUAD/train.json --dev SQUAD/dev.json --output outputs/search
torchrun --nproc_per_node 8 launch/search.py --triples MNLI/train.tsv --seeds 3 --ask "When was it built?" ...

OUTPUT/seed_0/model and so on are the trained models, for SentenceTransformer(folder, trust_remote_code=True).
"""

import argparse
import os
import statistics
import sys

from gmlp_scale.checkpoint.trained import read_export
from gmlp_scale.distributed.logs import command
from gmlp_scale.finetune.search import (
    SCORES,
    read_answered,
    search_by_embeddings,
    search_by_words,
    search_scores,
    train_search,
)
from gmlp_scale.options import count, positive
from gmlp_scale.storage.files import local_path


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", required=True, type=local_path, metavar="HF_DIR", help="an export of launch/export.py"
    )
    parser.add_argument("--pairs", metavar="FILE", help="train on SQuAD's questions and their passages")
    parser.add_argument("--triples", metavar="FILE", help="train on MNLI's entailed and contradicted sentences")
    parser.add_argument("--dev", required=True, metavar="FILE", help="SQuAD's questions, whose passages are searched")
    parser.add_argument("--output", required=True, type=local_path, metavar="DIR")
    parser.add_argument("--seeds", type=count, default=1, metavar="N", help="trainings (default: %(default)s)")
    parser.add_argument("--epochs", type=positive, default=1, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=count, default=64, metavar="N", help="of each rank (default: %(default)s)")
    parser.add_argument("--rate", type=positive, default=1e-3, help="the peak learning rate (default: %(default)s)")
    parser.add_argument("--ask", metavar="QUESTION", help="print the best passage for it too")
    options = parser.parse_args()
    if not options.pairs and not options.triples:
        parser.error("give --pairs, --triples or both")
    read_export(options.model)  # raises if it is damaged, or none
    questions = read_answered(options.dev, "dev")
    passages = list(dict.fromkeys(question.context for question in questions))
    settings = {
        "num_train_epochs": options.epochs,
        "per_device_train_batch_size": options.batch_size,
        "learning_rate": options.rate,
        "warmup_steps": 0.1,  # of all steps
        "save_steps": 50,
        "save_total_limit": 2,
    }
    trained = [
        train_search(
            options.model, options.pairs, options.triples, options.output / f"seed_{seed}", seed=seed, **settings
        )
        for seed in range(options.seeds)
    ]
    if int(os.environ.get("RANK", "0")) > 0:
        return 0
    searches = {
        "BM25": [search_by_words(passages)],
        "as exported": [search_by_embeddings(options.model, passages)],
        "trained": [search_by_embeddings(folder, passages) for folder in trained],
    }
    print(f"| {len(questions):,} questions, {len(passages):,} passages | {' | '.join(SCORES)} |\n| --- | --- | --- |")
    for name, of_seeds in searches.items():
        scores = [search_scores(search, passages, questions) for search in of_seeds]
        print(f"| {name} | {' | '.join(_shown([one[score] for one in scores]) for score in SCORES)} |")
    for name, (search, *_) in searches.items() if options.ask else ():
        print(f"\n{name}: {passages[search([options.ask]).argmax()]}")
    return 0


def _shown(scores: list[float]) -> str:
    """The median in percent, with the least and greatest of several."""
    median, *ends = (f"{100 * score:.1f}" for score in (statistics.median(scores), min(scores), max(scores)))
    return f"{median} ({' to '.join(ends)})" if len(scores) > 1 else median


if __name__ == "__main__":
    sys.exit(main())
