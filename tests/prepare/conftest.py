from tests.data_prep.conftest import tokenizer_dir  # noqa: F401
