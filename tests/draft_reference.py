"""What neural drafters should propose, computed the slow way: plain transformers hidden states, one
path at a time, attention written out, no KV arena.

Every reference also gives its margin: by how much its closest decision was won. Where that is in
the range of rounding, two right implementations may differ, and tests leave the case out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whiflash_agents.engine.noise import fold_seed, gumbel

SAFE = 1e-4  # a margin above what rounding to float32 can move

Path = tuple[int, ...]


def hidden_states(net: Any, tokens: Sequence[int]) -> list[Tensor]:
    """All hidden states of plain transformers, each `[tokens, hidden]`."""
    with torch.no_grad():
        output = net(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    return [state[0] for state in output.hidden_states]


def features(net: Any, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    states = hidden_states(net, tokens)
    return torch.cat([states[layer] for layer in layers], dim=-1)


def ranked(
    logits: Tensor, count: int, position: int, temperature: float, seed: int, to_target: Any
) -> tuple[list[tuple[float, int]], float]:
    """(score, token) of the `count` best of one row of logits, best first, and the margin between
    the last of them and the next.

    Scores are log-probabilities, or at temperature > 0 those of the 64 likeliest tokens with the
    target's noise added, normalised again."""
    scaled = logits.double() / (temperature or 1.0)
    scores = scaled.log_softmax(-1)
    order = scores.argsort(descending=True).tolist()
    pairs = [(float(scores[d]), to_target(d)) for d in order]
    if temperature > 0:
        pairs = pairs[: max(64, count)]
        tokens = torch.tensor([token for _, token in pairs])
        noise = gumbel(fold_seed(seed), position, tokens)
        perturbed = (torch.tensor([s for s, _ in pairs], dtype=torch.float64) + noise).log_softmax(
            -1
        )
        pairs = [(float(s), token) for s, (_, token) in zip(perturbed, pairs, strict=True)]
        pairs.sort(key=lambda pair: -pair[0])
    margin = pairs[count - 1][0] - pairs[count][0] if count < len(pairs) else math.inf
    return pairs[:count], margin


def attention(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None = None) -> Tensor:
    """One query `[heads, dim]` over `[kv_heads, positions, dim]` -> `[heads * dim]`."""
    heads, dim = query.shape
    groups = heads // len(keys)
    parts = []
    for head in range(heads):
        scores = keys[head // groups] @ query[head] / math.sqrt(dim)
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        parts.append(scores.softmax(-1) @ values[head // groups])
    return torch.cat(parts)


@dataclass
class Eagle3Reference:
    """EAGLE-3 below one text: `step` for one more row, `tree` for the algorithm.

    Attributes:
        net: the target as a plain transformers model.
        tokens: the text, the bonus token being its last.
    """

    net: Any
    model: Any
    tokens: Sequence[int]
    temperature: float = 0.0
    seed: int = 0
    margin: float = math.inf
    _rows: dict[Path, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, past = self.model, len(self.tokens) - 1
        true = features(self.net, self.tokens[:-1], model.config.feature_layers)
        with torch.no_grad():
            embedded = self.embed(self.tokens[1:])
            outputs = model(true, embedded, torch.arange(past))
            x, _ = model.attention_input(embedded, model.project(true))
            rotation = model.rotary(torch.arange(past), x.dtype)
            keys, values = model.midlayer.self_attn.keys_values(x, rotation)
        self.keys, self.values = keys, values  # of the true rows, `[kv_heads, past, dim]`
        self._rows[()] = (keys, values, outputs[-1])

    def embed(self, tokens: Sequence[int]) -> Tensor:
        own = self.model.embed_tokens
        table = self.net.get_input_embeddings().weight if own is None else own.weight
        return table[torch.tensor(list(tokens))].detach()

    def step(self, path: Path) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the true rows and those of `path`, and the last row's output."""
        if path not in self._rows:
            model = self.model
            keys, values, hidden = self.step(path[:-1])
            position = torch.tensor([len(self.tokens) - 2 + len(path)])
            with torch.no_grad():
                x, residual = model.attention_input(self.embed(path[-1:]), hidden[None])
                rotation = model.rotary(position, x.dtype)
                key, value = model.midlayer.self_attn.keys_values(x, rotation)
                keys, values = torch.cat((keys, key), 1), torch.cat((values, value), 1)
                query = model.midlayer.self_attn.queries(x, rotation)[0]
                # In a sliding layer all steps see what the last true row sees, and the path.
                past = len(self.tokens) - 1
                first = max(0, past - (model.config.layer.window(0) or past))
                attended = attention(query, keys[:, first:], values[:, first:])
                self._rows[path] = keys, values, model.finish(attended[None], residual)[0]
        return self._rows[path]

    def children(self, path: Path, count: int) -> list[tuple[float, int]]:
        """The `count` best tokens behind `path`."""
        with torch.no_grad():
            logits = self.model.logits(self.step(path)[2][None])[0]
        offsets = self.model.head.d2t
        best, margin = ranked(
            logits,
            count,
            len(self.tokens) + len(path),
            self.temperature,
            self.seed,
            lambda d: d if offsets is None else d + int(offsets[d]),
        )
        # Which of them are chosen, matters; their order does not.
        self.margin = min(self.margin, margin)
        return best

    def tree(self, *, depth: int, top_k: int, total: int) -> set[Path]:
        """The paths of all kept nodes."""
        candidates: dict[Path, float] = {}
        frontier: dict[Path, float] = {(): 0.0}
        for level in range(depth):
            grown = {
                (*path, token): above + score
                for path, above in frontier.items()
                for score, token in self.children(path, top_k)
            }
            candidates |= grown
            last = level + 1 == depth
            frontier = grown if last else self._best(grown, top_k)
        return set(self._best(candidates, total))

    def _best(self, paths: dict[Path, float], count: int) -> dict[Path, float]:
        order = sorted(paths, key=lambda path: -paths[path])
        if len(order) > count:
            self.margin = min(self.margin, paths[order[count - 1]] - paths[order[count]])
        return {path: paths[path] for path in order[:count]}


def dflash_logits(net: Any, model: Any, tokens: Sequence[int]) -> Tensor:
    """Logits of the drafted slots below one text, `[drafted, draft vocabulary]`."""
    config = model.config
    table = net.get_input_embeddings().weight
    if model.embed_tokens is not None:
        table = model.embed_tokens.weight
    block = [tokens[-1]] + [config.mask_token_id] * (config.block_size - 1)
    with torch.no_grad():
        if len(tokens) > 1:
            true = features(net, tokens[:-1], config.feature_layers)
        else:
            true = table.new_empty(0, len(config.feature_layers) * table.shape[1])
        hidden = model(true, table[torch.tensor(block)])
        if not config.sample_from_anchor:
            hidden = hidden[1:]
        head = net.get_output_embeddings() if model.head is None else model.head.lm_head
        logits = hidden @ head.weight.T * config.output_multiplier
        if config.logit_softcap is not None:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
    return logits


def dflash_ranked(
    net: Any,
    model: Any,
    tokens: Sequence[int],
    count: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[list[list[tuple[float, int]]], float]:
    """Per drafted slot, (score, token) of the `count` best; and the margin."""
    head = model.head
    offsets = None if head is None else head.d2t
    rows, margin = [], math.inf
    for slot, logits in enumerate(dflash_logits(net, model, tokens)):
        best, gap = ranked(
            logits,
            count,
            len(tokens) + slot,
            temperature,
            seed,
            lambda d: d if offsets is None else d + int(offsets[d]),
        )
        rows.append(best)
        margin = min(margin, gap)
    return rows, margin


def likeliest_paths(rows: Sequence[Sequence[tuple[float, int]]], budget: int) -> list[Path]:
    """Every path there is, likeliest first, the first `budget` of them."""
    scored: dict[Path, float] = {(): 0.0}
    level = dict(scored)
    for row in rows:
        level = {
            (*path, token): above + score for path, above in level.items() for score, token in row
        }
        scored |= level
    del scored[()]
    return sorted(scored, key=lambda path: (-scored[path], len(path)))[:budget]


def dflash_context(net: Any, model: Any, tokens: Sequence[int]) -> tuple[list[Tensor], ...]:
    """Keys and values of all positions of `tokens`, per layer `[kv_heads, tokens, dim]`."""
    with torch.no_grad():
        rows = model.context(features(net, tokens, model.config.feature_layers))
        rotation = model.rotary(torch.arange(len(tokens)), rows.dtype)
        pairs = [layer.self_attn.keys_values(rows, rotation) for layer in model.layers]
    return [k for k, _ in pairs], [v for _, v in pairs]


def eagle3_context(net: Any, model: Any, tokens: Sequence[int]) -> tuple[list[Tensor], ...]:
    """Keys and values of all positions of `tokens` but the last, and what drafting keeps of each
    (`[rows, hidden]`)."""
    table = net.get_input_embeddings().weight
    if model.embed_tokens is not None:
        table = model.embed_tokens.weight
    with torch.no_grad():
        projected = model.project(features(net, tokens[:-1], model.config.feature_layers))
        x, _ = model.attention_input(table[torch.tensor(list(tokens[1:]))], projected)
        rotation = model.rotary(torch.arange(len(x)), x.dtype)
        keys, values = model.midlayer.self_attn.keys_values(x, rotation)
    return [keys], [values], [projected]
