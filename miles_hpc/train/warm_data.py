"""Examples of the supervised warm start as token ids with a mask over the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from miles_hpc.config.schema import WarmStartConfig
from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.train.trainer import TrainerError


class WarmStartDataError(TrainerError):
    """The file of the warm start cannot be used; the text names file, line and remedy."""


class Example:
    """Token ids of prompt and answer; the loss counts from `answer_start` on."""

    __slots__ = ("answer_start", "token_ids")

    def __init__(self, token_ids: npt.NDArray[np.int64], answer_start: int) -> None:
        self.token_ids = token_ids
        self.answer_start = answer_start


def read_examples(warm: WarmStartConfig, tokenizer: ChatTokenizer) -> list[Example]:
    """Every example of `train.warm_start.data`.

    Raises:
        WarmStartDataError: the file is missing or empty, a line is broken, or the chat template does not keep a prompt
            as the beginning of the conversation.
    """
    path = Path(warm.data)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WarmStartDataError(f"{path}: not readable ({error.strerror}); correct train.warm_start.data") from error
    examples = [_example(warm, tokenizer, line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line]
    if not examples:
        raise WarmStartDataError(f"{path}: holds no example; correct train.warm_start.data")
    return examples


def _example(warm: WarmStartConfig, tokenizer: ChatTokenizer, line: str, where: str) -> Example:
    try:
        row = json.loads(line)
        prompt, answer = row[warm.prompt_key], str(row[warm.answer_key])
    except ValueError as error:
        raise WarmStartDataError(f"{where}: not JSON ({error}); correct the line") from error
    except (KeyError, TypeError) as error:
        raise WarmStartDataError(
            f"{where}: expected an object with {warm.prompt_key!r} and {warm.answer_key!r}; correct the line, or "
            "train.warm_start.prompt_key and answer_key"
        ) from error
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
    start = tokenizer.render(messages, add_generation_prompt=True)
    whole = tokenizer.render([*messages, {"role": "assistant", "content": answer}], add_generation_prompt=False)
    if whole[: len(start)] != start or len(whole) == len(start):
        raise WarmStartDataError(
            f"{where}: the chat template changes the prompt once it is answered, so the answer's tokens cannot be told "
            "apart; use a template that only appends (model.chat_template)"
        )
    return Example(np.asarray(whole, np.int64), len(start))


def batches(count: int, batch_size: int, steps: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Row numbers of each step, `[batch_size] int64`: epochs in an order that the seed decides, without a gap."""
    rng = np.random.default_rng(seed)
    rows: npt.NDArray[np.int64] = np.empty(0, np.int64)
    for _ in range(steps):
        while len(rows) < batch_size:
            rows = np.concatenate([rows, rng.permutation(count)])
        yield rows[:batch_size]
        rows = rows[batch_size:]
