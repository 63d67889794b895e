"""The texts in a tar file as webdataset's users write it: members KEY.txt, KEY.json or KEY.jsonl.

Every .txt is a document, every line of a .jsonl, and every .json but metadata: 0.json beside 0.txt, and 0.meta.json
beside 0.txt or 0.json. A name may have more dots, as v1.0.txt, and may come twice. Members with other endings, such as
a picture, hold no text and are passed over. Nothing is extracted to disk.
"""

import tarfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import PurePosixPath
from typing import BinaryIO

from gmlp_scale.prepare.open_input import BadFileError, InputFile

ENDINGS = (".txt", ".json", ".jsonl")


class StrictTarInfo(tarfile.TarInfo):
    """Raises an error at a damaged or missing header after the first one; tarfile takes it for the archive's end."""

    @classmethod
    def fromtarfile(cls, archive):
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError, tarfile.EmptyHeaderError) as error:
            raise tarfile.ReadError(str(error) or "it ends without the blocks of zeros that end an archive") from error


def text_members(content: BinaryIO, raw: BinaryIO, file: InputFile, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """(ending, content) of every member with text: of a .jsonl all of it, of others at most max_bytes + 1 bytes.

    They come in the archive's order, except that the .json come last among neighbours with the same webdataset key,
    the name up to the first dot.

    Args:
        content: the archive, decompressed; `raw`, the stored bytes below it, whose position says how much was read.

    Raises:
        BadFileError: the archive is damaged, cut short, or has no text at all.
    """
    num_members = 0
    try:
        with tarfile.open(fileobj=content, mode="r|", tarinfo=StrictTarInfo) as archive:
            members = _read(archive, max_bytes)
            for _, sample in groupby(members, key=lambda member: (member[0].parent, member[0].name.partition(".")[0])):
                for member in _documents(sample):
                    num_members += 1
                    yield member
    except (tarfile.TarError, EOFError) as error:
        raise BadFileError(file, raw.tell(), str(error)) from error
    if not num_members:
        raise BadFileError(file, raw.tell(), f"no member of it ends in {', '.join(ENDINGS)}")


def _read(archive: tarfile.TarFile, max_bytes: int) -> Iterator[tuple[PurePosixPath, bytes]]:
    """(name, first bytes)."""
    for member in archive:
        name = PurePosixPath(member.name)
        if member.isreg() and name.suffix in ENDINGS:
            num_bytes = -1 if name.suffix == ".jsonl" else max_bytes + 1
            yield name, archive.extractfile(member).read(num_bytes)


def _documents(sample: Iterable[tuple[PurePosixPath, bytes]]) -> Iterator[tuple[str, bytes]]:
    """(ending, content) without the metadata, of members with one key."""
    texts, jsons = set(), []
    for name, content in sample:
        if name.suffix == ".json":
            jsons.append((name.stem, content))
        else:
            texts.add(name.stem)
            yield name.suffix, content
    stems = texts.union(stem for stem, _ in jsons)
    for stem, content in jsons:
        shorter = (stem[:place] for place, character in enumerate(stem) if character == ".")
        if stem not in texts and stems.isdisjoint(shorter):
            yield ".json", content
