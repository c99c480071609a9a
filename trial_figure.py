"""One trial as a picture: the signal, the noise estimate, what is left, and the phonemes read from it."""

from collections.abc import Sequence

import numpy as np

from ctc import greedy_collapse
from evaluate_model_helpers import BLANK, PHONEMES

BIN_SECONDS = 0.02


def patches_to_bins(patches: np.ndarray, patch_size: int, patch_stride: int) -> np.ndarray:
    """Undo patching: each bin's features, averaged over the patches that hold it.

    Args:
        patches: (P, patch_size * F), or (T, F) where patch_size is 0.
    Returns:
        (T, F), with T the bins that some patch holds.
    """
    if patch_size == 0:
        return patches
    n_patches = len(patches)
    windows = patches.reshape(n_patches, patch_size, -1)
    n_bins = (n_patches - 1) * patch_stride + patch_size
    total, count = np.zeros((n_bins, windows.shape[2])), np.zeros((n_bins, 1))
    starts = np.arange(n_patches) * patch_stride
    for offset in range(patch_size):
        total[starts + offset] += windows[:, offset]
        count[starts + offset] += 1
    return (total / np.maximum(count, 1)).astype(np.float32)


def trial_figure(
    signal: np.ndarray,
    noise: np.ndarray | None,
    logits: np.ndarray,
    labels: Sequence[int],
    title: str,
    patch_size: int,
    patch_stride: int,
) -> np.ndarray:
    """Heat maps over time: phoneme posterior, signal, noise estimate, denoised signal.

    Args:
        signal, noise: (P, W), patched, after the day layer, valid patches only; no noise of a decoder without any.
        logits: (P, C).
        labels: the true phoneme classes.
        title: names the trial.
    Returns:
        the picture, (height, width, 3) uint8.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = logits - logits.max(-1, keepdims=True)
    posterior = np.exp(shown) / np.exp(shown).sum(-1, keepdims=True)
    decoded = greedy_collapse(logits.argmax(-1))
    maps = {"day-transformed signal": signal}
    if noise is not None:
        maps |= {"noise estimate": noise, "denoised (signal - noise)": signal - noise}
    maps = {name: patches_to_bins(patches, patch_size, patch_stride) for name, patches in maps.items()}
    seconds = len(maps["day-transformed signal"]) * BIN_SECONDS
    # Signal and denoised signal share a scale; the noise estimate has its own, since it starts near zero.
    limits = [float(np.percentile(np.abs(values), 99)) or 1.0 for values in maps.values()]
    limits[2:] = limits[:1] * len(limits[2:])

    figure = Figure(figsize=(12, 6.5 + 2.2 * len(maps)), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    top, *rest = figure.subplots(1 + len(maps), 1, sharex=True, height_ratios=(2.2, *(1 for _ in maps)))
    picture = top.imshow(
        posterior.T, aspect="auto", origin="lower", extent=(0, seconds, -0.5, posterior.shape[1] - 0.5),
        cmap="magma", vmin=0, vmax=1, interpolation="nearest",
    )  # fmt: skip
    top.set_yticks(range(len(PHONEMES)), PHONEMES, fontsize=6)
    top.set_ylabel("phoneme posterior")
    _write_emissions(top, logits.argmax(-1), seconds)
    figure.colorbar(picture, ax=top, pad=0.01)
    for axes, limit, (name, values) in zip(rest, limits, maps.items(), strict=True):
        picture = axes.imshow(
            values.T, aspect="auto", origin="lower", extent=(0, seconds, 0, values.shape[1]),
            cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest",
        )  # fmt: skip
        axes.set_ylabel(f"{name}\nfeature")
        figure.colorbar(picture, ax=axes, pad=0.01)
    rest[-1].set_xlabel("time (s)")
    figure.suptitle(
        f"{title}\ntrue      {_wrapped(labels)}\ndecoded {_wrapped(decoded)}", fontsize=9, ha="left", x=0.01
    )
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def _write_emissions(axes, path: np.ndarray, seconds: float) -> None:
    """Write each decoded phoneme where its run of frames begins."""
    begins = np.flatnonzero((path != BLANK) & np.concatenate([[True], path[1:] != path[:-1]]))
    for frame in begins:
        x = (frame + 0.5) / len(path) * seconds
        axes.text(x, path[frame] + 0.4, PHONEMES[path[frame]], color="cyan", fontsize=8, va="bottom", ha="center")


def _wrapped(labels: Sequence[int], width: int = 130) -> str:
    """Phoneme names in one line, cut with an ellipsis where it would leave the picture."""
    text = " ".join(PHONEMES[label] for label in labels)
    return text if len(text) <= width else text[: width - 1] + "…"
