import csv
import json
import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import evaluate_model_helpers as helpers
from evaluate_model_helpers import PHONEMES, SILENCE, ErrorCount

labels = st.lists(st.integers(1, 4), max_size=8)


def test_the_phoneme_table_has_the_order_of_the_data():
    assert len(PHONEMES) == len(set(PHONEMES)) == 41
    assert PHONEMES[0] == "BLANK" and PHONEMES[SILENCE] == PHONEMES[40] == "|"
    assert list(PHONEMES[1:40]) == sorted(PHONEMES[1:40])


def test_phonemes_to_text_and_back():
    assert helpers.phonemes_to_text([16, 6, 40]) == "HH AY |"
    assert helpers.text_to_phonemes("HH AY  |  ") == [16, 6, 40]
    assert helpers.phonemes_to_text([]) == "" and helpers.text_to_phonemes("") == []


@given(st.lists(st.integers(0, 40)))
def test_every_sequence_survives_the_way_to_text_and_back(ids):
    assert helpers.text_to_phonemes(helpers.phonemes_to_text(ids)) == ids


@pytest.mark.parametrize("ids", [[41], [-1]])
def test_a_class_outside_the_table_is_refused(ids):
    with pytest.raises(ValueError, match=f"class {ids[0]}; classes are 0 to 40"):
        helpers.phonemes_to_text(ids)


def test_a_name_that_is_no_phoneme_is_refused_in_words():
    with pytest.raises(ValueError, match=r"'hh' in 'hh AY' is no phoneme"):
        helpers.text_to_phonemes("hh AY")


def reference_distance(a, b):
    """The textbook recursion, a row at a time."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        new = [i]
        for j, y in enumerate(b, 1):
            new.append(min(row[j] + 1, new[-1] + 1, row[j - 1] + (x != y)))
        row = new
    return row[-1]


@given(labels, labels)
def test_edit_distance_and_confusions_agree_with_the_textbook(true, decoded):
    edits = helpers.edit_distance(true, decoded)
    assert edits == reference_distance(true, decoded)
    assert helpers.confusions([(true, decoded)]).total() == edits


def test_confusions_tell_substitutions_deletions_and_insertions_apart():
    counter = helpers.confusions([([1, 2, 3], [1, 4, 3]), ([5, 6], [6]), ([7], [7, 40]), ([2], [4])])
    assert counter == {(2, 4): 2, (5, None): 1, (None, 40): 1}
    assert helpers.name_confusions(counter, 2) == [("AE", "AO", 2), ("", "|", 1)]
    assert helpers.name_confusions(counter)[2] == ("AW", "", 1)


def test_error_rates_are_sums_and_never_means_of_rates():
    """Field case 42: a short trial with many errors must not weigh as much as a long one."""
    counts = [ErrorCount(1, 2, 1), ErrorCount(1, 10, 1), ErrorCount(0, 8, 1)]
    total = helpers.sum_errors(counts)
    assert total == ErrorCount(2, 20, 3) and total.rate == 0.1
    groups = helpers.sum_errors_by(["b", "a", "b"], counts)
    assert list(groups) == ["b", "a"] and groups["b"] == ErrorCount(1, 10, 2)
    assert helpers.sum_errors(groups.values()) == total


def test_a_trial_counts_its_edits_and_labels():
    assert helpers.count_errors([31, 31, 5], [31, 5]) == ErrorCount(1, 3, 1)
    assert helpers.count_errors([3, 4], [1, 2, 3, 4, 5, 6, 7]).rate == 2.5


def test_without_a_reference_the_rate_is_nan_and_null_in_json():
    count = helpers.count_errors([], [5])
    assert count.edits == 1 and math.isnan(count.rate)
    assert json.dumps(helpers.json_rate(count.rate)) == "null" and helpers.json_rate(0.5) == 0.5


DESCRIPTION = """Date,Post-implant day,Block number,Number of sentences,Corpus,Split
2023-08-11,25,2,20,50-Word,Train
2023-08-13,27,8,50,Switchboard,Val/Test
"""


@pytest.mark.parametrize("prefix", ["", "\ufeff"], ids=["plain", "byte order mark"])
def test_description_gives_the_corpus_of_a_block(tmp_path, caplog, monkeypatch, prefix):
    monkeypatch.setattr(logging.getLogger("b2txt"), "propagate", True)  # a command before may have cut caplog off
    path = tmp_path / "description.csv"
    path.write_text(prefix + DESCRIPTION.replace("\n", "\r\n"), encoding="utf-8", newline="")
    description = helpers.read_description(path)
    assert description == {("2023-08-11", 2): "50-Word", ("2023-08-13", 8): "Switchboard"}
    blocks = [("t15.2023.08.13", 8), ("t15.2023.08.13", 9), ("t15.2023.08.13", 9), ("odd", 1)]
    with caplog.at_level(logging.WARNING):
        corpora = helpers.corpora_of_blocks(blocks, description)
    assert corpora == ["Switchboard", "unknown", "unknown", "unknown"]
    assert len(caplog.records) == 1 and "t15.2023.08.13 block 9" in caplog.text and "odd block 1" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Date,Corpus\n", r"lacks the columns \['Block number'\]"),
        ("", "lacks the columns"),
        (DESCRIPTION + "11.8.2023,1,2,3,X,Train\n", "line 4: date '11.8.2023'"),
        (DESCRIPTION + "2023-08-11,1\n", "line 4: date '2023-08-11'"),
        (DESCRIPTION + "2023-08-11,25,2,20,Random,Train\n", "line 4: block 2 of .* '50-Word' and 'Random'"),
    ],
)
def test_a_description_that_cannot_be_used_says_why(tmp_path, text, message):
    path = tmp_path / "description.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        helpers.read_description(path)
    assert str(path) in str(error.value)


def test_an_absent_description_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.csv: cannot be read"):
        helpers.read_description(tmp_path / "none.csv")


def test_sessions_stand_in_the_order_of_their_dates():
    names = ["t15.2024.01.05", "a.2023.12.31", "t15.2023.08.11"]
    assert helpers.session_date(names[1]) == "2023-12-31" and helpers.session_date("odd") is None
    assert sorted(names, key=lambda name: helpers.trial_order(name, 0, 0)) == names[::-1]
    assert helpers.trial_order("s.2023.08.11", 2, 1) < helpers.trial_order("s.2023.08.11", 10, 0)


def make_rows():
    places = [("t15.2023.08.11", 2, 9), ("t15.2023.08.11", 10, 0), ("t15.2024.01.05", 1, 0)]
    return [{"id": i, "session": s, "block": b, "trial": t} for i, (s, b, t) in enumerate(places)]


def read_rows(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_submission_has_id_and_text_and_no_empty_text(tmp_path):
    """Field case 46."""
    path = tmp_path / "submission_test.csv"
    helpers.write_submission(path, make_rows(), ["i see", " you ", "no, i don't"])
    assert path.read_text() == 'id,text\n0,i see\n1,you\n2,"no, i don\'t"\n'
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="row 1: no text\nrow 2: no text"):
        helpers.write_submission(path, make_rows(), ["i see", "", " "])
    assert path.read_text().startswith("id,text\n0,i see")


@pytest.mark.parametrize("text", sorted(helpers.READ_AS_MISSING))
def test_words_that_mean_missing_values_survive_pandas(tmp_path, text):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "submission_test.csv"
    helpers.write_submission(path, make_rows(), [text, "i see", text.lower() + " and void"])
    table = pandas.read_csv(path)
    assert [cell.split() for cell in table.text] == [text.split(), ["i", "see"], [*text.lower().split(), "and", "void"]]
    assert table.id.tolist() == [0, 1, 2] and helpers.submission_problems(path, 3) == []


def test_everything_that_pandas_takes_for_missing_is_known():
    parsers = pytest.importorskip("pandas._libs.parsers")
    assert {name for name in parsers.STR_NA_VALUES if name} <= helpers.READ_AS_MISSING


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "the first line must be id,text"),
        ("id;text\n0;a\n", "the first line must be id,text"),
        ("id,text\n0,a\n1,b\n", "2 rows for 3 test trials"),
        ("id,text\n0,a\n1,\n2,c\n", "line 3: no word in the text"),
        ("id,text\n0,a\n1,...\n2,c\n", "line 3: no word in the text"),
        ("id,text\n0,a\n\n1,b\n2,c\n", "line 3: is empty"),
        ('id,text\n0,"a\n"\n1,b\n2,c\n', "a line break"),
        ("id,text\n0,a\n0,b\n2,c\n", "line 3: id 0 stands in line 2 already"),
        ("id,text\n1,a\n2,b\n3,c\n", "line 2: id '1' where 0 is due"),
        ("id,text\n0,a\n1,nan\n2,c\n", "line 3: pandas reads 'nan'"),
        ("id,text\n0,no, i see\n1,b\n2,c\n", "line 2: 3 fields"),
        ('id,text\n0,"a\nb"\n1,b\n2,c\n', "a line break"),
        ("id,text\n0,caf\xe9\n1,b\n2,c\n", "UTF-8"),
    ],
)
def test_a_submission_that_cannot_be_handed_in_says_why(tmp_path, content, said):
    path = tmp_path / "submission.csv"
    path.write_bytes(content.encode("latin-1"))
    assert said in "\n".join(helpers.submission_problems(path, 3))
    assert "cannot be read" in helpers.submission_problems(tmp_path / "none.csv", 3)[0]


def test_the_interval_holds_the_rate_and_shrinks_with_more_trials():
    few = [helpers.ErrorCount(i % 3, 5, 1) for i in range(12)]
    rate = helpers.sum_errors(few).rate
    low, high = helpers.bootstrap_interval(few)
    assert 0 <= low < rate < high <= 1 and helpers.bootstrap_interval(few) == (low, high)
    narrow = helpers.bootstrap_interval(few * 16)
    assert 3 < (high - low) / (narrow[1] - narrow[0]) < 5.3  # the root of 16 is 4
    assert helpers.bootstrap_interval([helpers.ErrorCount(0, 0, 1)]) is None and helpers.bootstrap_interval([]) is None


def test_predictions_keep_all_columns_and_an_empty_prediction(tmp_path):
    rows = [row | {"predicted_phonemes": text} for row, text in zip(make_rows(), ["AY |", "", "|"], strict=True)]
    helpers.write_predictions(tmp_path / "p.csv", rows, 3)
    table = read_rows(tmp_path / "p.csv")
    assert table[0] == ["id", "session", "block", "trial", "predicted_phonemes"]
    assert table[2] == ["1", "t15.2023.08.11", "10", "0", ""]


def test_rows_have_truth_and_corpus_only_where_they_are_given():
    places = [("t15.2023.08.11", 2, 9), ("t15.2023.08.11", 10, 0)]
    plain = helpers.prediction_rows(places, [[16, 6, 40], []])
    start = {"id": 0, "session": "t15.2023.08.11", "block": 2, "trial": 9}
    assert plain[0] == start | {"predicted_phonemes": "HH AY |"} and plain[1]["predicted_phonemes"] == ""
    full = helpers.prediction_rows(places, [[16, 6, 40], []], [[16, 40], [1]], ["Switchboard", "Harvard"])
    assert full[0] == start | {
        "corpus": "Switchboard",
        "true_phonemes": "HH |",
        "predicted_phonemes": "HH AY |",
        "edits": 1,
        "n_phonemes": 2,
    }
    assert full[1]["edits"] == 1


def test_a_directory_that_cannot_be_written_names_the_option(tmp_path):
    assert helpers.check_writable(tmp_path / "new" / "er").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file.inside: results cannot be written .*--output_dir"):
        helpers.check_writable(tmp_path / "file" / "inside")
    assert not list((tmp_path / "new" / "er").iterdir())


def drop(rows):
    return rows[:2]


def repeat_id(rows):
    return [rows[0], rows[1] | {"id": 0}, rows[2]]


def repeat_trial(rows):
    return [rows[0], rows[1], rows[1] | {"id": 2}]


def disorder(rows):
    return [row | {"id": i} for i, row in enumerate([rows[1], rows[0], rows[2]])]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop, "2 rows for 3 trials"),
        (repeat_id, "row 1 has id 0"),
        (
            repeat_trial,
            r"t15.2023.08.11 block 10 trial 0 must not stand after t15.2023.08.11 block 10 trial 0",
        ),
        (disorder, r"t15.2023.08.11 block 2 trial 9 must not stand after t15.2023.08.11 block 10 trial 0"),
    ],
)
def test_wrong_rows_are_not_written(tmp_path, spoil, message):
    """Field case 47: rows missing or sorted by session alone."""
    with pytest.raises(ValueError, match=message):
        helpers.write_submission(tmp_path / "s.csv", spoil(make_rows()), ["AY"] * 3)
    with pytest.raises(ValueError, match=message):
        helpers.write_predictions(tmp_path / "p.csv", spoil(make_rows()), 3)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(helpers.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        helpers.write_text_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
