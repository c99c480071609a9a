"""Log-probabilities of sentences under a causal language model of `transformers`.

A sentence w is scored as a document of its own: log p(w, end | start), the sum over its tokens and the token for
the end of the text, natural logarithm. The start is the tokenizer's BOS; where it has none, its end-of-text token,
which stands before every document while such models are trained; where it has neither, nothing predicts the first
token and it is not scored. Without an end-of-text token the end is not scored.

`transformers` is an optional extra and imported only when a model is asked for. bf16 on a GPU, float32 elsewhere;
log-softmax and sums are always float32.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from machine import available_memory
from training_log import progress_bar

logger = logging.getLogger("b2txt")

EXTRAS = "pip install -r requirements_extras.txt"
SECONDS_TO_REACH_HUB = 5.0
# A first logit may move by rounding when the token after it changes; by more, it has looked ahead.
LOOK_AHEAD = 0.02


class LlmError(ValueError):
    """A language model that cannot be found, loaded or run, with what to do about it."""


def import_transformers() -> Any:
    """The `transformers` package.

    Raises:
        LlmError: it is not installed, or broken.
    """
    if "accelerate" not in sys.modules:
        os.environ.setdefault("USE_TORCH_XLA", "0")  # transformers imports Accelerate, which would start torch_xla
    try:
        import transformers
    except ImportError as error:
        raise LlmError(f"rescoring needs the package transformers ({error}): {EXTRAS}") from error
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    return transformers


def missing_directory(name: str) -> str | None:
    """What is wrong with a model's name that is a path to no directory; None for a directory or a hub's name."""
    path = Path(name)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or not name or path.exists()
    return f"--model {name}: no such directory" if is_path and not path.is_dir() else None


class SentenceScorer:
    """A causal language model that gives sentences their log-probabilities.

    Only the tokenizer and the configuration are read at first; the weights, when they are needed.

    Args:
        name: directory of a model, or its name on the Hugging Face hub (taken from the local cache if it is there).
        device: 'cpu' or 'cuda'.
    Raises:
        LlmError: nothing of that name, no tokenizer, no causal language model.
    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.name, self.device = name, torch.device(device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self._transformers = import_transformers()
        self._model: torch.nn.Module | None = None
        if problem := missing_directory(name):
            raise LlmError(problem)
        self.tokenizer = self._find(self._transformers.AutoTokenizer.from_pretrained)
        self.config = self._find(self._transformers.AutoConfig.from_pretrained)
        if len(self.tokenizer) <= len(self.tokenizer.all_special_ids):  # made up where there is no file of it
            raise LlmError(f"{name}: has no tokenizer (tokenizer.json), or one without words")
        self._end = self.tokenizer.eos_token_id
        self._start = self._end if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id
        if self._end is None:
            logger.warning("%s has no end-of-text token: sentences are scored without their end", name)
        if self._start is None:
            logger.warning("%s has no token to start with: the first token of a sentence is not scored", name)

    def log_probabilities(self, texts: Sequence[str], batch_size: int = 32) -> list[float]:
        """log p of each text, end included; the same, up to rounding, whatever batch it is in.

        Args:
            texts: as the model shall read them; '' is scored as an empty document.
            batch_size: sentences a batch: changes the speed and the memory, not the results.
        Returns:
            natural logarithms, one a text; 0 where no token is scored.
        Raises:
            LlmError: texts that the model cannot read, too little memory, log-probabilities that are not finite.
        """
        sequences = self.encode(texts)
        model = self._load()
        # Of like lengths, so that little is padding; the longest first, so that memory runs out at once or never.
        order = sorted((i for i, ids in enumerate(sequences) if len(ids) > 1), key=lambda i: -len(sequences[i]))
        scores = [0.0] * len(texts)
        with progress_bar(len(order), 0, "sentence", "Scoring") as progress, torch.inference_mode():
            for first in range(0, len(order), batch_size):
                batch = order[first : first + batch_size]
                advice = "a smaller --batch_size or a smaller model"
                sums = self._with_memory(advice, _score_batch, model, [sequences[i] for i in batch])
                for index, score in zip(batch, sums.tolist(), strict=True):
                    scores[index] = score
                broken = [texts[i] for i in batch if not abs(scores[i]) < float("inf")]
                if broken:
                    raise LlmError(
                        f"{self.name}: the log-probability of {broken[0]!r} is not finite in {self.dtype}: its weights "
                        "are damaged, or too large for this precision (then --device cpu)"
                    )
                progress.update(len(batch))
        return scores

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text, with the start and the end where the tokenizer has them.

        Raises:
            LlmError: texts without a token, longer than the model reads, or with tokens that it does not have.
        """
        config = self.config.get_text_config()
        n_tokens, longest = config.vocab_size, getattr(config, "max_position_embeddings", None)
        start, end = ([] if token is None else [token] for token in (self._start, self._end))
        sequences, problems = [], []
        # Special tokens by hand: whether a tokenizer adds its own differs from model to model.
        for text, ids in zip(texts, self.tokenizer(list(texts), add_special_tokens=False)["input_ids"], strict=True):
            sequences.append([*start, *ids, *end])
            if text.strip() and not ids:
                problems.append(f"no token for {text[:60]!r}: the tokenizer does not know its words")
            if max(sequences[-1], default=0) >= n_tokens:
                problems.append(f"token {max(sequences[-1])} in {text[:60]!r}, and the model has {n_tokens}")
            if longest and len(sequences[-1]) > longest:
                problems.append(f"{len(sequences[-1])} tokens in {text[:60]!r}, and the model reads {longest}")
        if problems:
            shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
            raise LlmError(f"{self.name}: tokenizer and model do not fit the texts:\n" + "\n".join(shown))
        return sequences

    # ---- loading ----

    def _find(self, from_pretrained: Callable, **options: Any) -> Any:
        """What `from_pretrained` gives for the model: from the disk, else from the hub, if that can be reached."""
        options |= {"trust_remote_code": False}  # else it may ask on the terminal
        local = Path(self.name).is_dir()
        try:
            try:
                return from_pretrained(self.name, local_files_only=True, **options)
            except OSError as error:  # not in the cache
                reason = None if local else _hub_problem()
                if reason:
                    raise LlmError(
                        f"{self.name}: neither a directory here nor a model in the local cache, and {reason}; "
                        "give --model the directory of a model"
                    ) from error
                if local:
                    raise
            return from_pretrained(self.name, **options)
        except Exception as error:  # transformers, tokenizers and safetensors raise whatever they like
            if isinstance(error, LlmError) or _is_out_of_memory(error):
                raise
            lines = " ".join(str(error).split())[:300]
            raise LlmError(f"{self.name}: cannot be loaded as a causal language model: {lines}") from error

    def _load(self) -> torch.nn.Module:
        if self._model is None:
            self._check_memory()
            options = {"dtype": self.dtype, "output_loading_info": True}
            load = self._transformers.AutoModelForCausalLM.from_pretrained
            model, info = self._with_memory("a smaller model", self._find, load, **options)
            if info["missing_keys"]:
                names = sorted(info["missing_keys"])
                raise LlmError(
                    f"{self.name}: its files lack {len(names)} of the weights of a causal language model "
                    f"({', '.join(names[:3])}): it is another kind of model, or incomplete"
                )
            model.config.use_cache = False  # of no use for whole sentences, and large
            model = self._with_memory("a smaller model", model.to, self.device).eval()
            self._check_causal(model)
            self._model = model
        return self._model

    def _check_memory(self) -> None:
        """Refuse a model that cannot fit: Linux kills a process that fills the memory, without a word."""
        try:
            with torch.device("meta"):
                model = self._transformers.AutoModelForCausalLM.from_config(self.config, dtype=self.dtype)
        except Exception as error:
            raise LlmError(f"{self.name}: no causal language model: {str(error).splitlines()[0][:200]}") from error
        needed = sum(parameter.numel() for parameter in model.parameters()) * self.dtype.itemsize
        free = free_memory(self.device)
        if free is not None and needed > free:
            raise LlmError(
                f"{self.name}: its weights need {needed / 1e9:.1f} GB in {self.dtype} on {self.device}, where "
                f"{free / 1e9:.1f} GB are free: use a smaller model or another --device"
            )

    def _check_causal(self, model: torch.nn.Module) -> None:
        """Refuse a model that reads ahead, as BERT's does: its scores are no probabilities of sentences."""
        ids = torch.tensor([[0, 0, 0], [0, 1, 1]], device=self.device)
        with torch.inference_mode():
            first = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, 0].float()
        if (first[0] - first[1]).abs().max() > LOOK_AHEAD * first.std():
            raise LlmError(f"{self.name}: no causal language model: what it predicts depends on the words after it")

    def _with_memory(self, advice: str, function: Callable, *arguments: Any, **options: Any) -> Any:
        """What the function gives; where memory runs out, an error that says what to do."""
        try:
            return function(*arguments, **options)
        except (MemoryError, RuntimeError) as error:
            if _is_out_of_memory(error):
                raise LlmError(f"{self.name}: too little memory on {self.device}: use {advice}") from error
            raise


def _is_out_of_memory(error: Exception) -> bool:
    # On a CPU PyTorch raises a plain RuntimeError.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def _score_batch(model: torch.nn.Module, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """(B,) float32: sums of the log-probabilities of all tokens but the first.

    Args:
        sequences: tokens of each sentence, two at least.
    """
    device = next(model.parameters()).device
    lengths = torch.tensor([len(ids) for ids in sequences], device=device)
    rows = [torch.tensor(ids) for ids in sequences]
    # Padded on the right, where a causal model's real tokens never look: which token fills is of no matter.
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0).to(device)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    logits = model(input_ids=ids, attention_mask=mask.long()).logits  # (B, T, V)
    log_probabilities = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return log_probabilities.where(mask[:, 1:], 0.0).sum(1)


def free_memory(device: torch.device) -> int | None:
    """Bytes that a model may still take on the device; None where that cannot be known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def _hub_problem() -> str | None:
    """Why nothing can be fetched from the hub, within seconds: its own client would try for a minute, a file."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to download it"
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_REACH_HUB)
    except Exception as error:  # of an HTTP package that differs between its versions
        return f"{constants.ENDPOINT} cannot be reached ({error})"
    return None
