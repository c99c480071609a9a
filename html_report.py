"""An evaluation as one page to read: error rates, sessions, confused phonemes and the worst trials.

`evaluate_model.py` writes it as report_val.html. The file stands alone, without scripts, fonts or network, and is
the same to the byte for the same results. Its pictures are inline SVG, so that they follow the reader's light or
dark mode and each mark tells its numbers under the mouse.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rapidfuzz.distance import Levenshtein

from evaluate_model_helpers import PHONEMES, confusions, session_date, text_to_phonemes, write_text_atomically
from evaluation_report import lm_title
from report_pictures import SERIES, confusion_matrix, escape, plain_percent, session_chart

N_WORST = 10
SIGNS = {"replace": ("≠", "substituted"), "insert": ("+", "inserted"), "delete": ("−", "deleted")}

# The colours of marks follow Okabe and Ito's palette for all kinds of colour vision, lighter on dark ground.
STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --panel: #f4f6f8;
  --blue: #0072b2; --orange: #c04f00; --purple: #a3337a; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --ink: #e6e9ed; --soft: #9aa5b1; --line: #39424d;
  --panel: #1d2229; --blue: #56b4e9; --orange: #f0a030; --purple: #e79ac6; } }
body { background: var(--ground); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; max-width: 1200px;
  margin: 1.5em auto; padding: 0 1em; }
h1 { font-size: 1.4em; margin: 0; } h2 { font-size: 1.15em; margin: 2em 0 .4em; } h3 { font-size: 1em; margin: 0; }
p { margin: .4em 0; max-width: 75em; } .soft, th { color: var(--soft); } .big { font-size: 1.7em; font-weight: 600; }
table { border-collapse: collapse; margin: .6em 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2em 1.4em .2em 0; border-bottom: 1px solid var(--line); font-weight: 400; }
code { overflow-wrap: anywhere; } summary { cursor: pointer; color: var(--soft); }
.number { text-align: right; } .wide { overflow-x: auto; } .beside { display: flex; flex-wrap: wrap; gap: 0 2em; }
.beside > div { min-width: 0; }
svg { font: 11px system-ui, sans-serif; fill: var(--ink); display: block; } svg .faint { fill: var(--soft); }
svg .grid { stroke: var(--line); } svg .per { fill: var(--blue); } svg .wer, svg .wrong { fill: var(--orange); }
svg path.per { stroke: var(--blue); } svg path.wer { stroke: var(--orange); } svg path[class] { fill: none; }
.trial { background: var(--panel); border-radius: 6px; padding: .7em 1em; margin: .7em 0; }
.pairs { display: flex; margin-top: .5em; font: 13px/1.4 ui-monospace, monospace; }
.pairs > div { display: flex; flex-wrap: wrap; row-gap: .35em; }
.pair { display: grid; grid-template-rows: repeat(3, 1.4em); text-align: center; padding: 0 .3em; min-width: 1em; }
.side { min-width: 5.5em; color: var(--soft); }
.replace, .insert, .delete { font-weight: 700; border-radius: 4px; box-shadow: inset 0 0 0 1px; margin: 0 .15em; }
.replace { color: var(--orange); } .insert { color: var(--blue); } .delete { color: var(--purple); }
"""


def write_report(path: str | Path, results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the page of `report` to `path`, which is replaced as a whole."""
    write_text_atomically(path, report(results, rows))


def report(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The evaluation as a page of HTML.

    Args:
        results: what evaluation_val.json holds; rates are fractions, None where nothing is known.
        rows: of each trial, as `prediction_rows` makes them with the true phonemes.
    """
    sections = [_head(results), *_by_session(results, rows), *_confusions(results, rows), *_worst_trials(results, rows)]
    policy = "default-src 'none'; style-src 'unsafe-inline'"  # a browser then runs and fetches nothing, come what may
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{results['eval_type']}: PER {plain_percent(results['per'])}</title>",
            f"<style>{STYLE}</style>\n</head>\n<body>",
            *sections,
            "</body>\n</html>\n",
        ]
    )


def _with_interval(rate: float | None, interval: Sequence[float] | None) -> str:
    """'9.7% (8.0% to 11.2%)'; 'n/a' for None."""
    return plain_percent(rate) + (f" ({' to '.join(map(plain_percent, interval))})" if interval else "")


def _table(header: Sequence[str], lines: Iterable[Sequence[Any]], numbers: int = 0) -> str:
    """An HTML table; all is escaped. The last `numbers` columns are set to the right."""
    place = ["" if i < len(header) - numbers else ' class="number"' for i in range(len(header))]
    cells = [
        "".join(f"<{tag}{css}>{escape(cell)}</{tag}>" for css, cell in zip(place, line, strict=True))
        for tag, line in [("th", header), *(("td", line) for line in lines)]
    ]
    return '<div class="wide"><table>' + "".join(f"<tr>{line}</tr>" for line in cells) + "</table></div>"


# ---- head ----


def _head(results: Mapping[str, Any]) -> str:
    lines = [
        f"<h1>Evaluation on {escape(results['eval_type'])}: {results['n_trials']} trials</h1>",
        f'<p class="soft">checkpoint <code>{escape(results["checkpoint"])}</code>, step {escape(results["step"])}</p>',
        f'<p><span class="big">PER {plain_percent(results["per"])}</span> {_interval(results["per_interval"])}'
        f"{results['edits']} edits / {results['phonemes']} phonemes</p>",
    ]
    if "wer" in results:
        lines.append(
            f'<p><span class="big">WER {plain_percent(results["wer"])}</span> {_interval(results["wer_interval"])}'
            f"{results['word_edits']} edits / {results['words']} words</p>"
        )
    names = ("wer", "cer", "sentence_error_rate")
    methods = ((lm_title(results["lm"]), ""), ("the lexicon alone, greedily", "_lexicon_only"))
    table = [
        [title, *(_with_interval(results[name + end], results[f"{name}{end}_interval"]) for name in names)]
        for title, end in methods
        if f"wer{end}" in results
    ]
    lines.append(
        _table(("words by", "WER (95% interval)", "CER (95% interval)", "sentences wrong (95% interval)"), table)
    )
    lines.append("<p>" + "<br>".join(map(escape, _language_model(results))) + "</p>")
    for note in ("counted_as_deletions", "left_out_by_bad_trials_dict"):
        if results.get(note):
            named = "".join(f"<li>{escape(name)}</li>" for name in results[note])
            lines.append(f"<p>{note.replace('_', ' ')}:</p><ul>{named}</ul>")
    return "\n".join(lines)


def _interval(interval: Sequence[float] | None) -> str:
    return f"95% interval {plain_percent(interval[0])} to {plain_percent(interval[1])}, " if interval else ""


def _language_model(results: Mapping[str, Any]) -> list[str]:
    """Plain sentences on the language model and how far the rates can be trusted."""
    facts = results["lm"]
    if facts["kind"] == "none":
        return [
            f"No language model: words are the lexicon's ({facts['lexicon_words']}) nearest to the likeliest phonemes."
        ]
    source = facts.get("source", "none")
    line = f"Language model: {lm_title(facts)}; source: {source if isinstance(source, str) else ', '.join(source)}"
    line += f"; {' / '.join(map(str, facts['ngrams']))} 1-, 2-, ...-grams" if "ngrams" in facts else ""
    line += f"; word frequencies: {facts['word_frequencies']}" if facts.get("word_frequencies") else ""
    lines = [f"{line}; {facts['lexicon_words']} words in the lexicon."]
    perplexity = f"{facts['perplexity']:.0f}" if "perplexity" in facts else "not known"
    if "references_outside_lexicon" in facts:
        outside = plain_percent(facts["references_outside_lexicon"])
        lines.append(
            f"Perplexity of the true sentences: {perplexity}; {outside} of their words are not in the lexicon."
        )
    else:
        lines.append("The true sentences are not known.")
    if results.get("share_of_sentences_seen_by_lm") is None:
        lines.append("How many of the true sentences stand in the language model's text is not known.")
    else:
        seen, unseen = (plain_percent(results[f"wer_of_sentences_{name}_by_lm"]) for name in ("seen", "unseen"))
        share = plain_percent(results["share_of_sentences_seen_by_lm"])
        known = f"{share} of the true sentences stand in the language model's text"
        lines.append(f"{known}: WER of these {seen}, without them {unseen}.")
    if "tuning" in results:
        held_out = plain_percent(results["tuning"]["wer_cross_validated"])
        lines.append(f"The decoder was tuned on these trials, which flatters; WER by cross-validation {held_out}.")
    return lines


# ---- sessions and corpora ----


def _by_session(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    sessions = sorted(results["per_by_session"], key=lambda name: (session_date(name) or name, name))
    counts = Counter(row["session"] for row in rows)
    lines = [
        "<h2>By session</h2>",
        '<p class="soft">Sessions in order of date. Dashed: all trials together (edits summed, divided once).</p>',
        session_chart(results, sessions, counts),
        f"<details><summary>the same as numbers</summary>{_rate_table(results, 'session', sessions, counts)}</details>",
    ]
    if "wer_by_session" not in results:
        lines.append('<p class="soft">No language model, so no WER by session.</p>')
    if "per_by_corpus" in results:
        counts = Counter(row["corpus"] for row in rows)
        lines += ["<h2>By corpus</h2>", _rate_table(results, "corpus", sorted(results["per_by_corpus"]), counts)]
    return lines


def _rate_table(results: Mapping[str, Any], group: str, names: Sequence[str], counts: Mapping[str, int]) -> str:
    kinds = [kind for kind in SERIES if f"{kind}_by_{group}" in results]
    lines = [
        [name, counts[name], *(plain_percent(results[f"{kind}_by_{group}"].get(name)) for kind in kinds)]
        for name in names
    ]
    return _table((group, "trials", *(SERIES[kind][1] for kind in kinds)), lines, 1 + len(kinds))


# ---- confusions ----


def confusion_counts(rows: Sequence[Mapping[str, Any]]) -> Counter:
    """How often each phoneme was decoded as which, by alignment.

    Returns:
        Counter of (true name, decoded name), the rightly decoded ones too; '' stands for nothing (true: inserted,
        decoded: deleted). All but the diagonal sum to the edits; a phoneme's own add up to its occurrences.
    """
    pairs = [(text_to_phonemes(row["true_phonemes"]), text_to_phonemes(row["predicted_phonemes"])) for row in rows]
    counts = Counter(PHONEMES[each] for true, _ in pairs for each in true)
    counts = Counter({(name, name): count for name, count in counts.items()})
    for edit, count in confusions(pairs).items():
        true, decoded = ("" if each is None else PHONEMES[each] for each in edit)
        counts[true, decoded] += count
        if true:
            counts[true, true] -= count
    return counts


def _confusions(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    commonest = [
        (entry["true"] or "nothing", entry["decoded"] or "nothing", entry["count"]) for entry in results["confusions"]
    ]
    table = "<p>There are none.</p>"
    if commonest:
        table = f"<div><h3>Commonest</h3>{_table(('true', 'decoded', 'times'), commonest, 1)}</div>"
    return [
        "<h2>Confused phonemes</h2>",
        '<p class="soft">A row is a true phoneme, a column what was decoded; | is silence. Colour: an error as a '
        "fraction of the true phoneme's n occurrences, on a log scale; of an insertion, of the occurrences of what was "
        "inserted. The diagonal is left out of the colours: in grey, it shows the fraction decoded rightly.</p>",
        f'<div class="beside">{confusion_matrix(confusion_counts(rows))}{table}</div>',
    ]


# ---- worst trials ----


def worst_trials(rows: Sequence[Mapping[str, Any]], n: int = N_WORST) -> list[Mapping[str, Any]]:
    """Up to n trials with errors, most word edits first, then most phoneme edits, then in the order of the rows.

    A trial without a true sentence has no word edits: nothing is known there.
    """
    ranked = sorted(rows, key=lambda row: (-_word_edits(row), -int(row["edits"])))
    return [row for row in ranked[:n] if _word_edits(row) or int(row["edits"])]


def _word_edits(row: Mapping[str, Any]) -> int:
    return int(row["word_edits"]) if row.get("true_sentence") else 0


def align(true: Sequence[str], decoded: Sequence[str]) -> list[tuple[str, str, str]]:
    """Columns (equal | replace | insert | delete, true, decoded) with the least edits; '' stands for nothing."""
    columns = []
    for code in Levenshtein.opcodes(true, decoded):
        sides = true[code.src_start : code.src_end], decoded[code.dest_start : code.dest_end]
        columns += [(code.tag, *pair) for pair in zip_longest(*sides, fillvalue="")]
    return columns


def _worst_trials(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    worst = worst_trials(rows)
    if not worst:
        return ["<h2>The worst trials</h2>", "<p>No trial has an error.</p>"]
    method = lm_title(results["lm"]) if "wer" in results else "the lexicon alone"
    words = any(row.get("true_sentence") for row in rows)
    rank = f"word edits (words by {escape(method)}), then by phoneme edits" if words else "phoneme edits"
    key = "".join(f' <span class="{tag}">&nbsp;{sign}&nbsp;</span> {name}' for tag, (sign, name) in SIGNS.items())
    lines = [f'<h2>The worst trials</h2><p class="soft">By {rank}. True above, decoded below:{key}</p>']
    for number, row in enumerate(worst, 1):
        place = f"{number}. {row['session']}, block {row['block']}, trial {row['trial']}"
        place += f", {row['corpus']}" if "corpus" in row else ""
        errors, body = f"{row['edits']} edits / {row['n_phonemes']} phonemes", ""
        if row.get("true_sentence"):
            errors = f"{row['word_edits']} edits / {row['n_words']} words, {errors}"
            body = _alignment(row["true_sentence"], row["predicted_sentence"])
        elif row.get("predicted_sentence"):
            errors += f"; true sentence not known, decoded: {row['predicted_sentence']}"
        body += _alignment(row["true_phonemes"], row["predicted_phonemes"])
        head = f'<h3>{escape(place)}</h3><div class="soft">{escape(errors)}</div>'
        lines.append(f'<div class="trial">{head}{body}</div>')
    return lines


def _alignment(true: str, decoded: str) -> str:
    side = '<div class="side"><span class="pair"><span>true</span><span></span><span>decoded</span></span></div>'
    cells = []
    for tag, above, below in align(true.split(), decoded.split()):
        css, sign = ("pair", "") if tag == "equal" else (f"pair {tag}", SIGNS[tag][0])
        sides = (f"<span>{escape(each or '·')}</span>" for each in (above, below))
        cells.append(f'<span class="{css}">{f"<span>{sign}</span>".join(sides)}</span>')
    return f'<div class="pairs">{side}<div>{"".join(cells)}</div></div>'
