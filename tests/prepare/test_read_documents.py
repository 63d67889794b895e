"""The reading of documents ends early if too many records are bad."""

import json

import pytest

from gmlp_scale.errors import InputError
from gmlp_scale.prepare.job import JobOptions
from gmlp_scale.prepare.read_documents import ReadDocuments

NUM_RECORDS = 30_000


@pytest.mark.parametrize("kind", ["files", "hub"])
def test_a_wrong_field_is_reported_before_all_is_read(kind, tmp_path):
    (tmp_path / "corpus").mkdir()
    lines = "".join(json.dumps({"url": "x", "text": f"text {number}"}) + "\n" for number in range(NUM_RECORDS))
    (tmp_path / "corpus/a.jsonl").write_text(lines)
    source = {"files": f"{tmp_path}/corpus/a.jsonl", "hub": f"hf:{tmp_path}/corpus:default:train"}[kind]
    options = JobOptions(
        input=(source,), tokenizer="x", sequence_length=8, output=str(tmp_path / "out"), text_field="body"
    )
    with pytest.raises(InputError, match=r"10000 of 10000 records are bad \(10000 no text in field 'body'\), "):
        list(ReadDocuments(options, "tokenizing").run())
