"""What tests import again and again in new processes; tests/forked.py has it imported once."""

import gc
import importlib
import os

# Read while these are imported. Ranks that do not interpret use none of Triton's own functions.
os.environ |= {"DS_ACCELERATOR": "cpu", "TRITON_INTERPRET": "1", "TQDM_DISABLE": "1"}
for name in (
    "torch._dynamo",  # by the first optimizer
    "torch.utils.tensorboard",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "gmlp_scale.train.run",
    "data_prep.tokenize_corpus",
    "pyarrow.compute",
    "pandas",  # by pyarrow's first array
    "s3fs",
    "tensorboard.plugins.custom_scalar.layout_pb2",
    "tensorboard.plugins.hparams.summary_v2",
    "pytest",
):
    importlib.import_module(name)
gc.freeze()  # or every process would walk, and so copy, all of this as it collects and as it ends
