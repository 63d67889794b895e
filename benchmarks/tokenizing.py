"""Times the tokenizing pipeline beside the tokenizer alone, and the opening of a data set of C4's size.

python benchmarks/tokenizing.py --input FILE FILE --tokenizer TOKENIZER_DIR

Each contender runs in one process per file, all at the same time; the contenders take turns. `pipeline` reads,
tokenizes, packs and writes shards. `sentencepiece` and `tokenizers` only encode texts that are in memory; `tokenizers`
uses the tokenizer that launch/export.py writes. On a machine that others use, CPU seconds say more than wall seconds.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

from benchmarks.loading import C4_ROWS_PER_SHARD, C4_SHARDS, FAR_STEP, c4_shards, loader_of, write_manifest
from gmlp_scale.data.tokenizer import MODEL_NAME, Tokenizer
from gmlp_scale.distributed.logs import command
from gmlp_scale.prepare.job import JobOptions
from gmlp_scale.prepare.read_documents import read_documents
from gmlp_scale.prepare.read_records import Record
from gmlp_scale.prepare.write_shards import write_shards
from gmlp_scale.recipe.reader import load_run_config

T = TypeVar("T")
_TEXTS_AT_A_TIME = 100
_SLOW_TEXTS = 300  # of each file for `tokenizers`, which is slow


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="of documents; each a process")
    parser.add_argument("--tokenizer", required=True, metavar="TOKENIZER_DIR", help="that train_tokenizer.py wrote")
    parser.add_argument("--rounds", type=int, default=2, help="the best of so many counts (default: %(default)s)")
    arguments = parser.parse_args()
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        options = JobOptions(
            input=arguments.input, tokenizer=arguments.tokenizer, sequence_length=512, output=f"{folder}/out",
            max_bad_fraction=1.0,
        )  # fmt: skip
        Tokenizer(options.tokenizer)  # raises what is wrong with it before anything is timed
        for contender in (pipeline, sentencepiece, tokenizers, *(pipeline, sentencepiece) * (arguments.rounds - 1)):
            name = contender.__name__
            print(name, file=sys.stderr, flush=True)
            found = summed(in_processes(contender, options, len(options.files)))
            report[name] = min(found, report.get(name, found), key=lambda found: found["wall_seconds"])
        for kind in ("wall", "cpu"):
            ours, other = (report[name][f"mb_per_{kind}_second"] for name in ("pipeline", "sentencepiece"))
            report[f"pipeline_over_sentencepiece_by_{kind}"] = round(ours / other, 3)
        run = load_run_config("gmlp_base")
        write_manifest(run, c4_shards(run), Path(options.output))
        (report["c4_sized_data_set"],) = in_processes(open_c4_sized_data_set, options, 1)
    print(json.dumps(report, indent=1))
    return 0


def in_processes(contender: Callable[[JobOptions, int], dict], options: JobOptions, num_processes: int) -> list[dict]:
    """What the contender found in each of so many fresh processes, which have the ranks 0, 1, ..."""
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as processes:
        tasks = [processes.submit(contender, options, rank) for rank in range(num_processes)]
        return [task.result() for task in tasks]


def summed(parts: list[dict]) -> dict:
    num_bytes = sum(part["bytes"] for part in parts)
    wall, cpu = max(part["wall_seconds"] for part in parts), sum(part["cpu_seconds"] for part in parts)
    return {
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "mb_per_wall_second": round(num_bytes / 1e6 / wall, 3),
        "mb_per_cpu_second": round(num_bytes / 1e6 / cpu, 3),
        "peak_mb_of_a_process": round(max(part["peak_bytes"] for part in parts) / 1e6),
        **{name: sum(part[name] for part in parts) for name in ("texts_with_other_ids",) if name in parts[0]},
    }


def pipeline(options: JobOptions, rank: int) -> dict:
    documents = read_documents(options, "benchmark", None, rank, options.num_tasks)
    _, taken = timed(lambda: write_shards(options, documents, rank, options.num_tasks))
    return taken | {"bytes": options.job.read(f"counts/write-{rank:05d}.json")["bytes"]}


def sentencepiece(options: JobOptions, rank: int) -> dict:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=f"{options.tokenizer}/{MODEL_NAME}")
    texts = _texts(options, rank)

    def encode() -> None:
        for start in range(0, len(texts), _TEXTS_AT_A_TIME):
            model.encode(texts[start : start + _TEXTS_AT_A_TIME], num_threads=1)

    return timed(encode)[1] | {"bytes": _num_bytes(texts)}


def tokenizers(options: JobOptions, rank: int) -> dict:
    import tokenizers

    from gmlp_scale.export.fast_tokenizer import write_tokenizer

    ours = Tokenizer(options.tokenizer)
    exported = Path(options.output) / f"exported-{rank}"
    exported.mkdir()
    write_tokenizer(exported, ours, 512)
    model = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    model.encode_special_tokens = True
    texts = _texts(options, rank)[:_SLOW_TEXTS]
    encoded, taken = timed(lambda: [model.encode(text, add_special_tokens=False).ids for text in texts])
    num_different = sum(ours.encode(text) != ids for text, ids in zip(texts, encoded, strict=True))
    return taken | {"bytes": _num_bytes(texts), "texts_with_other_ids": num_different}


def _texts(options: JobOptions, rank: int) -> list[str]:
    return [record.text for record in options.reader(options.files[rank]) if isinstance(record, Record)]


def _num_bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def open_c4_sized_data_set(options: JobOptions, rank: int) -> dict:
    """Seconds and memory for opening shards as many as C4's and finding the rows of a late step; no shard is read."""
    run, before = load_run_config("gmlp_base"), _peak_bytes()
    loader, opening = timed(lambda: loader_of(run, Path(options.output)))
    _, addressing = timed(lambda: loader.addresses(FAR_STEP))
    loader.close()
    both = {kind: round(opening[kind] + addressing[kind], 3) for kind in ("wall_seconds", "cpu_seconds")}
    seconds = {"addressing_seconds": round(addressing["wall_seconds"], 3)} | both
    size = {"shards": C4_SHARDS, "rows": C4_SHARDS * C4_ROWS_PER_SHARD, "step": FAR_STEP}
    return seconds | {"megabytes": round((_peak_bytes() - before) / 1e6)} | size


def timed(call: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """What the call returns, and what this process took for it; of its memory the peak until then."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    seconds = {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return result, seconds | {"peak_bytes": _peak_bytes()}


def _peak_bytes() -> int:
    """Peak memory of this process; getrusage gives the parent's where that is larger."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
