"""nbest.py: the n-best file and the log that becomes one."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nbest
from evaluate_model_helpers import write_text_atomically
from nbest import Hypothesis, NbestLog, TrialHypotheses, nbest_text, parse_line, read_nbest

ODD = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh\té\U0001f600\ufeff"
scores = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=8) | st.just(ODD)
trials = st.builds(
    TrialHypotheses,
    id=st.integers(),
    session=texts,
    block=st.integers(0),
    trial=st.integers(0),
    hypotheses=st.lists(st.builds(Hypothesis, texts, scores, scores, scores), min_size=1, max_size=3).map(tuple),
    reference=st.none() | texts,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("nbest")


@given(st.lists(trials, min_size=1, max_size=4))
def test_what_is_written_is_read_whatever_the_texts_hold(directory, rows):
    path = directory / "nbest.jsonl"
    path.write_text(nbest_text(rows), encoding="utf-8", newline="")
    assert read_nbest(path) == rows
    assert path.read_bytes().count(b"\n") == len(rows)


def trial(index, text="you can see it", reference="you can see"):
    return TrialHypotheses(index, "t15.2023.08.13", 8, index, (Hypothesis(text, -21.4, -9.1, -12.3),), reference)


def test_a_line_is_as_the_documentation_shows():
    assert trial(0).to_json() == (
        '{"id": 0, "session": "t15.2023.08.13", "block": 8, "trial": 0, "hypotheses": '
        '[{"text": "you can see it", "score": -21.4, "acoustic_score": -9.1, "lm_score": -12.3}], '
        '"reference": "you can see"}'
    )
    assert "reference" not in trial(0, reference=None).to_json()
    assert parse_line(trial(3, reference="").to_json()).reference == ""


def test_further_keys_byte_order_marks_crlf_and_empty_lines_do_no_harm(tmp_path):
    path = tmp_path / "nbest.jsonl"
    row = json.loads(trial(0).to_json()) | {"by": "rescore_nbest.py"}
    row["hypotheses"][0]["total_score"] = 1.0
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode() + b"\r\n\r\n \n" + trial(1).to_json().encode())
    assert read_nbest(path) == [trial(0), trial(1)]


def changed(**changes):
    row = json.loads(trial(0).to_json())
    for name, value in changes.items():
        (row if name in row else row["hypotheses"][0])[name] = value
    return json.dumps(row)


@pytest.mark.parametrize(
    "line",
    [
        "you can see it",
        "[1, 2]",
        "3",
        "null",
        "{}",
        trial(0).to_json()[:-1],
        changed(hypotheses=None),
        changed(hypotheses={"text": "you"}),
        changed(hypotheses=["you"]),
        changed(hypotheses=[]),
        changed(text=None),  # not the word 'None'
        changed(text=5),
        changed(reference=["you"]),
        changed(session=None),
        changed(score="high"),
        changed(score=10**400),
        changed(id="first"),
        changed(id=1).replace('"id": 1', '"id": 1e999'),
        changed(block=None),
        '{"id": ' + "9" * 5000 + "}",
    ],
)
def test_a_line_that_is_no_trial_is_refused(line):
    with pytest.raises(ValueError, match=r"no line of an n-best file \(|trial 0 has no hypothesis") as error:
        parse_line(line)
    assert len(str(error.value)) < 400


def test_all_broken_lines_are_named(tmp_path):
    path = tmp_path / "nbest.jsonl"
    path.write_text("\n".join([trial(0).to_json(), "x", "", changed(hypotheses=[]), "{}"]))
    with pytest.raises(ValueError) as error:
        read_nbest(path)
    lines = str(error.value).splitlines()
    assert lines[0] == f"{path}:" and len(lines) == 4
    assert [line.split(":")[0] for line in lines[1:]] == ["line 2", "line 4", "line 5"]
    path.write_text("x\n" * 1000)
    with pytest.raises(ValueError, match=r"line 10: .*\nand 990 more$"):
        read_nbest(path)


def test_a_file_that_holds_no_trial_or_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "nbest.jsonl"
    for content, message in ((b"", "holds no trial"), (b"\n \r\n", "holds no trial"), (b"\xff\xfe{", "cannot be read")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"nbest\.jsonl: {message}"):
            read_nbest(path)
    for bad in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=f"{bad.name}: cannot be read as an n-best file"):
            read_nbest(bad)


def test_scores_that_are_no_numbers_are_never_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        TrialHypotheses(0, "s", 1, 1, (Hypothesis("", float("nan"), 0.0, 0.0),)).to_json()


# ---- the log

KEY = {"step": 3, "name": "é\u2028", "beam": [1, 2.5]}
ROWS = [trial(0, "über", "naïve"), trial(1), trial(2, "", None), trial(3, ODD)]


def decode(path, key=KEY, stop=None, rows=ROWS):
    """What the caller does: go on after the trials that are there; `stop` trials later a kill comes."""
    with NbestLog(path, key) as log:
        found = len(log.done)
        assert log.done == rows[:found]
        for row in rows[found:][:stop]:
            log.add(row)
        if stop is None:
            log.finish()
    return found


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_after_a_kill_at_any_byte_it_goes_on_and_the_file_is_the_same(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("log") / "nbest_val.jsonl"
    part = path.with_name("nbest_val.jsonl.part")
    decode(path, stop=data.draw(st.integers(0, len(ROWS)), "trials"))
    whole = part.read_bytes()
    rest = whole[: data.draw(st.integers(0, len(whole)), "bytes")]
    part.write_bytes(rest)
    found = decode(path)
    ends = [len(line.encode()) for line in part_lines()]
    assert found == sum(len(rest) >= sum(ends[: n + 2]) - 1 for n in range(len(ROWS)))  # the line's end may be lost
    assert read_nbest(path) == ROWS and path.read_text(encoding="utf-8") == nbest_text(ROWS)
    assert list(path.parent.iterdir()) == [path]


def part_lines():
    return [json.dumps(KEY, sort_keys=True) + "\n", *(row.to_json() + "\n" for row in ROWS)]


def test_a_kill_while_the_log_is_opened_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "nbest.jsonl"
    decode(path, stop=3)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            NbestLog(path, KEY)
    assert decode(path) == 3


def test_another_key_begins_anew(tmp_path):
    path = tmp_path / "nbest.jsonl"
    decode(path, stop=3)
    assert decode(path, KEY | {"step": 4}, stop=1) == 0
    assert decode(path) == 0
    decode(path, stop=2)
    assert decode(path, dict(reversed(KEY.items()))) == 2  # the order of a key's entries means nothing


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xff\n", b"{}", nbest_text(ROWS).encode()])
def test_a_part_file_of_another_kind_is_replaced(tmp_path, content):
    path = tmp_path / "nbest.jsonl"
    (tmp_path / "nbest.jsonl.part").write_bytes(content)
    assert decode(path) == 0 and read_nbest(path) == ROWS


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    path = tmp_path / "nbest.jsonl"
    path.write_text("old")
    decode(path, stop=4)
    assert path.read_text() == "old"

    def full(target, text):
        if target == path:
            raise OSError(28, "No space left on device")
        write_text_atomically(target, text)

    with monkeypatch.context() as patch:
        patch.setattr(nbest, "write_text_atomically", full)
        with pytest.raises(OSError, match="No space left"):
            decode(path)
    assert path.read_text() == "old"
    assert decode(path) == 4 and path.read_text(encoding="utf-8") == nbest_text(ROWS)


def test_each_trial_is_in_the_file_at_once(tmp_path):
    path = tmp_path / "nbest.jsonl"
    with NbestLog(path, KEY) as log:
        for n, row in enumerate(ROWS, 1):
            log.add(row)
            assert Path(f"{path}.part").read_text(encoding="utf-8").count('"id"') == n
