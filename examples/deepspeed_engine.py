"""DeepSpeed's engine on rows that stay exact: kill it, and start it again on another number of ranks.

deepspeed --num_gpus 2 examples/deepspeed_engine.py --shards data/own/shards --output outputs/deepspeed

With ZeRO (zero_optimization.stage), DeepSpeed wants its checkpoints converted before another number of ranks reads them
(ds_to_universal.py). The rows do not mind.
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import BertConfig, BertForMaskedLM

from gmlp_scale.data.rows import RowLoader, Rows

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shards", required=True)
parser.add_argument("--output", required=True)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save-steps", type=int, default=100)
parser.add_argument("--global-batch", type=int, default=256)
parser.add_argument("--micro-batch", type=int, default=8)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--local_rank", type=int, help="that the launcher gives")


def main(options: argparse.Namespace) -> None:
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    rows = Rows(options.shards, seed=1, global_batch_size=options.global_batch)
    loader = RowLoader(
        rows, rank=dist.get_rank(), world_size=dist.get_world_size(), micro_batch_size=options.micro_batch,
        masked_fraction=0.15, num_steps=options.steps,
    )  # fmt: skip
    manifest = rows.manifests[0]
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=manifest.vocab_size, hidden_size=options.width, intermediate_size=4 * options.width,
            num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=manifest.sequence_length,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch_sizes = {"train_batch_size": options.global_batch, "train_micro_batch_size_per_gpu": options.micro_batch}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=batch_sizes)
    _, saved = engine.load_checkpoint(options.output)
    if saved:
        loader.load_state_dict(saved["loader"])
    for batch in loader:
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        if engine.is_gradient_accumulation_boundary() and loader.step % options.save_steps == 0:
            engine.save_checkpoint(options.output, client_state={"loader": loader.state_dict()})
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
