"""The EAGLE-3 drafter against its network's plain forward over transformers' hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_drafters
import torch
from draft_reference import SAFE, Eagle3Reference
from drafting import Run, net
from small_engines import ask, text

from whiflash_agents.engine import Request
from whiflash_agents.engine.drafters.eagle3 import Eagle3Drafter
from whiflash_agents.engine.errors import SettingsError

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full vocabulary": {"draft_vocab": 96},
    "own embedding": {"own_embedding": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "all norms": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
    },
    "one feature": {"feature_layers": (1,)},
    "features in another order": {"feature_layers": (2, 0)},
    "five features": {"feature_layers": (0, 2, 1, 2, 0)},
    "no qk norm, biases": {
        "layer": tiny_drafters.layers(qk_norm=False, attention_bias=True, mlp_bias=True)
    },
    "one key head": {"layer": tiny_drafters.layers(num_kv_heads=1, num_heads=2, head_dim=12)},
    "as many key heads": {"layer": tiny_drafters.layers(num_kv_heads=4)},
    "window of 5": {"layer": tiny_drafters.layers(sliding=(True,), sliding_window=5)},
    "window of 1": {"layer": tiny_drafters.layers(sliding=(True,), sliding_window=1)},
    "window not used": {"layer": tiny_drafters.layers(sliding=(False,), sliding_window=2)},
    "linear rope": {
        "layer": tiny_drafters.layers(
            rope={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
        )
    },
    "another activation": {"layer": tiny_drafters.layers(hidden_act="gelu")},
}


def check(
    run: Run,
    model: Any,
    architecture: str,
    *,
    depth: int,
    top_k: int,
    total: int,
    requests: list[Request],
) -> None:
    """Every draft of the run is what the reference says, as far as that is sure."""
    sampling = {r.id: r.sampling for r in requests}
    sure = 0
    assert run.drafts
    for draft in run.drafts:
        budget = min(total, draft.limit.nodes)
        levels = min(depth, draft.limit.depth, budget)
        params = sampling[draft.id]
        reference = Eagle3Reference(
            net(architecture), model, draft.tokens, params.temperature, params.seed or 0
        )
        wanted = reference.tree(depth=levels, top_k=top_k, total=budget) if levels > 0 else set()
        if reference.margin > SAFE:
            sure += 1
            assert set(draft.paths) == wanted
            assert len(draft.paths) == len(wanted)
    assert sure >= 0.8 * len(run.drafts)


@pytest.mark.parametrize("shape", [(4, 1, 4), (3, 3, 9)], ids=["chain", "tree"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_those_of_the_plain_forward(variant: str, shape: tuple[int, int, int]) -> None:
    model = tiny_drafters.eagle3(**VARIANTS[variant]).double()
    depth, top_k, total = shape
    drafter = Eagle3Drafter(model, depth=depth, top_k=top_k, total_tokens=total)
    run = Run("eagle3", {"eagle3": drafter})
    requests = [ask("a", text(1, 21), 12), ask("b", text(2, 3), 9)]
    run.finish(*requests)
    check(run, model, "llama", depth=depth, top_k=top_k, total=total, requests=requests)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_a_chain_follows_the_steps_own_rows_over_many_rounds(architecture: str) -> None:
    model = tiny_drafters.eagle3(draft_vocab=96).double()
    run = Run("eagle3", {"eagle3": Eagle3Drafter(model, depth=5, top_k=1)}, architecture)
    requests = [ask("a", text(1, 2), 40)]
    run.finish(*requests)
    check(run, model, architecture, depth=5, top_k=1, total=60, requests=requests)
    assert all(len(p) == i + 1 for d in run.drafts for i, p in enumerate(d.paths))


@pytest.mark.parametrize(
    ("depth", "top_k", "total"),
    [(1, 1, 1), (1, 6, 4), (5, 4, 30), (2, 10, 60), (4, 2, 3), (3, 64, 50), (6, 3, 100)],
)
def test_trees_of_every_shape(depth: int, top_k: int, total: int) -> None:
    model = tiny_drafters.eagle3(draft_vocab=7).double()
    drafter = Eagle3Drafter(model, depth=depth, top_k=top_k, total_tokens=total)
    assert drafter.top_k == min(top_k, 7)  # there are no more tokens
    run = Run("eagle3", {"eagle3": drafter}, max_draft_nodes=128)
    requests = [ask("a", text(3, 14), 8)]
    run.finish(*requests)
    check(run, model, "llama", depth=depth, top_k=min(top_k, 7), total=total, requests=requests)


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_the_loops_limits_cut_the_tree(nodes: int) -> None:
    model = tiny_drafters.eagle3().double()
    drafter = Eagle3Drafter(model, depth=4, top_k=4, total_tokens=20)
    run = Run("eagle3", {"eagle3": drafter}, max_draft_nodes=nodes)
    requests = [ask("a", text(4, 9), 9), ask("b", text(5, 12), 3), ask("c", text(6, 5), 1)]
    run.finish(*requests)
    assert max(len(d.paths) for d in run.drafts) == nodes
    for draft in run.drafts:
        assert len(draft.paths) <= nodes
        assert max(map(len, draft.paths), default=0) <= draft.limit.depth
    assert any(d.limit.depth == 0 and not d.paths for d in run.drafts)
    check(run, model, "llama", depth=4, top_k=4, total=20, requests=requests)


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("draft_vocab", [40, 96])
def test_with_sampling_drafts_carry_the_targets_noise(top_k: int, draft_vocab: int) -> None:
    model = tiny_drafters.eagle3(draft_vocab=draft_vocab).double()
    drafter = Eagle3Drafter(model, depth=3, top_k=top_k, total_tokens=8)
    run = Run("eagle3", {"eagle3": drafter})
    requests = [
        ask("a", text(1, 10), 12, temperature=0.8, seed=2**63 + 5),
        ask("b", text(2, 10), 12, temperature=1.4, seed=-3),
        ask("c", text(3, 10), 12),
    ]
    run.finish(*requests)
    check(run, model, "llama", depth=3, top_k=top_k, total=8, requests=requests)


@pytest.mark.parametrize("window", [None, 4])
def test_drafts_do_not_depend_on_who_else_drafts(window: int | None) -> None:
    layer = tiny_drafters.layers(sliding=(window is not None,), sliding_window=window)
    model = tiny_drafters.eagle3(layer=layer).double()
    lengths = [3, 40, 1, 17, 26]
    requests = [
        ask(f"r{i}", text(i, n), 6 + 3 * i, temperature=(i % 2) * 0.9, seed=i)
        for i, n in enumerate(lengths)
    ]

    def drafted(*groups: list[Request]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for group in groups:
            drafter = Eagle3Drafter(model, depth=3, top_k=3, total_tokens=9)
            run = Run("eagle3", {"eagle3": drafter}, prefill_chunk=512)
            run.finish(*group)
            assert max(run.watched["eagle3"].calls) == len(group)
            found |= run.by_text()
        return found

    alone = drafted(*([r] for r in requests))
    assert drafted(requests) == alone
    assert drafted(requests[::-1]) == alone


def test_only_tokens_of_the_draft_vocabulary_are_drafted() -> None:
    model = tiny_drafters.eagle3(draft_vocab=5).double()
    run = Run("eagle3", {"eagle3": Eagle3Drafter(model, depth=3, top_k=5, total_tokens=30)})
    run.finish(ask("a", text(1, 10), 10))
    known = {d + int(offset) for d, offset in enumerate(model.head.d2t)}
    assert {token for d in run.drafts for path in d.paths for token in path} == known


def test_an_equal_path_is_not_drafted_twice_and_parents_stand_before_children() -> None:
    run = Run("eagle3")
    run.finish(ask("a", text(1, 10), 30))
    for draft in run.drafts:
        seen = {()}
        for path in draft.paths:
            assert path not in seen
            assert path[:-1] in seen
            seen.add(path)


@pytest.mark.parametrize("setting", ["depth", "top_k", "total_tokens"])
def test_settings_below_one_are_refused(setting: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"eagle3: {setting}=0; expected an integer of at least 1"
    ):
        Eagle3Drafter(tiny_drafters.eagle3(), **{setting: 0})


def test_one_drafter_serves_one_engine() -> None:
    drafter = Eagle3Drafter(tiny_drafters.eagle3().double())
    Run("eagle3", {"eagle3": drafter})
    with pytest.raises(SettingsError, match="serves another engine"):
        Run("eagle3", {"eagle3": drafter})


def test_nothing_of_a_draft_remembers_how_it_was_computed() -> None:
    run = Run("eagle3")
    run.engine.add(ask("a", text(1, 10), 30))
    for _ in range(3):
        run.step()
    last = run.running[0].contexts["eagle3"].last
    assert last is not None
    assert not last.requires_grad
    # A view would keep a whole backlog alive.
    assert last.untyped_storage().nbytes() == last.numel() * last.element_size()
    assert torch.isfinite(last).all()
