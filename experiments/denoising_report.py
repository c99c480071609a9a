"""Tables and pictures of the study of the NoiseModel, from its results.

    python experiments/denoising_report.py            # of the results kept beside this file, which RESULTS.md shows
    python experiments/denoising_report.py --results trained_models/denoising_study/results.jsonl

Prints Markdown and writes two pictures, denoising_errors.png and denoising_estimate.png.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compared_decoders import ADVERSARIAL, CLEAN, DECODERS, SINGLE, TRIPLE, TUNING_SEEDS, Results, Run

COLORS = {SINGLE: "black", CLEAN: "tab:gray", TRIPLE: "tab:blue", ADVERSARIAL: "tab:orange"}
NOISE_NAMES = {0.0: "absent", 1.0: "default", 2.0: "doubled"}
MOST_PER_SHOWN = 20.0  # of the second picture, in percent; what is above is written
Group = tuple[str, float | None, tuple[str, ...], int | None]  # decoder, noise, settings, batches


def grouped(done: Mapping[Run, Mapping[str, Any]]) -> dict[Group, list[Mapping[str, Any]]]:
    """The results of the seeds of each condition, the shortest trainings first; tuning left out."""
    groups: dict[Group, list[Mapping[str, Any]]] = {}
    order = list(DECODERS)
    for run in sorted(
        done, key=lambda run: (run.batches or 0, run.noise or 0, len(run.settings), order.index(run.decoder))
    ):
        if run.seed not in TUNING_SEEDS:
            groups.setdefault((run.decoder, run.noise, run.settings, run.batches), []).append(done[run])
    return groups


def values(results: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [result[name] for result in results if result.get(name) is not None]


def spread(found: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Mean and standard deviation over seeds, as text."""
    if not found:
        return ""
    mean = f"{scale * statistics.mean(found):.{digits}f}"
    return mean if len(found) < 2 else f"{mean} ± {scale * statistics.stdev(found):.{digits}f}"


def counted(results: Sequence[Mapping[str, Any]]) -> str:
    """How many, and how many of them diverged, which are in no mean."""
    n_diverged = sum("diverged" in result for result in results)
    return f"{len(results)}" + (f", {n_diverged} diverged" if n_diverged else "")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---- tables ----


ERRORS = {"per": "PER", "wer": "WER", "per_new_noise": "PER, new noise"}


def main_table(done: Mapping[Run, Mapping[str, Any]]) -> str:
    """Errors of the decoders in each condition: mean and standard deviation over seeds."""
    groups = {group: results for group, results in grouped(done).items() if not group[2]}
    conditions = list(dict.fromkeys((noise, batches) for _, noise, _, batches in groups))
    rows = []
    for name, label in ERRORS.items():
        for decoder in DECODERS:
            cells = [groups.get((decoder, noise, (), batches), []) for noise, batches in conditions]
            rows.append([label, decoder, *(spread(values(results, name), 100) for results in cells)])
    of_all = [
        [result for group in groups if group[1::2] == condition for result in groups[group]] for condition in conditions
    ]
    rows.append(["trainings", "", *(counted(results) for results in of_all)])
    names = [f"{NOISE_NAMES[noise]}, {batches} batches" for noise, batches in conditions]
    return markdown(["error (%)", "decoder", *names], rows)


def differences(done: Mapping[Run, Mapping[str, Any]], ours: Group, theirs: Group, name: str) -> list[float]:
    """Of the seeds with which both were trained and neither diverged, in points."""
    of_group: dict[Group, dict[int, float]] = {ours: {}, theirs: {}}
    for run, results in done.items():
        group = (run.decoder, run.noise, run.settings, run.batches)
        if group in of_group and run.seed not in TUNING_SEEDS and name in results:
            of_group[group][run.seed] = 100 * results[name]
    common = sorted(of_group[ours].keys() & of_group[theirs].keys())
    return [of_group[ours][seed] - of_group[theirs][seed] for seed in common]


def signed(found: Sequence[float]) -> str:
    """Mean with its sign, and standard deviation, as text."""
    text = spread(found)
    return text.replace("-", "−") if text.startswith("-") or not text else f"+{text}"


def difference_table(done: Mapping[Run, Mapping[str, Any]]) -> str:
    """What each part brings: differences between two decoders trained with the same seeds."""
    groups = [group for group in grouped(done) if not group[2]]
    conditions = list(dict.fromkeys((noise, batches) for _, noise, _, batches in groups))
    rows = []
    for name, label in ERRORS.items():
        for one, other in ((ADVERSARIAL, TRIPLE), (TRIPLE, CLEAN), (TRIPLE, SINGLE)):
            found = [
                differences(done, (one, noise, (), batches), (other, noise, (), batches), name)
                for noise, batches in conditions
            ]
            rows.append([label, f"{one} − {other}", *map(signed, found)])
    names = [f"{NOISE_NAMES[noise]}, {batches} batches" for noise, batches in conditions]
    return markdown(["error (points)", "difference", *names], rows)


def change_table(done: Mapping[Run, Mapping[str, Any]]) -> str:
    """What each changed setting does to the errors: differences from the same decoder and seeds without the change."""
    rows = []
    for decoder, noise, settings, batches in grouped(done):
        if settings:
            ours, theirs = (decoder, noise, settings, batches), (decoder, noise, (), batches)
            found = [differences(done, ours, theirs, name) for name in ERRORS]
            rows.append([f"{decoder}: {change(settings)}", *map(signed, found), f"{len(found[0])}"])
    rows.sort()
    return markdown(["changed (difference in points)", *ERRORS.values(), "seeds"], rows)


def estimate_table(done: Mapping[Run, Mapping[str, Any]]) -> str:
    """What the noise estimates hold, in every condition of the triple decoders."""
    rows = []
    for (decoder, noise, settings, batches), results in grouped(done).items():
        if decoder in (TRIPLE, ADVERSARIAL):
            rows.append(
                [
                    f"{decoder}{': ' if settings else ''}{change(settings)}",
                    *(NOISE_NAMES[noise], f"{batches}"),
                    *(spread(values(results, name), 100) for name in (*ERRORS, "noise_share")),
                    *(spread(values(results, f"{part}_correlation"), 1, 2) for part in ("noise", "speech")),
                    *(spread(values(results, f"probe_{view}"), 100) for view in ("signal", "noise", "denoised")),
                    counted(results),
                ]
            )
    header = ["decoder", "noise", "batches", *(f"{label} (%)" for label in ERRORS.values()), "noise share (%)"]
    header += ["r with noise", "r with speech", "probe: signal (%)", "estimate (%)", "denoised (%)", "seeds"]
    return markdown(header, rows)


def change(settings: Sequence[str]) -> str:
    """What a run changed, in short."""
    names = {"grl_lambda": "λ", "noisy_loss_weight": "weight", "noise_l2_weight": "L2", "noise_units": "units"}
    short = []
    for setting in settings:
        key, _, value = setting.partition("=")
        key = key.rpartition(".")[2]
        short.append(f"{names.get(key, key.replace('_steps', ''))} {value}")
    return ", ".join(short)


def in_order(settings: Sequence[str]) -> list[tuple[str, float]]:
    """For sorting: keys, then values as numbers."""
    return [(key, float(value)) for key, _, value in (setting.partition("=") for setting in settings)]


def rate_table(done: Mapping[Run, Mapping[str, Any]]) -> str:
    """Mean val PER by learning rate on the tuning seeds."""
    tuning = [run for run in done if run.seed in TUNING_SEEDS]
    rates = sorted({run.learning_rate for run in tuning})
    rows = []
    for decoder in DECODERS:
        of_rate = [
            [done[run] for run in tuning if (run.decoder, run.learning_rate) == (decoder, rate)] for rate in rates
        ]
        rows.append([decoder, *(spread(values(results, "per"), 100) for results in of_rate)])
    return markdown(["PER (%) by learning rate", *(f"{rate:g}" for rate in rates)], rows)


def ablation_table(done: Mapping[Run, Mapping[str, Any]]) -> str:
    """Errors by decoder and learning rate, of trainings on given data."""
    rows = []
    for decoder in DECODERS:
        for rate in sorted({run.learning_rate for run in done}):
            results = [done[run] for run in done if (run.decoder, run.learning_rate) == (decoder, rate)]
            if results:
                rates_of_errors = [spread(values(results, name), 100, 2) for name in ("per", "wer")]
                share = spread(values(results, "noise_share"), 100)
                rows.append([decoder, f"{rate:g}", *rates_of_errors, share, counted(results)])
    return markdown(["decoder", "learning rate", "val PER (%)", "WER (%)", "noise share (%)", "seeds"], rows)


# ---- pictures ----


def picture_of_errors(done: Mapping[Run, Mapping[str, Any]], path: Path) -> None:
    """PER by amount of noise, by length of training, and under noise never seen: a dot a seed, a bar their mean."""
    groups = grouped(done)
    shortest = min(batches for _, _, _, batches in groups)
    longest = max(batches for _, _, _, batches in groups)

    def of(noise: float, batches: int, name: str) -> Callable[[str], list[float]]:
        return lambda decoder: values(groups.get((decoder, noise, (), batches), []), name)

    panels = [
        ("Structured noise in the data", [(NOISE_NAMES[noise], of(noise, shortest, "per")) for noise in NOISE_NAMES]),
        (
            "Noise never seen, added in val",
            [(NOISE_NAMES[noise], of(noise, shortest, "per_new_noise")) for noise in NOISE_NAMES],
        ),
        (
            "Length of training (default noise)",
            [(f"{n} batches", of(1.0, n, "per")) for n in dict.fromkeys((shortest, longest))],
        ),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained", sharey=True, width_ratios=(3, 3, 2))
    for axis, (title, columns) in zip(axes, panels, strict=True):
        for place, (_, found) in enumerate(columns):
            for offset, decoder in zip((-0.3, -0.1, 0.1, 0.3), DECODERS, strict=True):
                pers = [100 * per for per in found(decoder)]
                if pers:
                    axis.bar(place + offset, np.mean(pers), 0.18, color=COLORS[decoder], alpha=0.55,
                             label=decoder if place == 0 else None)  # fmt: skip
                    axis.plot([place + offset] * len(pers), pers, ".", color="black", markersize=5)
        axis.set_xticks(range(len(columns)), [name for name, _ in columns])
        axis.set_title(title, fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("val PER (%)")
    axes[0].legend(frameon=False, fontsize=9, loc="upper left")
    axes[0].set_ylim(top=1.25 * axes[0].get_ylim()[1])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def picture_of_estimates(done: Mapping[Run, Mapping[str, Any]], path: Path) -> None:
    """At the default noise, by setting: PER, the estimate's correlation with the true parts, what a probe reads."""
    groups = {group: results for group, results in grouped(done).items() if group[1] == 1.0}
    if not groups:
        return
    shortest = min(batches for _, _, _, batches in groups)
    names = {
        group: group[0] + (f", {change(group[2])}" if group[2] else "")
        + ("" if group[3] == shortest else f", {group[3]} batches")
        for group in groups
    }  # fmt: skip
    order = sorted(groups, key=lambda group: (group[3], len(group[2]), [*DECODERS].index(group[0]), in_order(group[2])))
    places = np.arange(len(order))[::-1]
    figure, axes = plt.subplots(1, 3, figsize=(12, 0.34 * len(order) + 1.8), layout="constrained", sharey=True)

    def dots(axis, name: str, scale: float, color: str, label: str | None = None, marker: str = "o", up=0.0) -> None:
        for place, group in zip(places + up, order, strict=True):
            found = [scale * value for value in values(groups[group], name)]
            axis.plot(found, [place] * len(found), ".", color=color, alpha=0.5, markersize=4)
            if found:
                axis.plot(np.mean(found), place, marker, color=color, markersize=5, label=label)
                label = None

    dots(axes[0], "per", 100, "black")
    axes[0].set_title("val PER (%)", fontsize=11)
    axes[0].set_xlim(0, MOST_PER_SHOWN)
    for place, group in zip(places, order, strict=True):
        found = values(groups[group], "per")
        if found and 100 * max(found) > MOST_PER_SHOWN:
            axes[0].text(MOST_PER_SHOWN, place, f"{spread(found, 100, 0)} →", ha="right", va="center", fontsize=9)
    dots(axes[1], "noise_correlation", 1, "tab:red", "true structured noise", up=0.15)
    dots(axes[1], "speech_correlation", 1, "tab:green", "true speech", "s", up=-0.15)
    linear = [value for results in groups.values() for value in values(results, "linear_correlation")]
    if linear:
        axes[1].axvline(np.mean(linear), color="tab:red", linestyle=":", label="noise, by a regression that knew it")
    axes[1].axvline(0, color="gray", linewidth=0.8)
    axes[1].set_title("correlation of the estimate", fontsize=11)
    dots(axes[2], "probe_noise", 100, "tab:red", "noise estimate")
    dots(axes[2], "probe_denoised", 100, "tab:blue", "denoised signal", "s")
    signal = [value for results in groups.values() for value in values(results, "probe_signal")]
    silence = [value for results in groups.values() for value in values(results, "probe_silence")]
    if signal:
        axes[2].axvline(100 * np.mean(signal), color="tab:blue", linestyle=":", label="signal")
        axes[2].axvline(100 * np.mean(silence), color="gray", linestyle=":", label="always silence")
    axes[2].set_title("accuracy of a linear probe (%)", fontsize=11)
    axes[0].set_yticks(places, [names[group] for group in order], fontsize=9)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", linewidth=0.3)
    for axis in axes[1:]:
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 where there are no results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    kept = Path(__file__).resolve().parent / "denoising_results.jsonl"
    parser.add_argument("--results", default=kept, help="results.jsonl of a study (those kept beside this file)")
    parser.add_argument("--pictures", default="pictures", help="folder of the pictures (pictures)")
    options = parser.parse_args(arguments)
    try:
        done = Results(Path(options.results)).done
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if not grouped(done):
        print(f"{options.results}: no training of the study is complete yet", file=sys.stderr)
        return 2
    for table in (rate_table, main_table, difference_table, change_table, estimate_table):
        print(f"{table(done)}\n")
    folder = Path(options.pictures)
    folder.mkdir(parents=True, exist_ok=True)
    picture_of_errors(done, folder / "denoising_errors.png")
    picture_of_estimates(done, folder / "denoising_estimate.png")
    print(f"pictures are in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
