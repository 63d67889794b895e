import codecs
import gzip
import io
import json
import pickle
import tarfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import webdataset
import zstandard

from gmlp_scale.errors import InputError
from gmlp_scale.prepare.input_files import BadRecord, FileReader, Record, find_inputs, records_before_fault
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
    with pytest.raises(InputError, match="no column 'text'; it has body, n: choose one with --text-field"):
        read(tmp_path / "a.parquet")


def test_the_bytes_read_of_parquet_grow_with_the_rows(tmp_path):
    """pyarrow reads the footer first and whole column chunks ahead."""
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"{n} {n**9}" for n in range(1000)]}), tmp_path / "a.parquet")
    (file,) = find_inputs([f"{tmp_path}/a.parquet"])
    reader = FileReader(file, text_field="text", max_record_bytes=1000)
    assert [reader.bytes_read for _ in reader] == [file.num_bytes * row // 1000 for row in range(1, 1001)]


def tar_file(path, members: dict[str, bytes]) -> None:
    with path.open("wb") as file, webdataset.TarWriter(file) as writer:
        for name, content in members.items():
            key, _, ending = name.partition(".")
            writer.write({"__key__": key, ending: content})


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
    (file,) = find_inputs([str(path)])
    parts = [FileReader(file, text_field="text", max_record_bytes=1000, part=p, num_parts=2) for p in range(2)]
    assert sorted((record for part in parts for record in part), key=lambda record: record.line) == records


def test_the_text_of_a_sample_is_its_txt_and_a_json_beside_it_is_metadata(tmp_path):
    with (tmp_path / "a.tar").open("wb") as file, webdataset.TarWriter(file) as writer:
        writer.write({"__key__": "a/0", "json": b'{"text": "title"}', "txt": b"the text", "cls": b"3"})
        writer.write({"__key__": "b/0", "json": b'{"text": "alone"}'})
    assert [record.text for record in read(tmp_path / "a.tar")] == ["the text", "alone"]


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
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, text in members:
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    assert " ".join(record.text for record in read(tmp_path / "a.tar")) == texts


def test_every_tar_file_that_is_cut_short_is_found(tmp_path):
    tar_file(tmp_path / "whole.tar", MEMBERS)
    whole = (tmp_path / "whole.tar").read_bytes()
    end = len(whole.rstrip(b"\0"))  # after it come zeros, which end the archive
    for length in [*range(512, end, 512), 700, end - 1]:
        (tmp_path / "cut.tar").write_bytes(whole[:length])
        with pytest.raises(BadFileError, match="is broken after"):
            read(tmp_path / "cut.tar")


def test_a_damaged_header_in_the_middle_is_found(tmp_path):
    """tarfile, and so webdataset, ends the file there without a word."""
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as plain:
        for name, text in MEMBERS.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            plain.addfile(member, io.BytesIO(text))
    content = bytearray((tmp_path / "a.tar").read_bytes())
    content[content.index(b"002.jsonl") + 150] ^= 1
    (tmp_path / "a.tar").write_bytes(content)
    with tarfile.open(tmp_path / "a.tar") as plain:
        assert len(plain.getnames()) == 2
    with pytest.raises(BadFileError, match="is broken after"):
        read(tmp_path / "a.tar")


def test_a_tar_file_without_text_is_told(tmp_path):
    tar_file(tmp_path / "a.tar", {"0.jpg": b"picture"})
    with pytest.raises(BadFileError, match=r"no member of it ends in \.txt, \.json, \.jsonl"):
        read(tmp_path / "a.tar")


def test_a_range_in_braces_names_many_files(tmp_path):
    for number in range(3):
        tar_file(tmp_path / f"part-{number:03d}.tar", {"0.txt": b"text"})
    assert len(find_inputs([f"{tmp_path}/part-{{000..002}}.tar"])) == 3
    with pytest.raises(ValueError, match=r"part-003\.tar matches no file"):
        find_inputs([f"{tmp_path}/part-{{000..003}}.tar"])


def test_text_files_keep_every_character_and_are_cut_at_line_ends(tmp_path):
    text = "".join(f"line {number} é\r\n\r\n" for number in range(150_000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode(), 1))
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    for name in ("a.txt", "a.txt.gz"):
        parts = [record.text for record in read(tmp_path / name)]
        assert "".join(parts) == text and len(parts) == 3 and all(part.endswith("\n") for part in parts)
    assert [record.reason for record in read(tmp_path / "bad.txt")] == ["invalid UTF-8"]


def test_a_byte_order_mark_costs_no_document_and_stays_in_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + lines())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(codecs.BOM_UTF8 + b"the text"))
    members = {"0.txt": b"first", "1.json": b'{"text": "second"}', "2.jsonl": lines(["third", "fourth"])}
    tar_file(tmp_path / "a.tar", {name: codecs.BOM_UTF8 + content for name, content in members.items()})
    assert [record.text for record in read(tmp_path / "a.jsonl")] == TEXTS
    assert [record.text for record in read(tmp_path / "a.txt.gz")] == ["the text"]
    assert [record.text for record in read(tmp_path / "a.tar")] == ["first", "second", "third", "fourth"]


def test_a_text_without_line_ends_is_cut_between_characters(tmp_path):
    text = "a" + "é" * 700_000
    for name, content in (("a.txt", text.encode()), ("a.txt.gz", gzip.compress(text.encode(), 1))):
        (tmp_path / name).write_bytes(content)
        parts = [record.text for record in read(tmp_path / name)]
        assert "".join(parts) == text and len(parts) == 2


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
