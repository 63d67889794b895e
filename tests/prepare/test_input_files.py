import gzip
import io
import json
import pickle

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from gmlp_scale.prepare.input_files import BadRecord, FileReader, Record, find_inputs, records_before_fault
from gmlp_scale.prepare.job_folder import JobError
from gmlp_scale.prepare.open_input import BadFileError, InputFile
from gmlp_scale.prepare.read_documents import inputs_of_task

TEXTS = [f"document {number}\twith «ünïcode»\r\nand lines" for number in range(50)]


def lines(texts=TEXTS) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def read(path, **options):
    (file,) = find_inputs([str(path)])
    return list(FileReader(file, **({"text_field": "text", "max_record_bytes": 1000} | options)))


def two_frames(content: bytes) -> bytes:
    half = len(content) // 2
    return zstandard.compress(content[:half]) + zstandard.compress(content[half:])


FILES = {
    "a.jsonl": lines(),
    "a.json.gz": gzip.compress(lines()),
    "b.jsonl.gz": gzip.compress(lines()[:700]) + gzip.compress(lines()[700:]),
    "a.jsonl.zst": zstandard.compress(lines()),
    "b.jsonl.zst": two_frames(lines()),
    "no_last_newline.jsonl": lines()[:-1],
    "blank_lines.jsonl": lines().replace(b"\n", b"\n\n"),
}


@pytest.mark.parametrize("name", FILES)
def test_every_form_of_json_lines(name, tmp_path):
    (tmp_path / name).write_bytes(FILES[name])
    records = read(tmp_path / name)
    assert [record.text for record in records] == TEXTS
    if name != "blank_lines.jsonl":
        assert [record.line for record in records] == list(range(1, 51))


def test_parquet(tmp_path):
    table = pyarrow.table({"body": [*TEXTS[:20], None, "x" * 2000, *TEXTS[20:]], "n": range(52)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    records = read(tmp_path / "a.parquet", text_field="body")
    assert [record.text for record in records if isinstance(record, Record)] == TEXTS
    assert [(r.line, r.reason) for r in records if isinstance(r, BadRecord)] == [
        (21, "no text in field 'body'"),
        (22, "too long"),
    ]
    with pytest.raises(JobError, match="no column 'text'; it has body, n: choose one with --text-field"):
        read(tmp_path / "a.parquet")


def test_text_files_keep_every_character_and_are_cut_at_line_ends(tmp_path):
    text = "".join(f"line {number} é\r\n\r\n" for number in range(150_000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode(), 1))
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    for name in ("a.txt", "a.txt.gz"):
        parts = [record.text for record in read(tmp_path / name)]
        assert "".join(parts) == text and len(parts) == 3 and all(part.endswith("\n") for part in parts)
    assert [record.reason for record in read(tmp_path / "bad.txt")] == ["invalid UTF-8"]


BAD_LINES = {
    b'{"text": "unfinished': "broken JSON",
    b'{"text": "caf\xe9"}': "invalid UTF-8",
    b'{"body": "other field"}': "no text in field 'text'",
    b'{"text": 7}': "no text in field 'text'",
    b"[1, 2]": "no text in field 'text'",
    b'{"text": "\\ud800"}': "broken JSON",
    b'{"text": "' + b"x" * 3_000_000 + b'"}': "too long",
}


def test_bad_lines_come_out_with_their_place_and_the_rest_is_read(tmp_path):
    good = [line for line in lines().split(b"\n") if line]
    mixed = [item for pair in zip(good, BAD_LINES, strict=False) for item in pair] + good[len(BAD_LINES) :]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(mixed))
    records = read(tmp_path / "a.jsonl")
    assert [record.text for record in records if isinstance(record, Record)] == TEXTS
    bad = [(record.line, record.reason) for record in records if isinstance(record, BadRecord)]
    assert bad == [(2 * number, reason) for number, reason in enumerate(BAD_LINES.values(), start=1)]


def stored(kind: str, texts: list[str]) -> bytes:
    """A file of this kind, whose checksums cover all its bytes."""
    if kind == "parquet":
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(
            pyarrow.table({"text": texts}), buffer, row_group_size=100, write_page_checksum=True
        )
        return buffer.getvalue()
    if kind == "jsonl.gz":
        return gzip.compress(lines(texts))
    return zstandard.ZstdCompressor(write_checksum=True).compress(lines(texts))


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_a_file_that_is_cut_short_or_damaged_is_one_bad_file(kind, tmp_path, trials):
    texts = [f"{number} {number**9}" for number in range(3000)]
    whole, path = stored(kind, texts), tmp_path / f"a.{kind}"
    random = np.random.default_rng(0)
    damaged = [whole[: len(whole) // 2], whole[:-1], b""]
    for place in random.integers(0, len(whole), 60):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(random.integers(8))
        damaged.append(bytes(flipped))
    for content in damaged:
        path.write_bytes(content)
        found = []
        try:
            for record in FileReader(InputFile(str(path), len(content)), text_field="text", max_record_bytes=1000):
                found.append(record)
        except BadFileError as error:
            assert 0 <= error.bytes_read <= len(content)
            assert str(pickle.loads(pickle.dumps(error))) == str(error)  # it comes from a worker
            assert f"{path} is broken after {error.bytes_read:,} of {len(content):,} bytes: " in str(error)
        else:  # such as a bit of the header that tells who wrote the file
            assert [record.text for record in found] == texts
    trials("corpus files cut or damaged", len(damaged))


def test_a_file_cut_short_gives_what_could_be_read(tmp_path):
    texts = [f"{number} {number**9}" for number in range(9000)]
    whole, path, found = stored("jsonl.gz", texts), tmp_path / "a.jsonl.gz", []
    half = len(whole) // 2
    path.write_bytes(whole[:half])
    bad_files = []
    (file,) = find_inputs([str(path)])
    reader = FileReader(file, text_field="text", max_record_bytes=1000)
    found = [record.text for record in records_before_fault(reader, bad_files, max_bad_files=1)]
    assert 2000 < len(found) < 7000 and found == texts[: len(found)]
    (bad,) = bad_files
    assert (bad["file"], bad["bytes_read"], bad["bytes_lost"]) == (str(path), half, 0)


def test_parts_share_a_file_without_loss_or_repetition(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines())
    parts = [[record.text for record in read(tmp_path / "a.jsonl", part=part, num_parts=3)] for part in range(3)]
    assert sorted(text for part in parts for text in part) == sorted(TEXTS)
    assert {len(part) for part in parts} == {16, 17}


@pytest.mark.parametrize("num_files", [1, 2, 3, 7])
@pytest.mark.parametrize("num_tasks", [1, 2, 3, 5, 8])
def test_tasks_share_the_files(num_files, num_tasks):
    files = [InputFile(f"{number}.jsonl", 1) for number in range(num_files)]
    taken = [item for rank in range(num_tasks) for item in inputs_of_task(files, rank, num_tasks)]
    for file in files:
        parts = [(part, num_parts) for one, part, num_parts in taken if one == file]
        assert sorted(parts) == [(part, len(parts)) for part in range(len(parts))]


def test_sources_that_are_not_there_or_not_readable(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines())
    (tmp_path / "b.csv").write_bytes(b"1,2")
    assert [file.url for file in find_inputs([f"{tmp_path}/*.jsonl"])] == [f"{tmp_path}/a.jsonl"]
    assert find_inputs([f"file://{tmp_path}/a.jsonl"])[0].num_bytes == len(lines())
    for source, message in (
        ("*.gz", "matches no file"),
        ("*.csv", "format is unknown"),
        ("nothing.jsonl", "matches no file"),
    ):
        with pytest.raises(ValueError, match=message):
            find_inputs([f"{tmp_path}/{source}"])
    with pytest.raises(ValueError, match="twice"):
        find_inputs([f"{tmp_path}/a.jsonl", f"{tmp_path}/*.jsonl"])
