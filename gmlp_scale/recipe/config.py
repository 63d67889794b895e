"""A recipe as one frozen, checked object: RunConfig, or another Recipe. reader.py reads one from a file.

Every section's class stands beside the code that it configures. This file puts the sections together.
"""

import hashlib
import math
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import torch
import yaml
from pydantic import BaseModel, Field

from gmlp_scale.checkpoint.config import CheckpointConfig
from gmlp_scale.data.batch import num_masked_positions
from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.data_config import DataConfig, load_manifests
from gmlp_scale.data.mixture import Mixture, changing_steps, mixture_mistakes
from gmlp_scale.engine import EngineConfig, OptimizerConfig, TrainConfig
from gmlp_scale.errors import InputError
from gmlp_scale.fields import CountFrom0, FreeInBranch, FreeOnResume, OfOneMachine, flatten
from gmlp_scale.models import ModelConfig, build_model
from gmlp_scale.models.heads import MaskedLanguageModel
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.recipe.checks import change_mistakes, pretraining_mistakes, rank_mistakes, recipe_mistakes
from gmlp_scale.storage.files import Place, is_url, redacted


class ConfigError(InputError):
    """All mistakes in a recipe and its overrides, one per line. `needed`, if given, is a last line for all of them."""

    def __init__(self, source: str, mistakes: list[str], needed: str = ""):
        self.mistakes = mistakes
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        lines = [f"{source}: {count}", *(f"  {mistake}" for mistake in mistakes), needed]
        super().__init__("\n".join(filter(None, lines)))


class Recipe(BaseModel, frozen=True, extra="forbid"):
    """What the recipes of pretraining and finetuning share. Both also have train, optimizer, engine and checkpoint."""

    purpose: ClassVar[str]
    """What a run of the recipe does, as messages say it."""
    batch_printer: ClassVar[str] = ""
    """The script that prints the batch of a step, as messages name it; empty if there is none."""

    name: FreeOnResume[str] = Field(pattern=r"^\w[\w.-]*$")
    """The run folder is output_dir/name."""
    output_dir: OfOneMachine[Place[str]] = "outputs"
    """A local path, or a URL that fsspec opens, such as s3://bucket/runs."""
    seed: Annotated[CountFrom0, Field(lt=2**32)]
    """For the initial weights, the order of the rows, the masks and dropout. [no unit]"""

    @property
    def data_changes(self) -> list[int]:
        """The numbers of finished steps after which the recipe changes what its rows are like."""
        return []

    @property
    def run_folder(self) -> str:
        """A path or a URL."""
        if not is_url(self.output_dir):
            return str(Path(self.output_dir, self.name))
        return f"{self.output_dir.rstrip('/')}/{self.name}"

    @property
    def run_dir(self) -> Path:
        """The local folder that the run works in: the run folder or, if that is a URL, one in the temporary folder.

        It is the same for all processes of a host that run this recipe.
        """
        if not is_url(self.output_dir):
            return Path(self.run_folder)
        digest = hashlib.sha256(self.run_folder.encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir(), f"gmlp_scale-{os.getuid()}", f"{self.name}-{digest}")

    def rows_per_rank(self, world_size: int) -> Piecewise:
        """Rows per rank of each step. Raises ConfigError if the recipe does not fit this number of ranks."""
        if mistakes := list(rank_mistakes(self, world_size)):
            raise ConfigError(self.name, mistakes)
        return Piecewise(self.train.global_batch_size).map(lambda rows: rows // world_size)

    def batch_plan(self, *, rank: int, world_size: int) -> BatchPlan:
        """How this rank's batches are cut. Raises InputError if the ranks do not divide the batches evenly."""
        batch_sizes = Piecewise(self.train.global_batch_size)
        return BatchPlan(self.seed, batch_sizes, self.train.micro_batch_size, rank, world_size)

    def with_train(self, **fields: Any) -> Self:
        """This run with other values in its `train` section. They are not checked."""
        return self.model_copy(update={"train": self.train.model_copy(update=fields)})

    def to_json(self) -> dict[str, Any]:
        """The fields as they are written and compared: without the passwords and signatures of URLs."""
        return redacted(self.model_dump(mode="json"))

    def fields(self) -> dict[str, Any]:
        """The values of `to_json` by the fields' whole names, such as train.num_steps."""
        return dict(flatten(self.to_json()))

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_json(), sort_keys=False)

    def mistakes(self) -> Iterable[str]:
        """The mistakes that no section can see alone."""
        return recipe_mistakes(self)


class PretrainingRecipe(Recipe, frozen=True, extra="forbid"):
    """What the recipes of launch/pretrain.py share. Each also has a model.

    A dry run asks it for build_model() and num_rows(), the training rows of an epoch.
    """

    branch_from: FreeInBranch[Place[str | None]] = None
    """RUN@STEP: a new run goes on from this checkpoint of another run, with its weights, moments, step and rows. The
    optimizer section and train.num_steps may differ, as for a decay of its own. A path that every host sees."""

    @property
    def tokens_per_step(self) -> Piecewise:
        return self.train.batch_sizes.map(lambda rows: rows * self.model.sequence_length)

    def flops_per_row(self) -> Piecewise:
        """Training FLOPs of a row: 3 x the forward pass."""
        with torch.device("meta"):
            return Piecewise(3 * self.build_model().flops_per_sample())

    def flops_per_step(self) -> Piecewise:
        """Training FLOPs of each step's global batch."""
        return self.train.batch_sizes.times(self.flops_per_row())

    def accumulates(self, world_size: int) -> bool:
        """Whether a step has several micro-batches. Also True while micro_batch_size is `auto`: it may have several."""
        return any(rows != self.train.micro_batch_size for rows in self.rows_per_rank(world_size).values)

    @property
    def changes_end(self) -> float:
        """Batch, masking and sources may change only below this step. A branch keeps its trunk's changes, also those
        that come after its own end."""
        return math.inf if self.branch_from else self.train.num_steps

    def mistakes(self) -> Iterable[str]:
        yield from super().mistakes()
        yield from pretraining_mistakes(self)


class RunConfig(PretrainingRecipe, frozen=True, extra="forbid"):
    """One run of masked language modelling."""

    purpose: ClassVar[str] = "pretraining on text"
    batch_printer: ClassVar[str] = "data_prep/inspect_batch.py"

    init_from: FreeInBranch[Place[str | None]] = None
    """EXPORT, RUN or RUN@STEP: a new run starts from these weights, at step 0 and with a new optimizer. The length and
    the vocabulary may differ. A path or a URL. RUN is recorded as RUN@STEP, with the step of its newest checkpoint."""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: FreeInBranch[OptimizerConfig]
    engine: FreeOnResume[EngineConfig]
    checkpoint: FreeOnResume[CheckpointConfig]

    @property
    def data_changes(self) -> list[int]:
        """As in Recipe: other masking, or sources that begin or end."""
        return [*self.data.masked_fractions.starts, *changing_steps(self.data.sources)]

    def build_model(self) -> MaskedLanguageModel:
        return build_model(self.model, seed=None)

    def flops_per_row(self) -> Piecewise:
        """Training FLOPs of a row of each step: 3 x the forward pass, the head on the masked positions only."""
        with torch.device("meta"):
            model = self.build_model()
        return self.data.masked_fractions.map(
            lambda fraction: 3 * model.flops_per_sample(num_masked_positions(self.model.sequence_length, fraction))
        )

    def num_rows(self) -> int:
        """Raises FileNotFoundError where there are no shards, and ShardError where they do not fit the recipe."""
        return sum(self._rows_of_sources())

    def epochs(self) -> dict[str, float]:
        """How often the run sees the rows of each source, by its name. Raises as num_rows()."""
        counts = Mixture(self.data.sources, self.train.batch_sizes).counts(self.train.num_steps).tolist()
        sources = zip(self.data.sources, counts, self._rows_of_sources(), strict=True)
        return {source.name: count / num_rows for source, count, num_rows in sources}

    def _rows_of_sources(self) -> list[int]:
        manifests = load_manifests(self.data, self.model.sequence_length, self.model.vocab_size)
        return [manifest.num_rows("train") for manifest in manifests]

    def mistakes(self) -> Iterable[str]:
        yield from super().mistakes()
        yield from change_mistakes("data.masked_fraction", self.data.masked_fractions, self.changes_end)
        if self.data.is_mixture:
            yield from mixture_mistakes(self.data.sources, self.changes_end)
        if self.train.micro_batch_size == "auto" and self.train.device == "cpu":
            yield "train.micro_batch_size: found auto with train.device = cpu; give a number: auto tries sizes on a GPU"


AnyPretraining = TypeVar("AnyPretraining", bound=PretrainingRecipe)


def split_step(place: str) -> tuple[str, int | None]:
    """RUN and STEP of RUN@STEP; None for the step if none is given."""
    found = re.fullmatch(r"(.+)@(\d+)", place)
    return (found[1], int(found[2])) if found else (place, None)
