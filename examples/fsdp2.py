"""A plain FSDP2 loop, as torchtitan's, on rows that stay exact: kill it, and start it again on another number of ranks.

torchrun --nproc_per_node 2 examples/fsdp2.py --shards data/own/shards --output outputs/fsdp2

The loader is Stateful, so torch's distributed checkpoint saves it beside the model and the optimizer. torchtitan's own
loop takes pairs: `for batch in loader: yield {"input": batch["input_ids"][:, :-1]}, batch["labels"][:, 1:]`.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from gmlp_scale.data.rows import RowLoader, Rows

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shards", required=True)
parser.add_argument("--output", required=True, type=Path)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save-steps", type=int, default=100)
parser.add_argument("--global-batch", type=int, default=256)
parser.add_argument("--micro-batch", type=int, default=8)
parser.add_argument("--width", type=int, default=256)


def main(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = Rows(options.shards, seed=1, global_batch_size=options.global_batch)
    loader = RowLoader(
        rows, rank=rank, world_size=world_size, micro_batch_size=options.micro_batch, num_steps=options.steps
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=rows.manifests[0].vocab_size, hidden_size=options.width, intermediate_size=4 * options.width,
            num_hidden_layers=2, num_attention_heads=4,
        )
    ).to(device)  # fmt: skip
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> dict:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "loader": loader.state_dict()}

    if saved := sorted(path.parent for path in options.output.glob("*/.metadata")):  # which is written last
        loaded = state()
        dcp.load(loaded, checkpoint_id=saved[-1])
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        loader.load_state_dict(loaded["loader"])
    step = loader.step
    for batch in loader:
        logits = model(batch["input_ids"].to(device)).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten().to(device))
        (loss * len(logits) * world_size / options.global_batch).backward()
        if loader.step > step:  # the last micro-batch
            step = loader.step
            optimizer.step(), optimizer.zero_grad()
            if step % options.save_steps == 0 or step == options.steps:
                dcp.save(state(), checkpoint_id=options.output / f"step_{step:09d}")
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
