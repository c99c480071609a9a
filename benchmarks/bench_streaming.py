"""How long a patch takes while a trial comes, against the time to read its weights from memory once.

    OMP_NUM_THREADS=1 python benchmarks/bench_streaming.py

The compact model (random weights; 45 sessions) on one core. A patch's time is that of the pushes of its four new bins,
one bin each; its delay is that of the last of them alone, after which its phonemes are there. The reference is a read
of as many bytes, the faster of a sum and a matrix-vector product, in turn with the patches. Beside them the usual way,
model.forward with states, a patch a call. Bars: p50 at most 1.3 times the read, p99 at most 40 ms, half of the 80 ms in
which the next patch comes; logits within 1e-5 of those of the whole trial.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import paired

from checkpointing import save_checkpoint
from config import Config, load_config
from data_augmentations import transform_data
from rnn_model import build_model
from streaming import StreamingDecoder

COMPACT = Path(__file__).resolve().parent.parent / "rnn_args_compact.yaml"
MOST_READS, MOST_P99_MS, TOLERANCE = 1.3, 40.0, 1e-5
NAIVE_EVERY, WARM_UP = 10, 20  # patches
QUANTILES = {"p50": 0.5, "p99": 0.99, "worst": 1.0}


def quantiles(milliseconds: list[float]) -> dict[str, float]:
    """p50, p99 and the worst."""
    return {name: float(np.quantile(milliseconds, share)) for name, share in QUANTILES.items()}


def timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


def write_checkpoint(config: Config, path: Path) -> torch.nn.Module:
    """Of a model of random weights, which is returned."""
    torch.manual_seed(0)
    model = build_model(config).eval()
    state = {"model_state_dict": model.state_dict(), "step": 0, "config": config.to_dict()}
    save_checkpoint(state | {"preprocessing": {}, "sessions": config.dataset.sessions}, path)
    return model


def offline(decoder: StreamingDecoder, model: torch.nn.Module, bins: torch.Tensor, day: torch.Tensor) -> torch.Tensor:
    """Logits (P, C) of the whole trial, as validation computes them."""
    transforms = decoder.config.dataset.data_transforms
    features, _ = transform_data(bins[None], torch.tensor([len(bins)]), transforms, training=False)
    return model(features, day)[0]


@torch.no_grad()
def measure(options: argparse.Namespace, folder: Path) -> dict:
    torch.set_num_threads(1)
    config = load_config(options.config_path, ["dataset.data_transforms.smooth_causal=true"])
    size, stride = config.model.patch_size, config.model.patch_stride
    path = folder / "checkpoint"
    model = write_checkpoint(config, path)
    start = time.perf_counter()
    decoder = StreamingDecoder(path)
    load_seconds = time.perf_counter() - start
    day = torch.tensor([len(config.dataset.sessions) - 1])

    columns = 7168
    buffer = torch.randn(decoder.weight_bytes // 4 // columns, columns)
    vector, read = torch.randn(columns), buffer.nbytes
    reads = {"sum": buffer.sum, "matrix-vector product": lambda: torch.mv(buffer, vector)}

    n_patches = options.patches + WARM_UP
    bins = torch.randn(size + stride * (n_patches - 1), config.dataset.neural_dim)
    logits = [decoder.push(bins[: size - stride])]
    times, delays, naive, read_times = [], [], [], {name: [] for name in reads}
    states = None
    for patch in range(n_patches):
        begin = size - stride + patch * stride
        pushes = []
        for x in bins[begin : begin + stride]:
            pushes.append(timed(lambda x=x: logits.append(decoder.push(x[None]))))
        times.append(sum(pushes))
        delays.append(pushes[-1])
        name = list(reads)[patch % 2]
        read_times[name].append(timed(reads[name]))
        if patch % NAIVE_EVERY == 0:
            window = bins[None, patch * stride : patch * stride + size]
            start = time.perf_counter()
            _, states = model(window, day, states=states, return_state=True)
            naive.append(1000 * (time.perf_counter() - start))
    difference = (torch.cat(logits) - offline(decoder, model, bins, day)).abs().max().item()
    read_ms = min(float(np.median(each)) for each in read_times.values()) * decoder.weight_bytes / read
    figures = {
        "patches": options.patches,
        "load_seconds": load_seconds,
        "weight_megabytes": decoder.weight_bytes / 1e6,
        "gigabytes_a_second": decoder.weight_bytes / read_ms / 1e6,
        "read_ms": read_ms,
        "patch_ms": quantiles(times[WARM_UP:]),
        "delay_ms": quantiles(delays[WARM_UP:]),
        "naive_ms": quantiles(naive[WARM_UP // NAIVE_EVERY :]),
        "difference": difference,
    }
    return figures | {"reads": figures["patch_ms"]["p50"] / read_ms}


def report(figures: dict) -> None:
    print(
        f"{figures['weight_megabytes']:.0f} MB of weights a patch; read once at "
        f"{figures['gigabytes_a_second']:.1f} GB/s: {figures['read_ms']:.1f} ms "
        f"(loaded in {figures['load_seconds']:.1f} s)"
    )
    rows = {"patch_ms": "a patch, its four bins one by one", "delay_ms": "of it, the last bin", "naive_ms": "forward"}
    for key, name in rows.items():
        print(f"{name:34s}" + "".join(f"  {label} {ms:5.1f} ms" for label, ms in figures[key].items()))
    print(
        f"p50 is {figures['reads']:.2f} reads of the weights; logits within {figures['difference']:.1e} of the trial's"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config_path", default=str(COMPACT), help="of the model (compact)")
    parser.add_argument("--patches", type=int, default=600, help="to measure (600)")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options, Path(folder))
    report(figures)
    paired.finish(
        options.json, {"streaming, a patch over a read of its weights": paired.spread([figures["reads"]])}, figures
    )
    passed = (
        figures["reads"] <= MOST_READS
        and figures["patch_ms"]["p99"] <= MOST_P99_MS
        and figures["difference"] <= TOLERANCE
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
