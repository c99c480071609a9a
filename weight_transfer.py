"""Start a model from the weights of another run: all that fits is taken, by name, and what is not is said.

The other run may be a single GRU, of this project or the original's, and the model a triple decoder: its
CleanSpeechModel is that GRU. Day layers go by session; a session that the other run did not know starts from the
layer of the one nearest in date.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from checkpointing import LISTED, CheckpointError
from config import Config, config_from_dict
from evaluate_model_helpers import session_date
from rnn_model import Decoder, GRUDecoder, TripleGRUDecoder

logger = logging.getLogger("b2txt")

CLEAN = (  # names of a single GRU, and of the triple decoder's CleanSpeechModel
    ("gru.", "clean_speech_model.recurrent.gru."),
    ("h0", "clean_speech_model.recurrent.h0"),
    ("out.", "clean_speech_model.out."),
)
DAYS, NOISE_DAYS = "day_layers.", "noise_day_layers."


@dataclass
class Transfer:
    """What a model took over.

    Attributes:
        taken: names of its parameters that did.
        fresh: of those that did not, with the reason where the other run has one of that name.
        unused: names of the other run's that found no place.
        sessions: of each of the model's sessions, the one whose day layers it took.
    """

    taken: list[str] = field(default_factory=list)
    fresh: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    sessions: dict[str, str] = field(default_factory=dict)


def nearest_session(session: str, known: Sequence[str]) -> str:
    """The session itself where it is known, else the one nearest in date, the later of two as near.

    Sessions that are not named after their dates, as t15.2023.08.11, are taken in the order of the list: the last is
    the nearest.
    """
    if session in known:
        return session
    own, days = _day(session), [_day(name) for name in known]
    if own is None or None in days:
        return known[-1]
    return min(zip(known, days, strict=True), key=lambda pair: (abs(pair[1] - own), -pair[1]))[0]


def _day(session: str) -> int | None:
    """The number of a session's day; None where its name holds no date."""
    try:
        return date.fromisoformat(session_date(session) or "").toordinal()
    except ValueError:
        return None


def take_weights(model: Decoder, config: Config, checkpoint: Mapping[str, Any], path: Path) -> Transfer:
    """Set the model's parameters from a checkpoint, those that have its names and shapes.

    A triple decoder that starts from a single GRU has noise estimates of zero at first: with as many layers it decodes
    as that did.

    Args:
        model: to start.
        config: of it.
        checkpoint: of `load_checkpoint`.
        path: of its file, for messages.
    Raises:
        CheckpointError: nothing fits.
    """
    parameters = _renamed(checkpoint["model_state_dict"], model)
    known = list(checkpoint["sessions"])
    sources = {session: nearest_session(session, known) for session in config.dataset.sessions}
    rows = torch.tensor([known.index(source) for source in sources.values()])
    transfer, state = Transfer(sessions=sources), model.state_dict()
    with torch.no_grad():
        for name, target in state.items():
            if name not in parameters:
                transfer.fresh[name] = "new"
                continue
            value = parameters.pop(name)
            if _is_day_layer(name) and len(value) == len(known):
                value = value.index_select(0, rows)
            if value.shape != target.shape:
                transfer.fresh[name] = f"{tuple(value.shape)} there, {tuple(target.shape)} here"
                continue
            target.copy_(value)
            transfer.taken.append(name)
    transfer.unused = list(parameters)
    if not transfer.taken:
        first = "; ".join(f"{name}: {reason}" for name, reason in list(transfer.fresh.items())[:3])
        raise CheckpointError(f"{path}: nothing of it fits the model ({first}); set init_from_checkpoint: false")
    if isinstance(model, TripleGRUDecoder) and not any(name.startswith("noise_model.") for name in transfer.taken):
        model.noise_model.start_silent()
    _tell(transfer, config, checkpoint, path)
    return transfer


def _is_day_layer(name: str) -> bool:
    return name.startswith((DAYS, NOISE_DAYS))


def _renamed(parameters: Mapping[str, torch.Tensor], model: Decoder) -> dict[str, torch.Tensor]:
    """The parameters under the names of the model's architecture."""
    names = {name: name for name in parameters}
    if ("h0" in parameters) != isinstance(model, GRUDecoder):
        pairs = CLEAN if "h0" in parameters else [(triple, single) for single, triple in CLEAN]
        for before, after in pairs:
            names |= {name: after + name[len(before) :] for name in parameters if name.startswith(before)}
    renamed = {names[name]: value for name, value in parameters.items()}
    own = model.state_dict()
    for name in [name for name in renamed if name.startswith(DAYS)]:  # one set of day layers serves both branches
        if f"noise_{name}" in own and f"noise_{name}" not in renamed:
            renamed[f"noise_{name}"] = renamed[name]
    return renamed


def _tell(transfer: Transfer, config: Config, checkpoint: Mapping[str, Any], path: Path) -> None:
    total = len(transfer.taken) + len(transfer.fresh)
    logger.info("%s: %d of the model's %d parameters are taken from it", path, len(transfer.taken), total)
    changed = {name: reason for name, reason in transfer.fresh.items() if reason != "new"}
    for name, reason in changed.items():
        logger.warning("%s starts anew: %s", name, reason)
    for what, names in (("start anew", set(transfer.fresh) - set(changed)), ("of it find no place", transfer.unused)):
        if names:
            logger.info("%d %s: %s", len(names), what, ", ".join(_listed(names)))
    for session, source in transfer.sessions.items():
        if session != source:
            logger.info("%s starts from the day layers of %s", session, source)
    theirs, ours = config_from_dict(checkpoint["config"]).dataset.data_transforms, config.dataset.data_transforms
    for key in ours:
        if key.startswith("smooth") and theirs[key] != ours[key]:
            logger.warning("dataset.data_transforms.%s was %s there and is %s here", key, theirs[key], ours[key])


def _listed(names: Sequence[str]) -> list[str]:
    """The names, or of many the parts of the model that they belong to."""
    if len(names) <= LISTED:
        return sorted(names)
    return [f"{part} ({n})" for part, n in sorted(Counter(name.partition(".")[0] for name in names).items())]
