"""The DFlash drafter against its network's plain forward over transformers' hidden states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_drafters
import torch
from draft_reference import SAFE, dflash_ranked, likeliest_paths
from drafting import Draft, Run, net
from small_engines import ask, text

from whiflash_agents.engine import Request
from whiflash_agents.engine.drafters.ddtree import DDTreeDrafter
from whiflash_agents.engine.drafters.dflash import DFlashDrafter
from whiflash_agents.engine.drafters.dflash_model import DFlashModel


def sliding(window: int, *kinds: bool) -> Any:
    return tiny_drafters.layers(num_layers=len(kinds), sliding=kinds, sliding_window=window)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"layer": tiny_drafters.layers()},
    "three layers, no qk norm, biases": {
        "layer": tiny_drafters.layers(
            num_layers=3, qk_norm=False, attention_bias=True, mlp_bias=True
        )
    },
    "sliding causal": {"layer": sliding(4, True, False)},
    "sliding everywhere": {"layer": sliding(4, True, True)},
    "sliding non-causal": {"layer": sliding(3, True, False), "sliding_causal": False},
    "sliding causal from bonus": {"layer": sliding(4, True, False), "window_from": "bonus"},
    "sliding non-causal from bonus": {
        "layer": sliding(3, False, True),
        "sliding_causal": False,
        "window_from": "bonus",
    },
    "window of 1": {"layer": sliding(1, True, False)},
    "window longer than the text": {"layer": sliding(300, True, True)},
    "anchor": {"sample_from_anchor": True},
    "anchor, sliding": {"sample_from_anchor": True, "layer": sliding(3, True, False)},
    "own full head": {"draft_vocab_size": 96},
    "own reduced head": {"draft_vocab_size": 40},
    "own embedding": {"own_embedding": True, "draft_vocab_size": 40},
    "scaled embedding": {"embedding_scale": 3.5},
    "multiplier": {"output_multiplier": 0.25},
    "softcap": {"logit_softcap": 2.0},
    "all three": {"embedding_scale": 0.2, "output_multiplier": 3.0, "logit_softcap": 5.0},
    "features in another order": {"feature_layers": (2, 0, 1)},
    "block of two": {"block_size": 2},
    "block of eleven": {"block_size": 11},
    "linear rope": {
        "layer": tiny_drafters.layers(
            num_layers=2, rope={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
        )
    },
}


def make(**changes: Any) -> Any:
    model = tiny_drafters.dflash(**changes).double()
    if changes.get("draft_vocab_size") == 40:
        chosen = torch.randperm(96, generator=torch.Generator().manual_seed(3))[:40].sort().values
        model.head.d2t = chosen - torch.arange(40)
    return model


def reference_model(model: Any) -> Any:
    """The same network without a scale of its own: the reference scales the embeddings."""
    plain = DFlashModel(replace(model.config, embedding_scale=1.0)).double().eval()
    plain.load_state_dict(model.state_dict())
    return plain


def expected(
    model: Any, draft: Draft, request: Request, architecture: str, nodes: int | None
) -> tuple[Any, bool]:
    """What should have been drafted (a list for a chain, a set for a tree), and whether that is
    sure."""
    budget = min(draft.limit.nodes, nodes or draft.limit.nodes)
    depth = min(model.config.num_drafted, draft.limit.depth, budget)
    params = request.sampling
    target = ScaledEmbedding(net(architecture), model.config.embedding_scale)
    plain = reference_model(model)
    width = 1 if nodes is None else min(nodes, 4)
    rows, margin = dflash_ranked(
        target, plain, draft.tokens, width, params.temperature, params.seed or 0
    )
    rows = rows[:depth]
    if nodes is None:
        tokens = tuple(row[0][1] for row in rows)
        return [tokens[: i + 1] for i in range(depth)], margin > SAFE
    found = likeliest_paths(rows, budget + 1)
    scores = [sum(dict((t, s) for s, t in rows[i])[t] for i, t in enumerate(p)) for p in found]
    margin = scores[-2] - scores[-1] if len(found) > budget else 1.0
    return set(found[:budget]), margin > SAFE


class ScaledEmbedding:
    """A target whose embeddings are scaled before they enter the block."""

    def __init__(self, target: Any, scale: float) -> None:
        self._target, self._scale = target, scale

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._target(*args, **kwargs)

    def get_input_embeddings(self) -> Any:
        weight = self._target.get_input_embeddings().weight.detach() * self._scale
        return torch.nn.Embedding.from_pretrained(weight)

    def get_output_embeddings(self) -> Any:
        return self._target.get_output_embeddings()


def check_chains(
    run: Run, model: Any, requests: list[Request], architecture: str = "llama"
) -> None:
    asked = {r.id: r for r in requests}
    sure = 0
    assert run.drafts
    for draft in run.drafts:
        wanted, safe = expected(model, draft, asked[draft.id], architecture, None)
        if safe:
            sure += 1
            assert list(draft.paths) == wanted
    assert sure >= 0.8 * len(run.drafts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_those_of_the_plain_forward(variant: str) -> None:
    model = make(**VARIANTS[variant])
    run = Run("dflash", {"dflash": DFlashDrafter(model)})
    requests = [ask("a", text(1, 21), 14), ask("b", text(2, 3), 9), ask("c", [7], 6)]
    run.finish(*requests)
    check_chains(run, model, requests)
    longest = max(len(d.paths) for d in run.drafts)
    assert longest == model.config.num_drafted


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_drafts_follow_the_text_over_many_rounds(architecture: str) -> None:
    model = make(layer=sliding(6, True, False))
    run = Run("dflash", {"dflash": DFlashDrafter(model)}, architecture)
    requests = [ask("a", text(1, 2), 40)]
    run.finish(*requests)
    check_chains(run, model, requests, architecture)


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_loops_limits_cut_the_chain_but_not_the_block(nodes: int) -> None:
    """The block is what the network was trained on: the reference computes it whole."""
    model = make()
    run = Run("dflash", {"dflash": DFlashDrafter(model)}, max_draft_nodes=nodes)
    requests = [ask("a", text(4, 9), 9), ask("b", text(5, 12), 3), ask("c", text(6, 5), 2)]
    run.finish(*requests)
    assert max(len(d.paths) for d in run.drafts) == nodes
    assert all(len(d.paths) == min(nodes, d.limit.depth) for d in run.drafts)
    assert min(len(d.paths) for d in run.drafts) == 0
    check_chains(run, model, requests)


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 40}, {"sample_from_anchor": True}])
def test_with_sampling_drafts_carry_the_targets_noise(changes: dict[str, Any]) -> None:
    model = make(**changes)
    run = Run("dflash", {"dflash": DFlashDrafter(model)})
    requests = [
        ask("a", text(1, 10), 12, temperature=0.8, seed=2**63 + 5),
        ask("b", text(2, 10), 12, temperature=1.4, seed=-3),
        ask("c", text(3, 10), 12),
    ]
    run.finish(*requests)
    check_chains(run, model, requests)


@pytest.mark.parametrize("arm", ["dflash", "ddtree"])
@pytest.mark.parametrize(
    "variant", ["plain", "sliding causal", "sliding non-causal from bonus", "own reduced head"]
)
def test_drafts_do_not_depend_on_who_else_drafts(arm: str, variant: str) -> None:
    model = make(**VARIANTS[variant])
    lengths = [3, 40, 1, 17, 26]
    requests = [
        ask(f"r{i}", text(i, n), 6 + 3 * i, temperature=(i % 2) * 0.9, seed=i)
        for i, n in enumerate(lengths)
    ]

    def drafted(*groups: list[Request]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for group in groups:
            drafter = DFlashDrafter(model) if arm == "dflash" else DDTreeDrafter(model, nodes=7)
            run = Run(arm, {arm: drafter}, prefill_chunk=512)
            run.finish(*group)
            assert max(run.watched[arm].calls) == len(group)
            found |= run.by_text()
        return found

    alone = drafted(*([r] for r in requests))
    assert drafted(requests) == alone
    assert drafted(requests[::-1]) == alone


@pytest.mark.parametrize(
    "variant", ["plain", "sliding causal", "anchor", "own reduced head", "all three"]
)
def test_trees_hold_the_likeliest_paths_of_the_plain_forward(variant: str) -> None:
    model = make(**VARIANTS[variant] | {"block_size": 4})
    run = Run("ddtree", {"ddtree": DDTreeDrafter(model, nodes=4)})
    requests = [
        ask("a", text(1, 21), 12),
        ask("b", text(2, 3), 9, temperature=1.0, seed=4),
    ]
    run.finish(*requests)
    asked = {r.id: r for r in requests}
    sure = 0
    for draft in run.drafts:
        wanted, safe = expected(model, draft, asked[draft.id], "llama", 4)
        if safe:
            sure += 1
            assert set(draft.paths) == wanted
    assert sure >= 0.8 * len(run.drafts)


# What a sliding layer sees, spelled out -----------------------------------------------------------


@pytest.mark.parametrize("window_from", ["slot", "bonus"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("context", [0, 1, 4, 12])
def test_a_sliding_layer_sees_its_window(
    window_from: str, causal: bool, window: int, context: int
) -> None:
    model = make(layer=sliding(window, False, True), sliding_causal=causal, window_from=window_from)
    assert model.config.block_visible(0, context) is None
    visible = model.config.block_visible(1, context)
    size = model.config.block_size
    assert visible.shape == (size, context + size)
    for slot in range(size):
        for key in range(context + size):
            at = context + slot
            if key < context:
                # z-lab: `window` positions, the slot's own included. speculators: the last
                # `window` context positions, for every slot.
                sees = at - key < window if window_from == "slot" else context - key <= window
            else:
                sees = True if window_from == "bonus" else abs(at - key) < window
                sees = sees and (key <= at or not causal)
            assert bool(visible[slot, key]) == sees, (slot, key)
