"""The pictures of a report as inline SVG: error rates by session, and confused phonemes."""

import html
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from evaluate_model_helpers import PHONEMES, SILENCE, session_date
from evaluation_report import percent

# Sounds that are made alike stand together, voiceless before voiced, so that confusions form blocks by the diagonal.
PHONEME_GROUPS = {
    "vowels": ("IY", "IH", "EY", "EH", "AE", "AH", "ER", "UH", "UW", "OW", "AO", "AA", "AW", "AY", "OY"),
    "stops": ("P", "B", "T", "D", "K", "G"),
    "affricates": ("CH", "JH"),
    "fricatives": ("SH", "ZH", "S", "Z", "TH", "DH", "F", "V", "HH"),
    "nasals": ("M", "N", "NG"),
    "approximants": ("L", "R", "W", "Y"),
    "silence": (PHONEMES[SILENCE],),
}
# Fractions at which a confusion is drawn faintest and strongest, on a log scale; the same in every report, so that
# two can be compared.
FAINTEST, STRONGEST = 0.005, 0.5
SERIES = {"per": ("●", "PER"), "wer": ("■", "WER")}


def escape(value: Any) -> str:
    """Escaped for HTML; bytes of a file name that are no UTF-8 are shown as such."""
    return html.escape(str(value).encode("utf-8", "backslashreplace").decode())


def plain_percent(rate: float | None) -> str:
    """'9.7%'; 'n/a' for None."""
    return percent(rate).strip()


def _element(tag: str, content: Any = "", title: str = "", **attributes: Any) -> str:
    """An SVG element, all escaped; `css` is its class, text_anchor its text-anchor, `title` shown under the mouse."""
    named = {("class" if key == "css" else key.replace("_", "-")): value for key, value in attributes.items()}
    given = [f' {key}="{round(v, 2) if isinstance(v, float) else escape(v)}"' for key, v in named.items() if v != ""]
    return f"<{tag}{''.join(given)}>{escape(content)}{f'<title>{escape(title)}</title>' if title else ''}</{tag}>"


def _svg(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<div class="wide"><svg {size} role="img" aria-label="{label}">{"".join(parts)}</svg></div>'


def session_chart(results: Mapping[str, Any], sessions: Sequence[str], counts: Mapping[str, int]) -> str:
    """SVG: PER as circles and, where known, WER as squares, a mark each session that has a rate."""
    series = {kind: results[f"{kind}_by_session"] for kind in SERIES if f"{kind}_by_session" in results}
    known = [rate for rates in series.values() for rate in rates.values() if rate is not None]
    if not known:
        return "<p>No session has a rate.</p>"
    dates = [session_date(name) or name for name in sessions]
    names = dates if len(set(dates)) == len(dates) else sessions  # two people may have a session on one day
    names = [name if len(name) <= 24 else name[:23] + "…" for name in names]
    left, height = 48, 250
    width = min(max(340, 90 * len(sessions)), max(850, 19 * len(sessions)))
    step, longest = width / len(sessions), 6.5 * max(map(len, names))
    tick = next(
        base * 10.0**power for power in range(-2, 9) for base in (1, 2, 5) if max(known) <= 5 * base * 10.0**power
    )
    n_ticks = max(1, math.ceil(max(known) / tick - 1e-9))
    middles = [left + (i + 0.5) * step for i in range(len(sessions))]

    def y_of(rate: float) -> float:
        return 12 + height * (1 - rate / (n_ticks * tick))

    parts = []
    for rate in (i * tick for i in range(n_ticks + 1)):
        parts.append(_element("path", css="grid", d=f"M{left} {y_of(rate):.1f}h{width}"))
        parts.append(_element("text", f"{100 * rate:g}%", css="faint", x=left - 6, y=y_of(rate) + 4, text_anchor="end"))
    upright, y = longest < step, height + 28
    for x, name in zip(middles, names, strict=True):
        turn = {} if upright else {"transform": f"rotate(-90 {x:.1f} {y - 8})"}
        x, below = (x, y) if upright else (x, y - 4)
        parts.append(_element("text", name, x=x, y=below, text_anchor="middle" if upright else "end", **turn))
    overall = {kind: y_of(results[kind]) for kind in series if results[kind] is not None}
    labels = sorted(overall, key=overall.__getitem__)  # from the top; nearer than a line, they part evenly
    shift = max(0, 14 - (overall[labels[-1]] - overall[labels[0]])) / 2 if len(labels) == 2 else 0
    for kind, rates in reversed(series.items()):  # where marks coincide, a square shows around the circle
        sign, title = SERIES[kind]
        values = [rates.get(session) for session in sessions]
        lines = [
            f"M{a:.1f} {y_of(before):.1f}L{b:.1f} {y_of(after):.1f}"
            for (a, before), (b, after) in pairwise(zip(middles, values, strict=True))
            if before is not None and after is not None
        ]
        parts.append(_element("path", css=kind, stroke_opacity=0.45, d="".join(lines)) if lines else "")
        for x, rate, session in zip(middles, values, sessions, strict=True):
            if rate is not None:
                told = f"{session}: {title} {plain_percent(rate)}, {counts[session]} trials"
                circle, square = {"cx": x, "cy": y_of(rate), "r": 4}, {"x": x - 4.5, "y": y_of(rate) - 4.5}
                shape = ("circle", circle) if kind == "per" else ("rect", square | {"width": 9, "height": 9})
                parts.append(_element(shape[0], title=told, css=kind, **shape[1]))
        if kind in overall:
            line = f"M{left} {overall[kind]:.1f}h{width}"
            parts.append(_element("path", css=kind, stroke_dasharray="6 4", d=line))
            y = overall[kind] + 4 + (-shift if kind == labels[0] else shift)
            parts.append(
                _element("text", f"{sign} {title} {plain_percent(results[kind])}", css=kind, x=left + width + 8, y=y)
            )
    bottom = 24 if upright else longest + 20
    return _svg(left + width + 110, height + 16 + bottom, f"Error rates of {len(sessions)} sessions", parts)


def confusion_matrix(counts: Counter) -> str:
    """SVG of the confusions: 40 true phonemes and insertions down, 40 decoded and deletions across."""
    cell, left, top = 18, 66, 54
    places = {name: cell * i for i, name in enumerate([*chain(*PHONEME_GROUPS.values()), ""])}
    right = left + cell * len(places)
    occurrences: Counter = Counter()
    for (true, _), count in counts.items():
        occurrences[true] += count
    parts = [_element("text", "n", css="faint", x=right + 34, y=top - 6, text_anchor="end")]
    for name, place in places.items():
        x, y = left + place + cell / 2, top + place + cell / 2 + 4
        css = "" if occurrences[name] else "faint"
        parts.append(_element("text", name or "inserted", css=css, x=left - 6, y=y, text_anchor="end"))
        parts.append(_element("text", occurrences[name], css="faint", x=right + 34, y=y, text_anchor="end"))
        if name:
            parts.append(_element("text", name, css=css, x=x, y=top - 6, text_anchor="middle", font_size=9.5))
        else:
            parts.append(_element("text", "deleted", x=x + 4, y=top - 6, transform=f"rotate(-90 {x + 4} {top - 6})"))
    for (true, decoded), count in sorted(counts.items()):
        n = occurrences[true or decoded]
        fraction = count / n if n else FAINTEST  # inserted, and nowhere in the truth: there is no rate
        css, opacity = ("wrong", _strength(fraction)) if true != decoded else ("", 0.45 * fraction)
        title = f"{true or 'nothing'} decoded as {decoded or 'nothing'}: {count} of {n}"
        place = {"x": left + places[decoded] + 1, "y": top + places[true] + 1}
        parts.append(
            _element("rect", title=title, css=css, **place, width=cell - 1, height=cell - 1, fill_opacity=opacity)
        )
    for title, group in [*PHONEME_GROUPS.items(), ("", ("",))]:
        start = places[group[0]] + 0.5
        line = f"M{left} {top + start}H{right}M{left + start} {top}V{top + right - left}"
        parts.append(_element("path", css="grid", d=line))
        y = top + start + cell * len(group) / 2 + 4
        parts.append(_element("text", title, css="faint", x=right + 44, y=y))
    bottom = top + right - left
    parts.append(_element("path", css="grid", d=f"M{left} {bottom + 0.5}H{right + 0.5}V{top}"))
    for i, fraction in enumerate((0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, None)):
        look = {"css": "wrong", "fill_opacity": _strength(fraction)} if fraction else {"fill_opacity": 0.45}
        x, y = left + 66 * i, bottom + 16
        parts.append(_element("rect", x=x, y=y, width=16, height=16, **look))
        parts.append(_element("text", f"{100 * fraction:g}%" if fraction else "decoded rightly", x=x + 21, y=y + 12))
    return _svg(right + 120, bottom + 40, "Phoneme confusions", parts)


def _strength(fraction: float) -> float:
    """Opacity, 0.1 to 1, of a confusion of that fraction: even steps a factor, so that rare ones are seen."""
    place = math.log(fraction / FAINTEST) / math.log(STRONGEST / FAINTEST)
    return 0.1 + 0.9 * min(max(place, 0.0), 1.0)
