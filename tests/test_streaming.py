"""Decoding while a trial comes: the same logits, phonemes and words as offline, in every chunking; the replay."""

import functools
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from original import tiny_original, write_original_run
from tiny import tiny_config
from trained_run import LEXICON, checkpoint_of, lively_model, make_config, write_split

import stream_demo
from checkpointing import save_checkpoint
from config import DecoderConfig
from ctc import greedy_collapse, output_lengths
from data_augmentations import transform_data
from evaluate_model import load_model
from language_model import NgramDecoder
from lexicon import load_lexicon
from ngram import train_ngram
from stream_demo import LiveLines, replay
from streaming import RunningZScore, StreamingDecoder

FOLDER = tempfile.TemporaryDirectory()  # of the models, which are the same for all tests
N_FEATURES = 6
SENTENCES = ["i see you", "you want water", "no i do", "i know", "the sea", "be a cat", "hello you"]
MODELS = {
    "projection": {},
    "a noise model as wide as its patches": {"model__noise_units": 24},
    "day layers a branch": {"model__day_layers": "per_branch"},
    "day layers a branch, wide noise": {"model__day_layers": "per_branch", "model__noise_units": 24},
    "no patches": {"model__patch_size": 0},
    "uneven stride": {"model__patch_size": 4, "model__patch_stride": 3},
    "bins between patches": {"model__patch_size": 3, "model__patch_stride": 5},
    "single GRU": {"model__architecture": "gru", "adversarial__enabled": False},
    "single GRU, no patches": {"model__architecture": "gru", "adversarial__enabled": False, "model__patch_size": 0},
}


def write_model(path, **overrides):
    """A checkpoint of a model that emits many phonemes, others in each session."""
    overrides = {"dataset__data_transforms__smooth_causal": True} | overrides
    config = tiny_config(**overrides)
    model = lively_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "weight_hh" in name:
                parameter *= 0.5  # with larger ones it is chaotic, and rounding grows from frame to frame
    save_checkpoint(checkpoint_of(model, config), path)
    return path


@functools.cache
def written(name, causal=True):
    path = Path(FOLDER.name) / f"{name}, {'causal' if causal else 'symmetric'}"
    return write_model(path, dataset__data_transforms__smooth_causal=causal, **MODELS[name])


@functools.cache
def decoder_of(name, causal=True):
    return StreamingDecoder(written(name, causal), accept_delay=not causal)


def fresh(name, causal=True):
    decoder = decoder_of(name, causal)
    decoder.reset()
    return decoder


@torch.no_grad()
def offline(path, bins, session=None):
    """Logits (P, C) of a whole trial (T, F), as evaluation computes them; none of a trial shorter than one patch."""
    model, config, _ = load_model(path)
    day = len(config.dataset.sessions) - 1 if session is None else config.dataset.sessions.index(session)
    if len(bins) < max(config.model.patch_size, 1):
        return torch.empty(0, config.dataset.n_classes)
    bins = bins if config.dataset.feature_subset is None else bins[:, config.dataset.feature_subset]
    transforms = config.dataset.data_transforms
    features, _ = transform_data(bins[None], torch.tensor([len(bins)]), transforms, training=False)
    return model(features, torch.tensor([day]))[0]


def trial(n_bins, seed=0, width=N_FEATURES):
    return torch.randn(n_bins, width, generator=torch.Generator().manual_seed(seed))


def streamed(decoder, bins, borders=None):
    """Logits of all the pushes; bin by bin, or in chunks that end at the borders."""
    borders = range(1, len(bins)) if borders is None else sorted(min(border, len(bins)) for border in borders)
    chunks = [bins[begin:end] for begin, end in zip([0, *borders], [*borders, len(bins)], strict=True)]
    return torch.cat([*map(decoder.push, chunks), decoder.finish()])


# ---- logits


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15, deadline=None)
@given(n_bins=st.integers(0, 40), borders=st.lists(st.integers(0, 40), max_size=6), seed=st.integers(0, 99))
def test_every_chunking_gives_the_logits_of_the_whole_trial(name, causal, n_bins, borders, seed):
    bins = trial(n_bins, seed)
    logits = streamed(fresh(name, causal), bins, borders)
    assert logits.dtype == torch.float32
    expected = offline(written(name, causal), bins)
    scale = max(1.0, expected.abs().max().item()) if len(expected) else 1.0  # with it grows what float32 rounds off
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * scale)
    assert torch.equal(logits, streamed(fresh(name, causal), bins))


@pytest.mark.parametrize("name", ["projection", "no patches", "bins between patches"])
@pytest.mark.parametrize("causal", [True, False])
def test_logits_come_with_the_last_bin_of_a_patch_or_as_much_later_as_the_smoothing_sees(name, causal):
    decoder = fresh(name, causal)
    assert decoder.delay_bins == (0 if causal else 4)
    size, stride = decoder.config.model.patch_size, decoder.config.model.patch_stride
    n_frames = 0
    for n_bins, features in enumerate(trial(30), 1):
        n_frames += len(decoder.push(features[None]))
        assert n_frames == output_lengths(max(n_bins - decoder.delay_bins, 0), size, stride)
    n_frames += len(decoder.finish())
    assert n_frames == output_lengths(30, size, stride)


def test_a_session_has_its_own_day_layer_and_the_last_one_is_the_default():
    path, bins = written("projection"), trial(20)
    sessions = decoder_of("projection").config.dataset.sessions
    assert decoder_of("projection").session == sessions[-1]
    found = [streamed(StreamingDecoder(path, session), bins) for session in sessions]
    for session, logits in zip(sessions, found, strict=True):
        torch.testing.assert_close(logits, offline(path, bins, session), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[0], found[1], atol=1e-2)
    with pytest.raises(ValueError, match=r"no session 't15.2031.01.01'; it has t15.2030.01.01, "):
        StreamingDecoder(path, "t15.2031.01.01")


def test_the_features_of_the_subset_are_taken_from_those_of_the_file(tmp_path):
    overrides = {"dataset__feature_subset": [5, 0, 2], "model__input_network__input_layer_sizes": [3]}
    path = write_model(tmp_path / "checkpoint", **overrides)
    bins = trial(20)
    decoder = StreamingDecoder(path)
    torch.testing.assert_close(streamed(decoder, bins), offline(path, bins), rtol=1e-5, atol=1e-5)
    decoder.reset()
    bins[3, 1] = torch.nan  # a dead channel that the model does not read
    decoder.push(bins)
    bins[3, 2] = -torch.inf
    with pytest.raises(ValueError, match=r"1 values are NaN or infinite; the first is -inf, feature 2 of bin 3 of"):
        decoder.push(bins)


def test_features_that_are_not_smoothed(tmp_path):
    path = write_model(tmp_path / "checkpoint", dataset__data_transforms__smooth_data=False)
    decoder, bins = StreamingDecoder(path), trial(20)
    assert decoder.delay_bins == 0
    torch.testing.assert_close(streamed(decoder, bins), offline(path, bins), rtol=1e-5, atol=1e-5)


def test_a_checkpoint_of_the_original_decoder(tmp_path):
    write_original_run(tmp_path)
    decoder, bins = StreamingDecoder(tmp_path / "run", accept_delay=True), trial(25)
    transforms = decoder.config.dataset.data_transforms
    smoothed, _ = transform_data(bins[None], torch.tensor([25]), transforms, training=False)
    with torch.no_grad():
        expected = tiny_original()(smoothed, torch.tensor([2]))[0]
    torch.testing.assert_close(streamed(decoder, bins), expected, rtol=1e-5, atol=1e-5)


def test_a_trial_after_another_is_as_if_it_were_the_first():
    decoder, bins = fresh("day layers a branch", causal=False), trial(21)
    first, phonemes = streamed(decoder, bins), decoder.phonemes
    decoder.reset()
    decoder.push(trial(9, seed=1))  # broken off
    decoder.reset()
    assert decoder.phonemes == [] and torch.equal(streamed(decoder, bins), first) and decoder.phonemes == phonemes


def test_the_weights_that_a_patch_reads_are_counted_once():
    features, size, hidden, classes = 6, 4, 5, 41
    width = features * size
    plain = features**2 + 3 * hidden * (width + 9 * hidden) + hidden * classes  # 5 layers
    assert decoder_of("single GRU").weight_bytes == 4 * plain
    noise = 4
    triple = features**2 + 3 * (noise + hidden) * width + 9 * noise**2 + 3 * hidden * noise
    triple += 3 * hidden * 5 * hidden + hidden * classes
    assert decoder_of("projection").weight_bytes == 4 * triple


# ---- phonemes and words


class Scripted:
    """In place of the network: the n-th bin gives the n-th of the classes."""

    def __init__(self, classes):
        self.classes = iter(classes)

    def push(self, features):
        return torch.nn.functional.one_hot(torch.tensor([next(self.classes)]), 41).float()


@settings(deadline=None)
@given(path=st.lists(st.sampled_from([0, 0, 3, 3, 40]), max_size=20), borders=st.lists(st.integers(0, 20), max_size=5))
def test_phonemes_are_collapsed_across_the_borders_of_chunks(path, borders):
    decoder = StreamingDecoder(written("no patches"))
    decoder._network = Scripted(path)
    streamed(decoder, trial(len(path)), borders)
    assert decoder.phonemes == greedy_collapse(path)


@pytest.mark.parametrize("name", ["no patches", "single GRU"])
def test_phonemes_appear_as_they_are_decoded(name):
    decoder, bins, seen = fresh(name), trial(200), []
    for features in bins:
        decoder.push(features[None])
        seen.append(list(decoder.phonemes))
    classes = offline(written(name), bins).argmax(-1).numpy()
    model = decoder.config.model
    for n_bins, phonemes in enumerate(seen, 1):
        assert phonemes == greedy_collapse(classes[: output_lengths(n_bins, model.patch_size, model.patch_stride)])
    assert len(seen[-1]) > 5


@pytest.mark.parametrize("causal", [True, False])
def test_words_are_those_of_the_whole_trial(causal, tmp_path):
    pytest.importorskip("flashlight.lib.text.decoder")
    lexicon = load_lexicon(LEXICON)
    train_ngram(SENTENCES, 2, lexicon).save(tmp_path / "lm.arpa")  # without it, words that sound alike are equals
    words = NgramDecoder(lexicon, DecoderConfig(word_score=6, acoustic_scale=0.5), tmp_path / "lm.arpa")
    decoder, bins = fresh("single GRU", causal), trial(120)
    assert decoder.text is None
    decoder.words = words
    decoder.reset()
    assert decoder.text == "" and decoder.hypotheses is None
    streamed(decoder, bins, [3, 50, 51, 90])
    decoder.words = None  # other tests use this decoder
    expected = words.decode(offline(written("single GRU", causal), bins).log_softmax(-1).numpy())
    assert [each.text for each in decoder.hypotheses] == [each.text for each in expected]
    assert decoder.hypotheses[0].score == pytest.approx(expected[0].score, abs=1e-3)
    assert decoder.text == expected[0].text and len(decoder.text.split()) > 2


# ---- running z-score


def plain_z_score(bins, n_most):
    """The formula, with the weights of all bins spelled out, in float64."""
    z_scored = np.zeros_like(bins)
    weights = np.zeros(0)
    for n in range(len(bins)):
        share = 1 / min(n + 1, n_most)
        weights = np.append(weights * (1 - share), share)
        past = bins[: n + 1]
        mean = weights @ past
        std = np.sqrt(weights @ (past - mean) ** 2)
        moved = past.max(0) > past.min(0)
        z_scored[n, moved] = ((bins[n] - mean) / np.where(std == 0, 1, std))[moved]
    return z_scored


def recorded(n_bins, seed=0):
    """Features in units of their own, one of which never changes."""
    rng = np.random.default_rng(seed)
    bins = rng.gamma(2.0, size=(n_bins, N_FEATURES)) * [1, 1000, 0.01, 3, 1, 1] + [0, 500, 0, -7, 0, 4]
    bins[:, 4] = 0.1
    return bins.astype(np.float32)


@pytest.mark.parametrize("seconds", [0.04, 0.3, 0.5, 100])
def test_the_running_z_score_is_the_formula(seconds):
    bins = recorded(60)
    running = RunningZScore(N_FEATURES, seconds)
    found = torch.cat([running.push(features[None]) for features in torch.from_numpy(bins)])
    assert found.dtype == torch.float32 and not found[0].any() and not found[:, 4].any()
    np.testing.assert_allclose(found, plain_z_score(bins.astype(np.float64), seconds / 0.02), rtol=1e-5, atol=1e-5)
    if seconds == 100:  # all bins count alike until then
        expected = (bins[-1] - bins.astype(np.float64).mean(0))[:4] / bins.astype(np.float64).std(0)[:4]
        np.testing.assert_allclose(found[-1, :4], expected, rtol=1e-5)


def test_a_decoder_z_scores_before_it_smooths_and_goes_on_over_trials():
    bins = recorded(50)
    expected = torch.from_numpy(plain_z_score(bins.astype(np.float64), 15)).float()
    decoder = StreamingDecoder(written("projection"), z_score_seconds=0.3)
    first = streamed(decoder, torch.from_numpy(bins[:30]), [7, 8])
    decoder.reset()
    second = streamed(decoder, bins[30:])
    for logits, part in ((first, expected[:30]), (second, expected[30:])):
        torch.testing.assert_close(logits, offline(written("projection"), part), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seconds", [0.0, 0.03, -1.0, float("nan"), float("inf")])
def test_time_constants_that_are_none_are_refused(seconds):
    with pytest.raises(ValueError, match=r"z_score_seconds: expected 0\.04"):
        StreamingDecoder(written("projection"), z_score_seconds=seconds)


# ---- refusals


def test_a_model_that_sees_later_bins_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"4 later bins.* 80 ms late.*smooth_causal=true.*accept_delay") as error:
        StreamingDecoder(written("projection", causal=False))
    assert str(written("projection", causal=False)) in str(error.value)


@pytest.mark.parametrize(
    ("bins", "message"),
    [
        (np.zeros((3, 5)), r"\(3, 5\).*6 features"),
        (np.zeros(6), r"\(6,\).*one bin \(1, 6\)"),
        ("abc", "no numbers"),
        (None, "no numbers"),
        (np.full((2, 6), np.nan), "12 values are NaN or infinite; the first is nan, feature 0 of bin 0 of the 2"),
        ([[0, 0, 0, 0, 0, 1e60]], "first is inf, feature 5 of bin 0"),
    ],
)
def test_bins_that_are_none_are_refused_and_change_nothing(bins, message):
    decoder, good = fresh("projection"), trial(20)
    before = decoder.push(good[:9])
    with pytest.raises(ValueError, match=message):
        decoder.push(bins)
    assert torch.equal(torch.cat([before, decoder.push(good[9:])]), streamed(fresh("projection"), good))


def test_no_bins_are_no_fault():
    decoder = fresh("projection")
    assert decoder.push([]).shape == decoder.push(np.zeros((0, 6))).shape == (0, 41)


@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int64, list])
def test_bins_of_any_type_of_number(kind):
    bins = (trial(20) * 3).round()
    given_bins = bins.tolist() if kind is list else bins.numpy().astype(kind)
    assert torch.equal(fresh("projection").push(given_bins), fresh("projection").push(bins))


def test_a_trial_that_has_ended_takes_no_more():
    decoder = fresh("projection")
    decoder.finish()
    for more in (decoder.finish, lambda: decoder.push(trial(3))):
        with pytest.raises(ValueError, match=r"reset\(\) begins the next"):
            more()


# ---- the replay


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run, and the data set of tests/trained_run.py."""
    root = tmp_path_factory.mktemp("replay")
    write_split(root / "data", "val", labelled=True)
    write_split(root / "data", "test", labelled=False)
    config = make_config(root)
    config.dataset.data_transforms.smooth_causal = True
    save_checkpoint(checkpoint_of(lively_model(config), config), root / "run" / "checkpoint" / "best_checkpoint")
    config.dataset.data_transforms.smooth_causal = False
    save_checkpoint(checkpoint_of(lively_model(config), config), root / "late" / "checkpoint" / "best_checkpoint")
    return root


@pytest.fixture
def command(root):
    """stream_demo.py as a function, without waiting and with phonemes alone; returns the exit status."""

    def call(*options, model="run"):
        arguments = [
            "--model_path",
            str(root / model),
            "--speed",
            "1000",
            "--lm",
            "none",
            "--lexicon",
            LEXICON,
            *options,
        ]
        return stream_demo.main(arguments)

    return call


def expected_phonemes(root, session, key, model="run", split="val"):
    import h5py

    from evaluate_model_helpers import phonemes_to_text

    with h5py.File(root / "data" / session / f"data_{split}.hdf5") as file:
        bins = torch.from_numpy(file[key]["input_features"][()])
    return phonemes_to_text(greedy_collapse(offline(root / model, bins, session).argmax(-1).numpy()))


def test_the_command_shows_the_phonemes_of_a_trial_its_sentence_and_the_delay(command, root, capsys):
    assert command("--session", "t15.2023.08.13", "--trial", "trial_0001") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "t15.2023.08.13 trial_0001, block 9: 0.8 s"
    assert lines[1] == f"phonemes  {expected_phonemes(root, 't15.2023.08.13', 'trial_0001')}"
    assert lines[2] == "true      a b"
    assert lines[3].startswith("delay     p50 ") and "19 patches, at 1000 times real time" in lines[3]


def test_trials_are_found_by_number_and_the_first_of_the_last_session_is_the_default(command, capsys):
    assert command() == 0 and "t15.2023.08.11 trial_0000, block 2" in capsys.readouterr().out
    assert command("--session", "t15.2023.08.13") == 0
    assert "trial_0002, block 9" in (out := capsys.readouterr().out) and "shorter than one patch" in out
    assert command("--session", "t15.2023.08.13", "--trial", "1") == 0
    assert "trial_0001, block 9" in capsys.readouterr().out
    assert command("--eval_type", "test", "--trial", "1") == 0
    assert "trial_0001" in (out := capsys.readouterr().out) and "true" not in out


def test_a_model_that_sees_later_bins_is_replayed_where_the_delay_is_accepted(command, root, capsys):
    assert command(model="late") == 2 and "--accept_delay" in capsys.readouterr().err
    assert command("--accept_delay", "--speed", "100", model="late") == 0
    out = capsys.readouterr().out
    assert expected_phonemes(root, "t15.2023.08.11", "trial_0000", "late") in out
    assert "of it wait" not in out  # the clock is faster, and the computing is not


def test_words_by_an_n_gram_of_given_text(root, tmp_path, capsys):
    pytest.importorskip("flashlight.lib.text.decoder")
    (tmp_path / "text").write_text("a b\nb a\nhello you\n")
    arguments = ["--model_path", str(root / "run"), "--speed", "1000", "--lm_text", str(tmp_path / "text")]
    assert stream_demo.main([*arguments, "--lexicon", LEXICON]) == 0
    (words,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("words")]
    assert set(words.split()[1:]) <= set(load_lexicon(LEXICON))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--session", "t15.2024.01.01"], "--session t15.2024.01.01: the model has no such session"),
        (["--trial", "7"], r"--trial 7: not in .*data_val.hdf5, which has trial_0000 to trial_0001"),
        (["--speed", "0"], "--speed is above 0"),
        (["--data_dir", "nowhere"], "no data set directory"),
        (["--z_score_seconds", "0"], "z_score_seconds"),
        (["--lm_file", "none.arpa"], "--lm none takes no language model"),
    ],
)
def test_wrong_options_are_said_and_end_the_command_with_2(command, options, message, capsys):
    assert command(*options) == 2
    assert re.search(rf"^stream_demo\.py: (.|\n)*{message}", capsys.readouterr().err, re.MULTILINE)


def test_ctrl_c_ends_the_command_with_130(command, monkeypatch, capsys):
    monkeypatch.setattr(StreamingDecoder, "push", lambda self, bins: (_ for _ in ()).throw(KeyboardInterrupt))
    assert command() == 130 and "interrupted" in capsys.readouterr().err


def test_a_replay_keeps_the_time_of_its_bins_and_measures_from_each_patchs_last_one():
    decoder, bins = fresh("projection"), trial(25).numpy()
    start = time.perf_counter()
    found = replay(decoder, bins, speed=2.0)
    assert time.perf_counter() - start >= 0.25
    assert found.phonemes == decoder.phonemes and found.text is None and len(found.delays) == 11
    assert all(0 <= delay < 1 for delay in found.delays)
    late = replay(fresh("projection", causal=False), bins, speed=2.0)
    assert min(late.delays[:-2]) >= 4 * 0.01  # the last come with the trial's end


def test_live_lines_fit_the_terminal_and_are_drawn_over_each_other(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "21")
    live = LiveLines()
    live([16, 11, 21], "he", None)
    live([16, 11, 21] * 4, "hello hello hello", 0.0832)
    live.clear()
    clear, up = "\x1b[2K", "\x1b[1A"
    first = f"\r{clear}          HH EH L\n{clear}          he"
    second = f"\r{up}{clear}83 ms      L HH EH L\n{clear}          ello hello"
    assert capsys.readouterr().out == first + second + f"\r{clear}{up}{clear}"


def test_a_terminal_gets_the_live_lines(command, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert command() == 0
    out = capsys.readouterr().out
    assert out.count("\x1b[2K") > 10 and out.splitlines()[-1].startswith("delay")
