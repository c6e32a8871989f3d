"""A HF causal LM with a key/value cache of rows that sequences enter and leave between steps."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from miles_hpc.engine.chat_tokenizer import ModelDirError
from miles_hpc.engine.embedded.weights import WeightsError, checkpoint_names, replace_weights, take_weights

_COLUMN_STEP = 128
_KEEP_COLUMNS = 512
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def _load(path: Path) -> torch.nn.Module:
    """The model in fp32 on the CPU; raises ModelDirError when it is not one, or lacks weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    silence: Any = transformers_logging.disable_progress_bar
    silence()
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, info = load(str(path), dtype=torch.float32, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise ModelDirError(f"{path}: not a causal LM that transformers can load ({text})") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        bad = sorted([*info["missing_keys"], *(str(entry[0]) for entry in info["mismatched_keys"])])
        raise ModelDirError(f"{path}: weights are missing or have another shape: {', '.join(bad[:3])}")
    loaded: torch.nn.Module = model.eval()
    return loaded.requires_grad_(False)


def _row_cache_class() -> type:
    """The cache class; made late because it derives from one of transformers, which costs its import."""
    from transformers.cache_utils import Cache

    class RowCache(Cache):
        """Keys and values `[rows, heads, columns, head_dim]` per layer; column = position in the sequence.

        A column beyond a row's length holds leftovers, which the attention mask hides until they are overwritten.
        """

        def __init__(self) -> None:
            self.layers = []
            self.layer_class_to_replicate = None
            self.offloading = False
            self.reset_storage()

        def reset_storage(self) -> None:
            self.keys: list[torch.Tensor | None] = []
            self.values: list[torch.Tensor | None] = []
            self.rows = self.columns = 0
            self.first_row: int | None = None
            self.row_ids = self.positions = torch.empty(0, dtype=torch.int64)
            self.length = 0

        def reserve(self, rows: int, columns: int) -> None:
            """Room for that many rows and columns; what is there is kept."""
            if rows <= self.rows and columns <= self.columns:
                return
            self.rows = max(self.rows, rows if rows <= self.rows else max(rows, 2 * self.rows))
            if columns > self.columns:
                wanted = max(columns, self.columns + self.columns // 2)
                self.columns = -(-wanted // _COLUMN_STEP) * _COLUMN_STEP
            for buffers in (self.keys, self.values):
                for layer, old in enumerate(buffers):
                    if old is None:
                        continue
                    new = old.new_zeros((self.rows, old.shape[1], self.columns, old.shape[3]))
                    new[: old.shape[0], :, : old.shape[2]] = old
                    buffers[layer] = new

        def prefill_into(self, first_row: int) -> None:
            """The next forward pass fills rows from `first_row` on, from column 0."""
            self.first_row = first_row

        def decode_at(self, row_ids: torch.Tensor, positions: torch.Tensor, length: int) -> None:
            """The next forward pass adds one column to each row, at its position; `length` columns are looked at."""
            self.first_row = None
            self.row_ids, self.positions, self.length = row_ids, positions, length

        def copy_row(self, source: int, target: int, length: int) -> None:
            """Move a sequence to another row."""
            for buffers in (self.keys, self.values):
                for tensor in buffers:
                    if tensor is not None:
                        tensor[target, :, :length] = tensor[source, :, :length]

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            keys = self._buffer(self.keys, layer_idx, key_states)
            values = self._buffer(self.values, layer_idx, value_states)
            if self.first_row is not None:
                count, length = key_states.shape[0], key_states.shape[2]
                rows = slice(self.first_row, self.first_row + count)
                keys[rows, :, :length] = key_states
                values[rows, :, :length] = value_states
                return key_states, value_states
            keys[self.row_ids, :, self.positions] = key_states.squeeze(2)
            values[self.row_ids, :, self.positions] = value_states.squeeze(2)
            count = key_states.shape[0]
            return keys[:count, :, : self.length], values[:count, :, : self.length]

        def _buffer(self, buffers: list[torch.Tensor | None], layer: int, like: torch.Tensor) -> torch.Tensor:
            while len(buffers) <= layer:
                buffers.append(None)
            buffer = buffers[layer]
            if buffer is None:
                # Zeros and not garbage: a hidden column is multiplied by 0, and 0 x NaN would show.
                buffer = buffers[layer] = like.new_zeros((self.rows, like.shape[1], self.columns, like.shape[3]))
            return buffer

        def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
            return 0 if self.first_row is not None else self.length - 1

        def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
            return self.length, 0

        def __len__(self) -> int:
            return len(self.keys)

    return RowCache


class BatchModel:
    """The model and the rows of its running batch. Rows 0..n-1 are in use; all calls come from one thread.

    Raises:
        ModelDirError: when the directory is no causal LM, or one with an attention that rows cannot hold.
    """

    def __init__(self, path: Path) -> None:
        self.model = _load(path)
        config: Any = self.model.config
        self._config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.vocab_size = int(self._config.vocab_size)
        parameters = inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        layer_types = set(getattr(self._config, "layer_types", None) or ())
        if (
            "position_ids" not in parameters
            or self._cache_argument not in parameters
            or not layer_types <= _LAYER_TYPES
            or getattr(self.model, "_is_stateful", False)
        ):
            raise ModelDirError(
                f"{path}: {type(self.model).__name__} is not served by the embedded engine "
                f'(layers {sorted(layer_types)}); use inference.engine = "sglang"'
            )
        self._keep = "logits_to_keep" in parameters
        self._mixed = len(layer_types) > 1
        window = getattr(self._config, "sliding_window", None)
        sliding = "sliding_attention" in layer_types or not layer_types
        uses = getattr(self._config, "use_sliding_window", True)
        self._window = int(window) if window and sliding and uses else None
        self._direct = self._fits(path)
        self._cache = _row_cache_class()()
        self._columns = torch.arange(0)

    def _fits(self, path: Path) -> bool:
        # Some architectures are stored under other names than they are built with; those are loaded anew instead.
        try:
            return checkpoint_names(path) <= self.model.state_dict().keys()
        except WeightsError:
            return False

    def clear(self) -> None:
        """No row is in use any more; large buffers are given back."""
        if self._cache.columns > _KEEP_COLUMNS:
            self._cache.reset_storage()

    @torch.inference_mode()
    def move_row(self, source: int, target: int, length: int) -> None:
        """Sequence `source` of `length` columns takes the place of `target`."""
        self._cache.copy_row(source, target, length)

    def prefill(self, sequences: Sequence[list[int]], first_row: int, *, whole: bool = False) -> torch.Tensor:
        """Fill rows from `first_row` on with sequences.

        Returns:
            fp32 logits after the last token of each, `[sequences, vocab]`; with `whole`, and one sequence, after each
            token of it, `[tokens, vocab]`.
        """
        lengths = [len(ids) for ids in sequences]
        longest = max(lengths)
        self._cache.reserve(first_row + len(sequences), longest)
        self._cache.prefill_into(first_row)
        ids = torch.zeros((len(sequences), longest), dtype=torch.int64)
        for row, one in enumerate(sequences):
            ids[row, : len(one)] = torch.tensor(one)
        positions = torch.arange(longest)
        # Padding stands behind each sequence, so the causal mask alone hides it from every token that counts.
        mask = self._mask(positions.view(1, -1), longest)
        last = sorted({length - 1 for length in lengths})
        keep: dict[str, Any] = {}
        if self._keep and not whole:
            keep["logits_to_keep"] = torch.tensor(last)
        logits = self._forward(ids, positions.unsqueeze(0).expand_as(ids), mask, keep)
        if whole:
            return logits[0].float()
        index = [last.index(n - 1) if self._keep else n - 1 for n in lengths]
        return logits[torch.arange(len(sequences)), torch.tensor(index)].float()

    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Add one token to each row in use; `lengths` are those before. Returns fp32 logits `[rows, vocab]`."""
        longest = max(lengths) + 1
        self._cache.reserve(len(tokens), longest)
        positions = torch.tensor(lengths)
        self._cache.decode_at(torch.arange(len(tokens)), positions, longest)
        mask = self._mask(positions.view(-1, 1), longest)
        ids = torch.tensor(tokens).unsqueeze(1)
        logits = self._forward(ids, positions.unsqueeze(1), mask, {"logits_to_keep": 1} if self._keep else {})
        return logits[:, -1].float()

    def _mask(self, positions: torch.Tensor, columns: int) -> Any:
        """Additive masks `[batch, 1, queries, columns]` for queries at `positions` `[batch, queries]`."""
        if self._columns.numel() < columns:
            self._columns = torch.arange(2 * columns)
        column = self._columns[:columns]
        query = positions.unsqueeze(-1)
        hidden = column > query
        full = self._additive(hidden)
        if self._window is None:
            return full
        sliding = self._additive(hidden | (column <= query - self._window))
        return {"full_attention": full, "sliding_attention": sliding} if self._mixed else sliding

    @staticmethod
    def _additive(hidden: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(torch.float32).min
        return torch.zeros(hidden.shape).masked_fill_(hidden, lowest).unsqueeze(1)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, keep: dict[str, Any]) -> torch.Tensor:
        arguments = {self._cache_argument: self._cache, **keep}
        output = self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, return_dict=True, **arguments
        )
        logits: torch.Tensor = output.logits
        return logits

    def replace(self, path: Path) -> None:
        """Serve the weights of another directory of the same architecture.

        Raises:
            WeightsError: when they do not fit; the old weights stay.
        """
        if self._direct:
            replace_weights(self.model, path)
            return
        checkpoint_names(path)
        try:
            with torch.inference_mode(False):
                fresh = _load(path)
        except ModelDirError as error:
            raise WeightsError(f"Failed to load weights: {error}.") from error
        shapes = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        if {name: tensor.shape for name, tensor in fresh.state_dict().items()} != shapes:
            raise WeightsError(f"Weights of {path} do not fit the model: it is of another architecture or size.")
        self.model = fresh

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Serve these tensors in place of those of the same names.

        Raises:
            WeightsError: when they do not fit; the old weights stay.
        """
        if not self._direct:
            raise WeightsError("This architecture is stored under other names than it is built with: send a directory.")
        take_weights(self.model, tensors)

    def checksums(self) -> dict[str, str]:
        """Tensor name -> checksum of its bytes."""
        return {
            name: hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
            for name, tensor in self.model.state_dict().items()
        }
