"""The tokenizing job that data_prep/tokenize_corpus.py starts: it reads documents, filters them and writes shards.

From the outside in: job_options (what was asked for), job_folder (what is done), run_job (the passes, in order),
executors (where their tasks run), read_documents, dedup, write_shards (the steps of a task), report (the end).
Below read_documents are input_files (records) and open_input (bytes). Scripts alone import this package; training
does not.
"""
