"""Shared by all tests: the project's root on the path, Accelerate kept off XLA, and a tiny simulated data set."""

import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("USE_TORCH_XLA", "0")  # before anything imports Accelerate
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
    """Makes a trainer on the simulated data: make_trainer(existing="keep", **overrides of tiny.training_config)."""
    from tiny import training_config

    from rnn_trainer import BrainToTextDecoder_Trainer

    def make(existing="keep", **overrides):
        overrides = {"output_dir": tmp_path / "run"} | overrides
        return BrainToTextDecoder_Trainer(training_config(simulated, **overrides), "cpu", existing)

    return make
