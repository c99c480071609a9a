"""A training step on a CUDA GPU in bf16: time, memory, waits for the device, against plain PyTorch on the same GPU.

    python benchmarks/bench_gpu.py                   # under 6 minutes on one GPU
    python benchmarks/bench_gpu.py --device cpu      # a rehearsal with small models; its times mean nothing

The original, the compact and the 687M model at 64 trials of 1,000 bins, augmentation, clipping and AdamW included, the
batch in pinned memory. In turn with the reference (reference.py; of the 687M model there is none, since its day layers
and NoiseModel are another shape). Waits are what torch.cuda's synchronisation check reports in a step. The share of the
peak is that of the step's matrix products, counted by weights, at the rate of a large bf16 product measured in the same
run. Bars: 1.3 times the reference for the original, no wait in a step.
"""

import os

os.environ.setdefault("USE_TORCH_XLA", "0")

import gc
import json
import statistics
import sys
import time
import warnings
from typing import Any

import paired
import reference
import torch

from backend import Backend
from config import Config
from optimizer import make_optimizer
from rnn_model import build_model
from training_step import TrainingStep

CONFIGS = {"original": "rnn_args_original.yaml", "compact": "rnn_args_compact.yaml", "687M": "rnn_args.yaml"}
N_TRIALS, N_BINS, N_STEPS, N_ROUNDS, N_BATCHES = 64, 1_000, 5, 5, 120_000
LEAST_RATIO = 1.3
SMALL = ["model.n_units=32", "model.n_layers=2"]  # of the rehearsal


def make_config(name: str, device: str) -> Config:
    overrides = ["gradient_accumulation_steps=1", "log_with=none", f"use_amp={json.dumps(device == 'cuda')}"]
    if device == "cpu":
        units = [] if name == "original" else ["model.noise_units=32"]
        overrides += [*SMALL, *units, 'dataset.sessions=["a","b"]', "dataset.dataset_probability_val=null"]
    return paired.whole_design(CONFIGS[name], overrides)


def make_batch(config: Config, device: str) -> dict[str, torch.Tensor]:
    """On the host, in pinned memory where there is a GPU; all of full length."""
    n_trials, n_bins = (N_TRIALS, N_BINS) if device == "cuda" else (4, 100)
    n_labels = n_bins // 28
    batch = {
        "features": torch.randn(n_trials, n_bins, paired.N_FEATURES),
        "n_time_steps": torch.full((n_trials,), n_bins),
        "day_indices": torch.arange(n_trials) % min(4, len(config.dataset.sessions)),
        "labels": torch.randint(1, 41, (n_trials, n_labels)),
        "label_lengths": torch.full((n_trials,), n_labels),
        "weights": torch.ones(n_trials),
    }
    return {key: value.pin_memory() for key, value in batch.items()} if device == "cuda" else batch


def seconds_a_step(step: Any, backend: Backend) -> float:
    """Mean of N_STEPS steps, from an idle device to an idle device."""
    backend.wait_for_device()
    start = time.perf_counter()
    for _ in range(N_STEPS):
        step()
    backend.wait_for_device()
    return (time.perf_counter() - start) / N_STEPS


def waits(step: Any) -> int:
    """How often a step waits for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def tflops(model: torch.nn.Module, config: Config, batch: dict[str, torch.Tensor]) -> float:
    """Of a step's matrix products: every weight once a frame forward and twice backward, a day's once a bin."""
    n_trials, n_bins, n_features = batch["features"].shape
    frames = n_trials * (n_bins - config.model.patch_size) / config.model.patch_stride
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "day_" not in name)
    n_day_layers = sum("day_layers.weights" in name for name, _ in model.named_parameters())
    return 6e-12 * (frames * weights + n_day_layers * n_trials * n_bins * n_features**2)


def product_rate(backend: Backend) -> float:
    """TFLOP/s of a large product, bf16 on a GPU."""
    size, dtype = (8192, torch.bfloat16) if backend.kind == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, device=backend.device, dtype=dtype) for _ in range(2))
    return 2e-12 * size**3 / seconds_a_step(lambda: torch.mm(a, b), backend)


def measure(name: str, device: str) -> tuple[dict[str, float] | None, dict[str, Any]]:
    config, backend = make_config(name, device), Backend(device, use_amp=device == "cuda")
    backend.seed(0)
    batch, n_done = make_batch(config, device), 0
    model = backend.build(lambda: build_model(config))
    training_step = TrainingStep(model, make_optimizer(model, config, backend.device), config, backend)

    def ours() -> None:
        nonlocal n_done
        training_step([batch], n_done)
        n_done += 1

    ours()  # cuDNN plans, allocations
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    functions = [lambda: seconds_a_step(ours, backend), lambda: product_rate(backend)]
    figures: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    figures["milliseconds"] = 1e3 * seconds_a_step(ours, backend)
    if device == "cuda":
        figures["gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
        figures["waits a step"] = waits(ours)
    if name != "687M":
        theirs = reference.make_model(config).to(backend.device)
        optimizer, scheduler = reference.make_optimizer(theirs, config)
        plain = {key: value for key, value in batch.items() if key != "weights"}
        run = lambda: reference.train_step(theirs, optimizer, scheduler, plain, config)  # noqa: E731
        run()
        functions.insert(0, lambda: seconds_a_step(run, backend))
    rounds = paired.in_turn(functions, N_ROUNDS, name)
    figures["milliseconds"] = paired.spread(1e3 * times[-2] for times in rounds)
    rate = tflops(model, config, batch) / (figures["milliseconds"]["median"] / 1e3)
    figures["share of a large product's rate"] = rate / statistics.median(times[-1] for times in rounds)
    figures["hours for 120,000 batches"] = figures["milliseconds"]["median"] * N_BATCHES / 3.6e6
    ratio = None if name == "687M" else paired.spread(times[0] / times[1] for times in rounds)
    return ratio, figures


def main() -> int:
    parser = paired.parser_of(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no CUDA GPU; --device cpu rehearses, with small models")
    print(torch.cuda.get_device_name() if options.device == "cuda" else "rehearsal on a CPU: times mean nothing")
    ratios, figures = {}, {}
    for name in CONFIGS:
        ratio, figures[name] = measure(name, options.device)
        if ratio:
            ratios[f"{options.device} step, {name}"] = ratio
        print(name)
        for what, value in figures[name].items():
            print(f"  {what}: " + (paired.in_words(value, 1) if isinstance(value, dict) else f"{value:,.4g}"))
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    paired.finish(options.json, ratios, figures)
    if options.device == "cpu":
        return 0
    waited = any(each["waits a step"] for each in figures.values())
    return 0 if ratios["cuda step, original"]["median"] >= LEAST_RATIO and not waited else 1


if __name__ == "__main__":
    sys.exit(main())
