"""The order of the rows for a trainer of any kind: a data set, and a loader for one rank that resumes at any step.

    rows = Rows("data/own/shards", seed=1, global_batch_size=512)
    loader = RowLoader(rows, rank=rank, world_size=world_size, micro_batch_size=8)
    loader.load_state_dict({"step": 1_000_000})  # after a kill, on any number of ranks
    for batch in loader:
        model(**batch).loss.backward()

The rows and masks of a step are those that launch/pretrain.py gives its models. Shapes: B rows of a batch, N positions.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.utils.data import Dataset

from gmlp_scale.data.batch import IGNORED
from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.data_config import DataConfig, check_manifests, check_masks
from gmlp_scale.data.loader import Loader
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.data.mixture import mixture_mistakes
from gmlp_scale.data.shards import Manifest
from gmlp_scale.data.source import BatchAddresses, locate_rows, read_rows
from gmlp_scale.errors import InputError
from gmlp_scale.piecewise import Piecewise, number_or_pieces

_ENDLESS = 10**12  # steps
_BATCH_SIZE = TypeAdapter(
    Annotated[Any, number_or_pieces(lambda value: type(value) is int and value > 0, "a whole number above 0")]
)


class Rows(Dataset):
    """The training rows of shards, in an order that a seed decides: rows[position] is int64 [N], of all rows in a list.

    Positions count from the start of training through all epochs, of which each has `len(rows)` rows. The processes of
    a DataLoader may share it.

    shards: a folder, or a mixture as in a recipe: [{"shards": "data/c4", "weight": 0.7}, {...}].
    global_batch_size: rows of a step over all ranks, or a list of [from_step, rows], from step 0 on. The from_step of a
        mixture's source counts these steps.
    run_dir: where the corrupt shards that were skipped are recorded.
    data: other fields of a recipe's section `data`, such as cache_dir.

    Raises ShardError if the shards cannot be used, FileNotFoundError if there are none, ValueError for a wrong field.
    """

    def __init__(
        self,
        shards: str | Sequence[Mapping[str, Any]],
        *,
        seed: int = 0,
        global_batch_size: int | Sequence[Sequence[int]] = 1,
        run_dir: str | Path = ".",
        **data: Any,
    ):
        self.seed, self.run_dir = seed, Path(run_dir)
        self.batch_sizes = Piecewise(_BATCH_SIZE.validate_python(global_batch_size))
        config = DataConfig(shards=shards, **data)
        if mistakes := list(mixture_mistakes(config.sources, _ENDLESS)):
            raise ShardError("\n".join(mistakes))
        self.manifests = [Manifest.load(source.shards) for source in config.sources]
        self.config = config.model_copy(update={"packing": self.manifests[0].packing})
        self._check(self.config)
        self._loader: Loader | None = None
        self._process: int | None = None

    def opened(self, plan: BatchPlan, **changes: Any) -> Loader:
        """A loader of these rows by `plan`, with other fields of its config."""
        config = self.config.model_validate(self.config.model_dump() | changes)
        self._check(config)
        return Loader(config, plan, self.manifests, run_dir=self.run_dir)

    def _check(self, config: DataConfig) -> None:
        first = self.manifests[0]
        check_manifests(self.manifests, config, first.sequence_length, first.vocab_size)

    def __len__(self) -> int:
        return sum(manifest.num_rows("train") for manifest in self.manifests)

    def __getitem__(self, position: int) -> Tensor:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Tensor]:
        if min(positions) < 0:
            raise IndexError(f"found position {min(positions)}; needed: 0 or more")
        if self._process != os.getpid():  # the worker of a DataLoader cannot use its parent's threads
            self._loader = self.opened(BatchPlan(self.seed, self.batch_sizes, micro_batch_size=1))
            self._process = os.getpid()
        sources = self._loader.sources
        addresses = locate_rows(sources, *self._loader.mixture.locate(np.asarray(positions, np.int64)))
        return list(torch.from_numpy(read_rows(sources, addresses).astype(np.int64)))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loader": None, "_process": None}


class RowLoader:
    """The batches of one rank, as dictionaries that the models of transformers take. A thread makes them ahead.

    Step t takes the rows of the positions that follow those of all steps before it, and each rank its slice of them.
    So the batch of all ranks together is the same on any number of them, and the state is the number of finished steps.

    input_ids: int64 [B, N].
    labels: int64 [B, N], with -100 where nothing is to be predicted. With masks, the original ids at the masked
        positions. Without, `input_ids`: the models of transformers shift them, and in a loss of one's own
        `labels[:, 1:]` are the next tokens of `input_ids[:, :-1]`.
    attention_mask: int64 [B, N], 0 at padding; only where rows hold one document each, since others are full.
    position_ids, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: with `documents`, the documents' boundaries.
        Positions int64 [B, N] begin anew with each document, and no label is at a document's first token without masks.
        The others are for FlashAttention: int32 [documents + 1], where each begins in the flattened batch, and its end;
        and the longest one's length.

    micro_batch_size: rows of each dictionary; None for all that the rank has in a step.
    masked_fraction: how much of each row is masked: a number, or a list of [from_step, fraction]; None for no masks.
    num_steps: the loader ends there; None for never.

    Raises InputError unless the ranks' micro-batches divide every batch; CorruptShardError in the loop.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        rank: int = 0,
        world_size: int = 1,
        micro_batch_size: int | None = None,
        masked_fraction: float | Sequence[Sequence[float]] | None = None,
        documents: bool = False,
        num_steps: int | None = None,
    ):
        plan = BatchPlan(rows.seed, rows.batch_sizes, micro_batch_size or 1, rank, world_size)
        masks = {} if masked_fraction is None else {"masked_fraction": masked_fraction}
        if masks:
            check_masks(rows.manifests, rows.config)
        self._loader, self._micro_batch_size = rows.opened(plan, **masks), micro_batch_size
        self._special = rows.manifests[0].special
        self._is_masked, self._documents, self._stop = bool(masks), documents, num_steps or _ENDLESS
        self.step = 0
        """Steps of which all batches were given out."""

    def state_dict(self) -> dict[str, int]:
        """The same on all ranks. Within a step, it is the state before the step."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next iteration begins at the state's step, whatever the number of ranks that saved it."""
        if type(step := state.get("step")) is not int or step < 0:
            raise InputError(f"found the state {dict(state)}; needed: step, the number of finished steps")
        self.step = step

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batches in self._loader.read_ahead(self._batches, self.step, self._stop):
            *others, last = batches
            yield from others
            self.step += 1
            yield last

    def close(self) -> None:
        """Ends the threads."""
        self._loader.close()

    def _batches(self, step: int, addresses: BatchAddresses) -> list[dict[str, Any]]:
        """The dictionaries of a step."""
        loader = self._loader
        if self._is_masked:
            masked = loader.masked(loader.sources, addresses, loader.num_masked.at(step))
            input_ids = masked.token_ids_BN
            labels = torch.full_like(input_ids, IGNORED).scatter_(1, masked.masked_positions_BM, masked.labels_BM)
        else:
            input_ids = torch.from_numpy(read_rows(loader.sources, addresses).astype(np.int64))
            labels = input_ids.masked_fill(self._special.is_filler(input_ids), IGNORED)
        batch = {"input_ids": input_ids, "labels": labels}
        if loader.config.padded:
            batch["attention_mask"] = (input_ids != self._special.pad).long()
        if self._documents:
            batch["is_start"] = is_start = torch.ones_like(input_ids, dtype=torch.bool)
            is_start[:, 1:] = input_ids[:, :-1] == self._special.end
            places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
            batch["position_ids"] = places - torch.where(is_start, places, 0).cummax(dim=1).values
            if not self._is_masked:
                batch["labels"] = labels.masked_fill(is_start, IGNORED)
        size = self._micro_batch_size or len(input_ids)
        parts = zip(*(tensor.split(size) for tensor in batch.values()), strict=True)
        batches = [dict(zip(batch, tensors, strict=True)) for tensors in parts]
        return [one | _boundaries(one.pop("is_start")) for one in batches] if self._documents else batches


def _boundaries(is_start_BN: Tensor) -> dict[str, Any]:
    """Where the documents of a flattened batch begin and end, by the names that transformers has for it."""
    starts = is_start_BN.flatten().nonzero().flatten()
    ends = torch.cat([starts, torch.tensor([is_start_BN.numel()])]).int()
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
