"""The check before a TPU is there, with the real TPU compiler: a small step is compiled for a v5e in every test run.

The compiler is installed by `./setup_env.sh --tpu_compiler`, as ./run_tests.sh does.
"""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_config

import tpu_compile_check
import tpu_compiler
from config import save_config
from tpu_compile_check import PARTS, TPUCompileError, check

ROOT = Path(__file__).resolve().parent.parent
on_linux = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="the TPU's compiler is for Linux on x86-64"
)
KEYS = {
    *("parameters", "fits", "peak_gib", "argument_gib", "temp_gib", "modelled_ms", "modelled_ms_by_part"),
    *("floor_ms_arithmetic", "floor_ms_memory", "all_reduces", "all_reduce_bytes", "unestimated"),
    *("hours_one_chip", "hours_eight_chips"),
}


def small_config(**overrides):
    """Two layers of 128 units for each part, wide enough that a TPU's layouts are those of a real model."""
    return tiny_config(
        **{
            "model__n_units": 128, "model__noise_units": 128, "model__n_layers": 2, "dataset__batch_size": 8,
            "dataset__neural_dim": 128, "model__n_input_features": 128, "model__patch_size": 6,
            "model__input_network__input_layer_sizes": "[128]", "model__rnn_dropout": 0.1, "use_amp": True,
        }
        | overrides
    )  # fmt: skip


@on_linux
def test_a_small_step_is_compiled_for_eight_chips_and_counted():
    config = small_config(num_training_batches=1000)
    result = check(config, time_bins=60, replicas=8)
    assert set(result) >= KEYS
    gib = 2**30
    n = result["parameters"]
    assert result["fits"] and 12 * n / gib < result["argument_gib"] < 12 * n / gib * 1.3 + 0.001  # weights and moments
    assert result["aliased_gib"] > 12 * n / gib * 0.99  # all of them updated in place
    assert result["argument_gib"] <= result["peak_gib"] <= result["argument_gib"] + result["temp_gib"] + 0.13
    parts = result["modelled_ms_by_part"]
    assert set(parts) == {*PARTS, "rest"}
    assert sum(parts.values()) == pytest.approx(result["modelled_ms"], rel=1e-6)
    assert all(parts[part] > 0 for part in PARTS)
    assert 0 < result["floor_ms_arithmetic"] < result["modelled_ms"]
    assert result["all_reduce_bytes"] == pytest.approx(4 * n, rel=0.01)
    assert len(result["loops"]) == 2 * (2 + 2 + 2) + 1  # forward and backward of six GRU layers, and CTC
    assert result["hours_eight_chips"] == pytest.approx(1000 * result["modelled_ms"] / 3.6e6)
    without = result["modelled_ms"] - parts["all_reduce"]
    assert result["hours_one_chip"] == pytest.approx(1000 * (8 * without - 7 * parts["optimiser"]) / 3.6e6)


@on_linux
def test_gradients_are_exchanged_once_a_step_when_they_are_accumulated():
    alone = check(small_config(gradient_accumulation_steps=1), time_bins=60)
    assert alone["trained_parameters"] == alone["parameters"]
    exchange_ms = 1e3 * 2 * 7 / 8 * 4 * alone["parameters"] / 90e9  # of eight chips, though one was compiled for
    expected = alone["modelled_ms"] + exchange_ms
    assert alone["hours_eight_chips"] == pytest.approx(120_000 * expected / 3.6e6)
    result = check(small_config(gradient_accumulation_steps=4), time_bins=60, replicas=2)
    assert alone["all_reduces"] == alone["all_reduce_bytes"] == 0
    assert result["all_reduces_before_the_last_micro_batch"] == 0
    assert result["all_reduce_bytes"] == pytest.approx(4 * result["parameters"], rel=0.01)
    added = result["argument_gib"] - alone["argument_gib"]  # the gradients that stay
    assert added == pytest.approx(4 * result["parameters"] / 2**30, rel=0.05)


@on_linux
def test_a_network_that_is_not_trained_costs_no_exchange():
    result = check(small_config(adversarial__enabled=False), time_bins=60)
    assert (
        0.5 < result["trained_parameters"] / result["parameters"] < 0.9
        and result["modelled_ms_by_part"]["noisy_gru"] == 0
    )
    exchange_ms = 1e3 * 2 * 7 / 8 * 4 * result["trained_parameters"] / 90e9
    assert result["hours_eight_chips"] == pytest.approx(120_000 * (result["modelled_ms"] + exchange_ms) / 3.6e6)


@on_linux
def test_the_command_prints_a_table_and_writes_the_numbers(tmp_path):
    save_config(small_config(), tmp_path / "c.yaml")
    command = [sys.executable, ROOT / "tpu_compile_check.py", "--config_path", tmp_path / "c.yaml", "--inference"]
    done = subprocess.run(
        [*command, "--time_bins", "60", "--batch_size", "16", "--json", tmp_path / "out.json"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in ("forward pass", "16 trials a chip of 60 bins", "peak", "fits", "modelled time", "not a run on a TPU"):
        assert words in done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["fits"] and "hours_one_chip" not in result


@on_linux
def test_what_does_not_fit_is_an_answer_with_what_to_change(tmp_path):
    config = small_config(dataset__batch_size=4096)
    result = check(config, time_bins=3000)
    assert not result["fits"] and result["peak_gib"] > 15.75
    arguments = type("Arguments", (), {"inference": False, "config_path": "c", "time_bins": 3000, "replicas": 1})()
    arguments.topology = "v5e:2x4"
    text = tpu_compile_check.table(result, config, arguments)
    assert "does not fit" in text and "--batch_size 2048" in text


def test_a_batch_larger_than_the_memory_is_answered_at_once():
    config = small_config(dataset__batch_size=10**9)
    result = check(config, time_bins=3000)
    assert not result["fits"] and "features of a batch alone" in result["out_of_memory"]
    assert "--batch_size 7629 " in tpu_compile_check._what_to_change(config, result["peak_gib"])[2]


def test_a_lock_file_that_cannot_be_opened_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tpu_compile_check, "LOCK_FILE", tmp_path / "lock")
    assert tpu_compile_check._locked_by_another() == []
    (tmp_path / "lock").write_text("")
    assert tpu_compile_check._locked_by_another() == []
    monkeypatch.setattr(tpu_compile_check.os, "access", lambda path, mode: False)
    assert "belongs to" in tpu_compile_check._locked_by_another()[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--topology", "v6e:2x4"], "only slices of v5e"),
        (["--replicas", "16"], "v5e:2x4 has 8 chips"),
        (["--json", "/nowhere/x.json"], "'/nowhere/x.json' cannot be written: No such file"),
        (["--json", ""], "'' cannot be written"),
        (["--save_program", "/tmp"], "'/tmp' cannot be written: Is a directory"),
        (["--batch_size", "x"], "expected a whole number from 1, found 'x'"),
        (["--time_bins", "13"], "less than a patch of 14"),
    ],
)
def test_what_cannot_work_is_said_before_any_work(options, words, tmp_path):
    command = [sys.executable, ROOT / "tpu_compile_check.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_a_missing_compiler_is_said_with_the_command_that_installs_it(tmp_path):
    code = (
        "import sys, tpu_compile_check as c; c.COMPILER = c.Path('/nowhere/python'); "
        f"sys.argv = ['x', '--config_path', {str(ROOT / 'rnn_args_compact.yaml')!r}]; sys.exit(c.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "/nowhere/python" in done.stderr and "./setup_env.sh --tpu_compiler" in done.stderr


def test_a_busy_compiler_is_waited_for_and_said(monkeypatch, tmp_path, capsys):
    answers = [{"error": "ABORTED: libtpu multi-process lockfile"}] * 2 + [{"cycles": 1}]
    monkeypatch.setattr(tpu_compile_check, "_compile", lambda program: answers.pop(0))
    monkeypatch.setattr(tpu_compile_check.time, "sleep", lambda seconds: None)
    assert tpu_compile_check.compile_program(tmp_path, {}, "v5e:2x4", 1, []) == {"cycles": 1}
    assert capsys.readouterr().err.count("waiting") == 1
    monkeypatch.setattr(tpu_compile_check, "_compile", lambda program: {"error": "lockfile"})
    with pytest.raises(TPUCompileError, match="remove /tmp/libtpu_lockfile"):
        tpu_compile_check.compile_program(tmp_path, {}, "v5e:2x4", 1, [])


PROGRAM = """HloModule step
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]) parameter(0)
  %a = f32[512,32]{1,0} fusion(%p), kind=kLoop, metadata={op_name="ctc.3/x"}, backend_config={"estimated_cycles":"10"}
  ROOT %t = (s32[], f32[4]) tuple(%p)
}

%condition (q: (s32[], f32[4])) -> pred[] {
  %n = s32[] constant(7)
  ROOT %c = pred[] compare(%n, %n), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %w = (s32[], f32[4]) while(%x), condition=%condition, body=%body
  %r = f32[100,100]{1,0} reverse(%x), dimensions={0}, metadata={op_name="noise_gru.1/y"}
  %g = (f32[10,10]{1,0}, f32[5]{0}) all-reduce(%x), replica_groups={{0,1}}
  ROOT %y = f32[4] fusion(%x), kind=kLoop, backend_config={"estimated_cycles":"5"}
}
"""


def test_cycles_are_summed_over_trips_and_by_part():
    counted = tpu_compiler.count_cycles(PROGRAM, ["ctc", "noise_gru"])
    assert counted["cycles"] == 7 * 10 + 5
    assert counted["by_part"] == {"ctc": 70, "noise_gru": 0, "rest": 5}
    assert counted["loops"] == [{"part": "ctc", "trips": 7, "cycles_a_trip": 10}]
    assert counted["unestimated"] == {"reverse": 1}
    assert (counted["all_reduces"], counted["all_reduce_bytes"]) == (1, 420)


def test_the_bytes_of_shapes():
    assert tpu_compiler.shape_bytes("(bf16[3,4]{1,0:T(8,128)(2,1)}, f32[], pred[5])") == 24 + 4 + 5
