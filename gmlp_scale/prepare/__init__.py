"""The preparation of data. Only the scripts of data_prep import this package; training does not.

The tokenizing job of data_prep/tokenize_corpus.py reads documents, filters them and writes shards. Its modules, from
the outside in: job_options (what was asked for), job_folder (what is done), run_job (the passes, in order), executors
(where their tasks run), read_documents, dedup and write_shards (the steps of a task), report (the end), estimate (all
of it, from a sample). Below read_documents are input_files (records), tar_members and open_input (bytes).

data_prep/prepare_images.py uses image_sources (which images there are), jpeg, job_folder and worker_pool.
"""
