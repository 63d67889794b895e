"""Masked language modelling on rows of text (section 4 of the paper).

A new run's weights are random, or those of a trained model (`init_from`), fitted to the recipe. Another length takes
the central offsets of each W, or puts zeros around them. So a gMLP has the same logits on rows that fit both lengths.
Another vocabulary keeps the embeddings of the pieces that both have.
"""

import logging

import torch
from torch import Tensor

from gmlp_scale.checkpoint.saved_run import open_checkpoint, read_recipe, read_run
from gmlp_scale.checkpoint.stores import checkpoints_of
from gmlp_scale.checkpoint.trained import TrainedModel, read_export
from gmlp_scale.data.batch import NUM_SPECIAL_TOKENS
from gmlp_scale.data.data_config import load_manifests
from gmlp_scale.data.loader import Loader
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.data.tokenizer import NUM_BYTE_TOKENS, Tokenizer
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine
from gmlp_scale.models.avey import AveyBlock
from gmlp_scale.models.backbone import Backbone
from gmlp_scale.models.gmlp import SpatialGatingUnit
from gmlp_scale.models.heads import MaskedLanguageModel
from gmlp_scale.recipe.config import ConfigError, RunConfig, split_step
from gmlp_scale.storage.files import read_file
from gmlp_scale.tasks.evaluate import evaluate, evaluation_batches
from gmlp_scale.tasks.task import Task

log = logging.getLogger(__name__)

_MAY_DIFFER = ("sequence_length", "vocab_size", "kernels", "masks_padding", "global_theta")


class Pretraining(Task):
    """The Task of a pretraining recipe."""

    def open_loader(self, world: World) -> Loader:
        """Raises ShardError if no rows are held out."""
        loader = self.loader = build_loader(self.config, rank=world.rank, world_size=world.size)
        folders = [source.shards for source in self.config.data.sources]
        if not loader.num_heldout_rows:
            loader.close()
            needed = "write it with more documents or a larger --heldout-fraction"
            raise ShardError(f"{' and '.join(folders)} has no held-out rows to evaluate on: {needed}")
        self.num_rows, self.fingerprint = loader.num_rows, loader.fingerprint()
        self.data = f"{', '.join(folders)}, {self.num_rows:,} rows and {loader.num_heldout_rows:,} held out"
        return loader

    def initialise(self, model: MaskedLanguageModel) -> None:
        super().initialise(model)
        if self.config.init_from:
            start_from(read_start(self.config.init_from), model, self.config)

    def epochs(self, step: int) -> dict[str, float]:
        return self.loader.epochs(step)

    def evaluate(self, engine: Engine, world: World, step: int) -> dict[str, float]:
        """Held-out loss, perplexity and accuracy."""
        rows_per_batch = self.train.micro_batch_size * world.size
        num_rows = min(self.train.num_evaluation_rows, self.loader.num_heldout_rows)
        batches = evaluation_batches(self.loader.heldout_batches(num_rows), world, -(-num_rows // rows_per_batch))
        return evaluate(engine.predict, batches, world).by_tag()


def build_loader(run: RunConfig, *, rank: int, world_size: int) -> Loader:
    """The run's loader for one rank of `world_size`.

    Raises ShardError if the shards do not fit the recipe, FileNotFoundError if there are none.
    """
    manifests = load_manifests(run.data, run.model.sequence_length, run.model.vocab_size)
    return Loader(run.data, run.batch_plan(rank=rank, world_size=world_size), manifests, run_dir=run.run_dir)


def with_newest_step(place: str) -> str:
    """RUN@STEP of the newest good checkpoint of a run; an export's place as it is."""
    try:
        read_file(f"{place}/config.json")
        return place
    except (FileNotFoundError, NotADirectoryError):
        read_recipe(place)  # says so if there is no run either
    with checkpoints_of(place) as checkpoints:
        return f"{place}@{open_checkpoint(checkpoints).step}"


def read_start(place: str) -> TrainedModel:
    """The model of RUN@STEP, or the export at `place`.

    Raises:
        TrainedModelError, ExportError, CheckpointError, FileNotFoundError: naming what is wrong with it.
    """
    run_folder, step = split_step(place)
    return read_export(place) if step is None else read_run(run_folder, step)


@torch.no_grad()
def start_from(trained: TrainedModel, model: Backbone, run: RunConfig) -> None:
    """Copies the weights of a trained model into an initialised one, as far as they fit.

    Raises:
        ConfigError: the models differ in more than length and vocabulary, or the length of a Mixer.
    """
    _check_alike(trained, run)
    old_ids, new_ids = _ids_of_both(trained, run)
    for name, parameter in model.named_parameters():
        if name not in trained.weights:
            if name.startswith("blocks."):
                raise ConfigError(run.name, [f"init_from: {trained.place} has no {name}, so it is of an older version"])
            continue  # a finetuned export has the trunk alone
        old = trained.weights[name]
        if name == "embedding.weight":
            parameter[new_ids] = old[old_ids]
        elif old.shape == parameter.shape:
            parameter.copy_(old)
        else:
            module_name, _, attribute = name.rpartition(".")
            module = model.get_submodule(module_name)
            is_gating = attribute == "weight" and isinstance(module, SpatialGatingUnit)
            is_spatial = is_gating or isinstance(module, AveyBlock)
            _copy_positions(old, parameter, is_spatial)
    log.info(
        "weights from %s, made for %d positions and here for %d; pieces: %d of %d",
        trained.place, trained.config.sequence_length, run.model.sequence_length, len(new_ids), run.model.vocab_size,
    )  # fmt: skip


def _check_alike(trained: TrainedModel, run: RunConfig) -> None:
    old, new = trained.config.model_dump(), run.model.model_dump()
    names = [name for name in {**old, **new} if name not in _MAY_DIFFER and old.get(name) != new.get(name)]
    mistakes = [f"model.{name}: found {new.get(name)!r}; {trained.place} has {old.get(name)!r}" for name in names]
    if new["kind"] == "mixer" and old["sequence_length"] != new["sequence_length"]:
        found, needed = new["sequence_length"], old["sequence_length"]
        mistakes.append(f"model.sequence_length: found {found}; a Mixer from {trained.place} keeps {needed}")
    if mistakes:
        raise ConfigError(run.name, mistakes, "a model starts from weights of its own family and widths")


def _ids_of_both(trained: TrainedModel, run: RunConfig) -> tuple[Tensor, Tensor]:
    """The ids in the old vocabulary, and those in the new one, of the pieces that both have."""
    old, new = trained.tokenizer(), Tokenizer(run.data.tokenizer_folder)
    first = NUM_SPECIAL_TOKENS + NUM_BYTE_TOKENS  # the same in every vocabulary
    id_of = {piece: id for id, piece in enumerate(old.pieces) if id >= first}
    both = [(id_of[piece], id) for id, piece in enumerate(new.pieces) if id >= first and piece in id_of]
    both = [(id, id) for id in range(first)] + both
    return tuple(torch.tensor(both).T)


def _copy_positions(old: Tensor, parameter: Tensor, is_spatial: bool) -> None:
    """Copies the part for the positions that both lengths have. The rest keeps its initial value, except in W, where it
    becomes 0."""
    if is_spatial:
        parameter.zero_()
    shift = (len(parameter) - len(old)) // 2 if is_spatial and old.ndim == 1 else 0  # its offset 0 is in the middle
    first_old, first_new = max(0, -shift), max(0, shift)
    sizes = [min(pair) for pair in zip(old.shape, parameter.shape, strict=True)]
    part = tuple(slice(first_old, first_old + size) for size in sizes)
    parameter[tuple(slice(first_new, first_new + size) for size in sizes)] = old[part]
