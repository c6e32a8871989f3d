"""`miles-hpc rollouts show FILE`: what a saved rollout holds, for people."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_hpc.cli.exits import BAD_INPUT
from miles_hpc.rollout.debug import SavedRollout, SavedRolloutError, read_rollout

if TYPE_CHECKING:
    from rich.text import Text

    from miles_hpc.transport.batch import RolloutBatch

# Colour by the probability of a generated token: from likely to unlikely.
_SHADES = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"), (float("-inf"), "red"))


def show(arguments: Namespace) -> int:
    """Print samples; 2 when the file is no saved rollout."""
    path = Path(arguments.file)
    try:
        saved, batch = read_rollout(path)
    except SavedRolloutError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    tokenizer = _tokenizer(path)
    groups = [spec.id for spec, size in zip(saved.specs, saved.sizes, strict=True) for _ in range(size)]
    rows = [row for row, group in enumerate(groups) if arguments.group in ("", group)]
    if not rows:
        print(f"{path}: no group {arguments.group!r}; it holds {', '.join(sorted(set(groups))[:5])} …", file=sys.stderr)
        return BAD_INPUT
    shown = rows[: arguments.limit or None]
    print(_head(saved, batch))
    for row in shown:
        _sample(groups[row], batch, row, tokenizer, plain=arguments.plain or not sys.stdout.isatty())
    if len(shown) < len(rows):
        print(f"\n{len(rows) - len(shown)} more samples; --limit 0 shows all")
    return 0


def _tokenizer(path: Path) -> Any:
    """The run's tokenizer, when the file lies in its run directory; else None, and token ids are shown."""
    from miles_hpc.config.errors import ConfigError
    from miles_hpc.config.load import read_resolved
    from miles_hpc.engine.chat_tokenizer import ChatTokenizer

    try:
        config = read_resolved(path.resolve().parents[1])
        return ChatTokenizer(config.model.path, config.model.chat_template)
    except (ConfigError, OSError, ValueError, IndexError):
        return None


def _head(saved: SavedRollout, batch: RolloutBatch) -> str:
    return (
        f"rollout {saved.rollout_id}: {len(saved.specs)} groups, {len(batch)} samples, "
        f"{int(batch.loss_mask.sum())} generated of {len(batch.token_ids)} tokens, "
        f"reward {float(batch.rewards.mean()):.4g}, asked for at weights {saved.weight_version}"
    )


def _sample(group: str, batch: RolloutBatch, row: int, tokenizer: Any, *, plain: bool) -> None:
    from miles_hpc.transport.batch import STATUSES

    one = batch.slice(row, row + 1)
    versions = ", ".join(f"{version} ({start}:{end})" for version, start, end in one.spans.tolist())
    print(
        f"\n{group} sample {int(one.sample_index[0])}  prompt {int(one.prompt_index[0])}  "
        f"reward {float(one.rewards[0]):.4g}  {STATUSES[int(one.status[0])]}  versions {versions or 'unknown'}"
    )
    ids, mask, logprobs = one.token_ids.tolist(), one.loss_mask.tolist(), one.logprobs.tolist()
    pieces = [str(token) + " " for token in ids] if tokenizer is None else [tokenizer.token_text(i) for i in ids]
    if plain:
        print(_marked(pieces, mask))
        drawn = [value for value, counts in zip(logprobs, mask, strict=True) if counts]
        print(f"log-probs {' '.join(f'{value:.2f}' for value in drawn)}")
        return
    from rich.console import Console

    Console().print(_coloured(pieces, mask, logprobs))


def _marked(pieces: list[str], mask: list[int]) -> str:
    """Text with what does not count between bars."""
    text, outside = "", False
    for piece, counts in zip(pieces, mask, strict=True):
        if bool(counts) == outside:
            text += "|"
            outside = not outside
        text += piece
    return text + ("|" if outside else "")


def _coloured(pieces: list[str], mask: list[int], logprobs: list[float]) -> Text:
    from rich.text import Text

    text = Text()
    for piece, counts, logprob in zip(pieces, mask, logprobs, strict=True):
        style = next(colour for bound, colour in _SHADES if logprob >= bound) if counts else "dim"
        text.append(piece, style=style)
    return text
