"""The results of an evaluation: error rates as evaluation_val.json has them, and as tables for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from evaluate_model_helpers import (
    bootstrap_interval,
    confusions,
    count_errors,
    json_rate,
    name_confusions,
    sum_errors,
    sum_errors_by,
)

N_CONFUSIONS = 10


def error_rates(
    truths: Sequence[Sequence[int]], decoded: Sequence[Sequence[int]], groups: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Phoneme errors, summed over trials; rates as fractions, null without reference.

    Args:
        truths, decoded: phoneme classes of each trial.
        groups: {'session': of each trial, 'corpus': of each trial}, each for rates a group.
    """
    counts = [count_errors(true, ids) for true, ids in zip(truths, decoded, strict=True)]
    total = sum_errors(counts)
    rates = {"per": json_rate(total.rate), "per_interval": bootstrap_interval(counts)}
    rates |= {"edits": total.edits, "phonemes": total.length}
    for name, keys in groups.items():
        by = sum_errors_by(keys, counts)
        rates[f"per_by_{name}"] = {key: json_rate(count.rate) for key, count in by.items()}
    commonest = name_confusions(confusions(zip(truths, decoded, strict=True)), N_CONFUSIONS)
    rates["confusions"] = [{"true": true, "decoded": wrong, "count": count} for true, wrong, count in commonest]
    return rates


def format_results(results: dict[str, Any]) -> str:
    """Short tables of what `evaluation` returned, for the terminal."""
    lines = [f"{results['n_trials']} trials decoded"]
    if results["eval_type"] == "val":
        errors = f"{results['edits']} edits / {results['phonemes']} phonemes, {results['n_trials']} trials"
        lines = [f"PER      {percent(results['per'])}  {errors}", "", *word_table(results), ""]
        for title in ("session", "corpus"):
            words = results.get(f"wer_by_{title}")
            if f"per_by_{title}" in results:
                lines.append(f"{title:<18}   PER" + ("     WER" if words else ""))
            for name, rate in results.get(f"per_by_{title}", {}).items():
                lines.append(f"{name:<18} {percent(rate)}" + (f"  {percent(words.get(name))}" if words else ""))
        lines.append(f"the {len(results['confusions'])} commonest confusions:")
        for entry in results["confusions"]:
            true, wrong = (entry[side] or "nothing" for side in ("true", "decoded"))
            lines.append(f"{entry['count']:>14}  {true} decoded as {wrong}")
        for note in ("counted_as_deletions", "left_out_by_bad_trials_dict"):
            lines += [f"{note.replace('_', ' ')}: {name}" for name in results[note]]
    return "\n".join([*lines, *(f"written: {path}" for path in results["files"])])


def word_table(results: Mapping[str, Any]) -> list[str]:
    """Lines of a table: the decoder's word errors beside those of the lexicon alone."""
    lines = [f"{'words by':<28}   WER   (95% interval)     CER   sentences wrong"]
    for title, suffix in ((lm_title(results["lm"]), ""), ("the lexicon alone, greedily", "_lexicon_only")):
        if f"wer{suffix}" in results:
            interval = results[f"wer{suffix}_interval"] or (None, None)
            lines.append(
                f"{title:<28} {percent(results[f'wer{suffix}'])}  ({percent(interval[0])}, {percent(interval[1])})  "
                f"{percent(results[f'cer{suffix}'])}  {percent(results[f'sentence_error_rate{suffix}'])}"
            )
    share = results.get("share_of_sentences_seen_by_lm")
    if share is not None:
        lines.append(
            f"{percent(share).strip()} of the sentences stand in the language model's text: WER there "
            f"{percent(results['wer_of_sentences_seen_by_lm']).strip()}, without them "
            f"{percent(results['wer_of_sentences_unseen_by_lm']).strip()}"
        )
    if results.get("trials_without_true_sentence"):
        lines.append(f"{results['trials_without_true_sentence']} trials without a true sentence are not in these rates")
    if "tuning" in results:
        held_out = percent(results["tuning"]["wer_cross_validated"]).strip()
        lines.append(f"tuned on these trials, which flatters: WER {held_out} on trials that had no part in the choice")
    if "perplexity" in results["lm"]:
        lines.append(f"perplexity of the true sentences: {results['lm']['perplexity']:.0f}")
    return lines


def lm_title(facts: Mapping[str, Any]) -> str:
    """What a language model is called in a table."""
    if facts["kind"] == "ngram":
        return f"beam search, {facts['order']}-gram" if "order" in facts else "beam search, n-gram file"
    return {"fst": "WFST", "lexicon": "beam search, lexicon"}.get(facts["kind"], facts["kind"])


def percent(rate: float | None) -> str:
    """'  9.7%', six characters wide up to 999%; '  n/a ' for None."""
    return "  n/a " if rate is None else f"{100 * rate:5.1f}%"
