"""Tiny neural drafters over the tiny targets: random weights, and weights made to agree."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import tiny
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from whiflash_agents.engine import Target
from whiflash_agents.engine.drafters.dflash_model import DFlashConfig, DFlashModel
from whiflash_agents.engine.drafters.eagle3_model import Eagle3Config, Eagle3Model
from whiflash_agents.engine.drafters.layers import LayerConfig

MASK = tiny.VOCAB - 1


def layers(**changes: Any) -> LayerConfig:
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_positions": 512,
    }
    return LayerConfig(**(fields | changes))


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Random weights whose distributions are neither flat nor one-hot."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3, generator=generator)
            else:
                parameter.uniform_(0.7, 1.3, generator=generator)
    model.eval().requires_grad_(False)


def eagle3(*, seed: int = 1, draft_vocab: int = 40, layer: Any = None, **changes: Any) -> Any:
    """A random EAGLE-3 network over all of a tiny target's hidden states."""
    config = Eagle3Config(
        layer=layer or layers(),
        feature_layers=changes.pop("feature_layers", (0, 1, 2)),
        target_hidden_size=32,
        vocab_size=tiny.VOCAB,
        draft_vocab_size=draft_vocab,
        **changes,
    )
    model = Eagle3Model(config)
    randomise(model, seed)
    if model.head.d2t is not None:
        chosen = torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(seed))
        chosen = chosen[:draft_vocab].sort().values
        model.head.d2t = chosen - torch.arange(draft_vocab)
    return model


def dflash(*, seed: int = 2, layer: Any = None, **changes: Any) -> Any:
    """A random DFlash network with two layers and blocks of six."""
    fields: dict[str, Any] = {
        "layers": layer or layers(num_layers=2),
        "feature_layers": (1, 2),
        "vocab_size": tiny.VOCAB,
        "num_target_layers": 2,
        "block_size": 6,
        "mask_token_id": MASK,
    }
    model = DFlashModel(DFlashConfig(**(fields | changes)))
    randomise(model, seed)
    return model


@cache
def random_eagle3() -> Any:
    """One network for many engines."""
    return eagle3()


@cache
def random_dflash() -> Any:
    """One network for many engines."""
    return dflash()


# A target that knows one step, and drafters that learnt it ---------------------------------------

USED = range(3, 15)  # the tokens that the target ever says
_CYCLES = ((3, 4, 5), (6, 7, 8, 9), (10, 11, 12, 13, 14))
FOLLOWS = {t: c[(i + 1) % len(c)] for c in _CYCLES for i, t in enumerate(c)}
_SECOND = {t: 3 + (5 * t + 1) % 12 for t in USED}  # what else may follow, at temperature > 0


def _next_logits() -> torch.Tensor:
    """`[used tokens, vocabulary]`: what follows each token. No two are equal."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.rand(len(USED), tiny.VOCAB, generator=generator) * 2 - 1
    logits = spread - 9.0
    logits[:, list(USED)] += 7.0
    for row, token in enumerate(USED):
        logits[row, _SECOND[token]] = 4.0 + 0.1 * spread[row, token]
        logits[row, FOLLOWS[token]] = 6.31
    return logits


def markov_net(max_positions: int = 512) -> Any:
    """A Llama whose hidden states are the embedding of their own token, and whose next token
    depends on that alone: the likeliest ones run in cycles of three, four and five."""
    config = tiny.CONFIGS["llama"]()
    config.max_position_embeddings = max_positions
    torch.manual_seed(11)
    net = LlamaForCausalLM(config).eval()
    hadamard = torch.ones(1, 1)
    for _ in range(5):
        hadamard = torch.cat(
            (torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1))
        )
    with torch.no_grad():
        for layer in net.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        table = net.model.embed_tokens.weight
        table.copy_(torch.randint(0, 2, table.shape) * 2.0 - 1.0)
        table[list(USED)] = hadamard[1 : 1 + len(USED)]  # orthogonal to one another
        net.lm_head.weight.copy_(_next_logits().T @ table[list(USED)] / table.shape[1])
    return net


@cache
def markov_target() -> Target:
    return Target(markov_net(), name="markov")


def _calm(model: Any) -> None:
    """Random weights to begin learning from."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1 / 3)


def _train(model: Any, loss_of: Callable[[torch.Generator], torch.Tensor], steps: int) -> None:
    model.train().requires_grad_(True)
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(generator).backward()
        optimizer.step()
        schedule.step()
    model.eval().requires_grad_(False)


@cache
def agreeing_eagle3(max_positions: int = 512, window: int | None = None) -> Any:
    """An EAGLE-3 network that says what the Markov target says, in a vocabulary of its own; with a
    window also in texts much longer than those it learnt from."""
    sliding = {"sliding": (window is not None,), "sliding_window": window}
    model = eagle3(layer=layers(max_positions=max_positions, **sliding), norm_before_residual=True)
    known = torch.tensor([0, 1, *USED, *range(20, 72, 2)])
    assert len(known) == 40
    model.head.d2t = known - torch.arange(40)
    _calm(model)
    table = markov_net().model.embed_tokens.weight.detach()
    wanted = _next_logits()[:, known].softmax(-1)

    def loss_of(generator: torch.Generator) -> torch.Tensor:
        tokens = torch.randint(USED.start, USED.stop, (65,), generator=generator)
        # While drafting, features are outputs of the step before: anything may stand there.
        features = table[tokens[:-1]].repeat(1, 3)
        features = features + torch.randn(features.shape, generator=generator)
        hidden = model(features, table[tokens[1:]], torch.arange(64))
        return cross_entropy(model.logits(hidden), wanted[tokens[1:] - USED.start])

    _train(model, loss_of, 450)
    return model


@cache
def agreeing_dflash(max_positions: int = 512) -> Any:
    """A DFlash network that says how likely the Markov target's next tokens are. Its layers slide,
    so that texts longer than those it learnt from are nothing new to it."""
    model = dflash(
        layer=layers(
            num_layers=2, max_positions=max_positions, sliding=(True, True), sliding_window=8
        ),
        sliding_causal=False,
    )
    _calm(model)
    net = markov_net()
    table, head = net.model.embed_tokens.weight.detach(), net.lm_head.weight.detach()
    follows = torch.tensor([FOLLOWS.get(token, 0) for token in range(tiny.VOCAB)])
    step = _next_logits().softmax(-1)
    many = torch.func.vmap(model)

    def loss_of(generator: torch.Generator) -> torch.Tensor:
        rows, free = torch.randint(0, 10, (2,), generator=generator).tolist()
        tokens = torch.randint(USED.start, USED.stop, (32, rows + 1), generator=generator)
        for at in range(free, rows):  # the end of a text runs in a cycle
            tokens[:, at + 1] = follows[tokens[:, at]]
        coming = [step[tokens[:, -1] - USED.start]]
        while len(coming) < model.config.num_drafted:
            coming.append(coming[-1][:, list(USED)] @ step)
        block = table[model.block_tokens(tokens[:, -1])]
        with sdpa_kernel(SDPBackend.MATH):  # the one that can be mapped
            hidden = many(table[tokens[:, :-1]].repeat(1, 1, 2), block)
        return cross_entropy((hidden[:, 1:] @ head.T).mT, torch.stack(coming, 2))

    _train(model, loss_of, 180)
    return model
