"""Trials to batches of few, constant shapes, drawn by a plan that is a pure function of seed and step.

    trials = index_splits(config, ["train", "val"])
    shapes = batch_shapes(trials["train"] + trials["val"], config)
    loader = make_loader(TrainBatches(trials["train"], config, shapes=shapes), config, start=0, end=1000)

A batch is a dict of CPU tensors. Axes: B trials, T time bins of the batch's bucket, F features, S labels.

    features      (B, T, F) float32, zero beyond n_time_steps
    n_time_steps  (B,) int64, valid bins
    day_indices   (B,) int64, index of the session in config.dataset.sessions
    labels        (B, S) int64, zero beyond label_lengths (and all zero where there are no labels)
    label_lengths (B,) int64
    weights       (B,) float32, 1 for a trial, 0 for one that only fills the batch
    trial_ids     (B,) int64, index into the list of trials, -1 for one that only fills the batch

B and S are the same for every batch of a run and T is one of a few buckets, so that XLA compiles a few graphs
and no more, and cuDNN and the allocator meet the same sizes again.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from config import n_features
from dataset_index import DataError, Trial, index_splits, index_trials, logger
from trial_reader import TrialReader

__all__ = [
    "BatchShapes",
    "DataError",
    "EvalBatches",
    "TrainBatches",
    "Trial",
    "batch_shapes",
    "index_splits",
    "index_trials",
    "make_loader",
    "time_buckets",
]

BIN_MULTIPLE = 8  # bucket lengths and the label width are multiples of it: the TPU's tiles have 8 rows


@dataclass(frozen=True)
class BatchShapes:
    """Shapes of all batches: features (batch_size, a bucket, n_features), labels (batch_size, label_width)."""

    batch_size: int
    buckets: tuple[int, ...]
    label_width: int
    n_features: int

    def bucket_of(self, trial: Trial) -> int:
        """Index of the smallest bucket that holds the trial."""
        bucket = int(np.searchsorted(self.buckets, trial.n_time_steps))
        if bucket == len(self.buckets) or trial.seq_len > self.label_width:
            raise DataError(
                f"{trial}: {trial.n_time_steps} time bins and {trial.seq_len} labels, but the batch shapes hold "
                f"{self.buckets[-1]} and {self.label_width}; make them from all trials: batch_shapes(trials, config)"
            )
        return bucket

    @property
    def largest_batch_bytes(self) -> int:
        return 4 * self.batch_size * self.buckets[-1] * self.n_features


def batch_shapes(trials: Sequence[Trial], config, batch_size: int | None = None) -> BatchShapes:
    """Shapes that hold all the given trials; made from train and val together, they are shared by both."""
    if not trials:
        raise DataError("There are no trials to make batches of.")
    # At least one patch: the model then always has a frame to compute, also where all trials are too short
    # for one.
    lengths = [max(trial.n_time_steps, config.model.patch_size, 1) for trial in trials]
    shapes = BatchShapes(
        batch_size=batch_size or config.dataset.batch_size,
        buckets=time_buckets(lengths, config.dataset.n_time_buckets),
        label_width=_round_up(max(1, *(trial.seq_len for trial in trials), 1)),
        n_features=n_features(config),
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if shapes.largest_batch_bytes > memory:
        raise DataError(
            f"a batch of {shapes.batch_size} trials of {shapes.buckets[-1]} bins takes "
            f"{shapes.largest_batch_bytes / 1e9:.0f} GB, and this machine has {memory / 1e9:.0f}; lower "
            "dataset.batch_size (--batch_size)"
        )
    return shapes


def time_buckets(lengths: Sequence[int], n_buckets: int) -> tuple[int, ...]:
    """At most n_buckets lengths, ascending, such that padding trials to the next one wastes the fewest bins.

    Exact, by dynamic programming over the lengths rounded up to a multiple of 8. A bucket holds at least a
    quarter of an equal share of the trials: batches from a nearly empty one would be the same few trials
    again and again.
    """
    ends, counts = np.unique(_round_up(np.asarray(lengths)), return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])  # below[j]: trials shorter than ends[j]
    least = max(1, len(lengths) // (4 * n_buckets))
    # cost[j]: the fewest padded bins for the trials of ends[:j] in k buckets
    cost = np.where(below == 0, 0.0, np.inf)
    best, starts = (np.inf, 0), []
    for k in range(min(n_buckets, len(ends))):
        in_bucket = below[1:, None] - below[None, :-1]  # (last length, first length)
        total = np.where(in_bucket >= least, cost[None, :-1] + ends[:, None] * in_bucket, np.inf)
        starts.append(total.argmin(1))
        cost = np.concatenate([[np.inf], total.min(1)])
        best = min(best, (cost[-1], k))
    chosen, j = [], len(ends)
    for k in range(best[1], -1, -1):
        chosen.append(int(ends[j - 1]))
        j = starts[k][j - 1]
    return tuple(reversed(chosen))


def _round_up(length):
    return -(-length // BIN_MULTIPLE) * BIN_MULTIPLE


class TrainBatches(Dataset):
    """Training batches without end: batch i is a pure function of (config.dataset.seed, i, rank, world_size).

    i counts micro-steps: step * gradient_accumulation_steps + micro. Ranks take different parts of one draw,
    from the same bucket. The law is the original's: days uniform, trials uniform within their day, so that a
    trial of day d has the expected share 1 / (number of days * trials of d) of all trials drawn. Since all
    trials of a batch come from one bucket, that takes three draws:

    1. a bucket, with probability proportional to the sum over days of P(bucket | day);
    2. world_size * days_per_batch days, in expected numbers proportional to P(bucket | day);
    3. for each of these days its part of the batch, from the day's trials in the bucket, without replacement
       over all ranks, and from the start again where the day has too few.

    Days of must_include_days take the first parts of every batch in whose bucket they have trials; the other
    days then share the rest.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        config,
        rank: int = 0,
        world_size: int = 1,
        shapes: BatchShapes | None = None,
    ):
        self.trials = list(trials)
        self.shapes = shapes or batch_shapes(self.trials, config)
        self.seed = config.dataset.seed
        self.rank, self.world_size = rank, world_size
        self.reader = TrialReader(config)

        day_sizes: dict[int, int] = {}
        members: list[dict[int, list[int]]] = [{} for _ in self.shapes.buckets]  # of each bucket, by day
        for index, trial in enumerate(self.trials):
            day_sizes[trial.day] = day_sizes.get(trial.day, 0) + 1
            members[self.shapes.bucket_of(trial)].setdefault(trial.day, []).append(index)
        self.members = [{day: np.array(of_day[day]) for day in sorted(of_day)} for of_day in members]
        self.day_weights = [
            np.array([len(indices) / day_sizes[day] for day, indices in of_day.items()]) for of_day in self.members
        ]
        self.bucket_shares = np.array([weights.sum() for weights in self.day_weights]) / len(day_sizes)

        # Fewer sessions than days_per_batch: every session is in every batch, with a larger part.
        self.n_slots = min(config.dataset.days_per_batch, len(day_sizes), self.shapes.batch_size)
        self.must_include = _resolve_days(config.dataset.must_include_days, len(config.dataset.sessions))
        if len(self.must_include) > self.n_slots:
            raise DataError(
                f"dataset.must_include_days names {len(self.must_include)} days, but a batch has trials of "
                f"{self.n_slots} (days_per_batch {config.dataset.days_per_batch}, {len(day_sizes)} sessions)"
            )

    def plan(self, micro_step: int) -> tuple[int, np.ndarray]:
        """Index of the bucket, and the trials (world_size, B) of all ranks."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, micro_step]))
        bucket = int(rng.choice(len(self.bucket_shares), p=self.bucket_shares / self.bucket_shares.sum()))
        days = self._draw_days(bucket, rng)  # (world_size, n_slots)
        # Parts of a batch as even as possible; the days stand in random order: none is favoured by a larger part.
        sizes = np.full(self.n_slots, self.shapes.batch_size // self.n_slots)
        sizes[: self.shapes.batch_size % self.n_slots] += 1
        day_of_place = np.repeat(days, sizes, axis=1)  # (world_size, B)
        indices = np.empty_like(day_of_place)
        for day in np.unique(day_of_place):
            places = day_of_place == day
            pool = self.members[bucket][int(day)]
            rounds = -(-int(places.sum()) // len(pool))
            indices[places] = np.concatenate([rng.permutation(pool) for _ in range(rounds)])[: places.sum()]
        return bucket, indices

    def _draw_days(self, bucket: int, rng: np.random.Generator) -> np.ndarray:
        """The days that take part, one for each part of each rank's batch: (world_size, n_slots)."""
        days = np.array(list(self.members[bucket]))
        weights = self.day_weights[bucket]
        fixed = [day for day in self.must_include if day in self.members[bucket]]
        free = ~np.isin(days, fixed)
        if free.any():
            days, weights = days[free], weights[free]
        n_drawn = self.world_size * (self.n_slots - len(fixed))
        order = rng.permutation(len(days))
        edges = np.cumsum(weights[order]) / weights.sum() * n_drawn
        # Systematic sampling, one random offset and then every whole number: each day is met as often as it is
        # expected to be, rounded down or up.
        hits = np.searchsorted(edges, rng.random() + np.arange(n_drawn), side="right").clip(max=len(days) - 1)
        drawn = rng.permutation(days[order[hits]]).reshape(self.world_size, -1)
        return np.concatenate([np.tile(np.array(fixed, dtype=days.dtype), (self.world_size, 1)), drawn], axis=1)

    def __getitem__(self, micro_step: int) -> dict[str, torch.Tensor]:
        if micro_step < 0:
            raise IndexError(f"micro-step {micro_step}; they count from 0")
        bucket, indices = self.plan(micro_step)
        batch = _assemble(self.trials, indices[self.rank], self.shapes, bucket, self.reader)
        next_indices = self.plan(micro_step + _stride())[1][self.rank]
        self.reader.expect([self.trials[index] for index in next_indices])
        return batch


class EvalBatches(Dataset):
    """Every trial once, over all ranks together, in batches of one size; zero-weight trials fill up what is left.

    Trials are sorted by length, the longest first, so that those of a batch are of about one length. Every rank has the
    same number of batches, and batch i has the same bucket on all ranks; a rank left without trials gets a batch of
    zero weight. batch_size is the most that a batch has. Without `shapes` they are made from the given trials, as a
    split with longer trials than the training data needs.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        config,
        batch_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        shapes: BatchShapes | None = None,
    ):
        self.trials = list(trials)
        self.shapes = shapes or batch_shapes(self.trials, config, batch_size)
        # As many batches as that takes, but all as large as each other: few trials only fill the last one.
        of_each_rank = -(-len(self.trials) // world_size)
        n_batches = -(-of_each_rank // (batch_size or self.shapes.batch_size))
        batch_size = -(-of_each_rank // max(n_batches, 1)) or 1
        self.shapes = replace(self.shapes, batch_size=batch_size)
        self.reader = TrialReader(config)
        buckets = [self.shapes.bucket_of(trial) for trial in self.trials]
        order = sorted(range(len(self.trials)), key=lambda i: (-self.trials[i].n_time_steps, self.trials[i].day, i))
        self.batches: list[tuple[int, list[int], int]] = []  # bucket, trials, day of the trials that only fill
        for start in range(0, len(order), batch_size * world_size):
            of_all = order[start : start + batch_size * world_size]
            of_rank = of_all[rank * batch_size : (rank + 1) * batch_size]
            self.batches.append((buckets[of_all[0]], of_rank, self.trials[(of_rank or of_all)[0]].day))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        bucket, indices, day = self.batches[i]
        batch = _assemble(self.trials, indices, self.shapes, bucket, self.reader, day)
        if i + _stride() < len(self):
            self.reader.expect([self.trials[index] for index in self.batches[i + _stride()][1]])
        return batch


def _stride() -> int:
    """How many batches on is the next one that this process makes."""
    worker = get_worker_info()
    return worker.num_workers if worker else 1


def make_loader(
    dataset: Dataset,
    config,
    start: int = 0,
    end: int | None = None,
    num_workers: int | None = None,
    pin_memory: bool | None = None,
) -> DataLoader:
    """A loader of the batches start to end of a data set, in order; the number of workers changes nothing in them.

    Args:
        end: None for all, which for TrainBatches is without end.
        num_workers: processes that read ahead; config.dataset.num_dataloader_workers if None.
        pin_memory: whether batches go to page-locked memory; if None, where there is CUDA.
    """
    if end is None:
        end = len(dataset) if isinstance(dataset, EvalBatches) else sys.maxsize
    if num_workers is None:
        num_workers = config.dataset.num_dataloader_workers
    num_workers = _workers_that_fit(num_workers, dataset.shapes.largest_batch_bytes)
    return DataLoader(
        dataset,
        batch_size=None,  # the data set's items are batches
        sampler=range(start, end),
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        multiprocessing_context=_worker_start_method() if num_workers else None,
        # Making an iterator draws a number; from this generator, so that torch's global random state is
        # untouched and a run that is resumed (and so makes one iterator more) goes on exactly as if it had
        # not stopped.
        generator=torch.Generator(),
    )


def _worker_start_method() -> str | None:
    """Workers only read files and fill CPU tensors, which is safe after a fork.

    A fork starts at once, and works in notebooks and in scripts without a __main__ guard, where spawn does not. But
    macOS cannot be forked safely, nor can a process in which a TPU's runtime has started its threads.
    """
    if os.environ.get("PJRT_DEVICE") == "TPU":
        return "spawn"
    return "fork" if sys.platform == "linux" else None


def _workers_that_fit(num_workers: int, batch_bytes: int, shared_memory: str = "/dev/shm") -> int:
    """Workers hand batches over in shared memory, where a small one (64 MB in a container) ends them by a signal."""
    if num_workers == 0 or not os.path.isdir(shared_memory):
        return num_workers
    free = shutil.disk_usage(shared_memory).free
    fitting = max(0, min(num_workers, (free // batch_bytes - 1) // 2))  # two batches ahead a worker, one in use
    if fitting < num_workers:
        logger.warning(
            "%s has %.0f MB free, and batches are of up to %.0f MB: %d loader workers in place of %d "
            "(docker: --shm-size; or a smaller dataset.batch_size)",
            *(shared_memory, free / 1e6, batch_bytes / 1e6, fitting, num_workers),
        )
    return fitting


def _assemble(
    trials: list[Trial],
    indices: Sequence[int],
    shapes: BatchShapes,
    bucket: int,
    reader: TrialReader,
    padding_day: int = 0,
) -> dict[str, torch.Tensor]:
    """The batch of the trials at `indices`, filled up to shapes.batch_size."""
    n_bins = shapes.buckets[bucket]
    chosen = [trials[index] for index in indices]
    # A trial that only fills the batch is as long as the bucket: a loss or norm over its bins is 0 / n, never
    # 0 / 0.
    batch = {
        "features": reader.read_batch(
            chosen, (shapes.batch_size, n_bins, shapes.n_features), longest=shapes.buckets[-1]
        ),
        "n_time_steps": torch.full((shapes.batch_size,), n_bins),
        "day_indices": torch.full((shapes.batch_size,), padding_day),
        "labels": torch.zeros(shapes.batch_size, shapes.label_width, dtype=torch.int64),
        "label_lengths": torch.zeros(shapes.batch_size, dtype=torch.int64),
        "weights": torch.zeros(shapes.batch_size),
        "trial_ids": torch.full((shapes.batch_size,), -1),
    }
    for row, (index, trial) in enumerate(zip(indices, chosen, strict=True)):
        batch["n_time_steps"][row] = trial.n_time_steps
        batch["day_indices"][row] = trial.day
        batch["labels"][row, : trial.seq_len] = torch.tensor(trial.labels, dtype=torch.int64)
        batch["label_lengths"][row] = trial.seq_len
        batch["weights"][row] = 1
        batch["trial_ids"][row] = int(index)
    return batch


def _resolve_days(days: Sequence[int] | None, n_days: int) -> list[int]:
    """must_include_days as indices from the start, each once; negative ones count from the end."""
    wrong = [day for day in days or () if not -n_days <= day < n_days]
    if wrong:
        raise DataError(f"dataset.must_include_days names {wrong}, but there are {n_days} sessions")
    return list(dict.fromkeys(day % n_days for day in days or ()))
