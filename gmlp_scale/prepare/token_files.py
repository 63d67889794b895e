"""Tokens that others have stored: Megatron's .bin and .idx, nanoGPT's .bin, and MosaicML's MDS.

A reader gives (place, tokens) for each piece, in the order of the files: a document of Megatron, a sample of MDS, or
some tokens of nanoGPT's stream. It raises ValueError, or what the libraries raise, where a file is damaged.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import zstandard

from gmlp_scale.errors import InputError, UserError

TOKEN_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_TOKENS_AT_A_TIME = 1 << 20
_LONGEST_DOCUMENT = 1 << 26  # tokens: without an end token the whole input would be one document, in memory
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_NANOGPT_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # by the header's first numbers, as in llm.c
_MDS_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}

Pieces = Iterator[tuple[str, np.ndarray]]


def read_pieces(path: Path, form: str, mds_column: str, token_dtype: str | None, vocab_size: int) -> Pieces:
    """The pieces at `path`: Megatron's prefix, nanoGPT's file or MDS's folder. InputError where it is damaged, or where
    a dtype that no file declares cannot hold the vocabulary."""
    try:
        if token_dtype and np.iinfo(token_dtype).max < vocab_size - 1:
            raise ValueError(f"{token_dtype} cannot hold a vocabulary of {vocab_size}")
        match form:
            case "megatron":
                yield from _megatron(f"{path}.idx", f"{path}.bin")
            case "nanogpt":
                yield from _nanogpt(path, vocab_size)
            case _:
                yield from _mds(path, mds_column, token_dtype)
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, struct.error, zstandard.ZstdError) as error:
        found = f"{error}" if isinstance(error, ValueError) else f"is damaged ({type(error).__name__}: {error})"
        raise InputError(f"--input {path}: {found}. Copy or write it again, or give its own --format") from error


def _megatron(index_path: str, tokens_path: str) -> Pieces:
    """MMapIndexedDataset of Megatron-LM, version 1."""
    index = Path(index_path).read_bytes()
    magic, version, code, num_sequences, num_bounds = struct.unpack_from("<9sQBQQ", index)
    if magic != _MEGATRON_MAGIC:
        raise ValueError(f"its .idx begins with {magic!r}, not with {_MEGATRON_MAGIC!r}")
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise ValueError(f"its .idx has version {version} and dtype {code}; needed: 1, and a dtype of whole numbers")
    needed = 34 + num_sequences * 12 + num_bounds * 8
    if len(index) not in (needed, needed + num_sequences):  # with a mode for each sequence at the end
        raise ValueError(f"its .idx has {len(index)} bytes; {num_sequences} sequences need {needed}")
    sizes = np.frombuffer(index, "<i4", num_sequences, 34).astype(np.int64)
    starts = np.frombuffer(index, "<i8", num_sequences, 34 + num_sequences * 4)
    bounds = np.frombuffer(index, "<i8", num_bounds, 34 + num_sequences * 12)
    if not num_bounds or bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise ValueError(f"its .idx has documents that do not run from sequence 0 to {num_sequences}")
    content, dtype = np.memmap(tokens_path, np.uint8, "r"), np.dtype(_MEGATRON_DTYPES[code])
    stops = starts + sizes * dtype.itemsize
    if (is_outside := (sizes < 0) | (starts < 0) | (stops > len(content))).any():
        raise ValueError(f"its .bin has {len(content)} bytes; sequence {is_outside.argmax()} of its .idx lies outside")
    for number, (first, stop) in enumerate(pairwise(bounds.tolist())):
        parts = [content[starts[place] : stops[place]] for place in range(first, stop)]
        yield f"{tokens_path}, document {number}", np.concatenate([content[:0], *parts]).view(dtype)


def _nanogpt(path: Path, vocab_size: int) -> Pieces:
    """uint16 without a header, as nanoGPT writes it, or with that of llm.c and modded-nanogpt."""
    content = np.memmap(path, np.uint8, "r")
    header = content[:1024].view("<i4")[:3].tolist() if len(content) >= 1024 else [0]
    if header[0] in {magic for magic, _ in _NANOGPT_DTYPES}:
        if (dtype := _NANOGPT_DTYPES.get(tuple(header[:2]))) is None:
            raise ValueError(f"has a header of version {header[1]}, which is unknown")
        tokens = content[1024:].view(dtype)
        if len(tokens) != header[2]:
            raise ValueError(f"has {len(tokens)} tokens, its header says {header[2]}")
    elif len(content) % 2:
        raise ValueError(f"has {len(content)} bytes, which is no number of uint16 tokens")
    else:
        tokens = content.view("<u2")
        if vocab_size > 1 << 16 or (len(tokens) >= 64 and not tokens[1:64:2].any()):
            raise ValueError(
                f"has no header, so uint16 tokens; it seems to have uint32, of a vocabulary of {vocab_size}"
            )
    yield str(path), tokens


def _mds(folder: Path, column: str, dtype_of_bytes: str | None) -> Pieces:
    """Shards that index.json lists, plain or compressed by zstd; version 2 of the format."""
    for shard in json.loads((folder / "index.json").read_bytes())["shards"]:
        names, fixed, raw = shard["column_names"], shard["column_sizes"], shard["raw_data"]
        if (compression := shard["compression"] or "zstd").partition(":")[0] != "zstd":
            raise ValueError(f"index.json has compression {compression}; needed: zstd, or none")
        if (shard["format"], shard["version"]) != ("mds", 2) or column not in names:
            found = f"{shard['format']} {shard['version']} with the columns {', '.join(names)}"
            raise ValueError(f"index.json has {found}; needed: mds 2 with the column {column} of --mds-column")
        place, name = names.index(column), folder / raw["basename"]
        if name.exists() or not shard["zip_data"]:
            content = name.read_bytes()
        else:
            packed = folder / shard["zip_data"]["basename"]
            content = zstandard.ZstdDecompressor().decompress(packed.read_bytes())
        num_samples, *ends = np.frombuffer(content, "<u4", shard["samples"] + 2).tolist()
        if len(content) != raw["bytes"] or num_samples != shard["samples"] or ends[-1] != len(content):
            raise ValueError(f"{name.name} has {len(content)} bytes, {num_samples} samples; index.json says otherwise")
        for number, (start, end) in enumerate(pairwise(ends)):
            head = iter(np.frombuffer(content, "<u4", fixed.count(None), start).tolist())
            stops = np.cumsum([4 * fixed.count(None), *(next(head) if size is None else size for size in fixed)])
            if start + stops[-1] != end:
                raise ValueError(f"sample {number} of {name.name} does not fill its {end - start} bytes")
            sample = content[start + stops[place] : start + stops[place + 1]]
            yield f"{name}, sample {number}", _mds_tokens(sample, shard["column_encodings"][place], dtype_of_bytes)


def _mds_tokens(sample: bytes, encoding: str, dtype_of_bytes: str | None) -> np.ndarray:
    """An array, whose dtype and shape stand before it unless they stand in `encoding`. Or bytes."""
    kind, dtype, shape = (*encoding.split(":"), "", "")[:3]
    if kind not in ("bytes", "ndarray") or (kind == "bytes") == (dtype_of_bytes is None):
        raise ValueError(f"the column is of {encoding}; readable are ndarray, and bytes with a --token-dtype")
    start = 0
    if kind == "ndarray" and not dtype:
        dtype, start = _MDS_DTYPES[sample[0]], 1
    if kind == "ndarray" and not shape:
        start += 1 + (sample[start] >> 2) * 2 ** (sample[start] % 4)
    if (dtype := dtype_of_bytes or dtype) not in TOKEN_DTYPES:
        raise ValueError(f"the column is of {dtype}; needed: whole numbers")
    return np.frombuffer(sample, dtype, offset=start)


def documents_of(
    pieces: Iterable[tuple[str, np.ndarray]], end: int, vocab_size: int, dtype: np.dtype, *, ends: str
) -> Iterator[list[np.ndarray]]:
    """Batches of the stream's documents without their end tokens, in `dtype`; the last one may have had none.

    ends: as they are in the stream ("kept"); or each piece must have one ("needed"), or gets it ("added").

    Raises InputError for an id outside the vocabulary, or where an end token is missing.
    """
    waiting, num_waiting, has_end = [np.empty(0, dtype)], 0, ends == "added"
    missing = f"without id {end}: give its --end-token, or for samples of MDS --append-end-token"
    for place, piece in pieces:
        lacks_end = ends != "kept" and piece[-1:].tolist() != [end]
        if lacks_end and ends == "needed":
            raise InputError(
                f"--input {place}: does not end with id {end}, the end token: give --append-end-token, or as "
                "--end-token the one that it was written with"
            )
        for start in range(0, len(piece), _TOKENS_AT_A_TIME):
            tokens = piece[start : start + _TOKENS_AT_A_TIME]
            if not 0 <= tokens.min() <= tokens.max() < vocab_size:
                found = f"has ids from {tokens.min()} to {tokens.max()}, the vocabulary has {vocab_size}"
                raise InputError(f"--input {place}: {found}: give the --tokenizer that it was written with")
            waiting.append(tokens.astype(dtype))
            num_waiting += len(tokens)
            if num_waiting >= _TOKENS_AT_A_TIME:
                documents, rest = _split(np.concatenate(waiting), end)
                yield documents
                waiting, num_waiting, has_end = [rest], 0, has_end or bool(documents)
                if len(rest) > _LONGEST_DOCUMENT:
                    raise InputError(f"--input {place}: {len(rest)} tokens {missing}")
        if lacks_end:
            waiting.append(np.array([end], dtype))
    documents, rest = _split(np.concatenate(waiting), end)
    if len(rest) and not (has_end or documents):
        raise InputError(f"--input: all tokens are {missing}")
    yield [*documents, rest] if len(rest) else documents


def _split(stream: np.ndarray, end: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The documents without their end tokens, and what follows the last end token."""
    *documents, rest = np.split(stream, np.flatnonzero(stream == end) + 1)
    return [document[:-1] for document in documents], rest
