"""rescore_nbest.py with tiny random language models, made here; nothing is downloaded."""

import csv
import json
import math
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llm_scores
import rescore_nbest
from evaluate_model_helpers import ErrorCount, edit_distance
from interpolation_weight import ScoredTrial, cross_validated_errors, errors_at, tune_weight
from nbest import Hypothesis, TrialHypotheses, nbest_text, read_nbest

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = ["<unk>", "<s>", "</s>", "you", "can", "see", "it", "i", "did", "not", "know", "that", "You", "I", "."]


def save_tokenizer(directory, **special):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    split = pre_tokenizers.Split(".", "isolated")  # 'it.' is 'it' and '.'
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **({"unk_token": "<unk>"} | special)).save_pretrained(directory)


def save_gpt2(directory, seed=1, **special):
    """A GPT-2 with an end-of-text token, which is its start too, and without a pad token."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5,
        bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(directory)
    save_tokenizer(directory, **(special or {"eos_token": "</s>"}))
    return directory


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama with BOS and EOS."""
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory, bos_token="<s>", eos_token="</s>")
    return directory


def by_hand(directory, text, start=2, end=2):
    """log p of the words and the end, a prefix at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    tokens = [WORDS.index(word) if word in WORDS else 0 for word in text.replace(".", " .").split()]
    tokens = [*tokens, *([] if end is None else [end])]
    total, prefix = 0.0, [start]
    for token in tokens:
        with torch.no_grad():
            logits = model(torch.tensor([prefix])).logits[0, -1].double()
        total += float(logits[token] - logits.logsumexp(0))
        prefix.append(token)
    return total


TEXTS = ["you can see it", "i did not know that", "you", "", "zebra can not", "can can can can can can can can"]


def trial(index, *hypotheses, reference=None):
    """Trial `index` with (text, score) hypotheses."""
    entries = tuple(Hypothesis(text, score, score - 1.0, 1.0) for text, score in hypotheses)
    return TrialHypotheses(index, "t15.2023.08.13", 1, index, entries, reference)


LISTS = (
    (("you can see it", -3.0), ("you can see", -3.5), ("i can see it", -3.6)),
    (("i did not know", -2.0), ("i did not know that", -2.2), ("", -9.0)),
    (("", -1.0),),
    (("you can see it", -4.0), ("you did see it", -4.1), ("you can see it", -5.0)),
)
REFERENCES = ("i can see it", "i did not know that", "you", "you did see it")


@pytest.fixture
def val_file(tmp_path):
    path = tmp_path / "nbest_val.jsonl"
    path.write_text(
        nbest_text(trial(i, *x, reference=y) for i, (x, y) in enumerate(zip(LISTS, REFERENCES, strict=True)))
    )
    return path


@pytest.fixture
def test_file(tmp_path):
    path = tmp_path / "nbest_test.jsonl"
    path.write_text(nbest_text(trial(i, *x) for i, x in enumerate(LISTS)))
    return path


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def refused(capsys, *arguments):
    """What the command says when it refuses."""
    assert rescore_nbest.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "rescore_nbest.py: " in err and "Traceback" not in err
    return err


# ---- log-probabilities ----


def test_scores_are_the_log_probabilities_of_the_words_and_the_end(gpt2, llama):
    for directory, start in ((gpt2, 2), (llama, 1)):
        scores = llm_scores.SentenceScorer(str(directory)).log_probabilities(TEXTS)
        assert scores == pytest.approx([by_hand(directory, text, start) for text in TEXTS], abs=1e-4)
    assert max(scores) < 0


def test_a_score_does_not_depend_on_the_batch(gpt2, llama):
    for directory in (gpt2, llama):
        scorer = llm_scores.SentenceScorer(str(directory))
        alone = [scorer.log_probabilities([text])[0] for text in TEXTS]
        for batch_size in (1, 2, 4, 32):
            assert scorer.log_probabilities(TEXTS, batch_size) == pytest.approx(alone, abs=1e-4)


def test_without_an_end_or_a_start_only_what_is_left_is_scored(tmp_path, caplog):
    directory = save_gpt2(tmp_path / "start", bos_token="<s>")
    scores = llm_scores.SentenceScorer(str(directory)).log_probabilities(TEXTS)
    assert scores == pytest.approx([by_hand(directory, text, 1, None) for text in TEXTS], abs=1e-4)
    assert scores[3] == 0 and "no end-of-text token" in caplog.text
    directory = save_gpt2(tmp_path / "neither", unk_token="<unk>")
    scores = llm_scores.SentenceScorer(str(directory)).log_probabilities(["you can", "you", ""])
    assert scores == pytest.approx([by_hand(directory, "can", WORDS.index("you"), None), 0, 0], abs=1e-4)
    assert "first token of a sentence is not scored" in caplog.text


def test_bf16_is_close_to_float32(gpt2):
    exact = llm_scores.SentenceScorer(str(gpt2)).log_probabilities(TEXTS)
    scorer = llm_scores.SentenceScorer(str(gpt2))
    scorer.dtype = torch.bfloat16  # as on a GPU
    scores = scorer.log_probabilities(TEXTS)
    assert scores != exact and scores == pytest.approx(exact, rel=0.05)


def test_a_text_is_scored_once_in_a_file(gpt2, test_file, monkeypatch):
    seen = []

    def note(self, texts, batch_size):
        seen.extend(texts)
        return [-1.0] * len(texts)

    monkeypatch.setattr(llm_scores.SentenceScorer, "log_probabilities", note)
    rescore_nbest.rescore(test_file, str(gpt2), weight=1.0)
    assert sorted(seen) == sorted({text for entries in LISTS for text, _ in entries})


# ---- ranking ----


@pytest.mark.parametrize("normalisation", ["words", "none"])
def test_the_ranking_is_by_the_formula(gpt2, test_file, normalisation):
    results = rescore_nbest.rescore(test_file, str(gpt2), weight=0.7, length_normalisation=normalisation)
    rows, changed = rows_of(test_file.with_name("nbest_test_rescored.jsonl")), 0
    for entries, row in zip(LISTS, rows, strict=True):
        mean = sum(len(text.split()) + 1 for text, _ in entries) / len(entries)
        expected = []
        for text, score in entries:
            llm_score = by_hand(gpt2, text)
            factor = mean / (len(text.split()) + 1) if normalisation == "words" else 1.0
            expected.append((score + 0.7 * llm_score * factor, text, score, llm_score))
        expected.sort(key=lambda entry: -entry[0])
        changed += expected[0][1] != entries[0][0]
        for (total, text, score, llm_score), entry in zip(expected, row["hypotheses"], strict=True):
            assert (entry["text"], entry["score"]) == (text, score)
            assert entry["total_score"] == pytest.approx(total, abs=1e-4)
            assert entry["llm_score"] == pytest.approx(llm_score, abs=1e-4)
    assert results["n_changed"] == changed > 0


def test_normalisation_matters(gpt2, test_file):
    totals = []
    for normalisation in ("words", "none"):
        rescore_nbest.rescore(test_file, str(gpt2), weight=1.0, length_normalisation=normalisation)
        totals.append([row["hypotheses"] for row in rows_of(test_file.with_name("nbest_test_rescored.jsonl"))])
    assert totals[0] != totals[1]
    assert totals[0][2] == totals[1][2]  # one hypothesis: nothing to compare it with


def test_weight_0_leaves_the_ranking_and_a_rescored_file_can_be_rescored(gpt2, val_file, tmp_path):
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    before = rescore_nbest.rescore(val_file, str(gpt2), weight=3.0, output=first)
    assert before["n_changed"] > 0 and read_nbest(first) != read_nbest(val_file)
    again = rescore_nbest.rescore(first, str(gpt2), weight=0.0, output=second)
    assert again["n_changed"] == 0 and again["wer_before"] == again["wer_after"] == before["wer_before"]
    assert [x.hypotheses[0].score for x in read_nbest(second)] == [x.hypotheses[0].score for x in read_nbest(val_file)]


def test_sentence_case_changes_what_the_model_reads_and_not_what_is_written(gpt2, test_file):
    assert rescore_nbest.presented("i think i'm in it", True) == "I think I'm in it."
    assert rescore_nbest.presented("", True) == "" and rescore_nbest.presented("i am", False) == "i am"
    rescore_nbest.rescore(test_file, str(gpt2), weight=0.0, sentence_case=True)
    rows = rows_of(test_file.with_name("nbest_test_rescored.jsonl"))
    best = rows[0]["hypotheses"][0]
    assert best["text"] == "you can see it"
    assert best["llm_score"] == pytest.approx(by_hand(gpt2, "You can see it."), abs=1e-4)
    assert best["llm_score"] != pytest.approx(by_hand(gpt2, "you can see it"), abs=1e-2)


# ---- the weight ----


def lines(scores, slopes, edits, length=4):
    return ScoredTrial(np.array(scores, float), np.array(slopes, float), np.array(edits), length)


def test_the_weight_is_the_middle_of_the_best_stretch():
    # Right above 1 in the first trial and below 3 in the second.
    trials = [lines([0, -1], [0, 1], [2, 0]), lines([0, -3], [0, 1], [0, 1])]
    assert tune_weight(trials) == 2.0
    assert errors_at(trials, 0.0) == ErrorCount(2, 8, 2) and errors_at(trials, 2.0) == ErrorCount(0, 8, 2)


def test_of_equal_weights_the_smaller_one_is_taken():
    same = lines([0, -1, -3], [0, 1, 2], [1, 1, 1])
    assert tune_weight([same]) == 0.0
    assert tune_weight([lines([0, -1, -6, -15], [0, 1, 2, 3], [2, 1, 2, 1])]) == 3.0  # from 1 to 5, and from 9 on
    assert tune_weight([lines([0, -1], [0, 1], [1, 0])]) == 2.0  # from 1 on, without an end
    assert tune_weight([lines([0, 0], [0, 1], [1, 0])]) == 1.0  # from right above 0 on


numbers = st.integers(-6, 6)
some_trials = st.lists(
    st.lists(st.tuples(numbers, numbers, st.integers(0, 4)), min_size=1, max_size=5).map(
        lambda rows: lines(*zip(*sorted(rows, reverse=True), strict=True))
    ),
    min_size=1,
    max_size=4,
)


@given(some_trials)
def test_no_weight_of_a_fine_grid_is_better_than_the_tuned_one(trials):
    weight = tune_weight(trials)
    grid = np.arange(0, 15, 0.01) + 0.0037  # beside the crossings, which are fractions of small numbers
    best = min(errors_at(trials, value).edits for value in [0.0, *grid[::7]])
    assert errors_at(trials, weight).edits <= best
    assert weight == 0 or errors_at(trials, weight).edits < errors_at(trials, 0.0).edits


def test_cross_validation_tunes_on_the_other_trials():
    """Each trial is right at its own weight alone, so that what is tuned on one is wrong for the other."""
    trials = [lines([0, -1, -3], [0, 1, 2], [1, 0, 1]), lines([0, -3, -8], [0, 1, 2], [1, 0, 1])]
    assert errors_at(trials, tune_weight(trials)).edits == 1
    assert cross_validated_errors(trials) == ErrorCount(2, 8, 2)
    assert cross_validated_errors(trials[:1]) is None


# ---- files ----


def test_val_tunes_and_test_takes_it_over(gpt2, val_file, test_file, tmp_path, capsys):
    assert rescore_nbest.main(["--nbest", str(val_file), "--model", str(gpt2)]) == 0
    out, err = capsys.readouterr()
    output, tuned = tmp_path / "nbest_val_rescored.jsonl", tmp_path / "nbest_val_rescored_tuned.json"
    assert f"written: {output}" in out and f"written: {tuned}" in out and "%|" not in err
    results = json.loads(tuned.read_text())
    edits = [[edit_distance(y.split(), text.split()) for text, _ in x] for x, y in zip(LISTS, REFERENCES, strict=True)]
    assert results["n_words"] == 14 and results["n_trials"] == 4
    assert results["wer_before"] == sum(row[0] for row in edits) / 14
    assert results["wer_oracle"] == sum(min(row) for row in edits) / 14
    best = [entry.hypotheses[0].text for entry in read_nbest(output)]
    after = sum(edit_distance(y.split(), text.split()) for y, text in zip(REFERENCES, best, strict=True))
    assert results["wer_after"] == after / 14 <= results["wer_before"]
    assert results["wer_cross_validated"] >= results["wer_oracle"]
    for name in ("wer_before", "wer_after", "wer_cross_validated", "wer_oracle"):
        assert f"WER {100 * results[name]:5.1f}%" in out

    before = {path: path.read_bytes() for path in (val_file, test_file, tuned)}
    submission = tmp_path / "made" / "submission.csv"
    assert rescore_nbest.main(["--nbest", str(test_file), "--tuned", str(tuned), "--submission", str(submission)]) == 0
    assert "WER" not in capsys.readouterr().out
    with open(submission, newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["id", "text"] and rows[3] == ["2", "the"]  # no text may be empty
    assert [text for _, text in rows[1:]] == [text or "the" for text in best]
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_options_of_tuning_are_those_of_test(gpt2, val_file, test_file, tmp_path, capsys, caplog):
    options = ["--sentence_case", "--length_normalisation", "none"]
    assert rescore_nbest.main(["--nbest", str(val_file), "--model", str(gpt2), *options]) == 0
    tuned = tmp_path / "nbest_val_rescored_tuned.json"
    results = rescore_nbest.rescore(test_file, tuned=tuned)
    saved = json.loads(tuned.read_text())
    assert saved["sentence_case"] is True and saved["length_normalisation"] == "none" and saved["model"] == str(gpt2)
    assert {key: results[key] for key in rescore_nbest.Settings._fields} == {
        key: saved[key] for key in rescore_nbest.Settings._fields
    }
    capsys.readouterr()
    err = refused(
        capsys, "--nbest", test_file, "--tuned", tuned, "--no-sentence_case", "--length_normalisation", "words",
        "--model", save_gpt2(tmp_path / "another"),
    )  # fmt: skip
    assert "--sentence_case is False" in err and "--length_normalisation is words" in err
    assert f"tuned for {gpt2} and is used for" in err


def test_all_problems_of_the_input_are_said_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(llm_scores.SentenceScorer, "__init__", lambda *_: pytest.fail("the model was looked at"))
    path, tuned = tmp_path / "list.jsonl", tmp_path / "tuned.json"
    row = json.loads(trial(0, ("you", -1.0), reference="you").to_json())
    other = json.loads(trial(2, ("i", -1.0)).to_json())
    other["hypotheses"][0]["score"] = math.nan
    path.write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n")
    tuned.write_text('{"model": 3, "weight": -1, "sentence_case": "no", "length_normalisation": "tokens"}')
    arguments = ["--nbest", path, "--tuned", tuned, "--model", tmp_path / "none", "--batch_size", 0]
    err = refused(capsys, *arguments, "--output", path, "--submission", tuned)
    for part in (
        "trial 2: a score of 'i' is not finite", "1 of 2 trials lack a reference (first 2)", "model is 3",
        "weight is -1", "sentence_case is 'no'", "length_normalisation is 'tokens'", "none: no such directory",
        "--batch_size is 0", "no submission: ids must count from 0", f"{path}: would be written, and is read too",
        f"{tuned}: would be written, and is read too",
    ):  # fmt: skip
        assert part in err
    assert "NaN" in path.read_text()


def test_wrong_files_and_options_are_refused(gpt2, val_file, test_file, tmp_path, capsys):
    base = ["--model", gpt2, "--nbest"]
    assert "cannot be read as an n-best file" in refused(capsys, *base, tmp_path / "none.jsonl")
    assert "give --tuned, of a run on val, or --weight" in refused(capsys, *base, test_file)
    err = refused(capsys, "--nbest", test_file, "--batch_size", 0)
    assert "no language model: give --model" in err and "has no references" in err and "--batch_size is 0" in err
    config = (gpt2 / "config.json").read_bytes()
    assert "may belong to the model" in refused(capsys, *base, val_file, "--output", gpt2 / "config.json")
    assert (gpt2 / "config.json").read_bytes() == config
    for weight in ("-1", "nan", "inf"):
        assert "it is a number from 0 on" in refused(capsys, *base, val_file, f"--weight={weight}")
    assert "cannot be read as a file for --tuned" in refused(capsys, *base, val_file, "--tuned", tmp_path / "none")
    broken = tmp_path / "broken.json"
    for content in ("[]", '{"weight": 1}', "not json"):
        broken.write_text(content)
        err = refused(capsys, *base, test_file, "--tuned", broken)
        assert "cannot be read as a file for --tuned" in err and err.count("\n") == 1
    assert "is a directory: name a file" in refused(capsys, *base, val_file, "--output", tmp_path)
    same = ["--output", tmp_path / "x", "--submission", tmp_path / "x"]
    assert "would be written, and is written too" in refused(capsys, *base, val_file, *same)
    assert "with --output and --submission" in refused(capsys, *base, val_file, "--output", broken / "inside.jsonl")
    with pytest.raises(SystemExit):
        rescore_nbest.main(["--nbest", str(val_file), "--weight", "1", "--tuned", str(broken)])
    assert "not allowed with" in capsys.readouterr().err
    assert not list(tmp_path.glob("*rescored*"))
    if not torch.cuda.is_available():
        assert "sees no CUDA GPU" in refused(capsys, *base, val_file, "--device", "cuda")


# ---- models that cannot be used ----


def test_a_model_that_is_not_there_is_refused_in_seconds(val_file, tmp_path, capsys, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    start = time.monotonic()
    for name in ("./none", tmp_path / "none", "a/b/c", val_file):
        assert "no such directory" in refused(capsys, "--nbest", val_file, "--model", name)
    for name in ("no-such-organisation/no-such-model", "nosuchmodel"):
        err = refused(capsys, "--nbest", val_file, "--model", name)
        assert "neither a directory here nor a model in the local cache" in err
        assert "http://127.0.0.1:9 cannot be reached" in err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids" in refused(capsys, "--nbest", val_file, "--model", "no-such/model")
    assert time.monotonic() - start < 10


def test_a_missing_package_is_named(val_file, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    err = refused(capsys, "--nbest", val_file, "--model", "x/y")
    assert "pip install -r requirements_extras.txt" in err and "transformers" in err


def spoil(directory, change):
    """Change the weights of a saved model."""
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def test_damaged_models_are_refused(val_file, tmp_path, capsys):
    base = ["--nbest", val_file, "--model"]
    (tmp_path / "empty").mkdir()
    assert "cannot be loaded as a causal language model" in refused(capsys, *base, tmp_path / "empty")

    directory = save_gpt2(tmp_path / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    assert "tokenizer" in refused(capsys, *base, directory)

    directory = save_gpt2(tmp_path / "weights")
    (directory / "model.safetensors").unlink()
    assert "model.safetensors" in refused(capsys, *base, directory)

    directory = save_gpt2(tmp_path / "cut")
    with open(directory / "model.safetensors", "r+b") as file:
        file.truncate(2000)
    assert "cannot be loaded as a causal language model" in refused(capsys, *base, directory)

    directory = save_gpt2(tmp_path / "lacking")
    spoil(directory, lambda weights: weights.pop("transformer.ln_f.weight"))
    assert "its files lack 1 of the weights" in refused(capsys, *base, directory)

    directory = save_gpt2(tmp_path / "nan")
    spoil(directory, lambda weights: weights["transformer.ln_f.weight"].fill_(math.nan))
    assert "is not finite in torch.float32" in refused(capsys, *base, directory)
    assert not list(val_file.parent.glob("*rescored*"))


def test_a_model_that_reads_ahead_is_refused(val_file, tmp_path, capsys):
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        initializer_range=0.5,
    )  # fmt: skip
    BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    save_tokenizer(tmp_path / "bert", eos_token="</s>")
    err = refused(capsys, "--nbest", val_file, "--model", tmp_path / "bert")
    assert "depends on the words after it" in err


def test_texts_that_do_not_fit_the_model_are_refused(gpt2, tmp_path, capsys, monkeypatch):
    path = tmp_path / "long.jsonl"
    path.write_text(nbest_text([trial(0, ("you " * 14 + "can", -1.0)), trial(1, ("you", -1.0))]))
    err = refused(capsys, "--nbest", path, "--model", gpt2, "--weight", 1)
    assert "17 tokens in 'you you" in err and "the model reads 16" in err
    monkeypatch.setattr("test_rescore_nbest.WORDS", WORDS[:5])
    directory = save_gpt2(tmp_path / "small")
    monkeypatch.undo()
    save_tokenizer(directory, eos_token="</s>")
    path.write_text(nbest_text([trial(0, ("you can see", -1.0))]))
    err = refused(capsys, "--nbest", path, "--model", directory, "--weight", 1)
    assert "token 5 in 'you can see', and the model has 5" in err


def test_too_little_memory_is_said(gpt2, val_file, capsys, monkeypatch):
    monkeypatch.setattr(llm_scores, "free_memory", lambda device: 1000)
    assert "use a smaller model or another --device" in refused(capsys, "--nbest", val_file, "--model", gpt2)
    monkeypatch.setattr(llm_scores, "free_memory", lambda device: None)
    for error in (torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(llm_scores, "_score_batch", fail)
        assert "too little memory on cpu: use a smaller --batch_size" in refused(
            capsys, "--nbest", val_file, "--model", gpt2
        )
    assert llm_scores.free_memory(torch.device("cpu")) is None  # as set above
    monkeypatch.undo()
    free = llm_scores.free_memory(torch.device("cpu"))
    assert free is None or free > 1e6


def test_control_c_is_130(gpt2, val_file, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm_scores, "_score_batch", interrupt)
    assert rescore_nbest.main(["--nbest", str(val_file), "--model", str(gpt2)]) == 130
    assert capsys.readouterr().err.endswith("rescore_nbest.py: interrupted\n")
    assert not list(val_file.parent.glob("*rescored*"))
