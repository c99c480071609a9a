"""Train on all the chips of a TPU: one process of train_model.py a chip.

python launch_tpu_training.py --config rnn_args.yaml --dry_run        # check everything, print the plan
python launch_tpu_training.py --config rnn_args.yaml                  # num_tpu_cores processes
python launch_tpu_training.py --config rnn_args.yaml --num_cores 1    # one chip
python launch_tpu_training.py --config rnn_args_quickstart.yaml --backend cpu --num_cores 2    # rehearse on a CPU
python launch_tpu_training.py ... --resume                            # any option of train_model.py is passed on

All problems are listed before a process is started. Each process writes to <output_dir>/launch_logs/rank_<i>.log, the
first one to the terminal too. When one fails the others are ended, and the exit code is that of the first that failed.
This program starts no runtime of a TPU: the chips are for the processes.
"""

import argparse
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import train_model
from machine import usable_cores
from process_group import run_processes
from tpu_host import Findings, check_tpu, clean_environment, find_chips, free_host_gb, remove_stale_lock_file

TRAIN_MODEL = Path(train_model.__file__).resolve()
PROCESS_GB = {"tpu": 1.1, "cpu": 0.7}  # resident before there is a model: measured, with torch_xla and without
TIGHT = 0.8  # of the free memory


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, argparse.Namespace, list[str]]:
    """This program's options; train_model.py's as it reads them; and the arguments to give to train_model.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        epilog="and every option of train_model.py but --device: see its --help",
    )  # fmt: skip
    parser.add_argument("--config", "--config_path", default=TRAIN_MODEL.with_name("rnn_args.yaml"), metavar="FILE")
    parser.add_argument("--num_cores", type=_positive, help="processes: 1 or all chips (num_tpu_cores in the file)")
    parser.add_argument("--backend", choices=("tpu", "cpu"), default="tpu", help="cpu: rehearse without a TPU (tpu)")
    parser.add_argument("--dry_run", action="store_true", help="check everything and print the plan, start nothing")
    options, rest = parser.parse_known_args(arguments)
    passed = ["--config_path", str(options.config), *rest]
    if train_model.parse_arguments(passed).device is not None:
        parser.error("--device follows from --backend: leave it out")
    passed += ["--device", "xla" if options.backend == "tpu" else "cpu"]
    if options.backend == "tpu" and options.num_cores:
        passed += ["--set", f"num_tpu_cores={options.num_cores}"]
    return options, train_model.parse_arguments(passed), passed


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


def main(arguments: list[str] | None = None, script: str | Path = TRAIN_MODEL) -> int:
    """Check, print the plan, run `script` in each process. Returns the exit code."""
    options, training_options, passed = parse_arguments(arguments)
    try:
        return launch(options, training_options, [sys.executable, str(script), *passed])
    except KeyboardInterrupt:
        print("interrupted before a process was started", file=sys.stderr)
        return 130
    except OSError as error:
        print(error, file=sys.stderr)
        return 2


def launch(options: argparse.Namespace, training_options: argparse.Namespace, command: list[str]) -> int:
    """What `main` does after parsing."""
    findings = Findings()
    config, model = _read_config(training_options, findings)
    n_processes = options.num_cores or (config.num_tpu_cores if config else None)
    if options.backend == "tpu":
        check_tpu(n_processes, str(options.config), findings)
    if config is not None:
        check_run(config, model, training_options, findings)
        if options.backend == "cpu" or find_chips()[0]:  # else it is another machine's memory that counts
            check_host_memory(options.backend, n_processes, model, findings)
    for warning in findings.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if findings.problems:
        lines = [problem.replace("\n", "\n    ") for problem in findings.problems]
        found = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        print("\n  - ".join([f"{found}; nothing was started:", *lines]), file=sys.stderr)
        return 2
    cleaned, said = clean_environment(dict(os.environ)) if options.backend == "tpu" else (dict(os.environ), [])
    log_dir = _log_dir(config)
    print("\n".join([*plan(options, config, model, n_processes, log_dir), *said]), flush=True)
    if options.dry_run:
        print("dry run: nothing was started")
        return 0
    if options.backend == "tpu" and remove_stale_lock_file():  # check_tpu has made sure that nobody holds it
        print("removed libtpu's lock file, which an earlier process left", flush=True)
    environments = process_environments(options.backend, n_processes, cleaned)
    return run_processes(command, environments, log_dir, append=training_options.resume)


def _read_config(options: argparse.Namespace, findings: Findings) -> tuple[Any, Any]:
    """The configuration and its model, without memory for the weights; None, None where there is a mistake in it."""
    import torch

    from config import load_config
    from rnn_model import build_model

    try:
        config = load_config(options.config_path, train_model.overrides(options))
        with torch.device("meta"):
            return config, build_model(config)
    except (ValueError, OSError) as error:
        findings.problems.append(str(error))
        return None, None


def _log_dir(config: Any) -> Path:
    from run_directory import LAUNCH_LOGS

    return Path(config.output_dir) / LAUNCH_LOGS


# ---- checks ------------------------------------------------------------------------------------------------------


def check_run(config: Any, model: Any, options: argparse.Namespace, findings: Findings) -> None:
    """Data files (that they are there; each process looks into them), output directory, disk."""
    from checkpointing import check_disk
    from dataset_index import split_files
    from run_directory import check_vacant

    logging.getLogger("b2txt").addHandler(logging.NullHandler())  # what is only a warning the processes say
    found = [problem for split in ("train", "val") for problem in split_files(config, split)[1]]
    findings.problems += dict.fromkeys(found)  # each once
    vacant = (config.output_dir, options.resume, options.overwrite, config.checkpoint_dir)
    for check, arguments in ((check_vacant, vacant), (check_disk, (model, config))):
        try:
            check(*arguments)
        except (ValueError, OSError) as error:
            findings.problems.append(str(error))


def check_host_memory(backend: str, n_processes: int, model: Any, findings: Findings) -> None:
    """The host's memory against what the processes need together."""
    needed, free = host_gb(backend, n_processes, model), free_host_gb()
    words = f"{n_processes} processes need about {needed:.1f} GB of this machine's memory, and {free:.1f} GB are free"
    if needed > free:
        findings.problems.append(f"{words}; end other programs, or take fewer --num_cores or a smaller model")
    elif needed > TIGHT * free:
        findings.warnings.append(f"{words}: tight, with the data's batches besides")


def host_gb(backend: str, n_processes: int, model: Any) -> float:
    """Host memory of all processes in GB: the programs, and the weights as they are initialised.

    On a TPU rank 0 fetches weights and moments to save them; on a CPU gradients and moments are there all the time.
    """
    weights, state = weight_gb(model)
    if backend == "cpu":
        return n_processes * (PROCESS_GB["cpu"] + state)
    return n_processes * (PROCESS_GB["tpu"] + weights) + state


def weight_gb(model: Any) -> tuple[float, float]:
    """GB of the float32 weights; and of the weights, their gradients and two moments."""
    weights = sum(4 * p.numel() for p in model.parameters()) / 1e9
    return weights, weights + sum(12 * p.numel() for p in model.parameters() if p.requires_grad) / 1e9


# ---- the processes' environment ----------------------------------------------------------------------------------


def process_environments(backend: str, n_processes: int, environment: dict[str, str]) -> list[dict[str, str]]:
    """The environment of each process, on one machine: the names of torchrun, and what the backend needs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    threads = max(1, usable_cores() // n_processes)
    common = {
        "WORLD_SIZE": str(n_processes),
        "LOCAL_WORLD_SIZE": str(n_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or str(threads),
        "PYTHONUNBUFFERED": "1",  # what a process said before it was killed is worth most
        "B2TXT_LAUNCHER": "1",
    }
    if backend == "cpu":
        common["USE_TORCH_XLA"] = "0"
    else:
        common["PJRT_DEVICE"] = "TPU"
        if n_processes == 1:  # the first chip, and no more; several processes choose theirs by LOCAL_RANK
            bounds = dict.fromkeys(("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS"), "1,1,1")
            common |= {"TPU_VISIBLE_CHIPS": "0", **bounds}
    return [environment | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n_processes)]


# ---- what is printed ---------------------------------------------------------------------------------------------


def plan(options: argparse.Namespace, config: Any, model: Any, n_processes: int, log_dir: Path) -> list[str]:
    """The run in lines of words and numbers."""
    trials, accumulation = config.dataset.batch_size, config.gradient_accumulation_steps
    of = "the CPU (a rehearsal)" if options.backend == "cpu" else f"TPU {find_chips()[0][0]}, one a chip"
    last = f" to rank_{n_processes - 1}.log" if n_processes > 1 else ""
    rows = [
        ("processes", f"{n_processes} on {of}"),
        ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"),
        ("batch", f"{trials} trials a core x {accumulation} accumulated x {n_processes} process(es) = "
                  f"{trials * accumulation * n_processes} an optimiser step"),
        ("optimiser steps", f"{config.num_training_batches:,}"),
        ("host memory", f"about {host_gb(options.backend, n_processes, model):.1f} GB of {free_host_gb():.1f} GB free"),
        ("output", config.output_dir),
        ("logs", f"{log_dir / 'rank_0.log'}{last}"),
    ]  # fmt: skip
    if options.backend == "tpu":
        memory = f"{weight_gb(model)[1]:.1f} GB a core for weights, gradients and moments"
        rows.insert(4, ("device memory", f"{memory}; tpu_compile_check.py says exactly what a step takes"))
    return [f"{options.config}:", *(f"  {name:<18}{value}" for name, value in rows)]


if __name__ == "__main__":
    sys.exit(main())
