"""Two GRU layers, forward and backward, by the TPU compiler's cost model: ours against torch_xla's own scan GRU.

    ./setup_env.sh --tpu_compiler        # once
    python benchmarks/bench_tpu_gru.py   # 32 trials, input 7,168, 768 units, bf16 products, at 250 and 247 frames

No TPU is needed and none is timed: both are compiled for one v5e chip in the same way.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def trace(kind: str, input_gradient: int, n_frames: int, n_trials: int, width: int, hidden: int, file: str) -> None:
    """Write the HLO of outputs and gradients of one of the two, that of the input (0 or 1) among them."""
    import torch
    import torch_xla
    from torch_xla.experimental.gru import GRU as ScanGRU

    import recurrent

    device = torch_xla.device()
    # Ours holds float32 parameters and multiplies in bf16. The scan is given bf16 parameters, which it needs to be
    # fast: with float32 ones under autocast the compiler counts more than twice the time.
    module = recurrent.GRU(width, hidden, 2) if kind == "ours" else ScanGRU(width, hidden, 2).to(torch.bfloat16)
    module = module.to(device)
    x = torch.randn(n_frames, n_trials, width).to(torch.bfloat16).to(device).requires_grad_(bool(input_gradient))
    torch_xla.sync()
    with torch.autocast("xla", dtype=torch.bfloat16, enabled=kind == "ours"):
        outputs, _ = module(x)
    outputs.float().sum().backward()
    results = [outputs, x.grad, *(parameter.grad for parameter in module.parameters())]
    context = torch_xla._XLAC.lowering.LoweringContext("gru")
    context.build([result for result in results if result is not None])
    Path(file).write_bytes(context.hlo())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--trace", nargs=7, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trace:
        kind, *sizes, file = arguments.trace
        trace(kind, *map(int, sizes), file)
        return
    from tpu_compile_check import COMPILER, compile_program

    if not COMPILER.exists():
        sys.exit("the TPU's compiler is not installed: ./setup_env.sh --tpu_compiler")
    found = {}
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    environment.pop("USE_TORCH_XLA", None)
    for n_frames, input_gradient in ((250, 1), (247, 1), (250, 0), (247, 0)):
        name = f"{n_frames} frames, {'with' if input_gradient else 'without'} the input's gradient"
        counts = {}
        for kind in ("torch_xla", "ours"):
            with tempfile.NamedTemporaryFile(suffix=".hlo") as hlo:
                sizes = map(str, (input_gradient, n_frames, 32, 7168, 768))
                command = [sys.executable, __file__, "--trace", kind, *sizes, hlo.name]
                subprocess.run(command, check=True, env=environment)
                compiled = compile_program(Path(hlo.name), {}, "v5e:2x4", 1, [])
            counts[kind] = compiled["cycles"] / 1.5e6, compiled["temp_bytes"] / 1e6
            milliseconds, megabytes = counts[kind]
            print(f"{name}, {kind:<9} {milliseconds:6.1f} ms modelled, {megabytes:7.1f} MB temporaries", flush=True)
        times, memory = (counts["torch_xla"][i] / max(counts["ours"][i], 1e-9) for i in (0, 1))
        print(f"{name}: {times:.1f} times fewer milliseconds, {memory:.0f} times less temporary memory", flush=True)
        found[name] = {"modelled_ms": times, "temporaries": memory}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
