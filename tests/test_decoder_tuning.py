"""decoder_tuning.py: the search, with a stand-in for the decoder whose errors are known for every setting."""

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest

import decoder_tuning
from config import DecoderConfig, load_decoder_settings
from decoder_tuning import RANGES, _choose, _cross_validated, tune_decoder
from evaluate_model_helpers import ErrorCount
from nbest import Hypothesis

pytest.importorskip("optuna")

RIGHT = "you can see it too"


class StandInPool:
    """Trial `t` holds its best lm_weight; it has one wrong word of five for each half that lm_weight is off."""

    def __init__(self, **settings):
        self.settings = DecoderConfig(**settings)
        self.decoder = SimpleNamespace(searched=tuple(RANGES))
        self.asked = []

    def decode(self, emissions, settings=None):
        self.asked.append((settings, len(emissions)))
        for each in emissions:
            wrong = min(5, int(abs(settings.lm_weight - float(each[0, 0])) / 0.5))
            words = RIGHT.split()
            yield [Hypothesis(" ".join(words[: 5 - wrong]), 0.0, 0.0, 0.0), Hypothesis(RIGHT, -1.0, 0.0, 0.0)]


def trials(*best):
    return [np.full((1, 41), weight, np.float32) for weight in best]


def test_the_settings_of_the_fewest_errors_are_found_written_and_used(tmp_path, caplog):
    pool = StandInPool(lm_weight=4.5, n_best=7, beam_size=33)
    path = tmp_path / "decoder_tuned.yaml"
    with caplog.at_level(logging.INFO):
        facts = tune_decoder(pool, trials(1.0, 1.0, 1.0), [RIGHT] * 3, path, n_searches=25)
    assert facts["wer_before"] == 1.0 and facts["wer_after"] == 0.0 == facts["wer_cross_validated"]
    assert facts["n_searches"] == 25 and abs(pool.settings.lm_weight - 1) < 0.5
    assert pool.settings.n_best == 7 and pool.settings.beam_size == 33
    assert facts["settings"] == pool.settings.to_dict()
    assert load_decoder_settings(path, DecoderConfig()) == pool.settings
    text = path.read_text()
    assert "WER 0.00% on val, 100.00% before;\n# 0.00% on trials that had no part" in text
    assert "tuned: WER 100.00% before, 0.00% after (0.00% on trials that had no part in the choice)" in caplog.text


def test_the_settings_to_beat_are_tried_first_and_all_others_stay_in_their_ranges(tmp_path):
    pool = StandInPool(lm_weight=7.0, word_score=-9.0, n_best=4)
    before = pool.settings.copy()
    tune_decoder(pool, trials(1.0), [RIGHT], tmp_path / "tuned.yaml", n_searches=8)
    settings = [each for each, _ in pool.asked]
    assert len(settings) >= 9 and settings[0] == before  # after the search come means of the best
    assert settings[1].lm_weight == 5.0 and settings[1].word_score == -4.0  # the same, within the ranges
    for each in settings[1:9]:
        assert all(low <= each[name] <= high for name, (low, high) in RANGES.items()) and each.n_best == 1
        assert (each.beam_size, each.acoustic_scale) == (before.beam_size, before.acoustic_scale)


def test_every_range_is_searched(tmp_path):
    pool = StandInPool()
    tune_decoder(pool, trials(1.0), [RIGHT], tmp_path / "tuned.yaml", n_searches=8)
    for name in RANGES:
        assert len({settings[name] for settings, _ in pool.asked}) > 5


def test_the_same_seed_finds_the_same(tmp_path):
    def search(seed):
        pool = StandInPool()
        tune_decoder(pool, trials(0.4, 2.0, 3.0), [RIGHT] * 3, tmp_path / "tuned.yaml", 6, seed)
        return [settings for settings, _ in pool.asked]

    assert search(1) == search(1) != search(2)


def test_settings_that_nothing_beats_are_kept(tmp_path):
    pool = StandInPool(lm_weight=2.0)
    before = pool.settings.copy()
    facts = tune_decoder(pool, trials(2.0), [RIGHT], tmp_path / "tuned.yaml", n_searches=5)
    assert pool.settings == before and facts["wer_before"] == facts["wer_after"] == 0
    assert tune_decoder(pool, trials(2.0), [RIGHT], tmp_path / "tuned.yaml", n_searches=0)["wer_after"] == 0


def test_only_trials_with_a_true_sentence_are_decoded(tmp_path):
    pool = StandInPool(lm_weight=1.0)
    facts = tune_decoder(pool, trials(9.0, 1.0, 9.0), ["", RIGHT, ""], tmp_path / "tuned.yaml", n_searches=2)
    assert facts["wer_before"] == 0 and {n for _, n in pool.asked} == {1}
    with pytest.raises(ValueError, match="--tune_decoder needs trials with a true sentence"):
        tune_decoder(pool, trials(1.0), [""], tmp_path / "none.yaml")
    assert not (tmp_path / "none.yaml").exists()


def test_without_optuna_its_installation_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ValueError, match=r"--tune_decoder needs the optuna package .*pip install optuna"):
        tune_decoder(StandInPool(), trials(1.0), [RIGHT], tmp_path / "tuned.yaml")


def test_a_file_that_cannot_be_written_changes_no_settings(tmp_path):
    pool = StandInPool(lm_weight=4.5)
    before = pool.settings.copy()
    (tmp_path / "tuned.yaml").mkdir()
    with pytest.raises(OSError):
        tune_decoder(pool, trials(1.0), [RIGHT], tmp_path / "tuned.yaml", n_searches=8)
    assert pool.settings == before and [path.name for path in tmp_path.iterdir()] == ["tuned.yaml"]


# ---- the cross-validation by hand


def counts(*edits, length=10):
    return [ErrorCount(each, length, 1) for each in edits]


def bad_mean(numbers):
    """Of any settings the mean is so bad that the best is taken."""
    return counts(*[99] * 5)


def test_each_half_is_decoded_with_what_was_best_on_the_other():
    """Trials 0, 2 and 4 are one half. Best on it is the third (3 edits), which has 9 + 0 on trials 1 and 3; best on
    those is the second (2 edits), which has 2 + 3 + 4 on trials 0, 2 and 4: 18 of 50."""
    tried = [counts(5, 5, 5, 5, 5), counts(2, 1, 3, 1, 4), counts(1, 9, 1, 0, 1)]
    assert _cross_validated(tried, bad_mean) == pytest.approx((9 + 0 + 2 + 3 + 4) / 50)


def test_edits_are_summed_over_trials_of_any_length():
    first, second = [ErrorCount(1, 2, 1), ErrorCount(0, 30, 1)], [ErrorCount(0, 2, 1), ErrorCount(3, 30, 1)]
    assert _cross_validated([first, second], bad_mean) == (3 + 1) / 32


def test_of_equally_good_settings_the_earlier_are_taken():
    assert _cross_validated([counts(1, 1), counts(1, 0), counts(0, 1)], bad_mean) == pytest.approx((1 + 1) / 20)
    assert _cross_validated([counts(0, 4), counts(0, 0)], bad_mean) == pytest.approx(4 / 20)


def test_a_single_trial_is_decoded_with_the_settings_before():
    assert _cross_validated([counts(3), counts(0)], bad_mean) == 0.3
    assert math.isnan(_cross_validated([[], []], bad_mean))


def test_tuning_flatters_and_the_cross_validation_does_not(tmp_path):
    """Halves that want different weights: each is wrong by what the other wants."""
    pool = StandInPool(lm_weight=2.0)
    facts = tune_decoder(pool, trials(1.0, 3.0), [RIGHT] * 2, tmp_path / "tuned.yaml", n_searches=30)
    assert facts["wer_after"] <= 0.4 < facts["wer_cross_validated"]
    assert decoder_tuning.N_SEARCHES == 60


# ---- the mean of the best by hand


def test_the_mean_of_the_best_is_taken_where_it_is_no_worse_than_each_of_them():
    tried = [counts(9), *(counts(n) for n in (5, 3, 8, 2, 4, 6))]
    asked = []

    def mean_of(edits):
        return lambda numbers: asked.append(list(numbers)) or counts(edits)

    for edits, taken in ((0, 0), (6, 6), (7, 2)):  # 6 edits has the worst of the five best
        assert _choose(tried, slice(None), mean_of(edits)) == counts(taken)
    assert asked == [[4, 2, 5, 1, 6]] * 3
    assert _choose(tried, slice(None), bad_mean) == counts(2)
    assert _choose([counts(2), *tried], slice(None), mean_of(0)) == counts(2)  # nothing beats those before
    assert _choose([counts(3), *tried[3:]], slice(None), mean_of(4)) == counts(2)  # worse than those before


def test_the_mean_of_the_best_is_found_written_and_used(tmp_path):
    pool = StandInPool(lm_weight=4.5)
    facts = tune_decoder(pool, trials(1.0, 1.0), [RIGHT] * 2, tmp_path / "tuned.yaml", n_searches=25)
    searched = [settings for settings, _ in pool.asked[1:26]]
    right = [settings.lm_weight for settings in searched if abs(settings.lm_weight - 1) < 0.5]
    assert len(right) > 5 and pool.settings.lm_weight == pytest.approx(sum(right[:5]) / 5, abs=1e-4)
    assert facts["wer_after"] == 0
