"""The training step on XLA's CPU backend, ours against the same model in the pieces that torch_xla provides.

    python benchmarks/bench_xla_step.py      # a few minutes

The reference is the same decoder with torch.nn.GRU as torch_xla replaces it and F.ctc_loss, which leaves the device.
247 patches, 8 trials, input 896, 192 units. Each is run in processes of its own, in turn. What a CPU takes is not what
a TPU takes: this shows the cost of tracing, of leaving the device and of compiling.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import paired

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

N_TRIALS, N_FEATURES, N_UNITS, N_LABELS = 8, 64, 192, 40


def use_torch_xlas_pieces() -> None:
    """Make the decoder's parts those that somebody writes who does not know XLA."""
    import torch
    import torch.nn.functional as F

    import loss
    import recurrent
    import rnn_model

    def run(self, ops, x, state, plus, dtype):
        if plus is not None:
            x = plus.signal() if x is None else x + plus.signal()
        if not hasattr(self, "_scan"):
            self._scan = torch.nn.GRU(x.shape[-1], self.hidden_size, self.num_layers).to(x.device)
            for name, parameter in self.gru.named_parameters():
                setattr(self._scan, name, parameter)
        return self._scan(x, state)

    def ctc_loss(logits, labels, lengths, label_lengths):
        log_probs = logits.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, labels, lengths, label_lengths, reduction="none")

    def noise(self, x, state=None):
        hidden, state = self.recurrent(x, state)
        return self.projection(hidden), state

    recurrent.GRU._run_layers, loss.ctc_loss, rnn_model.NoiseModel.forward = run, ctc_loss, noise


def measure(kind: str, n_patches: int, n_steps: int) -> dict[str, float]:
    """Seconds of the first step, of a later one and of all compilation; the loss, to see that both are one model."""
    import torch
    import torch_xla
    import torch_xla.debug.metrics as metrics
    from tiny import tiny_config

    from loss import trial_losses
    from rnn_model import build_model

    device = torch_xla.device()
    config = tiny_config(
        model__n_input_features=N_FEATURES, dataset__neural_dim=N_FEATURES, model__noise_units=N_UNITS,
        model__n_units=N_UNITS, model__patch_size=14, model__patch_stride=4,
        model__input_network__input_layer_sizes=f"[{N_FEATURES}]",
    )  # fmt: skip
    if kind == "torch_xla":
        use_torch_xlas_pieces()
    torch.manual_seed(0)
    model = build_model(config).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    n_bins = 14 + 4 * (n_patches - 1)
    batch = [
        torch.randn(N_TRIALS, n_bins, N_FEATURES), torch.full((N_TRIALS,), n_bins), torch.arange(N_TRIALS) % 3,
        torch.randint(1, 41, (N_TRIALS, N_LABELS)), torch.full((N_TRIALS,), N_LABELS),
    ]  # fmt: skip
    batch = [tensor.to(device) for tensor in batch]
    torch_xla.sync(wait=True)
    seconds, losses = [], []
    for _ in range(n_steps + 1):
        start = time.perf_counter()
        loss = trial_losses(model, config, *batch).total.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        torch_xla.sync(wait=True)
        seconds.append(time.perf_counter() - start)
    compiling = metrics.metric_data("CompileTime")[1] / 1e9
    later = statistics.median(seconds[2:])
    return {"first_s": seconds[0], "step_s": later, "compile_s": compiling, "loss": losses[0].item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="processes of each (2)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, n_patches, n_steps = arguments.child
        print(json.dumps(measure(kind, int(n_patches), int(n_steps))))
        return
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    environment.pop("USE_TORCH_XLA", None)

    def run(kind: str, n_patches: int, n_steps: int) -> dict[str, float]:
        command = [sys.executable, __file__, "--child", kind, str(n_patches), str(n_steps)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        words = f"first step {found['first_s']:6.2f} s, a later one {found['step_s']:6.3f} s"
        print(f"{kind:<9} {n_patches} patches: {words}, compiling {found['compile_s']:6.2f} s", flush=True)
        return found

    pairs = [(run("torch_xla", 247, 6), run("ours", 247, 6)) for _ in range(arguments.repeats)]
    assert all(abs(a["loss"] / b["loss"] - 1) < 1e-3 for a, b in pairs), "the two are not the same model"
    ratios = {
        name: [a[key] / b[key] for a, b in pairs] for name, key in (("step", "step_s"), ("first step", "first_s"))
    }
    lengths = [(run("ours", 400, 2), run("ours", 100, 2)) for _ in range(arguments.repeats)]
    ratios["compile time, 400 over 100 patches"] = [a["compile_s"] / b["compile_s"] for a, b in lengths]
    named = {f"XLA on a CPU, {name}": paired.spread(values) for name, values in ratios.items()}
    paired.finish(arguments.json, named, {})


if __name__ == "__main__":
    main()
