"""Started by tests once a rank: runs a function of this file and prints its result as JSON.

python two_processes.py FUNCTION ARGUMENTS_AS_JSON, with RANK, WORLD_SIZE, ... as torchrun sets them.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def start(command: list[str], n_processes: int, **popen: Any) -> list[subprocess.Popen]:
    """The command once a rank, connected to each other over gloo; {rank} in it stands for the rank."""
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n_processes),
        "LOCAL_WORLD_SIZE": str(n_processes), "OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0",
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, *(word.replace("{rank}", str(rank)) for word in command)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen,
        )
        for rank in range(n_processes)
    ]  # fmt: skip


def run_on(n_processes: int, function: str, *arguments: Any) -> list[Any]:
    """The results of a function of this file, one a rank."""
    processes = start([__file__, function, json.dumps(arguments, default=str)], n_processes)
    outputs = [process.communicate(timeout=240) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


# ---- what runs in the processes --------------------------------------------------------------------------------------


def make_trainer(data_dir: str, settings: dict[str, Any], existing: str = "keep", in_float64: bool = False) -> Any:
    from tiny import training_config

    from optimizer import make_optimizer
    from rnn_trainer import BrainToTextDecoder_Trainer
    from training_step import TrainingStep

    trainer = BrainToTextDecoder_Trainer(training_config(data_dir, **settings), "cpu", existing)
    if in_float64:
        trainer.model.double()
        trainer.optimizer = make_optimizer(trainer.model, trainer.config, trainer.backend.device)
        trainer.training_step = TrainingStep(trainer.model, trainer.optimizer, trainer.config, trainer.backend)
    return trainer


def train(data_dir: str, settings: dict[str, Any], existing: str = "keep", in_float64: bool = False) -> dict[str, Any]:
    trainer = make_trainer(data_dir, settings, existing, in_float64)
    start = trainer.backend.check_parameters(trainer.model)
    statistics = trainer.train()
    last = statistics["val_metrics"][-1]
    return {
        "checksum": start,
        "end": trainer.backend.check_parameters(trainer.model),
        "train_losses": statistics["train_losses"],
        "val_PERs": statistics["val_PERs"],
        "val_losses": statistics["val_losses"],
        "day_PERs": {day: [count.edits, count.length] for day, count in last["day_PERs"].items()},
        "decoded": last["decoded_seqs"],
        "lr": [group["lr"] for group in trainer.optimizer.param_groups],
        "parameters": [p.double().sum().item() for p in trainer.model.parameters()],
        "output_dir": str(trainer.output_dir),
        "seed": trainer.config.seed,
    }


def validate(data_dir: str, settings: dict[str, Any]) -> dict[str, Any]:
    """PER and per-trial arrays of an untrained model, whose outputs are made to be of all classes."""
    import torch

    trainer = make_trainer(data_dir, settings)
    with torch.no_grad():
        trainer.model.clean_speech_model.out.weight.mul_(50)
    metrics = trainer.validation(return_logits=True, return_data=True)
    return {
        "PER": metrics["avg_PER"], "loss": metrics["avg_loss"], "n_trials": metrics["n_trials"],
        "day_PERs": {day: [count.edits, count.length] for day, count in metrics["day_PERs"].items()},
        "decoded": metrics["decoded_seqs"],
        "logits": [float(logits.sum()) for logits in metrics["logits"]],
        "features": [float(features.sum()) for features in metrics["input_features"]],
        "shapes": [list(features.shape) for features in metrics["input_features"]],
    }  # fmt: skip


def draws(data_dir: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Trials and buckets of the first batches of this rank, and random numbers of its dropout and noise."""
    import torch

    from training_step import AUGMENTATION, DROPOUT

    trainer = make_trainer(data_dir, settings)
    backend, batches = trainer.backend, [trainer.train_batches[i] for i in range(12)]
    backend.seed(trainer.config.seed, DROPOUT, 0, 0, backend.rank)
    generator = backend.generator(trainer.config.seed, AUGMENTATION, 0, 0, backend.rank)
    return {
        "trials": [batch["trial_ids"].tolist() for batch in batches],
        "bins": [batch["features"].shape[1] for batch in batches],
        "dropout": torch.rand(3).tolist(),
        "noise": torch.rand(3, generator=generator).tolist(),
    }


def reductions(data_dir: str, settings: dict[str, Any]) -> dict[str, int]:
    """All-reduces of gradients in one optimiser step, and its micro-batches."""
    import torch

    trainer = make_trainer(data_dir, settings)
    n_micro = trainer.config.gradient_accumulation_steps
    counted = []

    def count(_, bucket):
        counted.append(bucket.buffer().numel())
        summed = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return summed.then(lambda future: future.value()[0] / trainer.backend.world_size)

    trainer.training_step.wrapped_model.register_comm_hook(None, count)
    trainer.train_step([trainer.train_batches[i] for i in range(n_micro)])
    return {"numbers": sum(counted), "parameters": sum(p.numel() for p in trainer.training_step.trained_parameters)}


def on_main_fails() -> str:
    from backend import Backend
    from processes import OtherProcessFailed

    processes = Backend("cpu").processes
    assert processes.on_main(lambda: ["ä", processes.rank]) == ["ä", 0]

    def fail():
        raise ValueError("a full disk")

    try:
        processes.on_main(fail)
    except ValueError as error:
        return str(error)
    except OtherProcessFailed:
        return "other"
    return "nothing"


def differing_parameters() -> str:
    import torch

    from backend import Backend

    backend = Backend("cpu")
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(backend.rank)
        model.bias.fill_(1)
    try:
        return backend.check_parameters(model)
    except RuntimeError as error:
        return str(error)


def resume_without_the_file(data_dir: str, settings: dict[str, Any]) -> str:
    import rnn_trainer
    from checkpointing import CheckpointError
    from processes import OtherProcessFailed

    trainer = make_trainer(data_dir, settings | {"num_training_batches": 3})
    trainer.train()
    if not trainer.backend.is_main:

        class Elsewhere(Path):
            """A path on a host that does not have the checkpoints."""

            _flavour = type(Path())._flavour

            def exists(self) -> bool:
                return False

        rnn_trainer.Path = Elsewhere
    try:
        make_trainer(data_dir, settings, "resume")
    except CheckpointError as error:
        return str(error)
    except OtherProcessFailed:
        return "other"
    return "nothing"


def disagree_about_the_best(data_dir: str, settings: dict[str, Any]) -> list[float]:
    """The second process finds other error rates than the first."""
    trainer = make_trainer(data_dir, settings)
    validation = trainer.validation

    def otherwise(**options: Any) -> dict[str, Any]:
        metrics = validation(**options)
        metrics["avg_PER"] = trainer.step / 100 if trainer.backend.rank else 1 - trainer.step / 100
        return metrics

    trainer.validation = otherwise
    return trainer.train()["val_PERs"]


def evaluate(run: str) -> str:
    import evaluate_model

    try:
        evaluate_model.evaluation(run, device="cpu")
    except ValueError as error:
        return str(error)
    return "evaluated"


def peak_of_initialisation() -> dict[str, float]:
    """Bytes by which the process grew while it got a model, and bytes of the model."""
    import resource

    from tiny import tiny_config

    from backend import Backend
    from rnn_model import build_model

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    backend, config = Backend("cpu"), tiny_config(model__n_units=1024, model__noise_units=1024, model__n_layers=6)
    before = peak()
    model = backend.build(lambda: build_model(config))
    return {"growth": peak() - before, "parameters": sum(p.numel() * p.element_size() for p in model.parameters())}


if __name__ == "__main__":
    result = globals()[sys.argv[1]](*json.loads(sys.argv[2]))
    print(json.dumps(result), flush=True)
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
