"""One optimiser step, from batches to new parameters: what the trainer repeats and tpu_compile_check.py compiles.

On XLA a micro-batch is one program: augmentation, forward and backward pass, and on the last one of a step the
exchange and clipping of gradients and AdamW. Nothing in it waits for the device, and what changes from step to step
(learning rates, the adversarial ramp, the number of trials, seeds) comes in as data, not as constants.
"""

from typing import Any

import torch

from backend import Backend
from data_augmentations import transform_data
from loss import adversarial_ramp, trial_losses
from optimizer import set_learning_rates

# Streams of random numbers, so that no two uses of (seed, step) draw the same.
INITIALISATION, DROPOUT, AUGMENTATION = range(3)
STEP_METRICS = ("loss", "clean_ctc", "noisy_ctc", "noise_l2", "gradient_norm")


class TrainingStep:
    """The step of one model and optimiser.

    Args:
        model: on the backend's device.
        optimizer: of `make_optimizer`.
        config: the whole configuration.
        backend: device, precision, processes.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: Any, backend: Backend) -> None:
        self.model, self.optimizer, self.config, self.backend = model, optimizer, config, backend
        self.wrapped_model, self.wrapped_optimizer = backend.prepare(model, optimizer)
        self.trained_parameters = [p for p in model.parameters() if p.requires_grad]
        # Gradients that are there from the start, and zero, make the first micro-batch the same program as the next.
        self._gradients_stay = backend.kind == "xla" and config.gradient_accumulation_steps > 1
        if self._gradients_stay:
            for parameter in self.trained_parameters:
                parameter.grad = torch.zeros_like(parameter)
        self._no_sums = torch.zeros(len(STEP_METRICS) - 1, device=backend.device)
        backend.end_program("optimiser's initial state")

    def __call__(self, batches: list[dict[str, torch.Tensor]], step: int) -> torch.Tensor:
        """Optimiser step number `step`, from 0, over its micro-batches.

        Args:
            batches: of TrainBatches, on the host.
        Returns:
            (5,) STEP_METRICS, on the device; losses are averages over the step's trials on this process.
        """
        backend = self.backend
        self.wrapped_model.train()
        ramp = backend.scalar(adversarial_ramp(step, self.config.adversarial.warmup_steps))
        n_trials = backend.scalar(sum(float(batch["weights"].sum()) for batch in batches))
        sums = self._no_sums
        for micro, batch in enumerate(batches[:-1]):
            batch = backend.to_device(batch)
            sums = self.accumulate(batch, sums, n_trials, ramp, step, micro, last=False)
            backend.end_program("micro-batch", batch)
        batch = backend.to_device(batches[-1])
        sums = self.accumulate(batch, sums, n_trials, ramp, step, len(batches) - 1, last=True)
        norm = self.update(step)
        metrics = torch.cat([sums / n_trials, norm.detach().reshape(1).to(sums.dtype)])
        del sums, norm  # else they would be results of the program too
        backend.end_program("training step", batch)
        return metrics

    def accumulate(
        self,
        batch: dict[str, torch.Tensor],
        sums: torch.Tensor,
        n_trials: torch.Tensor,
        ramp: torch.Tensor,
        step: int,
        micro: int,
        last: bool,
    ) -> torch.Tensor:
        """Add a micro-batch's share to the gradients; returns sums (4,) with its losses added.

        Args:
            batch: on the device.
            n_trials: (1,), of the whole step on this process.
            ramp: (1,), from `adversarial_ramp`.
            last: whether it is the step's last, after which the processes exchange gradients.
        """
        config, backend = self.config, self.backend
        generator = backend.generator(config.seed, AUGMENTATION, step, micro, backend.rank)
        features, n_time_steps = transform_data(
            batch["features"], batch["n_time_steps"], config.dataset.data_transforms, True, generator
        )
        backend.seed(config.seed, DROPOUT, step, micro, backend.rank)
        with backend.gradients_stay_local(self.wrapped_model, not last), backend.autocast():
            losses = trial_losses(
                self.wrapped_model, config, features, n_time_steps, batch["day_indices"],
                batch["labels"], batch["label_lengths"], ramp,
            )  # fmt: skip
            backend.backward((losses.total * batch["weights"]).sum() / n_trials.squeeze())
        return sums + torch.stack([(part.detach() * batch["weights"]).sum() for part in losses])

    def update(self, step: int) -> torch.Tensor:
        """Exchange and clip the gradients, step the optimiser, clear the gradients; returns their norm before."""
        set_learning_rates(self.optimizer, step, self.config)
        norm = self.backend.clip_gradients(self.trained_parameters, self.config.grad_norm_clip_value)
        self.wrapped_optimizer.step()
        self.wrapped_optimizer.zero_grad(set_to_none=not self._gradients_stay)
        return norm
