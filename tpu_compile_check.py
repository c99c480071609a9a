"""Before you get a TPU: compile the training step of a configuration for one, and see what its compiler says.

    ./setup_env.sh --tpu_compiler                                   # once: the compiler, in an environment of its own
    python tpu_compile_check.py --config_path rnn_args_compact.yaml
    python tpu_compile_check.py --config_path rnn_args.yaml --batch_size 64 --time_bins 2000 --replicas 8

The step is the trainer's own (training_step.py): augmentation, the model, both losses, clipping, AdamW and, with
--replicas, the exchange of gradients. It is traced here, without data and without memory for the weights, and
compiled by the real TPU compiler, which needs no TPU. Whether it fits into the memory is then certain. The times are
the sum of the compiler's own estimates: good for comparing, and not measured on any TPU.
"""

import argparse
import fcntl
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tpu_host import LOCK_FILE

COMPILER = Path(sys.prefix) / "tpu_compiler" / "bin" / "python"
LABEL_WIDTH = 128
CHIP_GIB = 15.75  # of a v5e's 16 GB, what a program can have
PEAK_FLOPS, MEMORY_BYTES_PER_S = 197e12, 819e9  # v5e: docs.cloud.google.com/tpu/docs/v5e
LINK_BYTES_PER_S = 90e9  # one link of a v5e, both directions
CHIPS = 8
LONGEST_WAIT_S = 900  # for another process to be done with the compiler
PARTS = ("noise_gru", "clean_gru", "noisy_gru", "ctc", "optimiser", "all_reduce")


class TPUCompileError(RuntimeError):
    """The compiler is not there, is busy, or refuses the program for another reason than its size."""


def main() -> int:
    """Parse, trace, compile, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    default = Path(__file__).with_name("rnn_args.yaml")
    parser.add_argument("--config_path", default=str(default), help="the configuration (rnn_args.yaml)")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change settings")
    parser.add_argument("--topology", default="v5e:2x4", help="the TPU slice (v5e:2x4: 8 chips)")
    parser.add_argument("--batch_size", type=_positive, help="trials a chip (dataset.batch_size of the configuration)")
    parser.add_argument(
        "--time_bins", type=_positive, default=1000, help="length of the trials in bins of 20 ms (1000)"
    )
    parser.add_argument("--replicas", type=_positive, default=1, help="chips that exchange gradients (1)")
    parser.add_argument("--inference", action="store_true", help="the forward pass of evaluation in place of a step")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    parser.add_argument("--save_program", metavar="FILE", help="write the compiled program's text here, to be read")
    arguments = parser.parse_args()

    from config import ConfigError, load_config

    try:
        settings = [*arguments.set, *([f"dataset.batch_size={arguments.batch_size}"] if arguments.batch_size else [])]
        config = load_config(arguments.config_path, settings)
        if arguments.time_bins < config.model.patch_size:
            raise ConfigError(f"--time_bins {arguments.time_bins} is less than a patch of {config.model.patch_size}")
        _check_request(arguments)
        result = check(
            config, arguments.topology, arguments.time_bins, arguments.replicas, arguments.inference,
            arguments.save_program,
        )  # fmt: skip
        print(table(result, config, arguments))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")
    except (ConfigError, TPUCompileError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0 if result["fits"] else 1


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


def _check_request(arguments: argparse.Namespace) -> None:
    """Raise a TPUCompileError that lists what can be known to fail before a minute of work."""
    problems = []
    chips = re.fullmatch(r"v5e:(\d+)x(\d+)", arguments.topology)
    if chips is None:
        problems.append(
            f"--topology {arguments.topology}: only slices of v5e are known here, such as v5e:1x1 or v5e:2x4"
        )
    elif arguments.replicas > math.prod(map(int, chips.groups())):
        n_chips = math.prod(map(int, chips.groups()))
        problems.append(f"--replicas {arguments.replicas}: {arguments.topology} has {n_chips} chips")
    problems += _locked_by_another()
    for option, file in (("--json", arguments.json), ("--save_program", arguments.save_program)):
        if file is not None:
            problems += _unwritable(option, file)
    if not COMPILER.exists():
        problems.append(
            f"the TPU's compiler is not installed (looked for {COMPILER}); install it, in an environment of its own "
            "inside this one, with\n    ./setup_env.sh --tpu_compiler"
        )
    if problems:
        raise TPUCompileError("\n".join(problems))


def _unwritable(option: str, file: str) -> list[str]:
    existed = os.path.exists(file)
    try:
        with open(file, "a"):
            pass
    except OSError as error:
        return [f"{option} {file!r} cannot be written: {error.strerror}"]
    if not existed:
        os.remove(file)
    return []


def _locked_by_another() -> list[str]:
    """A lock file that this user cannot open, which the compiler would take for a compilation that goes on."""
    if not LOCK_FILE.exists() or os.access(LOCK_FILE, os.R_OK | os.W_OK):
        return []
    return [
        f"{LOCK_FILE} belongs to {LOCK_FILE.owner()}, and only they can use the TPU's compiler here until they, or an "
        "administrator, remove it"
    ]


def check(
    config: Any,
    topology: str = "v5e:2x4",
    time_bins: int = 1000,
    replicas: int = 1,
    inference: bool = False,
    save_program: str | None = None,
) -> dict[str, Any]:
    """Trace and compile one program of a configuration.

    Args:
        config: the whole configuration; its data are not looked at.
        time_bins: T, of a batch of dataset.batch_size trials.
        replicas: chips among which gradients are exchanged.
        inference: the forward pass in place of the last micro-batch of a training step.
        save_program: a file for the compiled program's text.
    Returns:
        the JSON of --json; README.md explains it.
    Raises:
        TPUCompileError: the compiler is missing, is busy or fails.
    """
    batch_gib = 4 * config.dataset.batch_size * time_bins * config.dataset.neural_dim / 2**30
    if batch_gib > CHIP_GIB:
        words = f"the features of a batch alone take {batch_gib:.1f}G of {CHIP_GIB}G"
        return {"fits": False, "peak_gib": batch_gib, "out_of_memory": words}
    with tempfile.TemporaryDirectory() as folder:
        hlo = Path(folder) / "program.hlo"
        traced = _trace_in_new_process(config, time_bins, replicas, inference, hlo)
        compiled = compile_program(hlo, traced["aliases"], topology, replicas, list(PARTS), save_program)
    return {
        **{key: traced[key] for key in ("parameters", "trained_parameters", "all_reduces_before_the_last_micro_batch")},
        **_judge(compiled, config, replicas, inference, traced["trained_parameters"]),
    }


def compile_program(
    hlo: Path, aliases: dict[str, int], topology: str, replicas: int, parts: list[str], text: str | None = None
) -> dict[str, Any]:
    """What tpu_compiler.py says of a serialised HLO module; {"error": its words} where it does not fit."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as program:
        settings = {"hlo": str(hlo), "aliases": aliases, "topology": topology, "replicas": replicas}
        json.dump({**settings, "parts": parts, "text": text}, program)
        program.flush()
        compiled = _compile(program.name)
        for waited in range(0, LONGEST_WAIT_S, 5):
            if "lockfile" not in compiled.get("error", ""):
                break
            if waited == 0:
                print("another process has the TPU's compiler, which serves one at a time: waiting", file=sys.stderr)
            time.sleep(5)
            compiled = _compile(program.name)
        else:
            raise TPUCompileError(
                f"another process has had the TPU's compiler for {LONGEST_WAIT_S} s; end it, or, if there is none, "
                f"remove {LOCK_FILE}"
            )
    if "error" in compiled and "RESOURCE_EXHAUSTED" not in compiled["error"]:
        raise TPUCompileError(f"the TPU's compiler refused the program: {compiled['error'][:3000]}")
    return compiled


def _compile(program: str) -> dict[str, Any]:
    command = [COMPILER, Path(__file__).with_name("tpu_compiler.py"), program]
    # One after the other of this program's own, in their order; others are met as "lockfile" above.
    with open(Path(tempfile.gettempdir()) / f"tpu_compile_check.{os.getuid()}.lock", "w") as queue:
        try:
            fcntl.flock(queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another check is compiling, one at a time: waiting", file=sys.stderr)
            fcntl.flock(queue, fcntl.LOCK_EX)
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise TPUCompileError(f"the TPU's compiler failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _judge(compiled: dict[str, Any], config: Any, replicas: int, inference: bool, trained: int) -> dict[str, Any]:
    """The compiler's counts in the units that people ask for."""
    if "error" in compiled:
        words = compiled["error"].splitlines()[0].split(" Total hbm usage")[0]
        used, single = re.search(r"Used ([\d.]+)G", words), re.search(r"\(size=(\d+)\)", words)  # all, or one array
        peak = float(used.group(1)) if used else int(single.group(1)) / 2**30 if single else None
        return {"fits": False, "peak_gib": peak, "out_of_memory": words}
    by_part = {part: cycles / 1.5e6 for part, cycles in compiled["by_part"].items()}
    exchange = _exchange_ms(replicas, compiled["all_reduce_bytes"])
    by_part["all_reduce"] += exchange
    modelled = compiled["cycles"] / 1.5e6 + exchange
    arguments, temporaries = compiled["argument_bytes"], compiled["temp_bytes"]
    peak = compiled["peak_bytes"] / 2**30
    result = {
        "fits": peak <= CHIP_GIB,
        "peak_gib": peak,
        "argument_gib": arguments / 2**30,
        "output_gib": compiled["output_bytes"] / 2**30,
        "aliased_gib": compiled["aliased_bytes"] / 2**30,
        "temp_gib": temporaries / 2**30,
        "modelled_ms": modelled,
        "modelled_ms_by_part": by_part,
        "modelled_ms_a_trial": modelled / config.dataset.batch_size,
        "floor_ms_arithmetic": 1e3 * compiled["product_flops"] / PEAK_FLOPS,
        "floor_ms_memory": 1e3 * (arguments + compiled["output_bytes"]) / MEMORY_BYTES_PER_S,
        "all_reduces": compiled["all_reduces"],
        "all_reduce_bytes": compiled["all_reduce_bytes"],
        "unestimated": compiled["unestimated"],
        "loops": compiled["loops"],
        "compile_s": compiled["compile_s"],
    }
    if not inference:
        optimiser = by_part["optimiser"]  # once a step: its other micro-batches go without
        micro_batches = config.gradient_accumulation_steps * (modelled - optimiser - by_part["all_reduce"])
        eight_chips_ms = micro_batches + optimiser + _exchange_ms(CHIPS, compiled["all_reduce_bytes"] or 4 * trained)
        result["hours_eight_chips"] = config.num_training_batches * eight_chips_ms / 3.6e6
        result["hours_one_chip"] = config.num_training_batches * (CHIPS * micro_batches + optimiser) / 3.6e6
    return result


def _exchange_ms(chips: int, n_bytes: int) -> float:
    """An all-reduce over a ring of chips: each sends 2 (n - 1) / n of the bytes."""
    return 1e3 * 2 * (chips - 1) / chips * n_bytes / LINK_BYTES_PER_S


# ---- tracing, in a process of its own, since torch_xla changes torch -------------------------------------------------


def _trace_in_new_process(config: Any, time_bins: int, replicas: int, inference: bool, hlo: Path) -> dict[str, Any]:
    request = {"config": config.to_dict(), "time_bins": time_bins, "replicas": replicas, "inference": inference}
    environment = {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "XLA_HLO_DEBUG": "1",  # names of scopes go into the program
        "XLA_ALWAYS_ALLREDUCE": str(int(replicas > 1)),  # also where this process is the only one
    }
    environment.pop("USE_TORCH_XLA", None)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import tpu_compile_check as c; c._trace_here(*sys.argv[2:])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(hlo)],
        input=json.dumps(request), capture_output=True, text=True, env=environment,
    )  # fmt: skip
    if done.returncode != 0:
        raise TPUCompileError(f"the step could not be traced:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _trace_here(hlo: str) -> None:
    import torch_xla  # noqa: F401  first: see backend.py

    from config import config_from_dict

    request = json.load(sys.stdin)
    config = config_from_dict(request["config"])
    trace = _trace_inference if request["inference"] else _trace_training
    outputs, persistent, counts = trace(config, request["time_bins"], request["replicas"])
    context = _lowered(outputs)
    Path(hlo).write_bytes(context.hlo())
    first = len(outputs) - len(persistent)
    ids = [context.tensor_parameter_id(tensor) for tensor in persistent]
    aliases = {number: first + i for i, number in enumerate(ids) if number != -1}
    print(json.dumps({"aliases": aliases, **counts}))


class _StandIns:
    """Tensors on XLA that have a shape and no memory, and keep being found after they were changed in place."""

    def __init__(self) -> None:
        self.originals: list[Any] = []
        self.tensors: list[Any] = []

    def make(self, shape: Any, dtype: Any, persistent: bool = False) -> Any:
        import torch
        import torch_xla.core.xla_builder as xb

        original = xb.create_placeholder_tensor(torch.Size(shape), dtype)
        tensor = original.clone()
        if persistent:
            self.originals.append(original)
            self.tensors.append(tensor)
        return tensor


def _model_and_batch(config: Any, time_bins: int, stand_ins: _StandIns) -> tuple[Any, dict[str, Any]]:
    import torch

    from rnn_model import build_model

    with torch.device("meta"):
        model = build_model(config)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            stand_in = stand_ins.make(parameter.shape, parameter.dtype, persistent=True)
            module._parameters[name] = torch.nn.Parameter(stand_in, requires_grad=parameter.requires_grad)
            stand_ins.tensors[-1] = module._parameters[name]
    n_trials, n_features = (
        config.dataset.batch_size,
        len(config.dataset.feature_subset or range(config.dataset.neural_dim)),
    )
    shapes = {
        "features": ((n_trials, time_bins, n_features), torch.float32),
        "labels": ((n_trials, LABEL_WIDTH), torch.int64),
        "weights": ((n_trials,), torch.float32),
        **{name: ((n_trials,), torch.int64) for name in ("n_time_steps", "label_lengths", "day_indices")},
    }
    return model, {name: stand_ins.make(*of) for name, of in shapes.items()}


def _backend(config: Any, replicas: int) -> Any:
    from backend import Backend

    backend = Backend("xla", config.use_amp)
    backend.watch = None  # nothing is to run
    backend.world_size = replicas
    return backend


def _trace_inference(config: Any, time_bins: int, replicas: int) -> tuple[list, list, dict[str, int]]:
    from inference import batch_logits

    stand_ins = _StandIns()
    model, batch = _model_and_batch(config, time_bins, stand_ins)
    _name_scopes(model)
    decoded = next(batch_logits(model, [batch], config, _backend(config, replicas)))
    return [decoded.logits, decoded.logits.argmax(-1)], [], _counts(model, [], 0)


def _trace_training(config: Any, time_bins: int, replicas: int) -> tuple[list, list, dict[str, int]]:
    import torch

    import loss
    from optimizer import make_optimizer
    from training_step import STEP_METRICS, TrainingStep

    backend, stand_ins = _backend(config, replicas), _StandIns()
    model, batch = _model_and_batch(config, time_bins, stand_ins)
    model.train()
    optimizer = make_optimizer(model, config, backend.device)
    step = TrainingStep(model, optimizer, config, backend)
    shared: dict[int, Any] = {}  # a group's parameters have one step count
    for state in optimizer.state.values():
        for name, tensor in state.items():
            if id(tensor) not in shared:
                shared[id(tensor)] = tensor, stand_ins.make(tensor.shape, tensor.dtype, persistent=True)
            state[name] = shared[id(tensor)][1]
    _name_scopes(model)
    loss.ctc_loss = _in_scope("ctc", loss.ctc_loss)
    sums = stand_ins.make((len(STEP_METRICS) - 1,), torch.float32)
    n_trials, ramp = stand_ins.make((1,), torch.float32), stand_ins.make((1,), torch.float32)

    exchanges_before_the_last = 0
    if config.gradient_accumulation_steps > 1:
        for parameter in step.trained_parameters:
            parameter.grad = stand_ins.make(parameter.shape, parameter.dtype)
        other = step.accumulate(batch, sums, n_trials, ramp, 0, 0, last=False)
        context = _lowered([other, *(parameter.grad for parameter in step.trained_parameters)])
        exchanges_before_the_last = len(re.findall(r'opcode: "all-reduce', context.hlo_text()))
        for parameter in step.trained_parameters:  # they stay from one micro-batch to the next
            parameter.grad = stand_ins.make(parameter.shape, parameter.dtype, persistent=True)
            stand_ins.tensors[-1] = parameter.grad
    sums = step.accumulate(batch, sums, n_trials, ramp, 0, 0, last=True)
    norm = _in_scope("optimiser", step.update)(0)
    metrics = torch.cat([sums / n_trials, norm.reshape(1)])
    counts = _counts(model, step.trained_parameters, exchanges_before_the_last)
    return [metrics, *stand_ins.tensors], stand_ins.originals, counts


def _counts(model: Any, trained: Iterable[Any], exchanges_before_the_last: int) -> dict[str, int]:
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": sum(parameter.numel() for parameter in trained),
        "all_reduces_before_the_last_micro_batch": exchanges_before_the_last,
    }


def _lowered(outputs: list) -> Any:
    import torch_xla

    context = torch_xla._XLAC.lowering.LoweringContext("step")
    context.build(outputs)
    return context


def _in_scope(name: str, function: Callable) -> Callable:
    import torch_xla.debug.profiler as profiler

    def scoped(*arguments: Any, **options: Any) -> Any:
        with profiler.Trace(name):
            return function(*arguments, **options)

    return scoped


def _name_scopes(model: Any) -> None:
    """Put what the three models compute into scopes of their names: forward, and backward in xla_ops.py."""
    import xla_ops

    inside: list[str] = []  # the model that computes now
    for name, module in (
        ("noise_gru", model.noise_model), ("clean_gru", model.clean_speech_model),
        ("noisy_gru", model.noisy_speech_model),
    ):  # fmt: skip
        forward = _in_scope(name, module.forward)

        def named(*arguments: Any, name: str = name, forward: Callable = forward) -> Any:
            inside.append(name)
            outputs = forward(*arguments)
            inside.pop()
            return outputs

        module.forward = named
    for function in (xla_ops._GRULayer, xla_ops._LargeGRULayer, xla_ops._Linear):
        forward, backward = function.forward, function.backward

        def remember(ctx: Any, *arguments: Any, forward: Callable = forward) -> Any:
            ctx.part = inside[-1] if inside else "rest"
            return forward(ctx, *arguments)

        def recall(ctx: Any, *gradients: Any, backward: Callable = backward) -> Any:
            return _in_scope(ctx.part, backward)(ctx, *gradients)

        function.forward, function.backward = staticmethod(remember), staticmethod(recall)


# ---- what is printed ---------------------------------------------------------------------------------------------


def table(result: dict[str, Any], config: Any, arguments: argparse.Namespace) -> str:
    """The result in words and numbers."""
    n_micro, program = config.gradient_accumulation_steps, "training step"
    if arguments.inference:
        program = "forward pass"
    elif n_micro > 1:
        program = f"last of the {n_micro} micro-batches of a training step, with the optimiser,"
    chips = "1 chip" if arguments.replicas == 1 else f"{arguments.replicas} chips"
    lines = [
        f"{program} of {arguments.config_path}: {config.dataset.batch_size} trials a chip of "
        f"{arguments.time_bins} bins, {chips} of {arguments.topology}",
        "",
    ]
    if "out_of_memory" in result:
        hints = _what_to_change(config, result["peak_gib"])
        return "\n".join([*lines, f"does not fit: {result['out_of_memory']}", *hints])
    # Those that are not trained have no gradients and no moments.
    rested = 0 if arguments.inference else result["parameters"] - result["trained_parameters"]
    trained = f", of which {result['trained_parameters']:,} are trained" if rested else ""
    rows = [
        ("parameters", f"{result['parameters']:,}{trained}"),
        ("arguments", f"{result['argument_gib']:.2f} GiB"),
        ("outputs", f"{result['output_gib']:.2f} GiB, of which {result['aliased_gib']:.2f} in place of arguments"),
        ("temporaries", f"{result['temp_gib']:.2f} GiB, with the gaps between them"),
        ("peak in use", f"{result['peak_gib']:.2f} GiB of {CHIP_GIB}: {'fits' if result['fits'] else 'does not fit'}"),
        ("modelled time", f"{result['modelled_ms']:.1f} ms, {result['modelled_ms_a_trial']:.2f} ms a trial"),
    ]
    rows += [
        (f"  {part.replace('_', ' ')}", f"{ms:.1f} ms, {100 * ms / result['modelled_ms']:.0f}%")
        for part, ms in result["modelled_ms_by_part"].items()
        if ms
    ]
    rows += [
        ("products at peak speed", f"{result['floor_ms_arithmetic']:.1f} ms"),
        ("arguments and outputs at memory speed", f"{result['floor_ms_memory']:.1f} ms"),
    ]
    if arguments.replicas > 1:
        rows.append(("exchanged", f"{result['all_reduce_bytes'] / 1e6:.1f} MB, all-reduces: {result['all_reduces']}"))
    if "hours_one_chip" in result:
        rows += [
            (f"{config.num_training_batches:,} steps on 8 chips", _duration(result["hours_eight_chips"])),
            ("as many trials on one chip", _duration(result["hours_one_chip"])),
        ]
    lines += [f"  {name:<40}{value}" for name, value in rows]
    if result["unestimated"]:
        found = ", ".join(f"{count} {opcode}" for opcode, count in result["unestimated"].items())
        lines += ["", f"The compiler gives no estimate of {found}."]
    if not result["fits"]:
        lines += _what_to_change(config, result["peak_gib"])
    lines += ["", "Times are the compiler's cost model, not a run on a TPU; memory is what the program will take."]
    return "\n".join(lines)


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


def _what_to_change(config: Any, needed_gib: float | None) -> list[str]:
    """Hints; what a batch takes is at most in proportion to its trials, so that the half is halved till it fits."""
    batch = config.dataset.batch_size
    smaller = batch // 2
    while needed_gib and smaller > 1 and needed_gib * smaller / batch > CHIP_GIB:
        smaller //= 2
    hints = [f"  --batch_size {smaller} (and more gradient_accumulation_steps)"] if batch > 1 else []
    hints.append("  fewer --time_bins: leave out the longest trials, or cut them")
    if config.model.noise_units > 768:
        hints.append("  model.noise_units=768: a projected noise estimate, an eighth of the parameters")
    return ["", "What takes less:", *hints]


if __name__ == "__main__":
    sys.exit(main())
