"""evaluate_model.py, run on a tiny data set with a model of random parameters."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
import torch
from trained_run import (
    DESCRIPTION,
    IN_ORDER,
    LEXICON,
    SESSIONS,
    TOO_SHORT,
    TRIALS,
    checkpoint_of,
    evaluate,
    lively_model,
    make_config,
    make_run,
    rows_of,
    write_split,
)

import evaluate_model
from backend import Backend
from checkpointing import save_checkpoint
from config import save_config
from ctc import greedy_collapse, output_lengths
from data_augmentations import transform_data
from evaluate_model import compute_logits, list_trials, load_model
from lexicon import load_lexicon
from run_directory import EVALUATION_LOCK
from word_evaluation import greedy_phonemes

ROOT = Path(evaluate_model.__file__).parent
NO_LM = ["--lm", "none", "--lexicon", LEXICON]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data set, and a run with a best_checkpoint."""
    monkeypatch.setenv("B2TXT_CACHE_DIR", str(tmp_path / "cache"))
    make_run(tmp_path)
    return tmp_path


def evaluation(*arguments, **options):
    """Without a language model, unless a test asks for one."""
    return evaluate(*arguments, **{"lm": "none"} | options)


def places_of(rows) -> list[tuple]:
    return [(row["session"], int(row["block"]), int(row["trial"])) for row in rows]


def one_at_a_time(model, trials, config):
    """Logits (P, C) of each trial by the model alone: no batch, no padding, no loader."""
    for trial in trials:
        frames = output_lengths(trial.n_time_steps, config.model.patch_size, config.model.patch_stride)
        if frames == 0:
            yield torch.empty(0, 41)
            continue
        with h5py.File(trial.path) as file:
            features = torch.tensor(file[trial.key]["input_features"][()])[None]
        features = features.to(next(model.parameters()).dtype)
        length = torch.tensor([trial.n_time_steps])
        features, _ = transform_data(features, length, config.dataset.data_transforms, training=False)
        with torch.no_grad():
            yield model(features, torch.tensor([trial.day]))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_batches_give_what_one_trial_at_a_time_gives(root, dtype):
    """Law 2: padding and batch neighbours change no logits and no phoneme."""
    model, config, _ = load_model(root / "run")
    model = model.to(dtype)
    trials, _, _ = list_trials(config, "test")
    expected = list(one_at_a_time(model, trials, config))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for batch_size in (1, 2, 8):
        config.dataset.batch_size = batch_size
        found = dict(compute_logits(model, trials, config, Backend("cpu")))
        assert sorted(found) == list(range(len(trials)))
        for index, logits in enumerate(expected):
            assert found[index].dtype == dtype and found[index].shape == logits.shape
            scale = max(1.0, float(logits.abs().max())) if len(logits) else 1.0
            torch.testing.assert_close(found[index], logits.to(dtype), rtol=tolerance, atol=tolerance * scale)
        phonemes = [greedy_collapse(logits.argmax(-1)) for logits in expected]
        emissions = [found[index].log_softmax(-1).numpy() for index in range(len(trials))]
        assert greedy_phonemes(emissions) == phonemes
        assert sum(map(len, phonemes)) > 20  # else it would show little


def test_val_writes_predictions_and_micro_averaged_error_rates(root):
    results = evaluation(root / "run", csv_path=root / "description.csv")
    rows = rows_of(root / "run" / "predictions_val.csv")
    assert list(rows[0]) == [
        *("id", "session", "block", "trial", "corpus"),
        *("true_phonemes", "predicted_phonemes", "edits", "n_phonemes"),
        *("true_sentence", "predicted_sentence", "word_edits", "n_words"),
    ]
    assert places_of(rows) == IN_ORDER and [row["id"] for row in rows] == list("01234")
    report = json.loads((root / "run" / "evaluation_val.json").read_text())
    assert report == json.loads(json.dumps({key: value for key, value in results.items() if key != "files"}))
    edits, phonemes = (sum(int(row[column]) for row in rows) for column in ("edits", "n_phonemes"))
    assert phonemes == 15 and report["edits"] == edits and report["phonemes"] == phonemes
    assert report["per"] == edits / phonemes and report["n_trials"] == 5
    assert report["step"] == 7 and report["checkpoint"].endswith("best_checkpoint")
    for column, groups in (("session", report["per_by_session"]), ("corpus", report["per_by_corpus"])):
        assert set(groups) == {row[column] for row in rows}
        for name, rate in groups.items():
            of_group = [row for row in rows if row[column] == name]
            assert rate == sum(int(r["edits"]) for r in of_group) / sum(int(r["n_phonemes"]) for r in of_group)
    assert 0 < len(report["confusions"]) <= 10


def test_a_val_trial_too_short_to_decode_counts_as_deletions_and_is_named(root):
    report = evaluation(root / "run")
    row = rows_of(root / "run" / "predictions_val.csv")[TOO_SHORT]
    assert row["predicted_phonemes"] == "" and row["edits"] == row["n_phonemes"] == "3"
    (named,) = report["counted_as_deletions"]
    assert named.startswith("t15.2023.08.13 trial_0002: 3 time bins") and "corpus" not in row
    assert named in evaluate_model.format_results(report)


def test_a_trial_in_bad_trials_dict_is_left_out_of_val_and_kept_in_test(root):
    config = make_config(root)
    config.dataset.bad_trials_dict = {"t15.2023.08.13": {9: [2, 11]}}
    save_config(config, root / "bad.yaml")
    report = evaluation(root / "run", root / "bad.yaml")
    assert report["n_trials"] == 3 and report["counted_as_deletions"] == []
    assert sorted(report["left_out_by_bad_trials_dict"]) == ["t15.2023.08.13 trial_0001", "t15.2023.08.13 trial_0002"]
    assert evaluation(root / "run", root / "bad.yaml", "test")["n_trials"] == 5


def test_the_submission_has_a_text_for_every_test_trial_in_order(root):
    """Field cases 42, 46, 47: a trial too short to decode has its row too."""
    results = evaluation(root / "run", eval_type="test")
    rows = rows_of(root / "run" / "predictions_test.csv")
    assert list(rows[0]) == ["id", "session", "block", "trial", "predicted_phonemes", "predicted_sentence"]
    assert places_of(rows) == IN_ORDER
    submission = rows_of(root / "run" / "submission_test.csv")
    assert list(submission[0]) == ["id", "text"] and [row["id"] for row in submission] == list("01234")
    assert [row["text"] for row in submission] == [row["predicted_sentence"] or "the" for row in rows]
    assert rows[TOO_SHORT]["predicted_phonemes"] == "" and submission[TOO_SHORT]["text"] == "the"
    assert set(submission[0]["text"].split()) <= set(load_lexicon(LEXICON))
    assert results["n_trials"] == 5 and "per" not in results
    assert not (root / "run" / "evaluation_val.json").exists()


def test_blocks_that_the_description_lacks_are_of_an_unknown_corpus(root, caplog):
    (root / "description.csv").write_text(DESCRIPTION.splitlines()[0] + "\n")
    report = evaluation(root / "run", eval_type="val", csv_path=root / "description.csv")
    assert report["per_by_corpus"] == {"unknown": report["per"]}
    assert sum("no row for" in record.getMessage() for record in caplog.records) == 1


def test_all_test_trials_too_short_still_give_a_submission(root, monkeypatch):
    monkeypatch.setitem(TRIALS, "t15.2023.08.13", [(9, 0, 1)])
    monkeypatch.setitem(TRIALS, "t15.2023.08.11", [(2, 0, 3)])
    write_split(root / "data", "test", labelled=False)
    evaluation(root / "run", eval_type="test")
    assert [row["text"] for row in rows_of(root / "run" / "submission_test.csv")] == ["the", "the"]


def test_the_checkpoint_may_be_named_in_three_ways_and_results_go_where_told(root):
    reports = [
        evaluation(path, output_dir=root / "out" / str(i))
        for i, path in enumerate([root / "run", root / "run" / "checkpoint", root / "run/checkpoint/best_checkpoint"])
    ]
    assert reports[0]["per"] == reports[1]["per"] == reports[2]["per"]
    assert (root / "out" / "2" / "evaluation_val.json").exists()
    assert not list((root / "run").glob("*val*"))


def test_the_configuration_gives_the_data_and_the_checkpoint_all_else(root, caplog):
    """Field case 13: other smoothing than in training is said and not followed."""
    own = evaluation(root / "run")
    (root / "data").rename(root / "moved")
    config = make_config(root)
    config.dataset.dataset_dir, config.dataset.batch_size = str(root / "moved"), 5
    config.dataset.data_transforms.smooth_kernel_std = 5.0
    config.dataset.data_transforms.smooth_causal = True
    config.model.n_units = 16
    config.model.rnn_dropout = 0.1  # without effect, so not worth a word
    config.dataset.sessions = [*SESSIONS[::-1], "t15.2023.08.18"]
    save_config(config, root / "other.yaml")
    with caplog.at_level(logging.WARNING, logger="b2txt"):
        other = evaluation(root / "run", root / "other.yaml")
    assert other["per"] == own["per"] and other["edits"] == own["edits"]
    said = [record.getMessage() for record in caplog.records if "the checkpoint's is used" in record.getMessage()]
    assert [line.split()[0].rstrip(":") for line in said] == [
        *("model.n_units", *(f"dataset.data_transforms.smooth_{name}" for name in ("kernel_std", "causal"))),
        "dataset.sessions",
    ]
    assert "is 16 in the configuration and 8 in the checkpoint" in said[0]
    assert "t15.2023.08.18" in said[3]


def test_sessions_in_another_order_are_a_difference(root):
    own, given = make_config(root), make_config(root)
    assert evaluate_model.differences(own, given) == []
    given.dataset.sessions = SESSIONS[::-1]
    (line,) = evaluate_model.differences(own, given)
    assert "the same in another order" in line


def test_data_dir_and_batch_size_come_before_all_configurations(root):
    checkpoint = checkpoint_of(lively_model(make_config(root)), make_config(root))
    config = evaluate_model.evaluation_config(checkpoint, make_config(root), "/elsewhere", 3)
    assert config.dataset.dataset_dir == "/elsewhere" and config.dataset.batch_size == 3
    config = evaluate_model.evaluation_config(checkpoint)
    assert config.dataset.dataset_dir == str(root / "data") and config.dataset.batch_size == 2


def test_parameters_that_do_not_fit_are_refused(root):
    """Field case 12: never a half-loaded model."""
    config = make_config(root)
    state = checkpoint_of(lively_model(config), config)
    del state["model_state_dict"]["clean_speech_model.out.bias"]
    save_checkpoint(state, root / "run" / "checkpoint" / "best_checkpoint")
    with pytest.raises(ValueError, match=r"best_checkpoint: its parameters .*\n.*clean_speech_model\.out\.bias"):
        evaluation(root / "run")


def test_a_feature_subset_is_the_checkpoints(root):
    """Field case 20, in evaluation."""
    config = make_config(root)
    config.dataset.feature_subset = [0, 2, 5]
    save_checkpoint(checkpoint_of(lively_model(config), config), root / "subset" / "checkpoint" / "best_checkpoint")
    save_config(make_config(root), root / "given.yaml")
    assert evaluation(root / "subset", root / "given.yaml")["n_trials"] == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model_path", "{root}/none"], "none: no checkpoint there"),
        (["--model_path", "{root}/run", "--data_dir", "{root}/none"], "download_data.py"),
        (["--model_path", "{root}/run", "--output_dir", "{root}/description.csv/x"], "--output_dir"),
        (["--model_path", "{root}/run", "--csv_path", "{root}/none.csv"], "none.csv: no such file"),
        (["--model_path", "{root}/run", "--config_path", "{root}/none.yaml"], "none.yaml"),
        (["--model_path", "{root}/run", "--batch_size", "0"], "batch_size"),
        (["--config_path", "{root}/nothing.yaml"], "download_data.py"),
    ],
    ids=["model", "data", "output", "description", "configuration", "batch size", "model and data"],
)
def test_what_the_user_can_put_right_is_said_in_words(root, capsys, arguments, said):
    config = make_config(root)
    config.output_dir, config.dataset.dataset_dir = str(root / "no_run"), str(root / "no_data")
    save_config(config, root / "nothing.yaml")
    status = evaluate_model.main([*NO_LM, *(argument.format(root=root) for argument in arguments)])
    message = capsys.readouterr().err
    assert status == 2 and said in message and "Traceback" not in message
    if arguments[-1] == "{root}/nothing.yaml":
        assert "no_run: no checkpoint there" in message


def test_a_directory_that_is_not_writable_stops_it_before_any_computing(root, monkeypatch):
    def read_only(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("evaluate_model_helpers.tempfile.TemporaryFile", read_only)
    monkeypatch.setattr(evaluate_model, "load_checkpoint", lambda _: pytest.fail("went on to the model"))
    with pytest.raises(ValueError, match=r"run: results cannot be written there \(Read-only.*--output_dir"):
        evaluation(root / "run")


def test_without_options_the_configuration_beside_the_script_is_meant(root, monkeypatch, capsys):
    save_config(make_config(root), root / "rnn_args.yaml")
    monkeypatch.setattr(evaluate_model, "DEFAULT_CONFIG", root / "rnn_args.yaml")
    assert evaluate_model.main(NO_LM) == 0
    printed = capsys.readouterr().out
    report = json.loads((root / "run" / "evaluation_val.json").read_text())
    assert f"{100 * report['per']:5.1f}%" in printed and f"{report['edits']} edits / 15 phonemes" in printed
    for name in (*SESSIONS, "decoded as", "predictions_val.csv", "evaluation_val.json"):
        assert name in printed


def test_a_full_disk_is_said_without_a_traceback(root, monkeypatch, capsys):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("evaluate_model_helpers.os.fsync", full)
    assert evaluate_model.main([*NO_LM, "--model_path", str(root / "run")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert {path.name for path in (root / "run").iterdir()} == {"checkpoint", EVALUATION_LOCK}


def test_mixed_precision_is_asked_for_by_the_configuration_and_can_be_disabled(root, monkeypatch):
    config = make_config(root)
    config.use_amp = True
    save_config(config, root / "amp.yaml")
    asked = []

    class Recorded(Backend):
        def __init__(self, *arguments, use_amp, **options):
            asked.append(use_amp)
            super().__init__(*arguments, use_amp=use_amp, **options)

    monkeypatch.setattr(evaluate_model, "Backend", Recorded)
    for options in ([], ["--disable_mixed_precision"]):
        arguments = ["--model_path", str(root / "run"), "--config_path", str(root / "amp.yaml"), "--device", "cpu"]
        assert evaluate_model.main([*NO_LM, *arguments, *options]) == 0
    assert asked == [True, False]


def test_the_command_runs_from_any_directory(root, tmp_path):
    command = [sys.executable, str(ROOT / "evaluate_model.py"), "--model_path", "run", "--eval_type", "test"]
    done = subprocess.run(
        [*command, *NO_LM, "--device", "cpu"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "5 trials decoded" in done.stdout and str(tmp_path / "run" / "submission_test.csv") in done.stdout
