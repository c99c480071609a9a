"""The report of an evaluation: a page that stands alone, with the numbers of the results and nothing unescaped."""

import re
from collections import Counter
from functools import partial
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from evaluate_model_helpers import (
    PHONEMES,
    bootstrap_interval,
    confusions,
    edit_distance,
    prediction_rows,
    text_to_phonemes,
)
from evaluation_report import error_rates
from html_report import align, confusion_counts, report, worst_trials, write_report
from report_pictures import PHONEME_GROUPS
from word_evaluation import word_results

EVIL = '<script>alert("x")</script>&\'"'
# True and decoded phonemes, true and decoded sentence, of trials in two sessions.
TRIALS = (
    ("t15.2023.08.11", "HH AY | DH EH R |", "HH AY | DH EH |", "hi there", "hi there"),
    ("t15.2023.08.11", "G UH D | D EY |", "G UH D | T EY IH |", "good day", "good tea eh"),
    ("t15.2023.08.25", "W AH N | T UW |", "W AH N | T UW |", "one two", "one two"),
    ("t15.2023.08.25", "Y EH S |", "", "yes", ""),
    ("t15.2023.08.25", "N OW | N OW | N OW |", "M OW | M OW |", "no no no", "mow mow"),
)


def evaluated(trials=TRIALS, lm="ngram", corpora=None, seen=()):
    """Results and rows of trials, by the functions that evaluation uses."""
    sessions, *phonemes, references, texts = (list(column) for column in zip(*trials, strict=True))
    truths, decoded = ([text_to_phonemes(each) for each in column] for column in phonemes)
    groups = {"session": sessions} | ({"corpus": corpora} if corpora else {})
    facts = {"kind": lm, "lexicon_words": 1234}
    facts |= {"order": 3, "source": "some text", "perplexity": 40.6} if lm == "ngram" else {}
    facts |= {"references_outside_lexicon": 0.25} if any(references) else {}
    words = SimpleNamespace(facts=facts, lm_sentences=frozenset(seen))
    results = {"eval_type": "val", "checkpoint": "run/best_checkpoint", "step": 70, "n_trials": len(trials)}
    results |= {"counted_as_deletions": [], "left_out_by_bad_trials_dict": []}
    results |= error_rates(truths, decoded, groups)
    results |= {"lm": words.facts}
    results |= word_results(references, texts, None if lm == "none" else texts, words, groups)
    places = [(session, 1, i) for i, session in enumerate(sessions)]
    return results, prediction_rows(places, decoded, truths, corpora, texts, references)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """Intervals are tested elsewhere; here they only need to be some."""
    for module in ("evaluation_report", "word_evaluation"):
        monkeypatch.setattr(f"{module}.bootstrap_interval", partial(bootstrap_interval, n_resamples=20))


class Page(HTMLParser):
    """What a page holds: its text, its tags and their attributes; tags must close in order."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, page: str):
        super().__init__()
        self.open, self.tags, self.attributes, self.pieces = [], Counter(), [], []
        self.feed(page)
        self.close()
        assert not self.open
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.pieces.append(data)


def test_the_numbers_in_the_report_are_those_of_the_results():
    results, rows = evaluated(corpora=["a", "b", "a", "b", "a"], seen=["hi there"])
    text = Page(report(results, rows)).text
    for name in ("per", "wer"):
        low, high = (f"{100 * end:.1f}%" for end in results[f"{name}_interval"])
        assert f"{name.upper()} {100 * results[name]:.1f}% 95% interval {low} to {high}" in text
    for name in ("wer", "cer", "sentence_error_rate"):
        for suffix in ("", "_lexicon_only"):
            rate, (low, high) = results[name + suffix], results[f"{name}{suffix}_interval"]
            assert f"{100 * rate:.1f}% ({100 * low:.1f}% to {100 * high:.1f}%)" in text
    assert "run/best_checkpoint , step 70" in text and "beam search, 3-gram" in text
    assert "true sentences: 41; 25.0% of their words are not in the lexicon" in text and "source: some text" in text
    assert "20.0% of the true sentences" in text and "WER of these 0.0%, without them 75.0%" in text
    for group, n_trials in (("session", (2, 3)), ("corpus", (3, 2))):
        for (name, per), n in zip(results[f"per_by_{group}"].items(), n_trials, strict=True):
            assert f"{name} {n} {100 * per:.1f}% {100 * results[f'wer_by_{group}'][name]:.1f}%" in text
    for entry in results["confusions"]:
        assert f"{entry['true'] or 'nothing'} {entry['decoded'] or 'nothing'} {entry['count']}" in text


def test_tuning_on_the_same_trials_and_trials_left_out_are_said():
    results, rows = evaluated()
    results |= {"tuning": {"wer_cross_validated": 0.123}, "counted_as_deletions": ["s trial_1: too short"]}
    text = Page(report(results, rows)).text
    assert "cross-validation 12.3%" in text and "counted as deletions: s trial_1: too short" in text


def test_all_that_comes_from_data_and_paths_is_escaped():
    results, rows = evaluated([(EVIL, "AA |", "B |", EVIL, f"x {EVIL}")] * 2, corpora=[EVIL, "other"])
    results |= {"checkpoint": EVIL + "\udcff", "counted_as_deletions": [EVIL], "left_out_by_bad_trials_dict": [EVIL]}
    results["lm"] |= {"source": [EVIL, EVIL], "word_frequencies": EVIL}
    written = report(results, rows)
    page = Page(written)
    assert not page.tags["script"] and "<script" not in written and "&amp;" in written
    assert page.text.count('alert("x")') > 8 and "\\udcff" in page.text


def test_the_page_stands_alone():
    page = Page(report(*evaluated()))
    assert page.tags["svg"] == 2 and not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not {name for name, _ in page.attributes} & {"src", "href", "onclick", "onload", "style"}
    assert "prefers-color-scheme: dark" in report(*evaluated()) and "url(" not in report(*evaluated())


def test_the_same_input_gives_the_same_bytes_and_a_failure_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report_val.html"
    write_report(path, *evaluated())
    first = path.read_bytes()
    write_report(path, *evaluated())
    assert path.read_bytes() == first
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(path, *evaluated(TRIALS[:2]))
    assert path.read_bytes() == first and list(tmp_path.iterdir()) == [path]


# ---- sessions ----


@pytest.mark.parametrize("n_sessions", [1, 2, 45])
def test_the_chart_has_a_mark_for_each_rate_in_order_of_date(n_sessions):
    days = [f"{2023 + i // 28}.02.{1 + i % 28:02}" for i in range(n_sessions)]
    results, rows = evaluated([(f"t15.{day}", *TRIALS[1][1:]) for day in reversed(days)])
    written = report(results, rows)
    chart = written[written.index("<svg") : written.index("</svg>")]
    assert chart.count("<circle") == chart.count("<rect") == n_sessions
    assert re.findall(r"(\d{4}-\d\d-\d\d)</text>", chart) == [day.replace(".", "-") for day in days]
    places = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', chart)]
    assert places == sorted(set(places))
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', chart).groups())
    assert all(0 < float(x) < width for x in re.findall(r'x="([\d.-]+)"', chart))
    assert all(0 < float(y) < height for y in re.findall(r'y="([\d.-]+)"', chart))


def test_two_sessions_of_one_day_keep_their_names():
    written = report(*evaluated([(f"{who}.2023.08.11", *TRIALS[0][1:]) for who in ("t15", "t16")]))
    assert "t15.2023.08.11</text>" in written and "t16.2023.08.11</text>" in written


# ---- confusions ----


def test_the_groups_hold_every_phoneme_once():
    assert sorted(name for group in PHONEME_GROUPS.values() for name in group) == sorted(PHONEMES[1:])


def test_confusion_counts_sum_to_the_edits_and_to_the_occurrences():
    results, rows = evaluated()
    counts = confusion_counts(rows)
    assert sum(count for (true, decoded), count in counts.items() if true != decoded) == results["edits"]
    assert sum(count for (true, _), count in counts.items() if true) == results["phonemes"]
    assert sum(count for (_, decoded), count in counts.items() if decoded) == sum(
        len(row["predicted_phonemes"].split()) for row in rows
    )
    assert min(counts.values()) >= 0
    assert counts["N", "M"] == 2 and counts["D", "T"] == 1 and counts["", "IH"] == 1 and counts["R", ""] == 1
    assert counts["|", "|"] == 8
    written = report(results, rows)
    assert "N decoded as M: 2 of 4</title>" in written and "nothing decoded as IH: 1 of 0</title>" in written


# ---- worst trials ----


def test_the_worst_trials_come_by_words_then_phonemes_and_never_one_without_errors():
    _, rows = evaluated()
    assert [row["id"] for row in worst_trials(rows)] == [4, 1, 3, 0]
    assert [row["id"] for row in worst_trials(rows, 2)] == [4, 1]
    places = re.findall(r"\d+\. t15\.\d{4}\.\d\d\.\d\d, block 1, trial (\d)", report(*evaluated()))
    assert places == ["4", "1", "3", "0"]
    assert len(worst_trials(evaluated([TRIALS[0]] * 30)[1])) == 10


def test_without_a_true_sentence_phonemes_decide():
    trials = [(*trial[:3], "", trial[4]) for trial in TRIALS]
    results, rows = evaluated(trials)
    assert [row["id"] for row in worst_trials(rows)] == [4, 3, 1, 0]
    text = Page(report(results, rows)).text
    assert "By phoneme edits." in text and "WER n/a" in text
    assert "true sentence not known, decoded: mow mow" in text


def test_alignments_are_marked_and_have_as_many_marks_as_edits():
    assert align(list("abc"), list("axcd")) == [
        ("equal", "a", "a"), ("replace", "b", "x"), ("equal", "c", "c"), ("insert", "", "d"),
    ]  # fmt: skip
    assert align(["a"], []) == [("delete", "a", "")] and align([], []) == []
    _, rows = evaluated()
    written, found = report(*evaluated()), Counter()
    for row in rows:
        for names in (("true_phonemes", "predicted_phonemes"), ("true_sentence", "predicted_sentence")):
            columns = align(*(row[name].split() for name in names))
            marks = Counter(tag for tag, _, _ in columns)
            assert marks.total() - marks["equal"] == edit_distance(*(row[name].split() for name in names))
            assert " ".join(true for _, true, _ in columns if true) == row[names[0]]
            assert " ".join(decoded for _, _, decoded in columns if decoded) == row[names[1]]
            found += marks
    for tag, sign in (("replace", "≠"), ("insert", "+"), ("delete", "−")):
        assert written.count(f'<span class="pair {tag}">') == written.count(f"<span>{sign}</span>") == found[tag] > 0
    assert '<span class="pair replace"><span>day</span><span>≠</span><span>' in written


def test_the_alignment_shown_is_the_one_that_is_counted():
    true, decoded = ["AH", "T", "AH", "N", "T", "AH"], ["T", "AH", "N", "N", "AH", "T"]
    shown = Counter((a, b) for tag, a, b in align(true, decoded) if tag != "equal")
    ids = [text_to_phonemes(" ".join(names)) for names in (true, decoded)]
    named = {tuple("" if i is None else PHONEMES[i] for i in pair): n for pair, n in confusions([ids]).items()}
    assert shown == named


# ---- little to show ----


def test_without_a_language_model_the_lexicon_stands_alone():
    text = Page(report(*evaluated(lm="none"))).text
    assert "No language model" in text and "the lexicon alone" in text and "beam search" not in text
    assert "words by the lexicon alone" in text and "By corpus" not in text


@pytest.mark.parametrize(
    "trials",
    [[TRIALS[2]], [("day one", "", "", "", "")], [("day one", "", "AH |", "", "a")]],
    ids=["all right", "all empty", "only insertions"],
)
@pytest.mark.parametrize("lm", ["ngram", "lexicon", "none"])
def test_the_report_is_written_where_there_is_little_to_show(trials, lm):
    page = Page(report(*evaluated(trials, lm)))
    assert ("No trial has an error." in page.text) == (trials[0][1] == trials[0][2])
    assert "nan" not in page.text.lower() and "None" not in page.text
