"""experiments/: what the study of the NoiseModel measures, plans and repeats, and the comparison on any data."""

import json
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import training_config

from config import ConfigError, save_config
from dataset_index import index_splits
from rnn_model import build_model
from synthetic_data import simulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))
import compared_decoders as compared
import denoising_measures as measures
import denoising_report as report
import denoising_study as study
from compared_decoders import ADVERSARIAL, CLEAN, DECODERS, SINGLE, TRIPLE, Results, Run

SMALL = {"electrodes": 4, "speaking_rate": 6.0, "words_per_sentence": (2, 3), "progress": False}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folder of the study's data sets, of two sessions and 8 features."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "data").mkdir()
    for noise in study.NOISES:
        for new in (False, True):
            simulate(
                study.data_set(folder, noise, new), sessions=2, trials=(12, 6, 0), structured_noise=noise,
                new_noise=0.3 * new, write_parts=not new, **SMALL,
            )  # fmt: skip
    return folder


@pytest.fixture
def config_path(data, tmp_path, monkeypatch):
    """A configuration file that trains for seconds."""
    monkeypatch.setenv("B2TXT_CACHE_DIR", str(tmp_path / "cache"))
    config = training_config(study.data_set(data, 1.0), tmp_path / "run")
    save_config(config, tmp_path / "tiny.yaml")
    return tmp_path / "tiny.yaml"


# ---- measures


@given(st.integers(2, 20), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_agreement_is_pearsons_correlation_within_sessions(n_frames, n_features, seed):
    rng = np.random.default_rng(seed)
    agreement, centred = measures.Agreement(), []
    for day in (0, 1):
        x, y = rng.normal(loc=5 * day, size=(2, n_frames, n_features))  # means of a session count for nothing
        for part in np.array_split(np.arange(n_frames), 2):
            agreement.add(day, torch.from_numpy(x[part]), torch.from_numpy(y[part]))
        centred.append((x - x.mean(0), y - y.mean(0)))
    x, y = (np.concatenate([each[side] for each in centred]).ravel() for side in (0, 1))
    assert agreement.correlation == pytest.approx((x @ y) / np.sqrt((x @ x) * (y @ y)), abs=1e-9)
    assert agreement.slope == pytest.approx((x @ y) / (y @ y), abs=1e-9)


def test_an_estimate_that_does_not_vary_agrees_with_nothing():
    agreement = measures.Agreement()
    agreement.add(0, torch.ones(5, 2), torch.randn(5, 2))
    assert agreement.correlation == 0 == agreement.slope


def test_a_probe_reads_what_is_there_and_nothing_else():
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(1, 5, (3000,), generator=generator)
    informative = torch.nn.functional.one_hot(classes, 10) + 0.3 * torch.randn(3000, 10, generator=generator)
    empty = torch.randn(3000, 10, generator=generator)
    reads = [measures.probe_accuracy(x[:2000], classes[:2000], x[2000:], classes[2000:]) for x in (informative, empty)]
    assert reads[0] > 0.9 and reads[1] < 0.35


def test_the_parts_of_a_trial_are_what_they_change_in_the_day_transformed_space(data, config_path):
    config = compared.load_config(config_path, ["dataset.data_transforms.smooth_data=false"])
    model, trials = build_model(config), index_splits(config, ("val",))["val"]
    torch.nn.init.normal_(model.day_layers.weights)
    for seen, trial in zip(measures.denoised_trials(model, trials, config), trials, strict=True):
        with h5py.File(trial.path) as file:
            group = {name: file[trial.key][name][:] for name in ("input_features", "noise", "speech", "frame_classes")}
        weights = model.day_layers.weights[trial.day].detach().numpy()

        def transformed(x, weights=weights):
            return x @ weights / (1 + np.abs(x @ weights))

        start = 3 * config.model.patch_stride
        window = slice(start, start + config.model.patch_size)
        whole = transformed(group["input_features"])[window]
        for name, part in seen.parts.items():
            known = {"private": group["input_features"] - group["speech"] - group["noise"]} | group
            without = transformed(group["input_features"] - known[name])[window]
            assert np.allclose(part[3].numpy(), (whole - without).ravel(), atol=1e-5)
        assert np.allclose(seen.signal[3].numpy(), whole.ravel(), atol=1e-5)
        assert seen.classes[3] == group["frame_classes"][start + config.model.patch_size // 2]
        assert len(seen.classes) == len(seen.signal) == len(seen.noise)


@pytest.mark.parametrize("taken", ["noise", "speech", "signal"])
def test_measures_tell_noise_from_speech(data, config_path, monkeypatch, taken):
    """Of an estimate that is the true noise, the true speech, or all of the signal."""
    config = compared.load_config(config_path)
    model, splits = build_model(config), index_splits(config, ("train", "val"))
    look = measures.denoised_trials

    def with_estimate(*arguments):
        for seen in look(*arguments):
            yield seen._replace(noise=seen.signal if taken == "signal" else seen.parts[taken])

    monkeypatch.setattr(measures, "denoised_trials", with_estimate)
    found = measures.noise_measures(model, splits["train"], splits["val"], config)
    if taken == "signal":
        assert found["noise_share"] == 1 and found["probe_denoised"] == pytest.approx(found["probe_silence"], abs=0.02)
        assert found["probe_noise"] == found["probe_signal"]
    else:
        other = {"noise": "speech", "speech": "noise"}[taken]
        assert found[f"{taken}_correlation"] == pytest.approx(1) and found[f"{taken}_subtracted"] == pytest.approx(1)
        assert abs(found[f"{other}_correlation"]) < 0.2 and found["noise_share"] < 0.6
    assert 0.1 < found["linear_correlation"] < 1


def test_without_an_estimate_only_the_signal_is_probed(data, config_path):
    config = compared.run_config(Run(SINGLE, 0.01, 1), config_path, study.data_set(data, 1.0), data / "none")
    splits = index_splits(config, ("train", "val"))
    found = measures.noise_measures(build_model(config), splits["train"], splits["val"], config)
    assert found.keys() == {"linear_correlation", "probe_signal", "probe_silence"}


# ---- decoders


def test_the_single_gru_has_the_parameters_that_the_triple_decoder_decodes_with():
    root = study.CONFIG.parent
    for name in ("rnn_args_quickstart.yaml", "rnn_args_compact.yaml", "rnn_args.yaml"):
        configs = [compared.run_config(Run(decoder, 0.02, 1), root / name, root, root / "x") for decoder in DECODERS]
        counts = [compared.n_decoding_parameters(config) for config in configs]
        assert counts[2] == counts[3] and 0.99 < counts[0] / counts[2] <= 1 and counts[1] < 0.7 * counts[2]
        assert [config.model.architecture for config in configs] == ["gru", "gru", "triple_gru", "triple_gru"]
        assert [config.model.n_layers for config in configs] == [5, 3, 3, 3]
        assert configs[1].model.n_units == configs[3].model.n_units
        assert [config.adversarial.enabled for config in configs] == [False, False, False, True]


def test_a_run_changes_what_it_says(data, config_path, tmp_path):
    run = Run(TRIPLE, 0.03, 7, 2.0, ("adversarial.noise_l2_weight=5",), 40)
    config = compared.run_config(run, config_path, data, tmp_path / "there", ["seed=3", "lr_min=0"])
    assert (config.lr_max, config.seed, config.lr_min, config.adversarial.noise_l2_weight) == (0.03, 7, 0, 5)
    assert config.num_training_batches == config.lr_decay_steps == config.lr_decay_steps_day == 40
    assert config.output_dir == str(tmp_path / "there") and config.dataset.dataset_dir == str(data)
    names = {Run(**{**run.__dict__, **other}).name for other in ({}, {"seed": 8}, {"noise": 0.0}, {"settings": ()})}
    assert len(names) == 4 and all("/" not in name for name in names)


# ---- results and plan


def test_results_survive_a_kill_in_the_midst_of_a_line(tmp_path):
    path, runs = tmp_path / "results.jsonl", [Run(SINGLE, 0.01, 1), Run(TRIPLE, 0.02, 2, None, ("a=1", "b=2"))]
    results = Results(path)
    for number, run in enumerate(runs):
        results.add(run, {"per": number})
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[0][:40])
    again = Results(path)
    assert again.done == results.done == {runs[0]: {"per": 0}, runs[1]: {"per": 1}}
    assert path.read_text() == whole


@pytest.mark.parametrize("line", ["nothing", "[]", '{"run": {"decoder": "x"}, "results": {}}', '{"run": 3}'])
def test_a_line_that_is_no_result_is_named(tmp_path, line):
    path = tmp_path / "results.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"results\.jsonl, line 1: is no result of a training"):
        Results(path)


def walk(per) -> list[Run]:
    """The trainings in the order in which they are done, where each gives the PER that per(run) says."""
    done = {}
    while True:
        missing, n_done, total = study.plan(done)
        assert n_done == len(done) and total >= n_done + len(missing)
        if not missing:
            assert total == len(done)
            return list(done)
        done[missing[0]] = {"per": per(missing[0])}


def test_every_decoder_has_every_condition_with_its_best_rate():
    best = {SINGLE: 0.01, CLEAN: 0.04, TRIPLE: 0.02, ADVERSARIAL: 0.08}
    runs = walk(lambda run: abs(np.log(run.learning_rate / best[run.decoder])))
    results = [run for run in runs if run.seed in study.SEEDS]
    assert len(set(runs)) == len(runs) and {(r.decoder, r.learning_rate) for r in results} == set(best.items())
    for decoder in DECODERS:
        plain = {(r.noise, r.batches, r.seed) for r in results if r.decoder == decoder and not r.settings}
        expected = {(noise, study.BATCHES, seed) for noise in study.NOISES for seed in study.SEEDS}
        assert plain == expected | {(1.0, study.MORE_BATCHES, seed) for seed in study.FEWER_SEEDS}
        changed = [r.settings for r in results if r.decoder == decoder and r.settings]
        assert sorted(changed) == sorted(len(study.FEWER_SEEDS) * list(study.CHANGES[decoder]))
    # A best rate at the end of the range is looked beyond, on either side.
    rates = {decoder: sorted({r.learning_rate for r in runs if r.decoder == decoder}) for decoder in DECODERS}
    assert rates[SINGLE][0] == 0.005 and rates[TRIPLE] == [0.01, 0.02, 0.04] and rates[ADVERSARIAL][-1] == 0.16


def test_a_rate_at_which_training_diverges_is_the_worst():
    done = {
        Run(TRIPLE, rate, seed, batches=study.BATCHES): {"diverged": "so"} for rate in (0.01, 0.04) for seed in (1, 2)
    }
    done |= {Run(TRIPLE, 0.02, seed, batches=study.BATCHES): {"per": 0.9} for seed in (1, 2)}
    assert study.tuned_rate(TRIPLE, done) == (0.02, [])
    assert f"| {TRIPLE} |  | 90.0 ± 0.0 |  |" in report.rate_table(done)


def test_the_search_for_a_rate_ends_where_every_training_diverges():
    done = {}
    while missing := study.tuned_rate(TRIPLE, done)[1]:
        assert len(done) < 12
        done |= {run: {"diverged": "so"} for run in missing}
    assert study.tuned_rate(TRIPLE, done)[0] == 0.02


# ---- the study


class InThisProcess:
    """In place of ProcessPoolExecutor."""

    def __init__(self, *arguments):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def one_of_each(data, config_path, monkeypatch, tmp_path):
    """A study of one short training a decoder, on the data sets made here."""
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "data").symlink_to(data / "data")
    noises = (0.0, 1.0, 1.0, 2.0)
    runs = [Run(decoder, 0.02, 10, noise, (), 6) for decoder, noise in zip(DECODERS, noises, strict=True)]
    runs.append(Run(TRIPLE, 0.02, study.TUNING_SEEDS[0], 1.0, (), 6))
    monkeypatch.setattr(study, "CONFIG", config_path)
    monkeypatch.setattr(study, "plan", lambda done: ([run for run in runs if run not in done], len(done), len(runs)))
    monkeypatch.setattr(study, "ProcessPoolExecutor", InThisProcess)
    return folder, runs


@pytest.fixture
def recorded(monkeypatch):
    """What a study trains with, and on what it measures."""
    seen = {"configs": [], "per_on": [], "fitted": [], "measured": []}
    train, per_on, noise_measures = study.train, study.per_on, study.noise_measures

    def see_measures(model, fitted, measured, config):
        seen["fitted"].append({trial.path for trial in fitted})
        seen["measured"].append({trial.path for trial in measured})
        return noise_measures(model, fitted, measured, config)

    monkeypatch.setattr(study, "train", lambda config, *rest: seen["configs"].append(config) or train(config, *rest))
    monkeypatch.setattr(study, "per_on", lambda trainer, data: seen["per_on"].append(data) or per_on(trainer, data))
    monkeypatch.setattr(study, "noise_measures", see_measures)
    return seen


def check_fairness(recorded, folder, runs):
    """Decoders are trained on the same batches, each on its noise, and measured on what none has seen."""
    noises = [run.noise for run in runs]
    assert [config.dataset.dataset_dir for config in recorded["configs"]] == [
        str(study.data_set(folder, noise)) for noise in noises
    ]
    for config in recorded["configs"]:  # what decides the batches and their augmentation
        config.dataset.dataset_dir = "the same"
        assert config.dataset == recorded["configs"][0].dataset
    seeds = [(config.seed, config.gradient_accumulation_steps) for config in recorded["configs"]]
    assert len(set(seeds[:4])) == 1 and seeds[4] != seeds[0]
    assert recorded["per_on"] == [study.data_set(folder, noise, new=True) for noise in noises[:4]]
    for fitted, measured in zip(recorded["fitted"], recorded["measured"], strict=True):
        assert {Path(path).name for path in fitted} == {"data_train.hdf5"}
        assert {Path(path).name for path in measured} == {"data_val.hdf5"}


def test_a_study_measures_every_training_and_goes_on_where_it_was(one_of_each, recorded, monkeypatch, capsys):
    folder, runs = one_of_each
    assert study.main(["--output_dir", str(folder), "--processes", "2"]) == 0
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    found = {Run.from_dict(line["run"]): line["results"] for line in lines}
    assert found.keys() == set(runs) and list((folder / "runs").iterdir()) == []
    for run in runs[:4]:
        results = found[run]
        assert results["per"] == results["edits"] / results["phonemes"] and results["per_new_noise"] > 0
        assert ("noise_correlation" in results) == (run.decoder in (TRIPLE, ADVERSARIAL)) == ("noise_share" in results)
        assert results["wer"] >= 0 and results["seconds"] > 0
    assert found[runs[4]].keys() == {"per", "seconds"}  # of a tuning seed nothing else is asked
    check_fairness(recorded, folder, runs)

    monkeypatch.setattr(study, "simulated_run", lambda run, folder: pytest.fail(f"{run} was done already"))
    assert study.main(["--output_dir", str(folder)]) == 0
    capsys.readouterr()
    assert report.main(["--results", str(folder / "results.jsonl"), "--pictures", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "| absent, 6 batches | default, 6 batches | doubled, 6 batches |" in printed
    assert f"| PER | {ADVERSARIAL} |  |  | {100 * found[runs[3]]['per']:.1f} |" in printed
    assert all((folder / f"denoising_{name}.png").stat().st_size > 10_000 for name in ("errors", "estimate"))


def test_a_training_that_diverges_is_a_result_and_in_no_mean(one_of_each, monkeypatch):
    folder, _ = one_of_each
    monkeypatch.setattr(study, "train", lambda config, device: (None, "diverged at batch 3"))
    monkeypatch.setattr(study.shutil, "rmtree", lambda directory: None)
    done = study.study(folder, 1).done
    assert all(results["diverged"] == "diverged at batch 3" and "per" not in results for results in done.values())
    assert "| 1, 1 diverged |" in report.main_table(done)
    assert "nan" not in report.difference_table(done) + report.change_table(done) + report.estimate_table(done)


def test_of_a_training_that_goes_on_the_time_is_not_known(one_of_each):
    folder, runs = one_of_each
    (folder / "runs" / runs[-1].name).mkdir(parents=True)
    assert study.simulated_run(runs[-1], folder)["seconds"] is None
    assert study.simulated_run(runs[-1], folder)["seconds"] > 0


def test_a_killed_training_is_told_in_words(one_of_each, monkeypatch, capsys):
    folder, _ = one_of_each

    def killed(run, folder):
        raise BrokenProcessPool("A process was terminated abruptly")

    monkeypatch.setattr(study, "simulated_run", killed)
    assert study.main(["--output_dir", str(folder)]) == 2
    assert "a training was killed" in capsys.readouterr().err


def test_differences_are_between_trainings_of_one_seed_on_one_noise():
    def errors(per):
        return {"per": per, "wer": per, "per_new_noise": per}

    pers = {(TRIPLE, 1.0): (0.10, 0.20, 0.30), (ADVERSARIAL, 1.0): (0.11, 0.22, 0.33), (ADVERSARIAL, 0.0): (0.9,) * 3}
    done = {
        Run(decoder, 0.02, seed, noise, (), 6): errors(per)
        for (decoder, noise), of_seeds in pers.items()
        for seed, per in zip(study.SEEDS, of_seeds, strict=True)
    }
    done[Run(TRIPLE, 0.02, 13, 1.0, (), 6)] = {"diverged": "so"}
    done[Run(ADVERSARIAL, 0.02, 13, 1.0, (), 6)] = errors(0.5)
    assert f"| PER | {ADVERSARIAL} − {TRIPLE} |  | +2.0 ± 1.0 |" in report.difference_table(done).splitlines()
    changed = [(10, 0.09), (12, 0.30)]
    done |= {Run(TRIPLE, 0.02, seed, 1.0, ("model.noise_units=3",), 6): errors(per) for seed, per in changed}
    line = f"| {TRIPLE}: units 3 | −0.5 ± 0.7 | −0.5 ± 0.7 | −0.5 ± 0.7 | 2 |"
    assert line in report.change_table(done).splitlines()


def test_data_sets_of_the_study_differ_in_noise_alone(data):
    def read(name, noise, new=False):
        with h5py.File(study.data_set(data, noise, new) / "t15.2030.01.09" / "data_val.hdf5") as file:
            sentences = [group.attrs["sentence_label"] for group in file.values()]
            return sentences, np.concatenate([group[name][:] for group in file.values()])

    sets = [read("input_features", noise, new) for noise in study.NOISES for new in (False, True)]
    assert len({tuple(sentences) for sentences, _ in sets}) == 1
    assert all(np.abs(sets[0][1] - features).mean() > 0.1 for _, features in sets[1:])
    speech = [read("speech", noise)[1] for noise in study.NOISES]
    assert all(np.corrcoef(speech[0].ravel(), other.ravel())[0, 1] > 0.98 for other in speech[1:])
    assert [part.var(0).mean() for part in speech] == pytest.approx([speech[0].var(0).mean()] * 3, rel=0.1)
    amounts = [read("noise", noise)[1].var(0).mean() for noise in study.NOISES]
    assert amounts[0] == 0 and amounts[2] / amounts[1] == pytest.approx(2, rel=0.1)


# ---- the comparison on given data


def ablate(config_path, folder, *options):
    return study.main(["--ablate", str(config_path), "--output_dir", str(folder), "--device", "cpu", *options])


def test_the_comparison_runs_on_any_data_in_one_command(data, config_path, tmp_path, capsys, monkeypatch):
    options = ["--seeds", "4", "--rates", "0.01", "0.02", "--set", "log_with=none"]
    assert ablate(config_path, tmp_path / "out", *options) == 0
    table = capsys.readouterr().out
    assert all(table.count(f"| {decoder} | 0.0{rate} | ") == 1 for decoder in DECODERS for rate in (1, 2))
    results = Results(tmp_path / "out" / "results.jsonl").done
    assert len(results) == 8 and {run.seed for run in results} == {4}
    for run, found in results.items():
        evaluated = json.loads((tmp_path / "out" / "runs" / run.name / "evaluation_val.json").read_text())
        assert (found["per"], found["wer"]) == (evaluated["per"], evaluated["wer"])

    calls = []
    given_run = study.given_run
    monkeypatch.setattr(study, "given_run", lambda run, *rest: calls.append(run) or given_run(run, *rest))
    assert ablate(config_path, tmp_path / "out", *options) == 0 and not calls
    assert capsys.readouterr().out.endswith(table[table.index("\n| decoder") :])
    # Another configuration's trainings are others.
    monkeypatch.setattr(study, "given_run", lambda run, *rest: calls.append(run) or {"per": 0.1, "wer": 0.1})
    assert ablate(config_path, tmp_path / "out", "--seeds", "4", "--num_batches", "3", "--set", "lr_min=0") == 0
    assert len(calls) == 4 and len(Results(tmp_path / "out" / "results.jsonl").done) == 12


def test_an_interrupted_comparison_goes_on_with_the_training_it_was_in(config_path, tmp_path, monkeypatch, capsys):
    trained = []
    make = compared.BrainToTextDecoder_Trainer

    class Interrupted(make):
        def train_step(self, batches):
            trained.append(self.step)
            if len(trained) == 5:
                raise KeyboardInterrupt
            return super().train_step(batches)

    monkeypatch.setattr(compared, "BrainToTextDecoder_Trainer", Interrupted)
    assert ablate(config_path, tmp_path / "out", "--seeds", "4") == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert ablate(config_path, tmp_path / "out", "--seeds", "4") == 0
    assert trained == [0, 1, 2, 3, 4, 3, 4, 5, *range(6), *range(6), *range(6)]  # a checkpoint was written after step 3


def test_everything_is_checked_before_the_first_training(data, config_path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "given_run", lambda *arguments: pytest.fail("a training began"))
    for options, message in (
        (["--data_dir", str(tmp_path / "none")], "There is no data set directory"),
        (["--num_batches", "1"], "lr_warmup_steps"),
        (["--set", "no_such=1"], "no_such"),
        (["--rates", "-1"], "lr_max"),
        (["--set", "seed=7", "checkpoint_dir=x"], "each training sets checkpoint_dir itself"),
        (["--num_batches", "6", "--set", "num_training_batches=5"], "each training sets num_training_batches itself"),
        (
            ["--set", "model.architecture=gru", "adversarial.enabled=false"],
            "takes the configuration of a triple decoder",
        ),
    ):
        assert ablate(config_path, tmp_path / "out", *options) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError):
        study.ablate(tmp_path / "none.yaml", tmp_path / "out")


@pytest.mark.parametrize(
    "options",
    [
        ["--device", "cpu"],
        ["--seeds", "3"],
        ["--num_batches", "0"],
        ["--processes", "0"],
        ["--ablate", "x.yaml", "--processes", "2"],
    ],
)
def test_options_that_would_change_nothing_are_refused(options, capsys):
    with pytest.raises(SystemExit) as exit_:
        study.main(options)
    assert exit_.value.code == 2


def test_a_report_of_nothing_says_so(tmp_path, capsys):
    assert report.main(["--results", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert report.main(["--results", str(tmp_path / "none.jsonl")]) == 2
    assert "no training of the study is complete yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "short"),
    [
        (("adversarial.grl_lambda=10", "adversarial.warmup_steps=0"), "λ 10, warmup 0"),
        (("model.noise_units=32",), "units 32"),
    ],
)
def test_changes_are_named_in_short(settings, short):
    assert report.change(settings) == short
