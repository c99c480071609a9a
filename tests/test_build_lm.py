"""build_lm.py: the command on small files, word frequencies, and text that is no text."""

import logging
import math
import sys
import time
import types
from pathlib import Path

import h5py
import pytest
from t15_files import SESSIONS, write_split

import build_lm
import evaluate_model_helpers
import ngram
from build_lm import TextError, check_vocabulary, read_frequencies, read_sentences
from lexicon import Lexicon, load_lexicon
from text_rules import normalize

normalize("1")  # loads inflect, which takes seconds, before tests that measure time

WORDS = Path(__file__).parent / "words.dict"
TEXT = "You can see it — I need to know.\r\n\r\nHELLO, you two!\n"


@pytest.fixture(autouse=True)
def only_small_lexicons(monkeypatch):
    """CMUdict takes seconds to read."""
    monkeypatch.setattr("lexicon.cmudict_entries", lambda: pytest.fail("CMUdict is not meant to be read here"))


@pytest.fixture(scope="module")
def lexicon():
    return load_lexicon(WORDS)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8", newline="")
    return path


def run(*arguments):
    """The exit status of the command with the tests' lexicon."""
    return build_lm.main([*map(str, arguments), "--lexicon", str(WORDS)])


def unigrams(path):
    """Words of the ARPA file and their probabilities."""
    lines = path.read_text().split("\\2-grams:")[0].split("\\1-grams:\n")[1].split("\n")
    return {line.split("\t")[1]: 10 ** float(line.split("\t")[0]) for line in lines if line}


def test_the_command_writes_an_arpa_file_and_says_what_is_in_it(tmp_path, text, capsys):
    output = tmp_path / "new" / "lm.arpa"
    assert run("--text", text, "--output", output) == 0
    said = capsys.readouterr().err
    assert "the text: 9.09% of 11 words are not in the lexicon, as it" in said
    assert f"{output}: 23 1-grams, 13 2-grams, 11 3-grams from 2 sentences" in said
    assert set(unigrams(output)) == {*load_lexicon(WORDS), "it", "<s>", "</s>", "<unk>"}
    assert list(output.parent.iterdir()) == [output]


def test_several_texts_orders_and_further_words(tmp_path, text):
    more, extra = tmp_path / "more.txt", tmp_path / "extra.dict"
    more.write_text("moo moo")
    extra.write_text("moo M UW\n")
    output = tmp_path / "lm.arpa"
    assert run("--text", text, more, "--order", 1, "--extra_words", extra, "--output", output) == 0
    both = unigrams(output)
    assert "ngram 2=0" in output.read_text()
    assert run("--text", text, "--order", 2, "--extra_words", extra, "--output", output) == 0
    assert both["moo"] > 2 * unigrams(output)["moo"] > 0
    assert "\\2-grams:" in output.read_text() and "\\3-grams:" not in output.read_text()


def test_the_train_sentences_of_a_data_set_of_any_number_of_features(tmp_path, text, capsys):
    """Each as often as it was spoken: there are six of 'a sentence'."""
    data, output = tmp_path / "data", tmp_path / "lm.arpa"
    for session in SESSIONS[:2]:
        path = write_split(data, session, "train", [40] * 3)
    with h5py.File(path, "r+") as file:
        file["trial_0001"].attrs["sentence_label"] = "I KNOW it."
    write_split(data, SESSIONS[2], "val", [40])
    assert run("--data_dir", data, "--order", 1, "--output", output) == 0
    assert "from 6 sentences" in capsys.readouterr().err
    words = unigrams(output)
    assert words["sentence"] > words["it"] > words["water"]
    assert run("--data_dir", data, "--text", text, "--order", 1, "--output", output) == 0
    assert "from 8 sentences" in capsys.readouterr().err


def test_a_data_set_without_sentences_is_refused(tmp_path, capsys):
    path = write_split(tmp_path, SESSIONS[0], "train", [40])
    with h5py.File(path, "r+") as file:
        file["trial_0000"].attrs["sentence_label"] = "..."
    assert run("--data_dir", tmp_path, "--output", tmp_path / "lm.arpa") == 2
    assert "no train trial has a sentence_label; name text files with --text\n" in capsys.readouterr().err
    path.write_bytes(b"no HDF5")
    assert run("--data_dir", tmp_path, "--output", tmp_path / "lm.arpa") == 2
    assert "cannot be read as HDF5" in (said := capsys.readouterr().err) and "--text takes another)" in said


# ---- field case 45


def test_45_an_upper_case_corpus_is_the_same_text(tmp_path, text):
    upper = tmp_path / "upper.txt"
    upper.write_text(TEXT.upper(), encoding="utf-8")
    for path in (text, upper):
        assert run("--text", path, "--output", path.with_suffix(".arpa")) == 0
    assert text.with_suffix(".arpa").read_bytes() == upper.with_suffix(".arpa").read_bytes()


def test_45_an_upper_case_vocabulary_is_the_same_lexicon(lexicon):
    upper = Lexicon({word.upper(): sounds for word, sounds in lexicon.items()})
    assert check_vocabulary(["you can see"], upper, "it") == 0 and dict(upper) == dict(lexicon)


def test_45_a_text_of_another_language_is_refused_and_the_old_model_stays(tmp_path, capsys):
    foreign, output = tmp_path / "foreign.txt", tmp_path / "lm.arpa"
    foreign.write_text("ich weiß es nicht you\nes war einmal\n", encoding="utf-8")
    output.write_text("old")
    assert run("--text", foreign, "--output", output) == 2
    assert "87.50% of 8 words are not in the lexicon, as es, ich, weiss, nicht, war; is it English" in (
        capsys.readouterr().err
    )
    assert output.read_text() == "old" and sorted(tmp_path.iterdir()) == [foreign, output]


def test_45_half_of_the_words_outside_is_told_and_no_fault(lexicon, caplog):
    with caplog.at_level(logging.INFO):
        assert check_vocabulary(["you zebra", "can zebra"], lexicon, "val") == 0.5
    assert "val: 50.00% of 4 words are not in the lexicon, as zebra" in caplog.text


def test_45_a_long_text_of_many_unknown_words_takes_no_long_time(lexicon):
    text = [" ".join(f"you {_letters(i + j)}" for j in range(50)) for i in range(0, 20_000, 50)]
    start = time.perf_counter()
    assert check_vocabulary(text, lexicon, "it") == 0.5
    assert time.perf_counter() - start < 2


def _letters(number):
    return "x" + "".join(chr(97 + int(digit)) for digit in str(number))


# ---- texts that cannot be read


@pytest.mark.parametrize(
    ("content", "sentences"),
    [
        (b"\xef\xbb\xbfOne\n", ["one"]),
        (b"one\rtwo\r\n three", ["one", "two", "three"]),
        ("one\u2028two".encode(), ["one", "two"]),
        (b"2\n...\n<s> a </s> <unk>\n", ["two", "s a s unk"]),
    ],
)
def test_a_text_is_a_sentence_a_line_in_normal_form(tmp_path, content, sentences):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert read_sentences([path]) == sentences


def test_all_texts_that_cannot_be_used_are_named(tmp_path, text):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "signs.txt").write_text("... ?\n\n")
    (tmp_path / "wide.txt").write_text(TEXT, encoding="utf-16")
    names = ("empty.txt", "signs.txt", "wide.txt", "none.txt", ".")
    with pytest.raises(TextError) as error:
        read_sentences([text, *(tmp_path / name for name in names)])
    reasons = ["holds no word", "holds no word", "cannot be read as text in UTF-8", "No such file", "Is a directory"]
    lines = str(error.value).splitlines()
    for name, reason, line in zip(names, reasons, lines, strict=True):
        assert line.startswith(str(tmp_path / name)) and reason in line


def test_the_command_says_what_is_wrong(tmp_path, text, capsys):
    cases = [
        ([], "there is no text: name files with --text, or a data set with --data_dir"),
        (["--text", tmp_path / "none.txt"], "none.txt: cannot be read as text"),
        (["--text", text, "--order", 0], "the order must be from 1 to 6, not 0"),
        (["--text", text, "--order", 7], "the order must be from 1 to 6, not 7"),
        (["--text", text, "--frequency_weight", 1], "must be from 0 to below 1, not 1.0"),
        (["--text", text, "--word_frequencies", tmp_path / "none"], "cannot be read as a list of word frequencies"),
        (["--text", text, "--extra_words", tmp_path / "none"], "cannot read the dictionary"),
        (["--data_dir", tmp_path / "none"], "none: no session there has a data_train.hdf5"),
        (["--data_dir", tmp_path], "no session there has a data_train.hdf5; name a data set with --data_dir"),
    ]
    output = tmp_path / "lm.arpa"
    output.write_text("old")
    for arguments, message in cases:
        assert run(*arguments, "--output", output) == 2
        said = capsys.readouterr().err
        assert message in said and "--lm_" not in said and "Traceback" not in said
    assert output.read_text() == "old" and sorted(tmp_path.iterdir()) == [output, text]


def test_the_output_must_be_a_file_in_a_directory_that_can_be_written(tmp_path, text, capsys, monkeypatch):
    assert run("--text", text, "--output", tmp_path) == 2
    assert "is a directory; name a file with --output" in capsys.readouterr().err
    assert run("--text", text, "--output", text / "lm.arpa") == 2
    assert "results cannot be written there" in capsys.readouterr().err

    def denied(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(evaluate_model_helpers.tempfile, "TemporaryFile", denied)
    monkeypatch.setattr(build_lm, "read_sentences", lambda _: pytest.fail("the directory is tried first"))
    assert run("--text", text, "--output", tmp_path / "lm.arpa") == 2
    said = capsys.readouterr().err
    assert (
        "results cannot be written there (Permission denied); name a directory that can be written with --output\n"
        in said
    )


def test_no_file_that_is_read_is_written_over(tmp_path, text, capsys):
    assert run("--text", text, "--output", tmp_path / "x" / ".." / text.name) == 2
    assert run("--text", text, "--word_frequencies", tmp_path / "counts", "--output", tmp_path / "counts") == 2
    assert capsys.readouterr().err.count("is read, and would be overwritten; name another file with --output") == 2
    assert read_sentences([text]) and list(tmp_path.iterdir()) == [text]


def test_a_full_disk_and_an_interruption_leave_the_old_model(tmp_path, text, capsys, monkeypatch):
    output = tmp_path / "lm.arpa"
    output.write_text("old")
    for error, status in ((OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr("os.replace", fail)
        assert run("--text", text, "--output", output) == status
    assert "No space left" in capsys.readouterr().err
    assert output.read_text() == "old" and sorted(tmp_path.iterdir()) == [output, text]


# ---- word frequencies


def test_a_file_of_word_frequencies(tmp_path, lexicon):
    path = tmp_path / "counts.csv"
    path.write_bytes("\ufeffSee,10\r\n\r\nto\t2.5\nTO 1e1\nzebra 7\nwater, 0\n".encode())
    assert read_frequencies(str(path), lexicon) == {"see": 10, "to": 12.5, "water": 0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is empty"),
        (
            "word,count\na,1\nb 2 3\nc\nd -1\ne nan\nf inf\n",
            "line 1: 'word,count'\nline 3: 'b 2 3'\nline 4: 'c'\nline 5",
        ),
        ("1 2\n" * 3 + "a b\n" * 20, "line 4: .*\nand 10 more$"),
        ("zebra 4\n", "none of its 1 words is in the lexicon"),
        ("you 0\nsee 0\n", "none of its 2 words is in the lexicon with a number above 0"),
    ],
)
def test_a_file_that_is_no_list_of_frequencies_says_where(tmp_path, lexicon, content, message):
    path = tmp_path / "counts.txt"
    path.write_text(content)
    with pytest.raises(TextError, match=r"(?s)counts\.txt: .*" + message):
        read_frequencies(str(path), lexicon)
    with pytest.raises(TextError, match="cannot be read as a list"):
        read_frequencies(str(tmp_path), lexicon)


def test_frequencies_make_words_that_the_text_lacks_as_likely_as_they_are(tmp_path, text, monkeypatch):
    """From wordfreq, too, which knows words in their usual spelling."""
    asked = []

    def get_frequency_dict(*arguments, **keywords):
        asked.append((arguments, keywords))
        return {"water": 3e-4, "cat": 1e-4, "I'm": 1e-4, "zebra": 1e-3}

    monkeypatch.setitem(sys.modules, "wordfreq", types.SimpleNamespace(get_frequency_dict=get_frequency_dict))
    counts, output = tmp_path / "counts.txt", tmp_path / "lm.arpa"
    counts.write_text("water 3\ncat 1\ni'm 1\n")
    found = []
    for arguments in (
        [],
        ["--word_frequencies", counts],
        ["--word_frequencies", "wordfreq"],
        ["--word_frequencies", "wordfreq", "--frequency_weight", 0.1],
    ):
        assert run("--text", text, *arguments, "--output", output) == 0
        found.append(unigrams(output))
    none, file, package, little = found
    assert none["water"] < none["cat"] and file["water"] > 2 * file["cat"]
    assert file == pytest.approx(package) and asked[0] == (("en",), {"wordlist": "large"})
    # 0.6 and 0.1 of the unigrams, of which 2 in 13 are ends of sentences
    assert package["water"] == pytest.approx(0.4 * none["water"] + 0.6 * 0.6 * 11 / 13, rel=1e-5)
    assert little["water"] == pytest.approx(0.9 * none["water"] + 0.1 * 0.6 * 11 / 13, rel=1e-5)
    assert math.isclose(sum(package.values()), 1, abs_tol=1e-5)


def test_without_the_wordfreq_package_its_installation_is_told(lexicon, monkeypatch):
    monkeypatch.setitem(sys.modules, "wordfreq", None)
    with pytest.raises(TextError, match="pip install wordfreq"):
        read_frequencies("wordfreq", lexicon)


def test_a_model_of_one_word(lexicon):
    model = build_lm.build_lm(["you"], lexicon, order=ngram.HIGHEST_ORDER)
    assert model.probability("you", (ngram.BEGIN,)) > 0.4
