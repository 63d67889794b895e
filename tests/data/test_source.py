"""The record of corrupt shards on a full disk, and after a line was cut short."""

import json
import logging
import resource
from pathlib import Path

from gmlp_scale.data.manifest import CorruptShardError
from gmlp_scale.data.source import SkipCorruptShards
from tests.gloo_ranks import run_ranks


def _meet_three_with_little_room(record: Path, has_room_again: bool) -> tuple[list[str], list[str], set[str]]:
    """A process that may write 150 bytes meets three corrupt shards: (lines by then, warnings of writing, names)."""
    warnings: list[str] = []
    for name in ("data.source", "storage.growing_file"):
        logging.getLogger(f"gmlp_scale.{name}").addFilter(lambda logged: warnings.append(logged.getMessage()))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))
    skip = SkipCorruptShards(record, max_shards=3)
    for number in (1, 2, 3):
        skip.note(CorruptShardError(f"train/train-{number}.tar", "x" * 60))
    lines = record.read_text().splitlines()
    if has_room_again:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    skip.close()
    return lines, [text for text in warnings if text.startswith(str(record))], skip.names()


ALL = {"train/train-1.tar", "train/train-2.tar", "train/train-3.tar"}


def test_what_a_full_disk_refused_is_recorded_once_there_is_room(tmp_path):
    record = tmp_path / "corrupt_shards.jsonl"
    ((lines, warnings, names),) = run_ranks(_meet_three_with_little_room, 1, record, True)
    assert len(lines) == 2 and not lines[1].endswith("}")
    (warning,) = warnings
    assert "cannot be written (File too large): free room there. Training goes on" in warning
    assert names == SkipCorruptShards(record, max_shards=3).names() == ALL


def test_a_run_that_ends_on_a_full_disk_says_which_shards_are_not_recorded(tmp_path):
    record = tmp_path / "corrupt_shards.jsonl"
    ((_, warnings, names),) = run_ranks(_meet_three_with_little_room, 1, record, False)
    assert "lacks train/train-2.tar, train/train-3.tar, which a resumed run reads" in warnings[-1]
    assert names == ALL and SkipCorruptShards(record, max_shards=3).names() == {"train/train-1.tar"}


def test_a_line_cut_short_is_left_out_and_spoils_no_later_one(tmp_path):
    record = tmp_path / "corrupt_shards.jsonl"
    whole = json.dumps({"shard": "train/train-1.tar", "found": "x"})
    record.write_text(f'{whole}\n{{"shard": "train/tr')
    skip = SkipCorruptShards(record, max_shards=3)
    assert skip.names() == {"train/train-1.tar"}
    skip.note(CorruptShardError("train/train-2.tar", "y"))
    assert skip.names() == SkipCorruptShards(record, max_shards=3).names() == {"train/train-1.tar", "train/train-2.tar"}
    assert record.read_text().startswith(f'{whole}\n{{"shard": "train/tr\n{{"shard": "train/train-2.tar"')
