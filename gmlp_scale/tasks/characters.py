"""Next-character prediction on one text, as in the paper of MLP-Attention: recipes with `task: characters`.

A row is a crop of the text. In every epoch one crop begins at each character, in an order of the epoch's own. So the
state of the data is the step, as in pretraining.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field

from gmlp_scale.checkpoint.config import CheckpointConfig
from gmlp_scale.data.batch import IGNORED
from gmlp_scale.data.batch_plan import EpochLoader
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine, EngineConfig, OptimizerConfig, TrainConfig
from gmlp_scale.fields import FreeInBranch, FreeOnResume, Positive, Share
from gmlp_scale.models import ModelConfig, build_model, kinds_with
from gmlp_scale.models.task_heads import NextTokenBatch, NextTokenModel
from gmlp_scale.recipe.config import PretrainingRecipe
from gmlp_scale.storage.files import read_file
from gmlp_scale.tasks.evaluate import evaluate, evaluation_batches
from gmlp_scale.tasks.records import DataError
from gmlp_scale.tasks.task import Task


class CharacterDataConfig(BaseModel, frozen=True, extra="forbid"):
    text: FreeOnResume[str]  # its checksum is compared
    """A UTF-8 text file, or one at a URL."""
    heldout_fraction: Annotated[Positive, Field(lt=1)] = 0.1
    """The end of the text that is evaluated on. [fraction]"""


class CharactersConfig(PretrainingRecipe, frozen=True, extra="forbid"):
    """A recipe of next-character prediction."""

    purpose: ClassVar[str] = "pretraining on characters"

    task: Literal["characters"]
    """Recipes of masked language modelling have no `task`."""
    model: ModelConfig
    """A model of a family whose blocks can be causal. Its vocabulary is the text's alphabet."""
    dropout: Share = 0.0
    """On residual branches and attention weights. [fraction]"""
    data: CharacterDataConfig
    train: TrainConfig
    optimizer: FreeInBranch[OptimizerConfig]
    engine: FreeOnResume[EngineConfig]
    checkpoint: FreeOnResume[CheckpointConfig]

    def build_model(self) -> NextTokenModel:
        return build_model(self.model, head=NextTokenModel, dropout=self.dropout, causal=True, seed=None)

    def num_rows(self) -> int:
        return Text(self).train.num_rows

    def mistakes(self) -> Iterable[str]:
        yield from super().mistakes()
        if not self.model.can_be_causal:
            yield f"model.kind: found {self.model.kind}; needed: one that can be causal: {kinds_with('can_be_causal')}"
        if getattr(self.model, "kernels", None) == "triton":
            yield "model.kernels: found triton; needed: auto or torch, since the fused kernels are not causal"
        if self.train.micro_batch_size == "auto":
            yield "train.micro_batch_size: found auto; needed: a number with task=characters"


class Crops:
    """Every crop of `length` characters, and for each of them the one that follows. Row i begins at character i."""

    def __init__(self, ids: np.ndarray, length: int):
        self.ids, self.length = ids, length
        self.num_rows = len(ids) - length

    def batch(self, row_indices: np.ndarray) -> NextTokenBatch:
        crops = torch.from_numpy(np.stack([self.ids[start : start + self.length + 1] for start in row_indices]))
        return NextTokenBatch(crops[:, :-1].contiguous(), crops[:, 1:].contiguous())


class Text:
    """The recipe's text, read whole.

    Raises:
        FileNotFoundError, DataError: naming the file and what is wrong with it.
    """

    def __init__(self, config: CharactersConfig):
        path, model = config.data.text, config.model
        try:
            content = read_file(path)
            text = content.decode()
        except FileNotFoundError:
            raise FileNotFoundError(f"no text at {path}: give a UTF-8 text file as data.text=...") from None
        except UnicodeDecodeError as error:
            raise DataError(path, [f"is not UTF-8 ({error}); needed: a UTF-8 text"]) from None
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.alphabet = "".join(sorted(set(text)))
        """Character i has id i."""
        if len(self.alphabet) != model.vocab_size:
            found = f"has {len(self.alphabet)} different characters"
            raise DataError(path, [f"{found}; needed: as many as model.vocab_size = {model.vocab_size}"])
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = np.unique(codes, return_inverse=True)[1].astype(np.int64)
        num_train = int(len(ids) * (1 - config.data.heldout_fraction))
        self.train, self.heldout = (Crops(part, model.sequence_length) for part in (ids[:num_train], ids[num_train:]))
        if self.train.num_rows < 1 or self.heldout.num_rows < 1:
            needed = f"a crop of model.sequence_length = {model.sequence_length} in its held-out part and in the rest"
            raise DataError(path, [f"has {len(ids)} characters; needed: enough for {needed}"])


class Characters(Task):
    """The Task of a CharactersConfig."""

    def open_loader(self, world: World) -> EpochLoader:
        text = self.text = Text(self.config)
        self.num_rows, self.fingerprint = text.train.num_rows, {"sha256": text.sha256, "alphabet": text.alphabet}
        sizes = f"{self.num_rows:,} crops and {text.heldout.num_rows:,} held out"
        self.data = f"{self.config.data.text}, {sizes}, {len(text.alphabet)} different characters"
        return EpochLoader(text.train, self.config.batch_plan(rank=world.rank, world_size=world.size))

    def evaluate(self, engine: Engine, world: World, step: int) -> dict[str, float]:
        """Held-out loss, perplexity and accuracy per character, on crops that do not overlap."""
        crops, plan = self.text.heldout, self.config.batch_plan(rank=world.rank, world_size=world.size)
        starts = np.arange(0, crops.num_rows, crops.length)[: self.train.num_evaluation_rows]

        def own_batches() -> Iterator[NextTokenBatch]:
            for numbers in evaluation_batches(plan.heldout(len(starts)), world):
                own = starts[numbers[numbers < len(starts)]]
                batch = crops.batch(own if len(own) else starts[:1])
                if not len(own):  # every rank predicts equally often; this one has no crop left
                    batch = replace(batch, next_ids_BN=torch.full_like(batch.next_ids_BN, IGNORED))
                yield batch

        return evaluate(engine.predict, own_batches(), world, attrgetter("next_ids_BN")).by_tag()
