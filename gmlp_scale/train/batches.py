"""What the loop's batches pass through: `without_end` makes up for a loader that fails, `staged` puts them onto the
device, `profiled` records a few steps.

A recording is a Chrome trace and, on a GPU, a memory snapshot of rank 0, in the run's folder `profile`.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from gmlp_scale.distributed.world import World
from gmlp_scale.piecewise import Piecewise

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_ALLOCATIONS = 200_000
"""How many allocations a snapshot holds: the newest ones."""


def without_end(
    steps: Iterable[list[Any]], start_step: int, num_micro_batches: Piecewise, failures: list[Exception]
) -> Iterator[list[Any]]:
    """The items of `steps`, which begin after `start_step`. After an error, which goes into `failures`, the last
    micro-batch again: this rank must take part in every step until all ranks know that it has failed."""
    step, micro_batches = start_step, None
    try:
        for micro_batches in steps:
            yield micro_batches
            step += 1
    except Exception as error:
        if micro_batches is None:  # no step is lost
            raise
        log.warning("no batch for step %d: %s", step + 1, error)
        failures.append(error)
    while failures:
        yield micro_batches[:1] * num_micro_batches.at(step)
        step += 1


def staged(steps: Iterable[list[Any]], device: torch.device) -> Iterator[list[Any]]:
    """Each step's micro-batches, which are dataclasses with tensors, on the device.

    The host runs ahead of a GPU, since no step waits for it. So copies from pinned memory on a stream of their own run
    while the step before still computes.
    """
    if device.type != "cuda":
        yield from steps
        return
    copying = torch.cuda.Stream(device)
    for micro_batches in steps:
        computing = torch.cuda.current_stream(device)
        with torch.cuda.stream(copying):
            on_device = [_pinned(micro_batch).to(device) for micro_batch in micro_batches]
        computing.wait_stream(copying)
        for micro_batch in on_device:
            for tensor in _tensors(micro_batch).values():
                tensor.record_stream(computing)  # so that its memory is not reused before the step has read it
        yield on_device


def _pinned(batch: Any) -> Any:
    return replace(batch, **{name: tensor.pin_memory() for name, tensor in _tensors(batch).items()})


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}


def profiled(
    steps: Iterable[T], start_step: int, profile_steps: tuple[int, int] | None, folder: Path, world: World
) -> Iterator[T]:
    """Yields the items of `steps`, one for each step after `start_step`. Records what the loop does in profile_steps.

    profile_steps: the first and the last step to record, where steps count from 1. A run that resumes or stops between
        the two records the steps that it does. A save or an evaluation after one of these steps is recorded too.
    """
    if profile_steps is None or not world.is_main:
        yield from steps
        return
    first, last = max(profile_steps[0], start_step + 1), profile_steps[1]
    recorded, step = None, start_step
    try:
        for step, of_step in enumerate(steps, start_step + 1):
            if step == first <= last:
                recorded = _begin(world.device)
            yield of_step
            if recorded and step == last:
                _write(recorded, folder, first, step, world)
                recorded = None
    finally:  # the loop ended before the last step to record
        if recorded:
            _write(recorded, folder, first, step, world)


def _begin(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        # Names for the C++ frames of "all", the default, would take minutes to look up when the snapshot is written.
        torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")
    recorded = profile(activities=activities, record_shapes=True, profile_memory=True)
    recorded.start()
    return recorded


def _write(recorded: profile, folder: Path, first: int, last: int, world: World) -> None:
    """If the disk refuses the files, that is logged and training goes on."""
    world.wait_for_device()
    recorded.stop()
    place, is_gpu = folder / f"steps_{first}_to_{last}", world.device.type == "cuda"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(f"{place}.trace.json.gz")
        if is_gpu:
            torch.cuda.memory._dump_snapshot(f"{place}.memory.pickle")
        log.info("steps %d to %d are profiled: %s.* (ui.perfetto.dev, pytorch.org/memory_viz)", first, last, place)
    except OSError as error:
        log.warning("the profile of steps %d to %d cannot be written: %s", first, last, error)
    finally:
        if is_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
