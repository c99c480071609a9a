"""The trainer: one loop over optimiser steps, with validation, checkpoints, resuming and logging.

    trainer = BrainToTextDecoder_Trainer(load_config("rnn_args.yaml"))
    statistics = trainer.train()                  # called again, it goes on for another round
    logits = trainer.inference(features, day_indices, n_time_steps)

All that is random in a step is a function of (seed, step), and so is the choice of its trials: a run that was killed
and resumed is the run that was not.
"""

import contextlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend import Backend
from checkpointing import (
    CheckpointError,
    check_disk,
    check_same_run,
    copy_checkpoint,
    find_checkpoint,
    flat_settings,
    latest_checkpoint,
    load_checkpoint,
    remove_temporary_files,
    save_checkpoint,
)
from config import Config, check_config, config_from_dict, save_config
from dataset import EvalBatches, TrainBatches, batch_shapes, make_loader
from dataset_index import LISTED_AS_BAD, Trial, index_splits
from evaluate_model_helpers import phonemes_to_text, write_text_atomically
from inference import batch_logits, inference_batch
from loss import adversarial_ramp
from optimizer import learning_rates, make_optimizer
from profiling import StepProfiler
from rnn_model import build_model
from run_directory import PROFILE, TRIALS, choose_directories, hold_directory, release_directory, remove_run
from training_log import go_on_in_file, log_to_file, log_to_terminal, progress_bar, speak_little
from training_step import INITIALISATION, STEP_METRICS, TrainingStep
from validation import look_at_trials, noise_share, picture_of_a_trial, save_validation, validate, warn_of_noise
from weight_transfer import take_weights

logger = logging.getLogger("b2txt")

BLANK_VALIDATIONS = 3  # so many validations with nothing but blanks are called a failure


class TrainingDiverged(RuntimeError):
    """The loss or the gradient is no longer a number."""


class BrainToTextDecoder_Trainer:
    """Trains the decoder that a configuration describes.

    Everything is checked when the trainer is made: configuration, every data file, the disk.

    Args:
        config: from load_config; copied. A mapping is read as `config_from_dict` does: of the original decoder's
            keys alone, as its start script has them from OmegaConf, it means the single GRU.
        device: 'cpu', 'cuda' or 'xla'; None to choose.
        existing: what to do with an output directory that holds a run. 'keep': write into the next free
            numbered directory, and say so. 'refuse': raise FileExistsError. 'resume': go on from its latest
            checkpoint, or from the start if it has none. 'overwrite': remove it, but for checkpoints that you named,
            after everything was checked.

    Raises:
        ConfigError, DataError, BackendError, CheckpointError: all of them ValueErrors that say what to do.
        OtherProcessFailed: where several processes share the run and another one raised one of these.
    """

    def __init__(self, config: Config | Mapping[str, Any], device: str | None = None, existing: str = "keep") -> None:
        config = config if isinstance(config, Config) else config_from_dict(config)
        check_config(config)
        log_to_terminal()
        self.config = config = config.copy()
        self.backend = backend = Backend(device, config.use_amp, config.gpu_number, config.log_with, config.use_tpu)
        if not backend.is_main:
            speak_little()
        processes = backend.processes
        self._seed_was_drawn = config.seed == -1
        config.seed = processes.on_main(lambda: _draw_seed() if self._seed_was_drawn else config.seed)
        config.output_dir, config.checkpoint_dir = processes.on_main(lambda: choose_directories(config, existing))
        processes.check_settings({k: v for k, v in flat_settings(config.to_dict()).items() if not k.endswith("_dir")})
        self.output_dir, self.checkpoint_dir = Path(config.output_dir), Path(config.checkpoint_dir)
        processes.local_main_first(self._load_data)
        self._build()
        processes.on_main(lambda: check_disk(self.model, config))
        resumed = existing == "resume" and self._resume()
        if config.init_from_checkpoint and not resumed:
            processes.together(self._start_from_checkpoint)
        processes.on_main(lambda: self._take_directory(existing == "overwrite"))
        self._open_output(resumed)

    def _take_directory(self, overwrite: bool) -> None:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        hold_directory(self.output_dir)
        if overwrite:
            remove_run(self.output_dir, self.checkpoint_dir)

    # ---- setting up ----------------------------------------------------------------------------------------------

    def _load_data(self) -> None:
        config, backend = self.config, self.backend
        left_out: list[tuple[Trial, str]] = []
        splits = index_splits(config, ("train", "val"), left_out=left_out)
        self.train_trials, self.val_trials = splits["train"], splits["val"]
        # Val trials that cannot be decoded count as deletions, so that leaving them out does not flatter the PER.
        self.undecodable = [t for t, reason in left_out if t.split == "val" and reason != LISTED_AS_BAD]
        shapes = batch_shapes(self.train_trials + self.val_trials, config)
        self.train_batches = TrainBatches(self.train_trials, config, backend.rank, backend.world_size, shapes)
        self.val_batches = EvalBatches(
            self.val_trials, config, rank=backend.rank, world_size=backend.world_size, shapes=shapes
        )

    def _build(self) -> None:
        config, backend = self.config, self.backend
        backend.seed(config.seed, INITIALISATION)
        self.model = backend.build(lambda: build_model(config))
        self.optimizer = make_optimizer(self.model, config, backend.device)
        self.training_step = TrainingStep(self.model, self.optimizer, config, backend)
        self.step = 0  # optimiser steps done
        self.train_losses: list[float] = []
        self.val_losses: list[float] = []
        self.val_PERs: list[float] = []
        self.val_metrics: list[dict[str, Any]] = []
        self.best_PER, self.best_loss, self.best_step = math.inf, math.inf, 0
        self.validations_without_gain = 0
        self._pending: list[torch.Tensor] = []  # STEP_METRICS (5,) of steps, on the device
        self._unlogged: list[np.ndarray] = []  # those fetched from it since the last line in the log

    def _start_from_checkpoint(self) -> None:
        path, _ = find_checkpoint(self.config.init_checkpoint_path)
        take_weights(self.model, self.config, load_checkpoint(path), path)
        self.backend.end_program("weights of another run")

    def _open_output(self, resumed: bool) -> None:
        config, backend = self.config, self.backend
        if backend.is_main:
            self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            remove_temporary_files(self.checkpoint_dir)
            log_to_file(self.output_dir / "training_log")
            save_config(config, self.checkpoint_dir / "args.yaml")
            self._list_trials()
        backend.start_trackers(flat_settings(config.to_dict()), self.step, self.output_dir)
        n_parameters = sum(p.numel() for p in self.model.parameters())
        self._log_device()
        logger.info("seed: %d%s", config.seed, " (drawn at random)" if self._seed_was_drawn else "")
        logger.info(
            "model: %s parameters (checksum %s), %d sessions",
            f"{n_parameters:,}", backend.check_parameters(self.model), len(config.dataset.sessions),
        )  # fmt: skip
        logger.info(
            "a batch is one optimiser step: %d trials a device x %d accumulated x %d process(es) = %d trials",
            config.dataset.batch_size, config.gradient_accumulation_steps, backend.world_size,
            self._trials_a_step(),
        )  # fmt: skip
        logger.info(
            "data: %d train and %d val trials; lengths padded to %s bins",
            len(self.train_trials), len(self.val_trials), list(self.train_batches.shapes.buckets),
        )  # fmt: skip
        logger.info("output: %s%s", self.output_dir, f", resumed after batch {self.step}" if resumed else "")

    def _list_trials(self) -> None:
        """Write which trials are used, as the original does: of each split and day index the file and trial numbers."""
        listed: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "val": {}}
        for split, trials in (("train", self.train_trials), ("val", self.val_trials)):
            for trial in trials:
                of_day = listed[split].setdefault(trial.day, {"trials": [], "session_path": trial.path})
                number = trial.key.rpartition("_")[2]
                of_day["trials"].append(int(number) if number.isdecimal() else trial.key)
        write_text_atomically(self.output_dir / TRIALS, json.dumps(listed) + "\n")

    def _take_the_log(self) -> None:
        """Write to this trainer's training_log, whichever trainer wrote to its own last."""
        if self.backend.is_main:
            go_on_in_file(self.output_dir / "training_log")

    def _log_device(self) -> None:
        """Say what the run is on, and where that is not what the configuration wishes for."""
        config, backend = self.config, self.backend
        logger.info("%s", backend.description)
        if config.use_tpu and backend.kind != "xla":
            logger.info("use_tpu is true and no TPU is attached: going on without one")
        if config.use_tpu and backend.kind == "xla" and backend.world_size != config.num_tpu_cores:
            logger.warning(
                "num_tpu_cores is %d, and this run has %d process(es), one a core: see the global batch below",
                config.num_tpu_cores, backend.world_size,
            )  # fmt: skip

    @property
    def stopped_early(self) -> bool:
        """Whether as many validations as early stopping allows have brought nothing better."""
        config = self.config
        return config.early_stopping and self.validations_without_gain >= config.early_stopping_val_steps

    # ---- training ------------------------------------------------------------------------------------------------

    def train(self, profile_steps: tuple[int, int] | None = None) -> dict[str, list]:
        """Train to the next multiple of num_training_batches, or until early stopping (each round counts anew).

        Args:
            profile_steps: first and last step, counted from 1, of which a trace goes to output_dir/profile.
        Returns:
            train_losses (one an optimiser step), val_losses and val_PERs (one a validation) from the first step on,
            and val_metrics (one a validation) since this trainer was made: checkpoints do not hold them.
        Raises:
            TrainingDiverged: when the loss or the gradient is no longer finite; checkpoints hold the last state
                that was.
        """
        self.backend.processes.on_main(lambda: hold_directory(self.output_dir))
        try:
            return self._train(profile_steps)
        finally:
            if self.backend.is_main:
                release_directory(self.output_dir)

    def _train(self, profile_steps: tuple[int, int] | None) -> dict[str, list]:
        self._take_the_log()
        config, accumulation = self.config, self.config.gradient_accumulation_steps
        if self.stopped_early or self.step % config.num_training_batches == 0:  # a new round, not a resumed one
            self.validations_without_gain = 0
        target = (self.step // config.num_training_batches + 1) * config.num_training_batches
        loader = make_loader(self.train_batches, config, start=self.step * accumulation, end=target * accumulation)
        batches = iter(loader)
        self._interval_start, self._interval_step = time.perf_counter(), self.step
        profiler = StepProfiler(profile_steps, self.output_dir / PROFILE, self.backend)
        with progress_bar(target, self.step) as self.bar, contextlib.closing(profiler):
            while self.step < target:
                profiler.before(self.step + 1)
                self._pending.append(self.train_step([next(batches) for _ in range(accumulation)]))
                self.step += 1
                profiler.after(self.step)
                self.bar.update()
                last = self.step == target
                if self.step % config.batches_per_train_log == 0 or last:
                    self._log_training()
                validate = self.step % config.batches_per_val_step == 0 or last
                if validate and self._validate_and_save():
                    break
                if config.batches_per_save and self.step % config.batches_per_save == 0:
                    self._fetch_losses()
                    self._save_checkpoint(f"checkpoint_batch_{self.step}")
        if config.save_final_model:
            self._save_checkpoint(f"final_checkpoint_batch_{self.step}")
        logger.info(
            "trained %d batches; best val PER %.2f%% after batch %d",
            self.step,
            100 * self.best_PER,
            self.best_step,
        )
        return {name: list(getattr(self, name)) for name in ("train_losses", "val_losses", "val_PERs", "val_metrics")}

    def train_step(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """One optimiser step over its micro-batches, on the host; (5,) STEP_METRICS, on the device."""
        return self.training_step(batches, self.step)

    def _fetch_losses(self) -> None:
        """Take the pending STEP_METRICS from the device.

        Raises:
            TrainingDiverged: if one of them is not finite.
        """
        if not self._pending:
            return
        # One by one: on XLA to stack so many would be a program for each number of them.
        values = torch.stack([metrics.cpu() for metrics in self._pending])
        processes = self.backend.processes
        if processes.count > 1:  # padded to one length, which on XLA is one program
            padded = torch.zeros(self.config.batches_per_train_log, len(STEP_METRICS), dtype=values.dtype)
            padded[: len(values)] = values
            values = processes.sum(padded)[: len(values)] / processes.count
        values = values.double().numpy()
        first = self.step - len(values)
        self._pending.clear()
        self.train_losses.extend(values[:, 0].tolist())
        self._unlogged.extend(values)
        bad = ~np.isfinite(values).all(axis=1)
        if bad.any():
            step = int(np.argmax(bad))
            found = ", ".join(f"{n} {v:.4g}" for n, v in zip(STEP_METRICS, values[step], strict=True))
            latest = latest_checkpoint(self.checkpoint_dir)
            saved = "No checkpoint had been written."
            if latest:
                saved = f"The last finite state is in {latest} (after batch {load_checkpoint(latest)['step']})."
            message = (
                f"training diverged at batch {first + step + 1}: {found}. {saved} Try a lower lr_max, more "
                "lr_warmup_steps, a smaller grad_norm_clip_value, or use_amp: false."
            )
            if self.backend.is_main:
                logger.error("%s", message)
            raise TrainingDiverged(message)

    def _log_training(self) -> None:
        self._fetch_losses()
        if not self._unlogged:
            return
        config, now = self.config, time.perf_counter()
        n_trials = (self.step - self._interval_step) * config.dataset.batch_size * self.backend.world_size
        rate = n_trials * config.gradient_accumulation_steps / (now - self._interval_start)
        self._interval_start, self._interval_step = now, self.step
        mean = dict(zip(STEP_METRICS, np.mean(self._unlogged, axis=0).tolist(), strict=True))
        self._unlogged.clear()
        ramp = adversarial_ramp(self.step - 1, config.adversarial.warmup_steps)
        rates = learning_rates(self.step - 1, config)
        self.backend.log(
            {f"train/{name}": value for name, value in mean.items()}
            | {
                "train/lr": rates[2],
                "train/lr_day_layers": rates[1],
                "train/grl_lambda": ramp * config.adversarial.grl_lambda,
                "train/noisy_loss_weight": ramp * config.adversarial.noisy_loss_weight,
                "train/trials_per_second": rate,
            }
            | self.backend.program_counts(),
            self.step,
        )
        parts = ""
        if config.model.architecture != "gru":  # whose loss has one part
            parts = " (clean {clean_ctc:.2f}, noisy {noisy_ctc:.2f}, noise L2 {noise_l2:.4f})".format(**mean)
        logger.info(
            "batch %d: loss %.2f%s, gradient norm %.2f, lr %.2g, %.1f trials/s",
            *(self.step, mean["loss"], parts, mean["gradient_norm"], rates[2], rate),
        )
        self._show(loss=mean["loss"], trials_per_s=rate)

    def _show(self, **numbers: float) -> None:
        """Numbers beside the progress bar; those not given keep their last value."""
        self._shown = getattr(self, "_shown", {}) | numbers
        self.bar.set_postfix({name: f"{value:.3g}" for name, value in self._shown.items()})

    # ---- validation ----------------------------------------------------------------------------------------------

    def validation(self, loader: Any = None, return_logits: bool = False, return_data: bool = False) -> dict[str, Any]:
        """Decode labelled trials greedily and count the errors, as `validation.validate` says.

        Args:
            loader: an EvalBatches of labelled trials, or a loader of one; None for the whole val split.
            return_logits: add 'logits', an array (P, C) a trial.
            return_data: add 'input_features', the preprocessed array (T, F) a trial.
        """
        self._take_the_log()
        loader = make_loader(self.val_batches, self.config) if loader is None else loader
        batches = getattr(loader, "dataset", loader)
        whole_split = batches is self.val_batches and len(loader) == len(batches)
        undecodable = self.undecodable if whole_split else []
        return validate(
            self.model, loader, batches.trials, self.config, self.backend, undecodable, return_logits, return_data
        )

    def _validate_and_save(self) -> bool:
        """Validate, log, write the checkpoints; whether training should stop early."""
        config = self.config
        self._fetch_losses()
        begin = time.perf_counter()
        wanted = {"return_logits": config.save_val_logits, "return_data": config.save_val_data}
        metrics = self.validation(**(wanted if config.save_val_metrics else {}))
        per, loss = metrics["avg_PER"], metrics["avg_loss"]
        self.val_PERs.append(per)
        self.val_losses.append(loss)
        # A tie in PER is broken by the loss. The main process decides: whoever waits, waits with all.
        better = self.backend.processes.on_main(lambda: (per, loss) < (self.best_PER, self.best_loss))
        if better:
            self.best_PER, self.best_loss, self.best_step = per, loss, self.step
        self.validations_without_gain = 0 if better else self.validations_without_gain + 1
        metrics["noise_share"] = self._look_at_noise()
        kept = {name: value for name, value in metrics.items() if name not in ("logits", "input_features")}
        self.val_metrics.append(kept)
        self._log_validation(metrics, time.perf_counter() - begin)
        self._warn_of_blanks(metrics)
        if metrics["noise_share"] is not None:
            warn_of_noise(metrics["noise_share"])
        self._save_checkpoint("last_checkpoint")
        if better:
            self.backend.processes.on_main(lambda: self._keep_best(metrics))
        if config.save_all_val_steps:
            self._save_checkpoint(f"checkpoint_batch_{self.step}")
        self._interval_start, self._interval_step = time.perf_counter(), self.step
        if self.stopped_early:
            logger.info(
                "early stopping: no better PER in %d validations (best %.2f%% after batch %d)",
                self.validations_without_gain, 100 * self.best_PER, self.best_step,
            )  # fmt: skip
            return True
        return False

    def _keep_best(self, metrics: dict[str, Any]) -> None:
        if self.config.save_best_checkpoint:
            copy_checkpoint(self.checkpoint_dir / "last_checkpoint", self.checkpoint_dir / "best_checkpoint")
        if self.config.save_val_metrics:
            save_validation(metrics, self.checkpoint_dir, self.step)

    def _log_validation(self, metrics: dict[str, Any], seconds: float) -> None:
        config = self.config
        values = {"val/PER": metrics["avg_PER"], "val/loss": metrics["avg_loss"]}
        if metrics["noise_share"] is not None:
            values["val/noise_share"] = metrics["noise_share"]
        if config.log_individual_day_val_PER:
            values |= {f"val_PER/{s}": count.rate for s, count in metrics["day_PERs"].items()}
        self.backend.log(values, self.step)
        self._show(PER=metrics["avg_PER"])
        if config.log_val_skip_logs:
            return
        share = metrics["noise_share"]
        logger.info(
            "validation after batch %d: PER %.2f%% (%d edits / %d phonemes, %d trials), loss %.3f%s, %.1f s",
            self.step, 100 * metrics["avg_PER"], metrics["edits"], metrics["phonemes"], metrics["n_trials"],
            metrics["avg_loss"], "" if share is None else f", noise {share:.1%} of the signal", seconds,
        )  # fmt: skip
        if config.log_individual_day_val_PER:
            for session, count in metrics["day_PERs"].items():
                logger.info("    %s PER %.2f%%", session, 100 * count.rate)
        logger.info("    true    %s", phonemes_to_text(metrics["true_seq"][0]))
        logger.info("    decoded %s", phonemes_to_text(metrics["decoded_seqs"][0]))

    def _warn_of_blanks(self, metrics: dict[str, Any]) -> None:
        """Say it when the model emits nothing, as it does before it has learnt anything, and after diverging."""
        if any(metrics["decoded_seqs"]):
            self._blank_validations = 0
            return
        self._blank_validations = getattr(self, "_blank_validations", 0) + 1
        if self.best_PER < 0.9 and metrics["avg_loss"] > self.best_loss:
            logger.warning(
                "the model emits nothing but blanks, after a PER of %.2f%% at batch %d: training has diverged; "
                "try a lower lr_max", 100 * self.best_PER, self.best_step,
            )  # fmt: skip
        elif self._blank_validations >= BLANK_VALIDATIONS:
            logger.warning(
                "still nothing but blanks after batch %d: if the loss no longer falls, try another lr_max, "
                "a smaller epsilon, or a longer run", self.step,
            )  # fmt: skip

    def _look_at_noise(self) -> float | None:
        """Show a val trial to the trackers; returns the noise's share of the signal's power in a few of them.

        None in processes other than the first, and of a decoder that estimates no noise.
        """
        if not self.backend.is_main or (self.config.log_with == "none" and self.config.model.architecture == "gru"):
            return None
        seen = look_at_trials(self.model, self.val_trials, self.config, self.backend)
        if self.config.log_with != "none":
            self.backend.log_image("val/trial", picture_of_a_trial(seen[0], self.config, self.step), self.step)
        return noise_share(seen)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _save_checkpoint(self, name: str, epoch: int | None = None) -> Path:
        """Write the whole state of the run to checkpoint/<name>; `epoch` is a user's own number, kept with it."""
        path = self.checkpoint_dir / name
        self.backend.processes.on_main(lambda: save_checkpoint(self._state(epoch), path))
        return path

    def _state(self, epoch: int | None) -> dict[str, Any]:
        config, dataset = self.config, self.config.dataset
        return {
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scheduler_state_dict": {"step": self.step},
            "step": self.step,
            "epoch": epoch,
            "val_PER": self.val_PERs[-1] if self.val_PERs else math.nan,
            "val_loss": self.val_losses[-1] if self.val_losses else math.nan,
            "best": {"PER": self.best_PER, "loss": self.best_loss, "step": self.best_step},
            "validations_without_gain": self.validations_without_gain,
            "history": {
                "train_losses": torch.tensor(self.train_losses, dtype=torch.float64),
                "val_losses": self.val_losses,
                "val_PERs": self.val_PERs,
            },
            "config": config.to_dict(),
            "preprocessing": {
                "smooth_data": dataset.data_transforms.smooth_data,
                "smooth_kernel_std": dataset.data_transforms.smooth_kernel_std,
                "smooth_kernel_size": dataset.data_transforms.smooth_kernel_size,
                "smooth_causal": dataset.data_transforms.smooth_causal,
                "feature_subset": list(dataset.feature_subset) if dataset.feature_subset else None,
                "patch_size": config.model.patch_size,
                "patch_stride": config.model.patch_stride,
            },
            "sessions": list(dataset.sessions),
            "trials_a_step": self._trials_a_step(),
        }

    def _trials_a_step(self) -> int:
        return self.config.dataset.batch_size * self.config.gradient_accumulation_steps * self.backend.world_size

    def _resume(self) -> bool:
        """Take up the latest checkpoint of the output directory; whether there was one."""
        processes = self.backend.processes
        name = processes.on_main(lambda: (path := latest_checkpoint(self.checkpoint_dir)) and path.name)
        if name is None:
            logger.warning("no checkpoint in %s: starting from the beginning", self.checkpoint_dir)
            return False
        path = self.checkpoint_dir / name
        processes.together(lambda: self._take_up(path))
        if self.best_step == self.step and self.config.save_best_checkpoint:  # a kill may have come between the two
            processes.on_main(lambda: copy_checkpoint(path, self.checkpoint_dir / "best_checkpoint"))
        return True

    def _take_up(self, path: Path) -> None:
        if not path.exists():
            raise CheckpointError(f"{path} is not on this host, {socket.gethostname()}: copy it there from the first")
        state = load_checkpoint(path)
        if "optimizer_state_dict" not in state:
            raise CheckpointError(
                f"{path} cannot be resumed: there is no optimiser's state in it (the original decoder's, and what "
                "finetune_session.py writes, have none); start from it in another output_dir: --set "
                f"init_from_checkpoint=true init_checkpoint_path={path}"
            )
        if self._seed_was_drawn:  # the run goes on with the one it drew at its start
            self.config.seed = state["config"]["seed"]
        check_same_run(state["config"], self.config.to_dict(), path)
        self.model.load_state_dict(state["model_state_dict"])
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        self.backend.end_program("resumed state")
        before = state.get("trials_a_step", self._trials_a_step())
        if before != self._trials_a_step():
            logger.warning("resuming with %d trials an optimiser step: %d before", self._trials_a_step(), before)
        self.step = state["step"]
        self.best_PER, self.best_loss, self.best_step = (state["best"][k] for k in ("PER", "loss", "step"))
        self.validations_without_gain = state["validations_without_gain"]
        history = state["history"]
        self.train_losses = history["train_losses"].tolist()
        self.val_losses, self.val_PERs = list(history["val_losses"]), list(history["val_PERs"])

    # ---- inference -----------------------------------------------------------------------------------------------

    def inference(self, features: Any, day_indices: Any, n_time_steps: Any) -> torch.Tensor:
        """Phoneme logits of raw trials, smoothed as in training.

        Args:
            features: (B, T, F) z-scored features, zero beyond each trial's n_time_steps; tensor or array.
            day_indices: (B,) index of each trial's session in config.dataset.sessions.
            n_time_steps: (B,) valid bins.
        Returns:
            (B, P, C) float32 on the CPU; frames beyond output_lengths(n_time_steps) mean nothing.
        Raises:
            ValueError: naming everything that does not fit, by trial, and what is possible.
        """
        batch = inference_batch(features, day_indices, n_time_steps, self.config)
        return next(batch_logits(self.model, [batch], self.config, self.backend)).logits.float().cpu()


def _draw_seed() -> int:
    return int.from_bytes(os.urandom(3), "little")
