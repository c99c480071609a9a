"""Sentences in evaluation: which language model, what is written, what an interruption costs, what is refused."""

import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml
from trained_run import LEXICON, evaluate, make_config, make_run, rows_of, write_split

import evaluate_model
import word_evaluation
from checkpointing import CheckpointError
from config import save_config
from dataset_index import index_trials
from emissions import EmissionStore
from language_model import NgramDecoder
from lexicon import load_lexicon
from nbest import read_nbest
from ngram import train_ngram
from word_evaluation import count_word_errors, word_error_rates

SENTENCES = ["i want water", "you see the sea", "i need to see you", "no i can do it", "hello you"]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A run and its data set, with train trials too."""
    monkeypatch.setenv("B2TXT_CACHE_DIR", str(tmp_path / "cache"))
    make_run(tmp_path)
    write_split(tmp_path / "data", "train", labelled=True)
    (tmp_path / "text").write_text("\n".join(SENTENCES))
    return tmp_path


def evaluation(root, eval_type="val", output="out", **options):
    options = {"output_dir": root / output, "device": "cpu", "decoder_processes": 1} | options
    return evaluate(root / "run", eval_type=eval_type, **options)


def test_the_train_sentences_are_the_language_model_by_default(root, caplog):
    with caplog.at_level(logging.INFO, logger="b2txt"):
        results = evaluation(root)
    facts = results["lm"]
    assert (facts["kind"], facts["order"], facts["source"]) == ("ngram", 3, "the train sentences of the data")
    assert facts["references_outside_lexicon"] == facts["text_outside_lexicon"] == 0
    assert facts["perplexity"] > 1 and (root / "out" / "ngram_val.arpa").exists()
    assert "train sentences of the data: 0.00% of 10 words are not in the lexicon" in caplog.text
    # All true sentences are "a b", in train as in val.
    assert results["share_of_sentences_seen_by_lm"] == 1 and results["wer_of_sentences_unseen_by_lm"] is None
    assert results["wer_of_sentences_seen_by_lm"] == results["wer"]


def test_errors_of_words_are_those_of_the_rows(root):
    results = evaluation(root, csv_path=root / "description.csv")
    rows = rows_of(root / "out" / "predictions_val.csv")
    assert {row["true_sentence"] for row in rows} == {"a b"}
    edits = sum(int(row["word_edits"]) for row in rows)
    assert results["wer"] == edits / 10 and results["word_edits"] == edits and results["words"] == 10
    low, high = results["wer_interval"]
    assert low <= results["wer"] <= high
    assert results["sentence_error_rate"] == sum(row["predicted_sentence"] != "a b" for row in rows) / 5
    for column in ("session", "corpus"):
        for name, rate in results[f"wer_by_{column}"].items():
            chosen = [row for row in rows if row[column] == name]
            assert rate == sum(int(row["word_edits"]) for row in chosen) / (2 * len(chosen))
    assert json.loads((root / "out" / "evaluation_val.json").read_text())["wer"] == results["wer"]
    assert (root / "out" / "report_val.html").exists()
    assert f"{100 * results['wer']:5.1f}%" in evaluate_model.format_results(results)


def test_word_character_and_sentence_errors_are_summed():
    errors = count_word_errors(["i see you", "no", ""], ["i see", "know", "never counted"])
    rates = word_error_rates(errors)
    assert rates["wer"] == 2 / 4 and rates["cer"] == (4 + 2) / (9 + 2) and rates["sentence_error_rate"] == 1
    assert word_error_rates(count_word_errors([""], ["i"]))["wer"] is None


def test_n_best_lists_hold_the_scores_of_every_trial(root):
    results = evaluation(root, nbest=3)
    trials = read_nbest(root / "out" / "nbest_val.jsonl")
    rows = rows_of(root / "out" / "predictions_val.csv")
    assert [trial.id for trial in trials] == list(range(5)) and {trial.reference for trial in trials} == {"a b"}
    assert [trial.hypotheses[0].text for trial in trials] == [row["predicted_sentence"] for row in rows]
    assert max(len(trial.hypotheses) for trial in trials) == 3
    assert str(root / "out" / "nbest_val.jsonl") in results["files"]


def test_the_submission_has_words_and_no_empty_text(root):
    """Field cases 46 and 47: a trial too short for a patch gets the likeliest word."""
    evaluation(root, "test", lm_text=[root / "text"])
    submission, rows = (rows_of(root / "out" / name) for name in ("submission_test.csv", "predictions_test.csv"))
    assert [row["id"] for row in submission] == list("01234")
    lexicon = load_lexicon(LEXICON)
    decoder = NgramDecoder(lexicon, make_config(root).decoder, root / "out" / "ngram_test.arpa")
    assert rows[2]["predicted_sentence"] == "" and submission[2]["text"] == decoder.likeliest_word == "you"
    for row, entry in zip(rows, submission, strict=True):
        assert entry["text"] == (row["predicted_sentence"] or "you") and set(entry["text"].split()) <= set(lexicon)


def test_an_interrupted_evaluation_goes_on(root, monkeypatch):
    whole = evaluation(root, output="whole")
    computed, decoded = [], []
    compute, decode = evaluate_model.compute_logits, NgramDecoder.decode

    def compute_two(*arguments):
        for n, found in enumerate(compute(*arguments)):
            if n == 2 and len(computed) == 2:
                raise KeyboardInterrupt
            computed.append(found[0])
            yield found

    def decode_three(self, log_probs):
        if len(decoded) == 3:
            decoded.append(None)
            raise KeyboardInterrupt
        decoded.append(log_probs)
        return decode(self, log_probs)

    monkeypatch.setattr(evaluate_model, "compute_logits", compute_two)
    with pytest.raises(KeyboardInterrupt):
        evaluation(root)
    assert len(computed) == 2 and not (root / "out" / "nbest_val.jsonl").exists()
    monkeypatch.setattr(NgramDecoder, "decode", decode_three)
    with pytest.raises(KeyboardInterrupt):  # now in the words
        evaluation(root)
    assert len(computed) == 4  # the trial too short has no frames: nothing of the first two was computed again
    again = evaluation(root)
    assert len(computed) == 4 and len(decoded) == 4 + 2  # three were kept, two were left
    assert not (root / "out" / "nbest_val.jsonl.part").exists()
    drop = ("files", "checkpoint")
    assert {k: v for k, v in again.items() if k not in drop} == {k: v for k, v in whole.items() if k not in drop}
    for name in ("nbest_val.jsonl", "predictions_val.csv"):
        assert (root / "out" / name).read_bytes() == (root / "whole" / name).read_bytes()


def test_emissions_of_another_checkpoint_or_data_are_computed_anew(root, monkeypatch):
    first = evaluation(root)
    computed = []
    compute = evaluate_model.compute_logits
    monkeypatch.setattr(evaluate_model, "compute_logits", lambda *a: (computed.append(1) or x for x in compute(*a)))
    assert evaluation(root)["edits"] == first["edits"] and not computed
    write_split(root / "data", "val", labelled=True)  # the same content, written anew
    assert evaluation(root)["edits"] == first["edits"] and len(computed) == 4
    evaluation(root, batch_size=1)
    assert len(computed) == 4  # the batch changes nothing


def test_other_settings_of_the_decoder_are_decoded_anew(root):
    (root / "narrow.yaml").write_text("decoder: {beam_size: 1, lm_weight: 3}\n")
    wide, narrow = evaluation(root), evaluation(root, decoder_config=str(root / "narrow.yaml"), output="narrow")
    config = make_config(root)
    config.decoder.beam_size, config.decoder.lm_weight = 1, 3.0
    save_config(config, root / "given.yaml")
    given = evaluation(root, config_path=root / "given.yaml", output="given")
    texts = [
        [r["predicted_sentence"] for r in rows_of(root / f / "predictions_val.csv")] for f in ("out", "narrow", "given")
    ]
    assert texts[0] != texts[1] == texts[2]
    assert wide["edits"] == narrow["edits"] == given["edits"]  # greedy phonemes are as they were


def test_tuning_writes_a_file_that_evaluation_takes(root):
    results = evaluation(root, tune_decoder=True, lm_text=[root / "text"])
    tuning = results["tuning"]
    assert tuning["wer_after"] <= tuning["wer_before"] and tuning["wer_after"] == results["wer"]
    tuned = yaml.safe_load((root / "out" / "decoder_tuned.yaml").read_text())["decoder"]
    assert tuned == tuning["settings"] and tuned["n_best"] == 10
    again = evaluation(
        root, output="again", lm_text=[root / "text"], decoder_config=str(root / "out" / "decoder_tuned.yaml")
    )
    assert again["wer"] == results["wer"]
    evaluation(root, "test", lm_text=[root / "text"], decoder_config=str(root / "out" / "decoder_tuned.yaml"))


def test_without_a_language_model_nothing_is_looked_for_and_nothing_waits(root, monkeypatch):
    """Field case 44."""
    monkeypatch.setattr(word_evaluation, "NgramDecoder", lambda *_: pytest.fail("made a decoder"))
    (root / "data" / "t15.2023.08.11" / "data_train.hdf5").unlink()
    results = evaluation(root, lm="none")
    assert "wer" not in results and results["wer_lexicon_only"] is not None
    assert not (root / "out" / "nbest_val.jsonl").exists()


def test_where_kenlm_is_missing_the_lexicon_alone_decodes_and_says_so(root, monkeypatch, caplog):
    monkeypatch.setattr(word_evaluation, "kenlm_available", lambda: False)
    results = evaluation(root)
    assert results["lm"]["kind"] == "lexicon" and results["wer"] is not None
    assert "by the lexicon alone" in caplog.text
    assert all(
        hypothesis.lm_score == 0 for t in read_nbest(root / "out" / "nbest_val.jsonl") for hypothesis in t.hypotheses
    )


def test_order_file_and_further_words_change_the_language_model(root):
    by_text = evaluation(root, lm_text=[root / "text"], lm_order=2)["lm"]
    assert by_text["order"] == 2 and len(by_text["ngrams"]) == 2
    lexicon = load_lexicon(LEXICON)
    train_ngram(SENTENCES, 2, lexicon).save(root / "own.arpa")
    by_file = evaluation(root, lm_file=str(root / "own.arpa"))["lm"]
    assert by_file["perplexity"] == pytest.approx(by_text["perplexity"], rel=1e-5) and "order" not in by_file
    (root / "extra").write_text("aardvark  AA1 R D V AA2 R K\n")
    assert evaluation(root, extra_words=str(root / "extra"))["lm"]["lexicon_words"] == by_text["lexicon_words"] + 1
    (root / "counts").write_text("cat 1000\nsea 1\n")
    rare = evaluation(root, lm_text=[root / "text"], lm_order=2, word_frequencies=str(root / "counts"))["lm"]
    assert rare["perplexity"] != by_text["perplexity"] and rare["word_frequencies"] == str(root / "counts")


def test_capital_letters_and_punctuation_in_the_text_make_no_difference(root):
    """Field case 45."""
    (root / "shouted").write_text("\n".join(f"{sentence.upper()}!" for sentence in SENTENCES))
    results = [evaluation(root, lm_text=[root / name], output=name + "_out") for name in ("text", "shouted")]
    assert results[0]["wer"] == results[1]["wer"] and results[0]["lm"]["sha256"] == results[1]["lm"]["sha256"]


def test_text_that_the_lexicon_does_not_know_is_an_error(root):
    """Field case 45: never everything unknown and exit status 0."""
    (root / "foreign").write_text("das wasser ist kalt\nich sehe dich\n")
    with pytest.raises(ValueError, match=r"foreign: 100\.00% of 7 words are not in the lexicon, as das, wasser"):
        evaluation(root, lm_text=[root / "foreign"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lm": "fst"}, "--lm_fst"),
        ({"lm_words": "x"}, "go together"),
        ({"lm_order": 0}, "--lm_order is from 1 to 6, not 0"),
        ({"lm_order": 7}, "--lm_order is from 1 to 6, not 7"),
        ({"nbest": 0}, "--nbest is 1 or more"),
        ({"lm": "none", "tune_decoder": True}, "nothing to tune"),
        ({"lm": "none", "lm_text": ["x"]}, "--lm none takes no language model, but there is --lm_text"),
        ({"lm_fst": "x", "lm_words": "y", "lm_file": "z"}, "--lm_file would change nothing"),
        ({"lm_file": "x", "word_frequencies": "wordfreq"}, "a finished model"),
        ({"lm_file": "x", "lm_order": 4}, "a finished model; --lm_order would change nothing"),
        ({"lm": "none", "lm_order": 4}, "there is --lm_order"),
        ({"lm_file": "{root}/none.arpa"}, "--lm_file .*none.arpa: no such file"),
        ({"lm_file": "{root}/text"}, "KenLM cannot read it"),
        ({"lm_text": ["{root}/none", "{root}/data"]}, "none: no such file\n--lm_text .*data: is a directory"),
        (
            {"lexicon": "{root}/none", "csv_path": "{root}/no.csv"},
            "--lexicon .*none: no.*\n--csv_path .*no.csv: no such",
        ),
        ({"decoder_config": "{root}/text"}, "decoder:"),
        ({"decoder_config": "{root}/wrong.yaml"}, "beam_size"),
        ({"word_frequencies": "{root}/text"}, "each line must be a word and a number"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_used_is_said_before_anything_is_computed(root, monkeypatch, options, said):
    monkeypatch.setattr(evaluate_model, "restore_model", lambda *_: pytest.fail("went on to the model"))
    (root / "wrong.yaml").write_text("decoder: {beam_sise: 3}\n")
    options = {
        key: value.format(root=root)
        if isinstance(value, str)
        else [each.format(root=root) for each in value]
        if isinstance(value, list)
        else value
        for key, value in options.items()
    }
    with pytest.raises(ValueError, match=rf"(?s){said}"):
        evaluation(root, **options)


def test_wrong_options_missing_files_and_a_missing_model_are_said_at_once(root):
    options = {"lm_order": 9, "lm_text": [root / "no text"], "lexicon": str(root), "csv_path": root / "no.csv"}
    (root / "run").rename(root / "elsewhere")
    with pytest.raises(CheckpointError) as error:
        evaluation(root, **options)
    for said in ("--lm_order is from", "no text: no such", "is a directory", "no.csv: no such", "no checkpoint"):
        assert said in str(error.value)


def test_n_best_lists_of_an_earlier_evaluation_stay_and_are_named(root, caplog):
    evaluation(root)
    before = (root / "out" / "nbest_val.jsonl").read_bytes()
    with caplog.at_level(logging.WARNING, logger="b2txt"):
        evaluation(root, lm="none")
    assert "nbest_val.jsonl: is of an earlier evaluation" in caplog.text
    assert (root / "out" / "nbest_val.jsonl").read_bytes() == before


def test_the_test_split_has_nothing_to_tune_on(root):
    with pytest.raises(ValueError, match="--tune_decoder needs val's true sentences"):
        evaluation(root, "test", tune_decoder=True)


def test_two_evaluations_do_not_write_into_one_directory(root):
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import run_directory\n"
        "run_directory.hold_directory(sys.argv[2], run_directory.EVALUATION_LOCK); print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    (root / "out").mkdir()
    command = [sys.executable, "-c", script, os.path.dirname(evaluate_model.__file__), str(root / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(OSError, match=rf"process {other.pid} .* evaluates into this directory"):
            evaluation(root)
        other.kill()
    assert evaluation(root)["n_trials"] == evaluation(root)["n_trials"] == 5


def test_without_train_files_another_text_is_asked_for(root):
    for path in (root / "data").glob("*/data_train.hdf5"):
        path.unlink()
    with pytest.raises(ValueError, match="--lm_text takes another; --lm_file takes a finished model, --lm none goes"):
        evaluation(root)


def test_trials_without_a_true_sentence_count_for_no_word_error(root):
    import h5py

    with h5py.File(root / "data" / "t15.2023.08.11" / "data_val.hdf5", "r+") as file:
        for trial in file.values():
            del trial.attrs["sentence_label"]
    results = evaluation(root)
    assert results["words"] == 6 and results["phonemes"] == 15 and results["trials_without_true_sentence"] == 2
    assert "2 trials without a true sentence" in evaluate_model.format_results(results)
    rows, trials = rows_of(root / "out" / "predictions_val.csv"), read_nbest(root / "out" / "nbest_val.jsonl")
    assert [row["word_edits"] for row in rows[:2]] == ["", ""] and rows[3]["n_words"] == "2"
    assert [trial.reference for trial in trials] == [None, None, "a b", "a b", "a b"]


def test_a_submission_is_checked_against_the_data(root, capsys):
    evaluation(root, "test", lm="none")
    submission = root / "out" / "submission_test.csv"
    command = ["--model_path", str(root / "run"), "--check_submission", str(submission)]
    assert evaluate_model.main(command) == 0 and "5 rows, nothing wrong" in capsys.readouterr().out
    lines = submission.read_text().splitlines()
    submission.write_text("\n".join([*lines[:3], lines[4], lines[5] + ",more"]) + "\n")
    before = submission.read_bytes()
    assert evaluate_model.main(command) == 2
    said = capsys.readouterr().err
    assert "4 rows for 5 test trials" in said and "id '3' where 2 is due" in said and "3 fields" in said
    assert submission.read_bytes() == before


def test_a_full_disk_while_the_report_is_written_loses_no_result(root, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluate_model, "write_report", full)
    with pytest.raises(OSError, match="No space"):
        evaluation(root)
    assert (root / "out" / "evaluation_val.json").exists() and (root / "out" / "nbest_val.jsonl").exists()


def test_memory_of_the_store_is_the_files(root):
    """Emissions are read from the disk as they are needed."""
    evaluation(root)
    trials = index_trials(make_config(root), "val")
    stored = np.load(root / "out" / "emissions_val.npy", mmap_mode="r")
    assert stored.dtype == np.float32 and stored.shape[1] == 41 and len(trials) == 4
    np.testing.assert_allclose(np.exp(stored).sum(1), 1, rtol=1e-5)
    assert EmissionStore.__len__ and os.path.getsize(root / "out" / "emissions_val.npy") < 41 * 4 * len(stored) + 200


def test_a_published_graph_decodes_the_words(root, caplog):
    pytest.importorskip("kaldi_decoder")
    import tlg

    lexicon = load_lexicon(LEXICON)
    train_ngram(SENTENCES, 2, lexicon).save(root / "lm.arpa")
    graph, words = tlg.write_tlg(root, root / "lm.arpa", lexicon)
    with caplog.at_level(logging.INFO, logger="b2txt"):
        results = evaluation(root, lm_fst=str(graph), lm_words=str(words), nbest=2)
    assert results["lm"]["kind"] == "fst" and results["lm"]["source"] == [str(graph), str(words)]
    assert results["lm"]["size_and_time"][0][0] == graph.stat().st_size  # another graph is another key to go on with
    assert "word_score and silence_score are not used" in caplog.text
    texts = [row["predicted_sentence"] for row in rows_of(root / "out" / "predictions_val.csv")]
    assert any(texts) and {word for text in texts for word in text.split()} <= set(lexicon)
    tuned = evaluation(root, lm_fst=str(graph), lm_words=str(words), tune_decoder=True)["tuning"]["settings"]
    assert tuned["word_score"] == 0 and tuned["silence_score"] == -2  # not searched
