"""The same prompts through transformers' own `generate`, beside a benchmark's contenders.

Plain decoding, prompt lookup, and its DFlash generation where the drafter's arithmetic is one that
transformers has: z-lab's layout with full attention and the target's own embedding and head.
Greedy decoding only, one prompt at a time, as transformers' assisted generation asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from whiflash_agents.engine.errors import SettingsError

if TYPE_CHECKING:
    from whiflash_agents.engine.drafters.dflash_model import DFlashModel
    from whiflash_agents.engine.request import Request, SamplingParams

PEERS = ("transformers",)
_LOOKUP_TOKENS = 10  # what transformers' documentation suggests for prompt lookup


@dataclass(slots=True)
class Prompt:
    """One row: its request, what `none` generated, and how long that took."""

    request: Request
    token_ids: list[int]
    seconds: float


def run_transformers(
    path: Path,
    prompts: Sequence[Prompt],
    *,
    device: str,
    dtype: str,
    dflash: DFlashModel | None,
    on_phase: Callable[[str], None],
    adapter: Path | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Generate all prompts with each of transformers' ways; returns their part of `bench.json`.

    Args:
        adapter: to merge into the model's weights.
        stopping: whether to end before the next prompt.

    Raises:
        SettingsError: a prompt asks for more than greedy decoding (`check_greedy`).
    """
    import torch
    from transformers import AutoModelForCausalLM

    from whiflash_agents.engine.adapter import merge_adapter
    from whiflash_agents.engine.target import quiet_transformers

    for prompt in prompts:
        check_greedy(prompt.request.sampling)
    on_phase("loading transformers' own model")
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=getattr(torch, dtype), trust_remote_code=False, local_files_only=True
        )
    if adapter is not None:
        merge_adapter(model, adapter)
    model.to(device)
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt-lookup": {"prompt_lookup_num_tokens": _LOOKUP_TOKENS},
    }
    figures: dict[str, Any] = {}
    if dflash is not None:
        reason = unlike_transformers(dflash)
        if reason is None:
            assistant = assistant_of(dflash).to(device)
            ways["dflash"] = {"assistant_model": assistant, "speculation_type": "dflash"}
        else:
            figures["dflash"] = {"left_out": reason}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    equal = dict.fromkeys(ways, 0)
    done: list[Prompt] = []
    for number, prompt in enumerate(prompts):
        if stopping():
            break
        names = list(ways)
        turn = number % len(names)
        for way in (*names[turn:], *names[:turn]):
            taken, token_ids = _generate(model, prompt, ways[way])
            seconds[way].append(taken)
            equal[way] += token_ids == prompt.token_ids
        done.append(prompt)
        on_phase(f"transformers: {number + 1} of {len(prompts)} rows")
    tokens = [len(prompt.token_ids) for prompt in done]
    for way, times in seconds.items():
        pairs = list(zip(done, times, strict=True))
        figures[way] = {
            "tokens": sum(tokens),
            "seconds": sum(times),
            "tokens_per_second": sum(tokens) / sum(times) if times else 0.0,
            "none_over_it": median(t / p.seconds for p, t in pairs) if pairs else 0.0,
            "rows": len(done),
            "rows_identical": equal[way],
        }
    return figures


def check_greedy(sampling: SamplingParams) -> None:
    """Raises SettingsError if this is more than greedy decoding, all that peers do."""
    asked = {
        name: getattr(sampling, name)
        for name, plain in (
            ("temperature", 0.0),
            ("repetition_penalty", 1.0),
            ("presence_penalty", 0.0),
            ("frequency_penalty", 0.0),
        )
        if getattr(sampling, name) != plain
    }
    if asked or sampling.logit_bias:
        told = ", ".join(f"{name}={value}" for name, value in asked.items()) or "logit_bias"
        raise SettingsError(
            f"peer transformers is compared under greedy decoding, not with {told}; leave "
            "temperature and penalties at their defaults"
        )


def _generate(model: Any, prompt: Prompt, how: dict[str, Any]) -> tuple[float, list[int]]:
    import torch

    ids = torch.tensor([list(prompt.request.prompt_ids)], device=model.device)
    length = len(prompt.token_ids)  # the same work, whoever does it
    started = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=False,
        pad_token_id=0,
        **how,
    )
    taken = time.perf_counter() - started
    return taken, output[0, ids.shape[1] :].tolist()


def unlike_transformers(model: DFlashModel) -> str | None:
    """Why transformers cannot run the drafter; None if it can."""
    config = model.config
    if any(config.layers.sliding):
        return "it has sliding layers, whose windows transformers counts otherwise"
    if model.head is not None or model.embed_tokens is not None:
        return "it has a head or an embedding of its own"
    if config.sample_from_anchor:
        return "its bonus slot drafts (sample_from_anchor)"
    if (config.embedding_scale, config.output_multiplier, config.logit_softcap) != (1.0, 1.0, None):
        return "it scales embeddings or logits"
    return None


def assistant_of(model: DFlashModel) -> Any:
    """The drafter as transformers' DFlash assistant: the same arithmetic under other names."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config, layers = model.config, model.config.layers
    assistant = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            hidden_size=layers.hidden_size,
            intermediate_size=layers.intermediate_size,
            num_hidden_layers=layers.num_layers,
            num_attention_heads=layers.num_heads,
            num_key_value_heads=layers.num_kv_heads,
            head_dim=layers.head_dim,
            rms_norm_eps=layers.rms_norm_eps,
            rope_parameters={"rope_type": "default", **layers.rope},
            max_position_embeddings=layers.max_positions,
            layer_types=["full_attention"] * layers.num_layers,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            target_layer_ids=[layer - 1 for layer in config.feature_layers],
        )
    ).eval()
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    state = {names.get(name, name): tensor for name, tensor in model.state_dict().items()}
    assistant.load_state_dict(state)
    return assistant.to(model.fc.weight.dtype)
