"""Shared by all tests: the project's root on the path, and a tiny simulated data set.

The tests in tests/xla need a process of their own, since torch_xla changes torch for all of it:
    PJRT_DEVICE=CPU python -m pytest tests/xla
All others run without torch_xla: where PJRT_DEVICE is not set, Accelerate is kept off XLA, and tests/xla is left out.
"""

import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path

if "PJRT_DEVICE" in os.environ and find_spec("torch_xla") is not None:
    import accelerate  # noqa: F401  with XLA
    import torch_xla

    torch_xla.device()  # before any backward pass, which would break every later one on XLA
else:
    os.environ.setdefault("USE_TORCH_XLA", "0")  # before anything imports Accelerate
    collect_ignore = ["xla"]
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """The index cache of the tests is theirs, and empty at first."""
    os.environ["B2TXT_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _visible_log():
    """Undo what `log_to_terminal` and `log_to_file` did in a test, so that caplog sees the log in the next."""
    logger = logging.getLogger("b2txt")
    yield
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True


@pytest.fixture(scope="session")
def simulated(tmp_path_factory) -> Path:
    """Directory of a simulated data set: 3 sessions (the first with train only), 8 features, short sentences."""
    from synthetic_data import simulate

    directory = tmp_path_factory.mktemp("data") / "simulated"
    simulate(
        directory,
        sessions=3,
        trials=(12, 5, 4),
        electrodes=4,
        seed=3,
        speaking_rate=8.0,
        speech_variance=0.3,
        words_per_sentence=(1, 2),
        progress=False,
    )
    return directory


@pytest.fixture
def make_trainer(simulated, tmp_path):
    """make_trainer(existing="keep", device="cpu", **overrides of tiny.training_config): one on the simulated data."""
    from tiny import training_config

    from rnn_trainer import BrainToTextDecoder_Trainer

    def make(existing="keep", device="cpu", **overrides):
        overrides = {"output_dir": tmp_path / "run"} | overrides
        return BrainToTextDecoder_Trainer(training_config(simulated, **overrides), device, existing)

    make.data = simulated
    return make
