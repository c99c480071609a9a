"""What each of several processes holds of the model as it starts: the growth of its peak memory over the model's size.

torchrun --nproc_per_node 2 benchmarks/bench_start.py --config_path rnn_args.yaml

Two copies would be 2.0. The first process initialises the weights, the others receive them.
"""

import argparse
import resource
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def peak_bytes() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Build the model and connect it; each process prints a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config_path", default=str(ROOT / "rnn_args.yaml"))
    config_path = parser.parse_args().config_path

    from backend import Backend
    from config import load_config
    from optimizer import make_optimizer
    from rnn_model import build_model

    config, backend = load_config(config_path), Backend("cpu")
    before, begin = peak_bytes(), time.perf_counter()
    model = backend.build(lambda: build_model(config))
    built, seconds = peak_bytes() - before, time.perf_counter() - begin
    backend.prepare(model, make_optimizer(model, config, backend.device))
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    print(
        f"process {backend.rank} of {backend.world_size}: model {size / 1e9:.2f} GB; built in {seconds:.0f} s, "
        f"peak {built / size:.2f} times the model; connected {(peak_bytes() - before) / size:.2f} times",
        flush=True,
    )


if __name__ == "__main__":
    main()
