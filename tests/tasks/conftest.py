"""A small tokenizer and small files of SQuAD, in the form in which it is published."""

import json
from itertools import count
from pathlib import Path

import pytest

from gmlp_scale.data.tokenizer import Tokenizer, train_tokenizer

TEXT = (
    "a man plays the guitar on stage while people in the park watch children who run and laugh under old trees "
    "good bad great awful film story charming dull journey wonderful terrible acting music boring moving bright dark "
    "Norman Normans Normandy France century people gave their name to region tenth eleventh first half Denver Broncos "
    "0123456789 , . ! ? ' \" ( ) - é ü “ ” abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    words = TEXT.split()
    train_tokenizer([" ".join(words[start:] + words[:start]) for start in range(len(words))], 400, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


@pytest.fixture
def write_squad(tmp_path):
    """write_squad(name, [(context, [(question, [(answer, start) ...]) ...]) ...]) -> path of SQuAD's JSON."""

    def asked(id: str, question: str, answers: list, version: str) -> dict:
        texts = [{"text": text, "answer_start": start} for text, start in answers]
        impossible = {"is_impossible": not answers} if version == "v2.0" else {}
        return {"id": id, "question": question, "answers": texts, **impossible}

    def write(name: str, paragraphs: list, version: str = "v2.0") -> Path:
        numbers = count()
        written = [
            {"context": context, "qas": [asked(f"q{next(numbers)}", *question, version) for question in questions]}
            for context, questions in paragraphs
        ]
        path = tmp_path / name
        path.write_text(json.dumps({"version": version, "data": [{"title": "Title", "paragraphs": written}]}))
        return path

    return write
