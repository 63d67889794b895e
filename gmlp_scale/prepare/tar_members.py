"""The texts in a tar file as webdataset's users write it: members KEY.txt, KEY.json or KEY.jsonl.

Members of one key, one after the other, are one sample. Its .txt is the text, and a .json beside that is metadata.
Members with other endings, such as a sample's picture, hold no text and are passed over. Nothing is extracted to disk.
"""

import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import PurePosixPath
from typing import BinaryIO

from gmlp_scale.prepare.open_input import BadFileError, InputFile

ENDINGS = (".txt", ".json", ".jsonl")


class StrictTarInfo(tarfile.TarInfo):
    """tarfile takes a damaged or missing header after the first one for the archive's end; this one tells it."""

    @classmethod
    def fromtarfile(cls, archive):
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError, tarfile.EmptyHeaderError) as error:
            raise tarfile.ReadError(str(error) or "it ends without the blocks of zeros that end an archive") from error


def text_members(content: BinaryIO, raw: BinaryIO, file: InputFile, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """(ending, content) of every member with text, in the archive's order: a .jsonl whole, of others max_bytes + 1.

    Args:
        content: the archive, decompressed; `raw`, the stored bytes below it, whose position says how much was read.

    Raises:
        BadFileError: the archive is damaged, cut short, or has no text at all.
    """
    num_members = 0
    try:
        with tarfile.open(fileobj=content, mode="r|", tarinfo=StrictTarInfo) as archive:
            for _, sample in groupby(_read(archive, max_bytes), key=lambda member: member[0]):
                members = {ending: content for _, ending, content in sample}
                for ending in [".txt"] if ".txt" in members else members:
                    num_members += 1
                    yield ending, members[ending]
    except (tarfile.TarError, EOFError) as error:
        raise BadFileError(file, raw.tell(), str(error)) from error
    if not num_members:
        raise BadFileError(file, raw.tell(), f"no member of it ends in {', '.join(ENDINGS)}")


def _read(archive: tarfile.TarFile, max_bytes: int) -> Iterator[tuple[str, str, bytes]]:
    """(key, ending, first bytes). webdataset's key is the name up to the first dot of its last part."""
    for member in archive:
        name = PurePosixPath(member.name)
        key, _, rest = name.name.partition(".")
        ending = f".{rest.rpartition('.')[2]}"
        if member.isreg() and ending in ENDINGS:
            num_bytes = -1 if ending == ".jsonl" else max_bytes + 1
            yield f"{name.parent}/{key}", ending, archive.extractfile(member).read(num_bytes)
