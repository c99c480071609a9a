"""Validation of a model while it trains: decode the val split greedily, count, and keep what was asked for."""

import logging
import math
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from backend import Backend
from checkpointing import replacing
from config import n_features
from ctc import collapse_paths, ctc_loss, output_lengths
from dataset import EvalBatches
from dataset_index import Trial
from evaluate_model_helpers import count_errors, sum_errors, sum_errors_by
from inference import batch_logits
from processes import Processes
from trial_figure import trial_figure

logger = logging.getLogger("b2txt")

PER_TRIAL_ARRAYS = ("logits", "input_features")
SEEN_TRIALS = 8  # of which a validation shows the noise
# Noise estimates outside this share of the signal's power are told. Untrained ones have 7% (compact) and 12% (the
# documents' scale). In the study of RESULTS.md trainings with the usual val PER had 4% to 41%; with an L2 weight of
# 1,000 it was 0.1%; with a lambda of 10 310%, and the PER a fifth higher; without warm-up 590%, and nothing was read.
LEAST_NOISE, MOST_NOISE = 0.005, 1.0


def validate(
    model: torch.nn.Module,
    loader: Iterable[dict[str, torch.Tensor]],
    trials: list[Trial],
    config: Any,
    backend: Backend,
    undecodable: list[Trial] = (),
    return_logits: bool = False,
    return_data: bool = False,
) -> dict[str, Any]:
    """Decode labelled trials greedily and count the errors.

    Args:
        model: on the backend's device.
        loader: batches of an EvalBatches made from `trials`.
        trials: what the batches' trial_ids index.
        undecodable: trials that are in no batch, since they cannot be decoded; each counts as deletions.
        return_logits: add 'logits', an array (P, C) a trial.
        return_data: add 'input_features', the preprocessed array (T, F) a trial.
    Returns:
        avg_PER (a fraction: edits of all trials over phonemes of all trials), avg_loss (clean CTC, mean over the
        decoded trials), edits, phonemes, n_trials, day_PERs {session: ErrorCount}, and for each decoded trial,
        in the order of `trials`: trials, losses, n_frames, true_seq, decoded_seqs (lists of classes).
    """
    found: dict[int, dict[str, Any]] = {}
    for batch, features, logits, lengths in batch_logits(model, loader, config, backend):
        losses, paths = ctc_loss(logits, batch["labels"], lengths, batch["label_lengths"]), logits.argmax(-1)
        backend.end_program("validation step", batch)
        losses, decoded = losses.cpu(), collapse_paths(paths, lengths)
        for row, trial_id in enumerate(batch["trial_ids"].tolist()):
            if trial_id >= 0:  # else it only fills the batch
                found[trial_id] = {"decoded": decoded[row], "loss": losses[row].item()}
        # Cut on the host: on XLA each length would be a program.
        if return_logits:
            _keep(found, "logits", logits.float(), lengths, batch["trial_ids"])
        if return_data:
            _keep(found, "input_features", features, batch["n_time_steps"], batch["trial_ids"])
    widths = {"logits": config.dataset.n_classes, "input_features": n_features(config)}
    widths = {name: widths[name] for name, wanted in zip(widths, (return_logits, return_data), strict=True) if wanted}
    found = _of_all_processes(found, trials, backend.processes, widths)
    order = sorted(found)
    decoded_trials = [trials[i] for i in order]
    decoded_seqs = [found[i]["decoded"] for i in order]
    counts = [count_errors(trial.labels, ids) for trial, ids in zip(decoded_trials, decoded_seqs, strict=True)]
    counts += [count_errors(trial.labels, []) for trial in undecodable]
    total = sum_errors(counts)
    patches = config.model.patch_size, config.model.patch_stride
    metrics = {
        "avg_PER": total.rate,
        "avg_loss": math.fsum(found[i]["loss"] for i in order) / max(len(order), 1),
        "edits": total.edits,
        "phonemes": total.length,
        "n_trials": total.n_trials,
        "day_PERs": sum_errors_by([trial.session for trial in (*decoded_trials, *undecodable)], counts),
        "trials": decoded_trials,
        "losses": [found[i]["loss"] for i in order],
        "n_frames": [output_lengths(t.n_time_steps, *patches) for t in decoded_trials],
        "true_seq": [list(trial.labels) for trial in decoded_trials],
        "decoded_seqs": decoded_seqs,
    }
    for name in PER_TRIAL_ARRAYS:
        if order and name in found[order[0]]:
            metrics[name] = [found[i][name] for i in order]
    return metrics


def _keep(
    found: dict[int, dict[str, Any]], name: str, values: torch.Tensor, lengths: torch.Tensor, trial_ids: torch.Tensor
) -> None:
    """Put each trial's rows of values (B, length, ...) under `name` into what was found of it."""
    rows = zip(values.cpu().numpy(), lengths.tolist(), trial_ids.tolist(), strict=True)
    for row, length, trial_id in rows:
        if trial_id >= 0:
            found[trial_id][name] = row[:length].copy()


def _of_all_processes(
    found: dict[int, dict[str, Any]], trials: list[Trial], processes: Processes, widths: dict[str, int]
) -> dict[int, dict[str, Any]]:
    """What every process found of its trials, in all of them.

    By sums of tables in which each has filled the rows of its own trials, of shapes that never change.

    Args:
        widths: of the arrays a trial, by name.
    Raises:
        ValueError: if two processes decoded the same trial.
    """
    if processes.count == 1:
        return found
    # Classes plus one, zero beyond the end: no trial gives more of them than it has bins.
    longest = max(trial.n_time_steps for trial in trials)
    classes = torch.zeros(len(trials), longest, dtype=torch.int32)
    losses, times = torch.zeros(len(trials), dtype=torch.float64), torch.zeros(len(trials), dtype=torch.int32)
    for number, of_trial in found.items():
        classes[number, : len(of_trial["decoded"])] = torch.tensor(of_trial["decoded"], dtype=torch.int32) + 1
        losses[number], times[number] = of_trial["loss"], 1
    classes, losses, times = (processes.sum(table) for table in (classes, losses, times))
    if (times > 1).any():
        raise ValueError("a trial was decoded in several processes: give EvalBatches their rank and world_size")
    everywhere = {
        number: {"decoded": (classes[number][classes[number] > 0] - 1).tolist(), "loss": losses[number].item()}
        for number in times.nonzero().flatten().tolist()
    }
    for name, width in widths.items():
        lengths = torch.zeros(len(trials), dtype=torch.int32)
        for number, of_trial in found.items():
            lengths[number] = len(of_trial[name])
        lengths = processes.sum(lengths)
        for number, of_trial in everywhere.items():
            table = torch.zeros(longest, width)
            if number in found:
                table[: lengths[number]] = torch.from_numpy(found[number][name])
            of_trial[name] = processes.sum(table)[: lengths[number]].numpy()
    return everywhere


def save_validation(metrics: dict[str, Any], directory: Path, step: int) -> None:
    """Write what a validation found to val_metrics.pkl: a pickled dict of the original decoder's entries.

    Of each decoded trial: decoded_seqs, true_seq (lists of classes), phone_seq_lens, transcription (character codes),
    losses, block_nums, trial_nums, day_indicies, n_time_steps (after patching, the frames of its logits), and logits
    (P, C) and input_features (T, F) where they are in `metrics`, as float32 arrays. day_PERs: of each day index
    total_edit_distance and total_seq_length. avg_PER, avg_loss, and `step`.

    Args:
        metrics: from `validate`.
        directory: of the checkpoints.
        step: optimiser steps done.
    """
    trials = metrics["trials"]
    days = {trial.session: trial.day for trial in trials}
    written = {
        **{name: metrics[name] for name in ("decoded_seqs", "true_seq", "losses", "avg_PER", "avg_loss")},
        "phone_seq_lens": [trial.seq_len for trial in trials],
        "transcription": [[*map(ord, trial.sentence_label)] for trial in trials],
        "block_nums": [trial.block_num for trial in trials],
        "trial_nums": [trial.trial_num for trial in trials],
        "day_indicies": [trial.day for trial in trials],
        "n_time_steps": metrics["n_frames"],
        "day_PERs": {
            days[session]: {"total_edit_distance": count.edits, "total_seq_length": count.length}
            for session, count in metrics["day_PERs"].items()
            if session in days
        },
        "step": step,
        **{name: metrics[name] for name in PER_TRIAL_ARRAYS if name in metrics},
    }
    with replacing(directory / "val_metrics.pkl") as file:
        pickle.dump(written, file)


class SeenTrial(NamedTuple):
    """What a decoder makes of a trial, valid patches only: signal and noise (P, W), logits (P, C), as float32 arrays.

    The noise is None of a decoder that estimates none.
    """

    trial: Trial
    signal: np.ndarray
    noise: np.ndarray | None
    logits: np.ndarray


def look_at_trials(model: torch.nn.Module, trials: list[Trial], config: Any, backend: Backend) -> list[SeenTrial]:
    """The trial of median length and the next shorter ones, in one batch: always the same ones."""
    by_length = sorted(trials, key=lambda trial: trial.n_time_steps)
    median = len(trials) // 2
    seen = by_length[max(0, median + 1 - SEEN_TRIALS) : median + 1][::-1]
    batches = EvalBatches(seen, config, batch_size=len(seen))
    batch, features, logits, lengths = next(batch_logits(model, [batches[0]], config, backend))
    with torch.no_grad(), backend.autocast():
        signal, noise = model.denoise(features, batch["day_indices"])
    backend.end_program("a look at the noise", batch)
    signal, noise, logits = (None if x is None else x.cpu().float().numpy() for x in (signal, noise, logits))
    found = {}
    for row, (number, length) in enumerate(zip(batch["trial_ids"].tolist(), lengths.tolist(), strict=True)):
        arrays = (None if x is None else x[row, :length] for x in (signal, noise, logits))
        found[number] = SeenTrial(seen[number], *arrays)
    return [found[number] for number in range(len(seen))]


def noise_share(seen: list[SeenTrial]) -> float | None:
    """Mean square of the noise estimates over that of the day-transformed signal; None where there are none."""
    if seen[0].noise is None:
        return None
    noise, signal = (
        math.fsum(np.square(getattr(trial, name), dtype=np.float64).sum() for trial in seen)
        for name in ("noise", "signal")
    )
    return noise / signal


def warn_of_noise(share: float) -> None:
    """Say it when the noise estimate has come to nothing, or takes away more than there is."""
    if share < LEAST_NOISE:
        logger.warning(
            "the noise estimate is %.2g%% of the signal's power (usual: %g%% to %g%%): the NoiseModel does nothing; "
            "try a smaller adversarial.noise_l2_weight",
            *(100 * share, 100 * LEAST_NOISE, 100 * MOST_NOISE),
        )
    elif share > MOST_NOISE:
        logger.warning(
            "the noise estimate is %.0f%% of the signal's power (usual: %g%% to %g%%): more than there is to take, as "
            "when it grows to escape its adversary; try a smaller adversarial.grl_lambda or noisy_loss_weight, or more "
            "warmup_steps",
            *(100 * share, 100 * LEAST_NOISE, 100 * MOST_NOISE),
        )


def picture_of_a_trial(seen: SeenTrial, config: Any, step: int) -> np.ndarray:
    """The trial drawn: its signal, noise estimate, denoised signal and phonemes; (height, width, 3) uint8."""
    trial = seen.trial
    title = f"{trial.session} block {trial.block_num} trial {trial.trial_num}, after batch {step}"
    return trial_figure(
        seen.signal, seen.noise, seen.logits, trial.labels, title, config.model.patch_size, config.model.patch_stride
    )
