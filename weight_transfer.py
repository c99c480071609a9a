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

from checkpointing import LISTED, CheckpointError, check_parameters
from config import Config, config_from_dict
from evaluate_model_helpers import session_date
from rnn_model import RECURRENT, Decoder, GRUDecoder, TripleGRUDecoder, build_model

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

    Where it is not named after its date, as t15.2023.08.11, or none of those known is, the last of the list is nearest.
    """
    if session in known:
        return session
    own, days = _day(session), {name: day for name in known if (day := _day(name)) is not None}
    if own is None or not days:
        return known[-1]
    return min(days, key=lambda name: (abs(days[name] - own), -days[name]))


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
        CheckpointError: no layer fits, the checkpoint's parameters are not those of its own settings, or the two models
            read other features.
    """
    theirs = config_from_dict(checkpoint["config"])
    with torch.device("meta"):
        check_parameters(build_model(theirs), checkpoint["model_state_dict"], path)
    other = model.other_inputs(theirs)
    if any(line.startswith("dataset.feature_subset") for line in other):
        raise CheckpointError(f"{path}: {other[0]}: its weights are of other features")
    for line in other:
        logger.warning("%s: %s", path, line)
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
            if name.startswith((DAYS, NOISE_DAYS)):
                value = value.index_select(0, rows)
            if value.shape != target.shape:
                transfer.fresh[name] = f"{tuple(value.shape)} there, {tuple(target.shape)} here"
                continue
            target.copy_(value)
            transfer.taken.append(name)
    transfer.unused = list(parameters)
    if not any(RECURRENT.search(name) or name.startswith((DAYS, NOISE_DAYS)) for name in transfer.taken):
        first = "; ".join(f"{name}: {reason}" for name, reason in list(transfer.fresh.items())[:3])
        raise CheckpointError(f"{path}: no layer of it fits the model ({first})")
    if isinstance(model, TripleGRUDecoder) and not any(name.startswith("noise_model.") for name in transfer.taken):
        model.noise_model.start_silent()
    _tell(transfer, config, theirs, path)
    return transfer


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


def _tell(transfer: Transfer, config: Config, there: Config, path: Path) -> None:
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
    theirs, ours = there.dataset.data_transforms, config.dataset.data_transforms
    for key in ours:
        if key.startswith("smooth") and theirs[key] != ours[key]:
            logger.warning("dataset.data_transforms.%s was %s there and is %s here", key, theirs[key], ours[key])


def _listed(names: Sequence[str]) -> list[str]:
    """The names, or of many the parts of the model that they belong to."""
    if len(names) <= LISTED:
        return sorted(names)
    return [f"{part} ({n})" for part, n in sorted(Counter(name.partition(".")[0] for name in names).items())]
