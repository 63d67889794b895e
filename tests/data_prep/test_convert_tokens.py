"""Tokens that others have stored give rows that hold the same stream; damaged files give one error and no output."""

import json
import struct
from itertools import pairwise

import numpy as np
import pytest
import zstandard

from gmlp_scale.data.json_tokenizer import open_tokenizer
from gmlp_scale.data.rows import RowLoader, Rows
from gmlp_scale.data.shards import Manifest
from gmlp_scale.errors import InputError
from gmlp_scale.prepare.token_files import documents_of, read_pieces
from tests import json_tokenizers
from tests.data_prep.corpora import contents, make_texts, run
from tests.data_prep.test_other_tokenizers import inspected
from tests.data_prep.test_tokenize_corpus import all_rows, report_of
from tests.json_tokenizers import END

MEGATRON_CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    """GPT-2's kind: 400 ids, of which 0 is the end token."""
    return json_tokenizers.gpt2(tmp_path_factory.mktemp("gpt2"), eos_token=END)


@pytest.fixture
def documents(tokenizer_dir) -> list[np.ndarray]:
    """Each with the end token."""
    return [np.append(ids, 0) for ids in open_tokenizer(tokenizer_dir).encode_batch(make_texts(300))]


@pytest.fixture
def convert(tokenizer_dir, tmp_path):
    """convert(format, input, options...) -> what the script printed; the shards are in tmp_path/out."""

    def convert(form, source, *options, **settings):
        return run("convert_tokens.py", "--format", form, "--input", source, "--tokenizer", tokenizer_dir,
                   "--sequence-length", 32, "--output", tmp_path / "out", "--shard-bytes", 20_000, *options,
                   **settings)  # fmt: skip

    return convert


def write_megatron(prefix, documents, dtype, *, sequences=1) -> None:
    """As Megatron-LM's IndexedDatasetBuilder; each document is that many sequences."""
    parts = [part for ids in documents for part in np.array_split(ids.astype(dtype), sequences)]
    sizes = np.array([len(part) for part in parts], "<i4")
    starts = (np.cumsum(sizes, dtype=np.int64) - sizes) * np.dtype(dtype).itemsize
    bounds = np.arange(0, len(parts) + 1, sequences, dtype="<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, MEGATRON_CODES[dtype], len(parts), len(bounds))
    prefix.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in parts))
    prefix.with_suffix(".idx").write_bytes(header + sizes.tobytes() + starts.tobytes() + bounds.tobytes())


def write_mds(folder, samples: list[dict[str, bytes]], encodings: dict[str, str], *, compression=None) -> None:
    """As MosaicML's MDSWriter, 100 samples to a shard; all columns are of variable size but those of int."""
    folder.mkdir()
    names, shards = sorted(encodings), []
    columns = {"column_names": names, "column_encodings": [encodings[name] for name in names],
               "column_sizes": [8 if encodings[name] == "int" else None for name in names]}  # fmt: skip
    config = json.dumps(columns | {"format": "mds"}).encode()
    for number, start in enumerate(range(0, len(samples), 100)):
        bodies = []
        for sample in samples[start : start + 100]:
            head = np.array([len(sample[name]) for name in names if encodings[name] != "int"], "<u4").tobytes()
            bodies.append(head + b"".join(sample[name] for name in names))
        ends = np.cumsum([4 + 4 * (len(bodies) + 1) + len(config), *map(len, bodies)]).astype("<u4")
        content = np.uint32(len(bodies)).tobytes() + ends.tobytes() + config + b"".join(bodies)
        raw = {"basename": f"shard.{number:05d}.mds", "bytes": len(content), "hashes": {}}
        packed = None
        if compression:
            stored = zstandard.ZstdCompressor().compress(content)
            packed = {"basename": f"{raw['basename']}.zstd", "bytes": len(stored), "hashes": {}}
        (folder / (packed or raw)["basename"]).write_bytes(stored if compression else content)
        shard = {"format": "mds", "version": 2, "hashes": [], "size_limit": 1 << 26, "compression": compression}
        shards.append(columns | shard | {"samples": len(bodies), "raw_data": raw, "zip_data": packed})
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))


def check_stream(out, documents) -> None:
    """The rows, one after the other, are the stream of the documents; only end tokens fill the last one up."""
    stream, found = np.concatenate(documents), all_rows(out, "train").reshape(-1)
    assert (found[: len(stream)] == stream).all() and len(found) - len(stream) < 32 and not found[len(stream) :].any()
    report = report_of(out)
    assert report["documents"] == report["documents_read"] == (stream == 0).sum() and "tokens_per_byte" not in report
    assert "0 problems" in run("verify_shards.py", out)


@pytest.mark.parametrize(("dtype", "sequences"), [("uint16", 1), ("int32", 3), ("int64", 2)])
def test_rows_hold_the_documents_of_megatron(dtype, sequences, documents, convert, tmp_path):
    for number, part in enumerate((documents[:100], documents[100:])):
        write_megatron(tmp_path / f"corpus_{number}", part, dtype, sequences=sequences)
    convert("megatron", f"{tmp_path}/corpus_*.idx")
    check_stream(tmp_path / "out", documents)
    manifest = Manifest.load(tmp_path / "out")
    assert (manifest.vocab_size, manifest.dtype, manifest.special.end) == (400, "uint16 little endian", 0)
    starts = {number for number, pair in enumerate(pairwise(np.concatenate(documents))) if pair[0] == 0}
    batch = next(iter(RowLoader(Rows(f"{tmp_path}/out", global_batch_size=8), documents=True)))
    assert (batch["position_ids"][:, 1:] == 0).any() and len(starts) == 299
    assert inspected(tmp_path / "out").count("  text   ") == 4


def test_an_end_token_is_added_where_asked_for(documents, convert, tmp_path):
    mixed = [ids if number % 3 else ids[:-1] for number, ids in enumerate(documents)]
    write_megatron(tmp_path / "corpus", mixed, "uint16")
    message = convert("megatron", tmp_path / "corpus.idx", code=2)
    assert "document 0: does not end with id 0, the end token: give --append-end-token" in message
    assert not (tmp_path / "out").exists()
    convert("megatron", tmp_path / "corpus.idx", "--append-end-token")
    check_stream(tmp_path / "out", documents)
    write_mds(
        tmp_path / "mds", [{"tokens": ids[:-1].astype("<i8").tobytes()} for ids in documents], {"tokens": "bytes"}
    )
    convert("mds", tmp_path / "mds", "--append-end-token", "--token-dtype", "int64", "--output", tmp_path / "other")
    check_stream(tmp_path / "other", documents)


def test_an_end_token_is_added_that_the_input_cannot_hold(tmp_path):
    write_megatron(tmp_path / "a", [np.array([1, 2]), np.array([3])], "uint8")
    pieces = read_pieces(tmp_path / "a", "megatron", "", None, 400)
    (documents,) = documents_of(pieces, 300, 400, np.dtype("<u2"), ends="added")
    assert [ids.tolist() for ids in documents] == [[1, 2], [3]]


def test_other_tokens_under_the_same_name_do_not_go_on_with_the_job(documents, convert, tmp_path):
    stream = np.concatenate(documents).astype("<u2")
    convert("nanogpt", write(tmp_path / "a.bin", stream.tobytes()))
    before = contents(tmp_path / "out")
    convert("nanogpt", tmp_path / "a.bin")
    message = convert("nanogpt", write(tmp_path / "a.bin", stream[: len(stream) // 2].tobytes()), code=2)
    assert "holds a job with other settings (tokens_xxh3_128 was" in message and contents(tmp_path / "out") == before


@pytest.mark.parametrize("header", [None, (20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_rows_hold_the_stream_of_nanogpt(header, documents, convert, tmp_path):
    """A file may end within a document."""
    for number, part in enumerate(np.split(np.concatenate(documents), [1001, 3000])):
        content = b""
        if header:
            content = np.array([*header[:2], len(part), *[0] * 253], "<i4").tobytes()
        (tmp_path / f"part_{number}.bin").write_bytes(content + part.astype(header[2] if header else "<u2").tobytes())
    convert("nanogpt", f"{tmp_path}/part_*.bin")
    check_stream(tmp_path / "out", documents)


def test_a_stream_that_ends_within_a_document_gets_an_end_token_and_some_documents_are_held_out(
    documents, convert, tmp_path
):
    stream = np.concatenate([[0], *documents])[:-1]  # llm.c puts the end token before each document
    (tmp_path / "a.bin").write_bytes(stream.astype("<u2").tobytes())
    convert("nanogpt", tmp_path / "a.bin")
    check_stream(tmp_path / "out", [np.array([0]), *documents])
    convert("nanogpt", tmp_path / "a.bin", "--heldout-fraction", 0.2, "--output", tmp_path / "split")
    found = []
    for split in ("train", "heldout"):
        tokens = all_rows(tmp_path / "split", split).reshape(-1)
        found.append([tuple(ids) for ids in np.split(tokens, np.flatnonzero(tokens == 0) + 1) if len(ids) > 1])
    assert sorted(found[0] + found[1]) == sorted(map(tuple, documents)) and 30 < len(found[1]) < 90


@pytest.mark.parametrize("encoding", ["bytes", "ndarray", "ndarray:int32", "ndarray:uint16:16"])
@pytest.mark.parametrize("compression", [None, "zstd:7"])
def test_rows_hold_the_samples_of_mds(encoding, compression, documents, convert, tmp_path):
    stream, samples = np.concatenate(documents), []
    cuts = range(0, len(stream), 16) if encoding.endswith(":16") else [0, 5, 900, 1300, *range(1400, len(stream), 64)]
    ids = stream[: len(stream) // 16 * 16]
    for start, stop in pairwise([*[cut for cut in cuts if cut < len(ids)], len(ids)]):
        shape = np.array([stop - start], "<u2").tobytes()
        form = {"bytes": ("<i8", b""), "ndarray": ("<u2", bytes([16, 5]) + shape),
                "ndarray:int32": ("<i4", bytes([5]) + shape), "ndarray:uint16:16": ("<u2", b"")}[encoding]  # fmt: skip
        tokens = form[1] + ids[start:stop].astype(form[0]).tobytes()
        samples.append({"tokens": tokens, "url": b"u" * (start % 7), "score": bytes(8)})
    write_mds(tmp_path / "mds", samples, {"tokens": encoding, "url": "str", "score": "int"}, compression=compression)
    convert("mds", tmp_path / "mds", *(["--token-dtype", "int64"] if encoding == "bytes" else []))
    found = all_rows(tmp_path / "out", "train").reshape(-1)
    assert (found[: len(ids)] == ids).all() and not found[len(ids) :].any()


def test_damaged_input_is_one_clear_error_and_leaves_nothing(documents, convert, tmp_path):
    idx, bin_path, out = tmp_path / "a.idx", tmp_path / "a.bin", tmp_path / "out"
    write_megatron(tmp_path / "a", documents, "uint16")
    whole, tokens = idx.read_bytes(), bin_path.read_bytes()
    header, sizes = whole[:34], whole[34 : 34 + 1200]
    for content, message in [
        (b"TNTIDX\x00\x00" + whole[8:], "its .idx begins with b'TNTIDX"),
        (whole[:9] + b"\2" + whole[10:], "its .idx has version 2"),
        (whole[:17] + b"\6" + whole[18:], "version 1 and dtype 6; needed: 1, and a dtype of whole numbers"),
        (whole[:20], "is damaged"),
        (whole[:-8], "300 sequences need"),
        (whole[:-8] + struct.pack("<q", 301), "documents that do not run from sequence 0 to 300"),
        (header + struct.pack("<i", -1) + sizes[4:] + whole[1234:], "sequence 0 of its .idx lies outside"),
        (whole[:1234] + struct.pack("<q", 1 << 40) + whole[1242:], "sequence 0 of its .idx lies outside"),
    ]:
        idx.write_bytes(content)
        assert message in convert("megatron", idx, code=2) and not out.exists()
    idx.write_bytes(whole)
    bin_path.write_bytes(tokens[:-2])
    assert "sequence 299 of its .idx lies outside" in convert("megatron", idx, code=2)
    bin_path.write_bytes(tokens[:-4] + struct.pack("<HH", 400, 0))
    assert "document 299: has ids from 0 to 400, the vocabulary has 400" in convert("megatron", idx, code=2)
    assert "is no number of uint16 tokens" in convert("nanogpt", write(bin_path, tokens[:-1]), code=2)
    for fields, message in [((20240520, 2, 9), "header of version 2"), ((20240520, 1, 9), "its header says 9")]:
        content = np.array([*fields, *[0] * 253], "<i4").tobytes() + bytes(16)
        assert message in convert("nanogpt", write(bin_path, content), code=2)
    assert "empty" in convert("nanogpt", write(bin_path, b""), code=2)
    assert "matches nothing here" in convert("nanogpt", tmp_path / "*.tokens", code=2)
    samples = [{"tokens": ids.astype("<i4").tobytes()} for ids in documents]
    mds, shard = tmp_path / "mds", tmp_path / "mds/shard.00001.mds"
    write_mds(mds, samples, {"tokens": "bytes"})
    typed = ("--token-dtype", "int32")
    assert "readable are ndarray, and bytes with a --token-dtype" in convert("mds", mds, code=2)
    found = "index.json has mds 2 with the columns tokens; needed: mds 2 with the column ids of --mds-column"
    assert found in convert("mds", mds, *typed, "--mds-column", "ids", code=2)
    content = shard.read_bytes()
    for damaged in (content[:-1], content[:100], b"", content + b"\0", bytes([99]) + content[1:]):
        assert f"--input {mds}: " in convert("mds", write(shard, damaged) and mds, *typed, code=2)
    place = int(np.frombuffer(content, "<u4", 1, 4)[0])
    write(shard, content[:place] + bytes([1]) + content[place + 1 :])
    assert "sample 0 of shard.00001.mds does not fill" in convert("mds", mds, *typed, code=2)
    shard.unlink()
    assert f"No such file or directory: '{shard}'" in convert("mds", mds, *typed, code=2)
    write(mds / "index.json", b'{"shards": [{}]}')
    assert "is damaged (KeyError: 'column_names')" in convert("mds", mds, *typed, code=2)
    assert "takes no --append-end-token" in convert("nanogpt", bin_path, "--append-end-token", code=2)
    assert "takes no --token-dtype" in convert("nanogpt", bin_path, *typed, code=2)
    idx.write_bytes(whole)
    assert "takes no --token-dtype" in convert("megatron", idx, *typed, "--append-end-token", code=2)
    write_mds(tmp_path / "none", [], {"tokens": "ndarray"})
    assert "--input holds no tokens" in convert("mds", tmp_path / "none", code=2)
    assert not out.exists()


def test_tokens_of_another_width_are_refused(documents, convert, tmp_path):
    stream = np.concatenate(documents)
    assert "it seems to have uint32" in convert(
        "nanogpt", write(tmp_path / "a.bin", stream.astype("<u4").tobytes()), code=2
    )
    write(tmp_path / "a.bin", stream.astype("<u2").tobytes())
    with pytest.raises(InputError, match=r"it seems to have uint32, of a vocabulary of 70000"):
        next(read_pieces(tmp_path / "a.bin", "nanogpt", "", None, 70_000))
    write_mds(tmp_path / "mds", [{"tokens": stream.astype("<u4").tobytes()}], {"tokens": "bytes"})
    assert "uint8 cannot hold a vocabulary of 400" in convert("mds", tmp_path / "mds", "--token-dtype", "uint8", code=2)
    assert not (tmp_path / "out").exists()


def test_a_stream_without_an_end_token_is_refused(documents, convert, tmp_path):
    samples = [{"tokens": ids[:-1].astype("<i8").tobytes()} for ids in documents]
    write_mds(tmp_path / "mds", samples, {"tokens": "bytes"})
    message = convert("mds", tmp_path / "mds", "--token-dtype", "int64", code=2)
    assert "all tokens are without id 0: give its --end-token, or for samples of MDS --append-end-token" in message
    assert not (tmp_path / "out").exists()


def test_mds_that_another_program_compressed_is_said_to_be(documents, convert, tmp_path):
    write_mds(tmp_path / "mds", [{"tokens": documents[0].tobytes()}], {"tokens": "bytes"}, compression="gz:9")
    message = convert("mds", tmp_path / "mds", "--token-dtype", "int64", code=2)
    assert "index.json has compression gz:9; needed: zstd, or none" in message


def write(path, content: bytes):
    path.write_bytes(content)
    return path
