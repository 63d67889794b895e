"""The preparation of data. Only the scripts of data_prep import this package; training does not.

The tokenizing job of data_prep/tokenize_corpus.py reads documents, filters them and writes shards. Its modules, from
the outside in: job (what was asked for, what is done), run_job (the passes, in order, and where their tasks run),
read_documents, dedup and write_shards (the steps of a task), report (the end; or an estimate of all of it, from a
sample). Below read_documents are read_records (texts) and input_files (bytes).

data_prep/convert_tokens.py reads the tokens of others (token_files), and writes them as the job does.

data_prep/prepare_images.py uses image_sources (which images there are) and job (its folder and its workers).
"""
