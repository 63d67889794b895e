import codecs
import gzip
import io
import json
import pickle
import tarfile
from functools import partial

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import webdataset
import zstandard

from gmlp_scale.errors import InputError
from gmlp_scale.prepare.input_files import BadFileError, InputFile, find_inputs
from gmlp_scale.prepare.read_documents import inputs_of_task
from gmlp_scale.prepare.read_records import BadRecord, FileReader, Record, records_before_fault
from tests.damage import flipped

TEXTS = [f"document {number}\twith «ünïcode»\r\nand lines" for number in range(50)]


def lines(texts=TEXTS) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def reader(path, **options) -> FileReader:
    file = InputFile(str(path), path.stat().st_size)
    return FileReader(file, **({"text_field": "text", "max_record_bytes": 1000} | options))


def read(path, **options) -> list[Record | BadRecord]:
    return list(reader(path, **options))


def texts_in(path, **options) -> list[str]:
    return [record.text for record in reader(path, **options)]


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
    with pytest.raises(InputError, match="no column 'text'; it has body, n: choose one with --text-field"):
        read(tmp_path / "a.parquet")


def test_the_bytes_read_of_parquet_grow_with_the_rows(tmp_path):
    """pyarrow reads the footer first and whole column chunks ahead."""
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"{n} {n**9}" for n in range(1000)]}), tmp_path / "a.parquet")
    rows, num_bytes = reader(tmp_path / "a.parquet"), (tmp_path / "a.parquet").stat().st_size
    assert [rows.bytes_read for _ in rows] == [num_bytes * row // 1000 for row in range(1, 1001)]


def tar_file(path, members: dict[str, bytes] | list[tuple[str, bytes]]) -> None:
    """As tarfile writes it; webdataset's writer allows no name twice."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members.items() if isinstance(members, dict) else members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


MEMBERS = {
    "000.txt": "first «text»\nof two lines".encode(),
    "001.json": json.dumps({"text": "second"}).encode(),
    "002.jsonl": lines(["third", "fourth"]),
    "003.jpg": b"\xff\xd8",
    "004.json": b'{"caption": "no text"}',
    "005.txt": b"\xff",
    "006.txt": b"x" * 1001,
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_tar_files_of_webdataset(pack, tmp_path):
    tar_file(tmp_path / "plain.tar", MEMBERS)
    path = tmp_path / {bytes: "a.tar", gzip.compress: "a.tar.gz", zstandard.compress: "a.tar.zst"}[pack]
    path.write_bytes(pack((tmp_path / "plain.tar").read_bytes()))
    records = read(path)
    assert [record.text for record in records[:4]] == ["first «text»\nof two lines", "second", "third", "fourth"]
    assert [record.reason for record in records[4:]] == ["no text in field 'text'", "invalid UTF-8", "too long"]
    assert [record.line for record in records] == [1, 2, 3, 4, 5, 6, 7]
    parts = [record for part in range(2) for record in read(path, part=part, num_parts=2)]
    assert sorted(parts, key=lambda record: record.line) == records


def test_the_text_of_a_sample_that_webdataset_wrote_is_its_txt_and_a_json_beside_it_is_metadata(tmp_path):
    with (tmp_path / "a.tar").open("wb") as file, webdataset.TarWriter(file) as writer:
        writer.write({"__key__": "a/0", "json": b'{"text": "title"}', "txt": b"the text", "cls": b"3"})
        writer.write({"__key__": "b/0", "json": b'{"text": "alone"}'})
    assert texts_in(tmp_path / "a.tar") == ["the text", "alone"]


@pytest.mark.parametrize(
    ("members", "texts"),
    [
        ([("Mr. A.txt", "A"), ("Mr. B.txt", "B"), ("v1.0.txt", "0"), ("v1.1.txt", "1")], "A B 0 1"),
        ([("0.json", '{"text": "document"}'), ("0.meta.json", '{"text": "title"}')], "document"),
        ([("0.boxes.json", "{}"), ("0.meta.json", "{}"), ("0.txt", "document")], "document"),
        ([("v1.0.json", '{"text": "title"}'), ("v1.0.txt", "0"), ("v1.1.json", '{"text": "1"}')], "0 1"),
        ([("v1.0.json", '{"text": "0"}'), ("v1.1.json", '{"text": "1"}'), ("v1.2.jsonl", '{"text": "2"}')], "2 0 1"),
        ([("0.txt", "text"), ("0.jsonl", '{"text": "line"}'), ("0.x/0.json", '{"text": "other"}')], "text line other"),
        ([("0.txt", "a"), ("0.txt", "b"), ("1.json", '{"text": "1"}'), ("1.json", '{"text": "2"}')], "a b 1 2"),
    ],
)
def test_no_document_of_a_tar_file_is_lost_and_metadata_is_none(members, texts, tmp_path):
    tar_file(tmp_path / "a.tar", [(name, text.encode()) for name, text in members])
    assert " ".join(texts_in(tmp_path / "a.tar")) == texts


def test_every_tar_file_that_is_cut_short_or_damaged_or_has_no_text_is_found(tmp_path):
    path = tmp_path / "a.tar"
    tar_file(path, MEMBERS)
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0"))  # after it come zeros, which end the archive
    damaged = flipped(whole, whole.index(b"002.jsonl") + 150)
    for content in [*(whole[:length] for length in (*range(512, end, 512), 700, end - 1)), damaged]:
        path.write_bytes(content)
        with pytest.raises(BadFileError, match="is broken after"):
            read(path)
    with tarfile.open(path) as plain:  # it, and so webdataset, ends at the damaged header without a word
        assert len(plain.getnames()) == 2
    tar_file(path, {"0.jpg": b"picture"})
    with pytest.raises(BadFileError, match=r"no member of it ends in \.txt, \.json, \.jsonl"):
        read(path)


def test_a_range_in_braces_names_many_files(tmp_path):
    for number in range(3):
        tar_file(tmp_path / f"part-{number:03d}.tar", {"0.txt": b"text"})
    assert len(find_inputs([f"{tmp_path}/part-{{000..002}}.tar"])) == 3
    with pytest.raises(ValueError, match=r"part-003\.tar matches no file"):
        find_inputs([f"{tmp_path}/part-{{000..003}}.tar"])


@pytest.mark.parametrize("pack", [bytes, partial(gzip.compress, compresslevel=1)], ids=["a.txt", "a.txt.gz"])
@pytest.mark.parametrize(
    ("text", "num_parts"),
    [("".join(f"line {number} é\r\n\r\n" for number in range(150_000)), 3), ("a" + "é" * 700_000, 2)],
    ids=["lines", "no line ends"],
)
def test_a_text_keeps_every_character_and_is_cut_at_line_ends_or_between_characters(text, num_parts, pack, tmp_path):
    path = tmp_path / ("a.txt" if pack is bytes else "a.txt.gz")
    path.write_bytes(pack(text.encode()))
    parts = texts_in(path)
    assert "".join(parts) == text and len(parts) == num_parts
    assert "\n" not in text or all(part.endswith("\n") for part in parts)


def test_a_byte_order_mark_costs_no_document_and_stays_in_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + lines())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(codecs.BOM_UTF8 + b"the text"))
    members = {"0.txt": b"first", "1.json": b'{"text": "second"}', "2.jsonl": lines(["third", "fourth"])}
    tar_file(tmp_path / "a.tar", {name: codecs.BOM_UTF8 + content for name, content in members.items()})
    assert texts_in(tmp_path / "a.jsonl") == TEXTS
    assert texts_in(tmp_path / "a.txt.gz") == ["the text"]
    assert texts_in(tmp_path / "a.tar") == ["first", "second", "third", "fourth"]


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
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    assert [record.reason for record in read(tmp_path / "bad.txt")] == ["invalid UTF-8"]


def stored(kind: str, texts: list[str]) -> bytes:
    """A file of this kind, whose checksums cover all its bytes."""
    if kind == "jsonl.gz":
        return gzip.compress(lines(texts))
    if kind == "jsonl.zst":
        return zstandard.ZstdCompressor(write_checksum=True).compress(lines(texts))
    buffer, table = io.BytesIO(), pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, buffer, row_group_size=100, write_page_checksum=True)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_a_file_that_is_cut_short_or_damaged_is_one_bad_file(kind, tmp_path, trials):
    texts = [f"{number} {number**9}" for number in range(3000)]
    whole, path = stored(kind, texts), tmp_path / f"a.{kind}"
    random = np.random.default_rng(0)
    damaged = [whole[: len(whole) // 2], whole[:-1], b""]
    for place in random.integers(0, len(whole), 60):
        damaged.append(flipped(whole, place, int(random.integers(8))))
    for content in damaged:
        path.write_bytes(content)
        try:
            found = read(path)
        except BadFileError as error:
            assert 0 <= error.bytes_read <= len(content)
            assert str(pickle.loads(pickle.dumps(error))) == str(error)  # it comes from a worker
            assert f"{path} is broken after {error.bytes_read:,} of {len(content):,} bytes: " in str(error)
        else:  # such as a bit of the header that says who wrote the file
            assert [record.text for record in found] == texts
    trials("corpus files cut or damaged", len(damaged))


def test_a_file_cut_short_gives_what_could_be_read(tmp_path):
    texts = [f"{number} {number**9}" for number in range(9000)]
    whole, path, bad_files = stored("jsonl.gz", texts), tmp_path / "a.jsonl.gz", []
    half = len(whole) // 2
    path.write_bytes(whole[:half])
    found = [record.text for record in records_before_fault(reader(path), bad_files, max_bad_files=1)]
    assert 2000 < len(found) < 7000 and found == texts[: len(found)]
    (bad,) = bad_files
    assert (bad["file"], bad["bytes_read"], bad["bytes_lost"]) == (str(path), half, 0)


def test_parts_share_a_file_without_loss_or_repetition(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines())
    parts = [texts_in(tmp_path / "a.jsonl", part=part, num_parts=3) for part in range(3)]
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


def test_folders_and_names_with_brackets(tmp_path):
    folder = tmp_path / "texts [2024]"
    folder.mkdir()
    (folder / "a [1].jsonl").write_bytes(lines())
    assert [file.url for file in find_inputs([f"{folder}/a [1].jsonl"])] == [f"{folder}/a [1].jsonl"]
    assert find_inputs([f"{tmp_path}/texts [[]2024]/*.jsonl"]) == find_inputs([f"{folder}/a [1].jsonl"])
    with pytest.raises(InputError, match=r"matches no file; in a glob \[\[\] stands for a bracket in a name"):
        find_inputs([f"{folder}/*.jsonl"])
    for source in (folder, f"{folder}/", f"{tmp_path}/tex*"):
        with pytest.raises(InputError) as error:
            find_inputs([str(source)])
        assert f"{folder} is a folder: give '{tmp_path}/texts [[]2024]/*.jsonl.gz'" in str(error.value)


def test_sources_that_are_not_there_or_not_readable(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines())
    (tmp_path / "b.csv").write_bytes(b"1,2")
    (tmp_path / "c.tsv").write_bytes(b"sentence\tlabel\ngood\t1\n")
    assert [file.url for file in find_inputs([f"{tmp_path}/*.jsonl"])] == [f"{tmp_path}/a.jsonl"]
    assert find_inputs([f"file://{tmp_path}/a.jsonl"])[0].num_bytes == len(lines())
    assert find_inputs([f"{tmp_path}/c.tsv"], "--decontaminate")
    for source, message in (
        ("*.gz", "matches no file"),
        ("*.csv", "format it does not read"),
        ("*.tsv", r"readable are .jsonl, .json, .parquet, .txt, .md, .tar, .* JSON lines: {\"text\": \"...\"}"),
        ("nothing.jsonl", "matches no file"),
        ("**.jsonl", "is not understood: .*entire path component"),
        ("a{1..3}{.jsonl", "is not understood"),
    ):
        with pytest.raises(InputError, match=message):
            find_inputs([f"{tmp_path}/{source}"])
    with pytest.raises(ValueError, match="twice"):
        find_inputs([f"{tmp_path}/a.jsonl", f"{tmp_path}/*.jsonl"])
