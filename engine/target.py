"""The target model behind one call: packed tokens in, logits and features out.

Any Hugging Face causal LM whose attention goes through transformers' attention registry can be a
target: its own modules run unchanged, only attention is ours, over the KV arena. What cannot be
rolled back (recurrent state), or whose layers ask for arithmetic that `attention.py` does not
implement, is refused by name; and every target proves itself at load: the packed, cached forward
must reproduce its plain forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .adapter import merge_adapter
from .attention import NAME, AttentionPlan, PackedRow, Probe, attend
from .errors import CheckpointError, ModelNotFoundError, SettingsError, UnsupportedTargetError
from .kv_cache import KVCache, PlaneShape
from .memory import device_memory

# Layer kinds whose cache is keys and values by position, thus can be rolled back by length.
_CROPPABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})

_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(slots=True)
class TargetBatch:
    """The new tokens of one forward, packed in the order of `rows`.

    Attributes:
        token_ids, positions: of every packed token.
        rows: one per sequence.
        logit_rows: packed indices whose logits are wanted, ascending.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    rows: list[PackedRow] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)

    def add(
        self,
        row: PackedRow,
        token_ids: Sequence[int],
        positions: Sequence[int],
        *,
        logits_from: int | None,
    ) -> int:
        """Append one sequence's tokens; logits are wanted from its `logits_from`-th on.

        Returns:
            the row of the returned logits that belongs to that token (meaningless without one).
        """
        first_logits = len(self.logit_rows)
        if logits_from is not None:
            base = len(self.token_ids)
            self.logit_rows.extend(range(base + logits_from, base + len(token_ids)))
        self.token_ids.extend(token_ids)
        self.positions.extend(positions)
        self.rows.append(row)
        return first_logits


@dataclass(slots=True)
class TargetOutput:
    """What one forward yields.

    Attributes:
        logits: `[logit_rows, vocab]`.
        hidden: `[logit_rows, hidden]`, the vectors that entered `lm_head`.
        features: per captured layer index, `[tokens, hidden]` for all packed tokens.
    """

    logits: Tensor
    hidden: Tensor
    features: dict[int, Tensor]


class Target:
    """A causal LM with its KV shape, limits and stop tokens.

    Attributes:
        plane: shape of its keys and values.
        hidden_size: width of its hidden states.
    """

    def __init__(
        self, model: Any, *, name: str = "target", eos_token_ids: Sequence[int] | None = None
    ) -> None:
        """Take over `model` (a transformers causal LM on its device, in its dtype).

        Raises:
            UnsupportedTargetError: see the module's docstring.
        """
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.name = name
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.vocab_size: int = self.config.vocab_size
        self.hidden_size: int = self.config.hidden_size
        self.eos_token_ids = tuple(
            _eos_token_ids(model) if eos_token_ids is None else eos_token_ids
        )
        self._hidden: Tensor | None = None

        self._refuse_uncroppable()
        self.max_context = _max_context(self.config)
        # Without the padding token: its embedding may be zero, and so may then be its logits.
        known = [t for t in range(1, 14) if t != self.config.pad_token_id][:12]
        reference_ids = torch.tensor([known], device=self.device) % self.vocab_size
        with torch.inference_mode():
            reference = model(input_ids=reference_ids, use_cache=False).logits[0].float()
        _register_attention()
        model.set_attn_implementation(NAME)
        self.plane = self._probe()
        self.num_layers = self.plane.layers
        model.get_output_embeddings().register_forward_pre_hook(self._keep_hidden)
        self._check_against(reference_ids[0].tolist(), reference)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "bfloat16",
        name: str = "",
        adapter: str | Path | None = None,
    ) -> Target:
        """Load a local Hugging Face folder (`whiflash_agents.models.resolve_model` fetches hub
        names into one). No code of the checkpoint is executed.

        Args:
            adapter: folder of a low-rank adapter to merge into the weights (`adapter.py`).

        Raises:
            ModelNotFoundError: there is no such folder, or no model in it.
            CheckpointError: its weights are damaged, incomplete, or of other shapes than its config
                says; or the adapter does not fit.
            SettingsError: `dtype` is none of bfloat16, float16, float32.
            UnsupportedTargetError: the engine cannot drive it.
        """
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM

        if dtype not in _DTYPES:
            raise SettingsError(f"dtype={dtype!r}: expected one of {', '.join(_DTYPES)}")
        if not Path(path).is_dir():
            raise ModelNotFoundError(
                f"target {str(path)!r} cannot be loaded: there is no such folder. Give a folder "
                "with config.json and safetensors; whiflash_agents.models.resolve_model(name).path "
                "is one for a hub name"
            )
        try:
            with quiet_transformers():
                model, report = AutoModelForCausalLM.from_pretrained(
                    str(path),
                    dtype=getattr(torch, dtype),
                    trust_remote_code=False,
                    output_loading_info=True,
                    local_files_only=True,
                )
        except (OSError, ValueError) as error:
            raise ModelNotFoundError(
                f"target {str(path)!r} cannot be loaded: {_first_line(error)}. Give a folder with "
                "config.json and safetensors of a model that transformers supports"
            ) from error
        except (SafetensorError, RuntimeError) as error:
            raise CheckpointError(
                f"the weights of target {str(path)!r} cannot be read: {_first_line(error)}. They "
                "are damaged or belong to another config.json; fetch or convert the model again"
            ) from error
        # transformers fills these with random numbers and goes on.
        if missing := sorted(report["missing_keys"]):
            raise CheckpointError(
                f"target {str(path)!r} lacks {len(missing)} weights, the first being "
                f"{missing[0]!r}; fetch or convert the model again"
            )
        if adapter is not None:
            merge_adapter(model, adapter)
        return cls(model.to(device), name=name or Path(path).name)

    # Running ---------------------------------------------------------------------------------

    def new_cache(self, positions: int, *, beside: Sequence[PlaneShape] = ()) -> KVCache:
        """A KV arena of `positions` for this target and the planes of its drafters, on its device.

        Raises:
            SettingsError: the device has not that much memory.
        """
        each = sum(shape.bytes_per_position(self.dtype) for shape in (self.plane, *beside))
        needed = positions * each
        memory = device_memory(self.device)
        refusal = (
            f"kv_tokens={positions} needs {_gib(needed)} of memory for keys and values "
            f"({each:,} bytes each), device {self.device} "
        )
        remedy = "lower kv_tokens, or leave it out to go by the free memory"
        if memory is not None and needed > memory:
            raise SettingsError(f"{refusal}has {_gib(memory)}; {remedy}")
        try:
            return KVCache(
                self.plane,
                positions=positions,
                dtype=self.dtype,
                device=self.device,
                beside=beside,
            )
        except (RuntimeError, MemoryError) as error:  # torch raises either, by device and size
            raise SettingsError(f"{refusal}does not give it; {remedy}") from error

    @property
    def embedding(self) -> Tensor:
        """`[vocab or more, hidden]`, the raw input embedding, without what a model may do to its
        output (scaling, norms)."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    def head(self, hidden: Tensor) -> Tensor:
        """The model's own output head: `[rows, hidden]` -> logits `[rows, vocab]`."""
        head = self.model.get_output_embeddings()
        return linear(hidden, head.weight, getattr(head, "bias", None))

    @torch.inference_mode()
    def forward(
        self, batch: TargetBatch, cache: KVCache, *, capture: Sequence[int] = ()
    ) -> TargetOutput:
        """One forward over the packed tokens; their keys and values are written to `cache`.

        Args:
            capture: hidden states to return as features, in Hugging Face indexing (0 is the
                embedding output, i the output of layer i - 1). Only these are kept.
        """
        targets = None
        if len(batch.rows) > 1:
            where: list[int] = []
            for row in batch.rows:
                where.extend(range(row.start + row.past, row.start + row.length))
            targets = torch.tensor(where, device=self.device)
        keep: int | Tensor = torch.tensor(batch.logit_rows, dtype=torch.long, device=self.device)
        if len(batch.logit_rows) == len(batch.token_ids):
            keep = 0  # all rows, without a gather
        kwargs: dict[str, Any] = {}
        if capture:
            kwargs["output_hidden_states"] = list(capture)
        output = self.model(
            input_ids=torch.tensor([batch.token_ids], device=self.device),
            position_ids=torch.tensor([batch.positions], device=self.device),
            use_cache=False,
            logits_to_keep=keep,
            whiflash=AttentionPlan(cache, batch.rows, targets),
            **kwargs,
        )
        features = {}
        if capture:
            # One entry per hidden state there is; those that were not asked for are None.
            features = {layer: output.hidden_states[layer][0] for layer in capture}
        hidden, self._hidden = self._hidden, None
        assert hidden is not None  # the hook ran: `_check_against` would have failed at load
        return TargetOutput(output.logits[0], hidden[0], features)

    def _keep_hidden(self, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0]

    # Refusing --------------------------------------------------------------------------------

    def _refuse_uncroppable(self) -> None:
        architecture = type(self.model).__name__
        if getattr(self.model, "_is_stateful", False):
            raise UnsupportedTargetError(
                f"{architecture} keeps recurrent state, which cannot be rolled back when a draft "
                "is rejected; use a target with attention layers only"
            )
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if strange := sorted(kinds - _CROPPABLE_LAYERS):
            raise UnsupportedTargetError(
                f"{architecture} has layers of kind {', '.join(strange)}, whose cache cannot be "
                f"rolled back by length; supported: {', '.join(sorted(_CROPPABLE_LAYERS))}"
            )
        if self.config.is_encoder_decoder:
            raise UnsupportedTargetError(
                f"{architecture} is an encoder-decoder; use a decoder-only causal LM"
            )
        if not getattr(self.model, "_supports_attention_backend", False):
            raise UnsupportedTargetError(
                f"{architecture} does not let its attention be replaced "
                "(_supports_attention_backend is false in transformers); use a target that does"
            )

    @torch.inference_mode()
    def _probe(self) -> PlaneShape:
        """Find the shape of every layer's keys and values; they must be alike."""
        probe = Probe()
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        self.model(input_ids=ids, use_cache=False, whiflash=probe)
        expected = set(range(self.config.num_hidden_layers))
        if set(probe.layers) != expected:
            raise UnsupportedTargetError(
                f"{type(self.model).__name__}: attention ran in layers {sorted(probe.layers)}, "
                f"expected all of 0 to {len(expected) - 1}"
            )
        shapes = set(probe.layers.values())
        shape = probe.layers[0]
        if len(shapes) > 1 or shape.key_dim != shape.value_dim:
            raise UnsupportedTargetError(
                f"{type(self.model).__name__} has keys and values of different shapes "
                f"({', '.join(map(str, sorted(shapes, key=str)))}); one shape is supported"
            )
        return PlaneShape(len(expected), shape.kv_heads, shape.key_dim)

    def _check_against(self, ids: list[int], reference: Tensor) -> None:
        """A packed, cached, chunked forward must give the plain forward's logits.

        It catches what no declaration says: an attention that ignores positions, masks or our
        cache. Two copies of the text run at once, the second one behind the first in the arena.
        """
        cache = self.new_cache(2 * 64)
        extents = [cache.allocate(len(ids)) for _ in range(2)]
        got = []
        split = len(ids) // 2
        for start, end in ((0, split), (split, split + 1), (split + 1, len(ids))):
            batch = TargetBatch()
            for extent in extents:
                assert extent is not None
                batch.add(
                    PackedRow(extent.start, start, end - start),
                    ids[start:end],
                    list(range(start, end)),
                    logits_from=0,
                )
            got.append(self.forward(batch, cache).logits.float().view(2, end - start, -1))
        logits = torch.cat(got, dim=1)
        wanted = reference - reference.mean(-1, keepdim=True)
        centred = logits - logits.mean(-1, keepdim=True)
        agreement = torch.cosine_similarity(centred, wanted.expand_as(centred), dim=-1).min().item()
        # Rounding in bfloat16 leaves 0.999 and more; a wrong mask or position far less.
        if not agreement > 0.98:
            raise UnsupportedTargetError(
                f"{type(self.model).__name__} does not give the same logits through the engine's "
                f"attention as by itself (correlation {agreement:.3f}, expected above 0.98); this "
                "architecture is not supported"
            )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no reports: what matters of them becomes an error of ours."""
    from transformers.utils import logging as transformers_logging

    level, bars = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _register_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def _max_context(config: Any) -> int:
    """Positions the model is made for, as far as its rotary frequencies stay the same.

    LongRoPE takes others beyond a length: for the whole forward, whoever is in it, and not for the
    keys cached before. So the context ends there.
    """
    limits = [config.max_position_embeddings]
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # of all layers, or by kind of layer
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
    return min(limits)


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """EOS ids from the generation config, else the config; either may hold one or several."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, Sequence) else (int(ids),)
