"""How many words are wrong in sentences made of the phonemes that a real decoder predicted.

    python benchmarks/bench_phoneme_rows.py --rows predictions_val.csv --text sentences.txt

The rows are a CSV file with the columns true_phonemes, predicted_phonemes (or pred_phonemes) and true_sentence, a
trial a row: predictions_val.csv of evaluate_model.py is one. Phonemes are names as 'HH AY |', the silence '|' after
every word, with any white space between. If there are word_edits and n_words (or edit_distance and num_words), the
errors of the file's own sentences, they are shown too. The text has a sentence a line.

Such rows no longer hold the probabilities of the phonemes, so emissions are made of them: a frame for each predicted
phoneme, which has 0.85 of the probability, and a frame of blank before, between and after them. The rest of a frame
is spread over the other classes: evenly (--spread uniform), or by what the decoder confuses (--spread confusions),
counted in the even rows. The decoder's settings are tuned on the even rows, each with confusions counted in others
of them; the odd rows have no part in any choice, and are decoded once, at the end.
"""

import argparse
import csv
import io
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from build_lm import check_vocabulary, read_frequencies, read_sentences
from config import DecoderConfig
from decoder_tuning import N_SEARCHES, tune_decoder
from evaluate_model_helpers import (
    BLANK,
    PHONEMES,
    SILENCE,
    ErrorCount,
    bootstrap_interval,
    confusions,
    count_errors,
    json_rate,
    sum_errors,
    text_to_phonemes,
)
from language_model import DecoderPool, NgramDecoder
from lexicon import Lexicon, load_lexicon
from ngram import train_ngram
from text_rules import normalize

# Each of these was chosen on the even rows of 200 trials of the T15 data.
PREDICTED = 0.85  # probability of the predicted class in its frame, and of blank between
PRIOR_WEIGHT = 80  # confusions that the likeness of sounds counts for, a predicted class; 200 rows have 618 in all
N_FREQUENT = 30_000  # words besides those of the text: rarer ones are heard more often than they are said
FREQUENCY_WEIGHT = 0.85  # more than ngram.py's, which has the least perplexity: here words count, not their chances
BEAM_SIZE, BEAM_THRESHOLD = 300, 12.0  # frames this flat need a wide beam; the threshold makes up for the time

FOLDS = 10
LEAST_ROWS = 2 * FOLDS
NAMES = {  # what a column may be called
    "true_phonemes": ("true_phonemes",),
    "predicted_phonemes": ("predicted_phonemes", "pred_phonemes"),
    "true_sentence": ("true_sentence",),
}
OWN_ERRORS = ("word_edits", "n_words"), ("edit_distance", "num_words")
CONSONANTS = (  # by where they are made, from the lips to the throat; then by how; then the voiced ones
    ("B P M W", "F V", "TH DH", "T D N S Z L", "R SH ZH CH JH", "Y", "K G NG", "HH"),
    ("B P T D K G", "M N NG", "F V TH DH S Z SH ZH HH", "CH JH", "L", "R W Y"),
    ("B D G M N NG V DH Z ZH JH L R W Y", "P T K F TH S SH CH HH"),
)


@dataclass
class Row:
    """A trial: phoneme classes and the true sentence in normal form; errors of the file's sentence, if it has one."""

    true: list[int]
    predicted: list[int]
    sentence: str
    own: ErrorCount | None


def read_rows(path: str | Path) -> list[Row]:
    """The rows of such a file, those without a true sentence left out.

    Raises:
        ValueError: the file cannot be read, lacks columns, has rows that cannot be used (by line), or too few rows.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as rows of phonemes: {error}") from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    found = reader.fieldnames or []
    columns = {name: next((each for each in names if each in found), None) for name, names in NAMES.items()}
    missing = [" or ".join(NAMES[name]) for name, column in columns.items() if column is None]
    if missing:
        raise ValueError(f"{path}: lacks the columns {', '.join(missing)}; found {', '.join(found) or 'none'}")
    own = next((pair for pair in OWN_ERRORS if set(pair) <= set(found)), None)
    rows, problems = [], []
    for row in reader:
        try:
            if None in row.values() or None in row:
                raise ValueError(f"has not the {len(found)} values of the first line")
            true, predicted = (text_to_phonemes(row[columns[name]]) for name in list(columns)[:2])
            if BLANK in true + predicted:
                raise ValueError(f"{PHONEMES[BLANK]} is no phoneme of a sentence")
            sentence = normalize(row[columns["true_sentence"]])
            errors = ErrorCount(int(row[own[0]]), int(row[own[1]]), 1) if own else None
        except ValueError as error:
            problems.append(f"line {reader.line_num}: {error}")
            continue
        if sentence:
            rows.append(Row(true, predicted, sentence, errors))
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise ValueError(f"{path}: rows that cannot be used:\n" + "\n".join(problems[:10] + more))
    if len(rows) < LEAST_ROWS:
        raise ValueError(f"{path}: {len(rows)} rows with a true sentence; {LEAST_ROWS} are needed to tune and to test")
    return rows


# ---- emissions ----


def likeness() -> np.ndarray:
    """(C, C) how readily one class is taken for another, 0 for itself, any unit: by place, manner and voice of
    consonants; vowels are like vowels; hardly anything is like the silence."""
    place, manner, voice = (
        [next((kind for kind, names in enumerate(way) if name in names.split()), None) for name in PHONEMES]
        for way in CONSONANTS
    )
    like = np.full((len(PHONEMES), len(PHONEMES)), 0.3)
    for a, b in itertools.product(set(range(len(PHONEMES))) - {BLANK, SILENCE}, repeat=2):
        if place[a] is None and place[b] is None:
            like[a, b] = 6
        elif place[a] is not None and place[b] is not None:
            like[a, b] = 4 ** (place[a] == place[b]) * 4 ** (manner[a] == manner[b]) * 2 ** (voice[a] == voice[b])
    like[BLANK] = like[:, BLANK] = 1.0
    np.fill_diagonal(like, 0.0)
    return like


def spread_by_confusions(rows: Sequence[Row]) -> np.ndarray:
    """(C, C) of each predicted class, blank for none, the chances of the other classes; rows sum to 1.

    A confusion counts both ways: few are seen, and what A is taken for is mostly taken for A.
    """
    counts = np.zeros((len(PHONEMES), len(PHONEMES)))
    for (true, predicted), number in confusions((row.true, row.predicted) for row in rows).items():
        true, predicted = (BLANK if each is None else each for each in (true, predicted))
        counts[predicted, true] += number
        counts[true, predicted] += number
    like = likeness()
    counts += PRIOR_WEIGHT * like / like.sum(1, keepdims=True)
    return counts / counts.sum(1, keepdims=True)


def emissions(predicted: Sequence[int], spread: np.ndarray) -> np.ndarray:
    """(2 * len(predicted) + 1, C) natural logarithms of the class probabilities.

    Args:
        predicted: (N,) classes.
        spread: (C, C) chances of the other classes for each predicted one; rows sum to 1, 0 on the diagonal.
    """
    frames = np.full(2 * len(predicted) + 1, BLANK)
    frames[1::2] = predicted
    chances = (1 - PREDICTED) * spread + PREDICTED * np.eye(len(PHONEMES))
    return np.log(chances[frames]).astype(np.float32)


def all_emissions(rows: Sequence[Row], by_confusions: bool) -> list[np.ndarray]:
    """Emissions of each row; confusions are those of the even rows, for an even row those of the other folds."""
    even = rows[::2]
    if by_confusions:
        others = [[row for i, row in enumerate(even) if i % FOLDS != fold] for fold in range(FOLDS)]
        spreads = [spread_by_confusions(each) for each in [*others, even]]
    else:
        n = len(PHONEMES)
        spreads = [(1 - np.eye(n)) / (n - 1)] * (FOLDS + 1)
    fold = [(i // 2) % FOLDS if i % 2 == 0 else FOLDS for i in range(len(rows))]
    return [emissions(row.predicted, spreads[k]) for row, k in zip(rows, fold, strict=True)]


# ---- the measurement ----


def make_decoder(text: Sequence[str], folder: Path, beam_size: int) -> NgramDecoder:
    """Of the text's words and the most frequent English ones, the first pronunciation of each; a 3-gram of the text."""
    lexicon = load_lexicon()
    check_vocabulary(text, lexicon, "the text")
    frequencies = read_frequencies("wordfreq", lexicon)
    words = {word for sentence in text for word in sentence.split()}
    words.update(sorted(frequencies, key=lambda word: (-frequencies[word], word))[:N_FREQUENT])
    lexicon = Lexicon({word: each[:1] for word, each in lexicon.items() if word in words})
    model = train_ngram(text, 3, lexicon, frequencies, FREQUENCY_WEIGHT)
    model.save(folder / "lm.arpa")
    settings = DecoderConfig(beam_size=beam_size, beam_threshold=BEAM_THRESHOLD)
    decoder = NgramDecoder(lexicon, settings, folder / "lm.arpa")
    grams = ", ".join(f"{len(each)} {n}-grams" for n, each in enumerate(model.probabilities, 1))
    print(f"{len(lexicon)} words, {len(decoder.lost)} of them lost to homophones; {grams}")
    return decoder


def rates(name: str, counts: Sequence[ErrorCount]) -> dict:
    """WER and its 95% interval (fractions, null where there is no word), shown and returned."""
    total, interval = sum_errors(counts), bootstrap_interval(counts)
    if interval is not None:
        print(f"  {name:<24} {total.rate:6.2%}  [{interval[0]:.2%}, {interval[1]:.2%}]  {total.n_trials} rows")
    return {"wer": json_rate(total.rate), "interval": interval, "edits": total.edits, "n_words": total.length}


def measure(options: argparse.Namespace, folder: Path) -> dict:
    """All figures, printed on the way."""
    rows, text = read_rows(options.rows), read_sentences([options.text])
    per = sum_errors(count_errors(row.true, row.predicted) for row in rows).rate
    print(f"{len(rows)} rows, PER {per:.2%}; {len(text)} sentences of text")
    decoder = make_decoder(text, folder, options.beam_size)
    known = set(text)
    new = [row.sentence not in known for row in rows]
    unseen = [row.sentence for row, is_new in zip(rows, new, strict=True) if is_new]
    perplexity, outside = decoder.perplexity(unseen) if unseen else (math.nan, math.nan)
    print(f"{len(unseen)} rows not in the text: perplexity {perplexity:.1f}, {outside:.2%} of the words unknown")
    made = all_emissions(rows, options.spread == "confusions")
    with DecoderPool(decoder) as pool:
        references = [row.sentence for row in rows[::2]]
        tuned = tune_decoder(pool, made[::2], references, folder / "tuned.yaml", options.searches, options.seed)
        print("tuned: " + ", ".join(f"{name} {value:g}" for name, value in tuned["settings"].items()))
        wall, cpu = time.perf_counter(), time.process_time()
        decoded = [each[0].text for each in pool.decode(made)]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{len(rows) / cpu:.1f} sentences/s of CPU time, {len(rows) / wall:.1f} by the clock, in one process")
    counts = [count_errors(row.sentence.split(), words.split()) for row, words in zip(rows, decoded, strict=True)]
    figures = {
        "spread": options.spread,
        "per": per,
        "perplexity": json_rate(perplexity),
        "outside": json_rate(outside),
        "n_lost": len(decoder.lost),
        "tuning": tuned,
        "sentences_a_second_cpu": len(rows) / cpu,
        "sentences_a_second": len(rows) / wall,
        "wer": {},
    }
    results = {f"{options.spread} spread": counts}
    if all(row.own for row in rows):
        results["the file's own sentences"] = [row.own for row in rows]
    for title, errors in results.items():
        print(f"WER, {title}:")
        figures["wer"][title] = {}
        for part, step in (("even", slice(0, None, 2)), ("odd", slice(1, None, 2)), ("all", slice(None))):
            only_new = [count for count, is_new in zip(errors[step], new[step], strict=True) if is_new]
            for name, each in ((part, errors[step]), (f"{part}, not in the text", only_new)):
                figures["wer"][title][name] = rates(name, each)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", required=True, help="CSV file of true and predicted phonemes")
    parser.add_argument("--text", required=True, help="sentences that the 3-gram is trained on, one a line")
    parser.add_argument("--spread", choices=("uniform", "confusions"), default="confusions")
    parser.add_argument("--beam_size", type=int, default=BEAM_SIZE, help=f"hypotheses kept a frame ({BEAM_SIZE})")
    parser.add_argument("--searches", type=int, default=N_SEARCHES, help=f"settings to try ({N_SEARCHES})")
    parser.add_argument("--seed", type=int, default=0, help="of the search (0)")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(options, Path(folder))
        if options.json:
            Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
    except (ValueError, OSError) as error:
        print(f"bench_phoneme_rows.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
