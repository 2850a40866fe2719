"""One test per known way to get neural drafters wrong without anyone noticing: output stays right
(verification sees to that), only acceptance suffers. So drafts themselves are compared, with what
the networks say of plain transformers hidden states; and each trap, set again, must show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_drafters
import torch
from draft_reference import SAFE, Eagle3Reference, dflash_ranked
from drafting import Run, ScheduleRouter, net, target
from small_engines import ask, text

from whiflash_agents.engine import EngineSettings, Request, WhiFlashEngine
from whiflash_agents.engine.catch_up import CatchUp
from whiflash_agents.engine.drafters import eagle3 as eagle3_module
from whiflash_agents.engine.drafters.candidates import Coupling
from whiflash_agents.engine.drafters.context import DraftContext
from whiflash_agents.engine.drafters.ddtree import DDTreeDrafter
from whiflash_agents.engine.drafters.dflash import DFlashContext, DFlashDrafter
from whiflash_agents.engine.drafters.dflash_model import DFlashModel
from whiflash_agents.engine.drafters.eagle3 import Eagle3Context, Eagle3Drafter
from whiflash_agents.engine.drafters.layers import DraftHead, Rotary
from whiflash_agents.engine.errors import ContextLengthError

DEPTH, TOP_K, TOTAL = 3, 3, 8


def make(arm: str, **changes: Any) -> Any:
    """A drafter over a random network of its own."""
    if arm == "eagle3":
        model = tiny_drafters.eagle3(**changes).double()
        return Eagle3Drafter(model, depth=DEPTH, top_k=TOP_K, total_tokens=TOTAL)
    model = tiny_drafters.dflash(**changes).double()
    if model.head is not None and model.head.d2t is not None:
        model.head.d2t = torch.arange(len(model.head.d2t)) + 1  # draft token d is target token 2d+1
    return DFlashDrafter(model) if arm == "dflash" else DDTreeDrafter(model, nodes=TOTAL)


def run_of(drafter: Any, *requests: Request, architecture: str = "llama", **options: Any) -> Run:
    run = Run(drafter.name, {drafter.name: drafter}, architecture, **options)
    run.finish(*requests)
    assert run.drafts
    return run


def as_the_network_says(
    run: Run, requests: Sequence[Request], architecture: str = "llama", weights: Any = None
) -> bool:
    """Whether all drafts are those of the plain forward; `weights` is the network as it was
    loaded, where the run may have changed its own."""
    sampling = {r.id: r.sampling for r in requests}
    sure = 0
    for draft in run.drafts:
        model = weights or run.watched[draft.drafter].inner.context.model
        params = sampling[draft.id]
        noise = params.temperature, params.seed or 0
        wanted: set[Any] = set()
        if draft.drafter == "eagle3":
            reference = Eagle3Reference(net(architecture), model, draft.tokens, *noise)
            budget = min(TOTAL, draft.limit.nodes)
            depth = min(DEPTH, draft.limit.depth, budget)
            if depth > 0:
                wanted = reference.tree(depth=depth, top_k=TOP_K, total=budget)
            safe = reference.margin > SAFE
        else:
            rows, margin = dflash_ranked(net(architecture), model, draft.tokens, 1, *noise)
            chain = tuple(row[0][1] for row in rows[: min(draft.limit.depth, draft.limit.nodes)])
            wanted = {chain[: i + 1] for i in range(len(chain))}
            safe = margin > SAFE
        if safe:
            sure += 1
            if set(draft.paths) != wanted:
                return False
    assert sure >= 0.8 * len(run.drafts)
    return True


REQUESTS = (ask("a", text(1, 20), 14), ask("b", text(2, 7), 14))


# 7: state and rows of others ----------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["eagle3", "dflash"])
def test_no_state_survives_from_one_request_to_the_next(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ask("first", text(1, 30), 12), ask("second", text(2, 30), 12)

    def after_another() -> Run:
        run = Run(arm, {arm: make(arm)}, prefix_reuse=False)
        run.finish(first)
        run.drafts.clear()
        run.finish(second)
        return run

    alone = run_of(make(arm), second, prefix_reuse=False).by_text()
    assert after_another().by_text() == alone

    # Set again: what is kept per slot of the batch is not forgotten with the request.
    context = Eagle3Context if arm == "eagle3" else DFlashContext
    consume = context._consume
    kept: dict[int, Any] = {}

    def keeping(self: Any, backlog: Any) -> Any:
        if arm == "eagle3":
            rows = consume(self, backlog)
            return [kept.setdefault(slot, row) for slot, row in enumerate(rows)]
        known = kept.get(0, 0) if backlog.starts == [0] else 0
        kept[0] = max(kept.get(0, 0), backlog.ends[0])
        rest = slice(min(known, backlog.ends[0]), None)
        names = ("features", "positions", "targets")
        parts = {name: getattr(backlog, name)[rest] for name in names}
        return consume(self, replace(backlog, **parts))

    monkeypatch.setattr(context, "_consume", keeping)
    assert after_another().by_text() != alone


@pytest.mark.parametrize("arm", ["eagle3", "dflash", "ddtree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_a_batch_do_not_mix_whatever_their_order(
    arm: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        ask(f"r{i}", text(i, 9 + 7 * i), 12, temperature=temperature, seed=i) for i in range(3)
    ]
    alone: dict[Any, Any] = {}
    for request in requests:
        alone |= run_of(make(arm), request).by_text()

    def together(*order: Request) -> dict[Any, Any]:
        return run_of(make(arm), *order, prefill_chunk=512).by_text()

    assert together(*requests) == alone
    assert together(*requests[::-1]) == alone

    # Set again: rows are attributed in another order than they were computed in.
    if temperature:
        of = Coupling.of.__func__  # type: ignore[attr-defined]
        turned: Any = classmethod(lambda cls, rows, device: of(cls, rows[::-1], device))
        monkeypatch.setattr(Coupling, "of", turned)
    elif arm == "eagle3":
        step = Eagle3Context.first_step
        monkeypatch.setattr(Eagle3Context, "first_step", lambda self, s: step(self, s).flip(0))
    else:
        block = DFlashContext.block
        monkeypatch.setattr(DFlashContext, "block", lambda self, s, d: block(self, s[::-1], d))
    assert together(*requests) != alone


# 8: loaded or fed wrongly -------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["eagle3", "dflash"])
@pytest.mark.parametrize("guessed", [(1, 2), (1, 0), (0, 2)])
def test_features_are_of_the_layers_that_the_config_names(arm: str, guessed: Any) -> None:
    right = make(arm, feature_layers=(0, 1))
    assert as_the_network_says(run_of(right, *REQUESTS), REQUESTS)

    wrong = make(arm, feature_layers=(0, 1))
    wrong.context.feature_layers = guessed
    assert not as_the_network_says(run_of(wrong, *REQUESTS), REQUESTS)


@pytest.mark.parametrize("arm", ["eagle3", "dflash"])
def test_features_are_of_the_positions_that_were_accepted(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [ask("a", text(1, 20), 40)]

    def drafted() -> Run:
        # A tree beside it, so that accepted nodes are not the first ones of their forward.
        drafters = {arm: make(arm), "tree": Perfect(requests)}
        run = Run(ScheduleRouter((arm, "tree"), 1), drafters)
        run.finish(*requests)
        run.drafts = [d for d in run.drafts if d.drafter == arm]
        assert any(r.drafter == "tree" and r.accepted for r in run.results["a"].stats.rounds)
        return run

    assert as_the_network_says(drafted(), requests)
    append = CatchUp.append
    monkeypatch.setattr(
        CatchUp,
        "append",
        lambda self, s, f, rows: append(self, s, f, range(rows[0], rows[0] + len(rows))),
    )
    assert not as_the_network_says(drafted(), requests)


class Perfect(tiny.ScriptedDrafter):
    """Proposes the right chain behind a wrong branch, so that accepted nodes are not the first."""

    def __init__(self, requests: Sequence[Request]) -> None:
        engine = WhiFlashEngine(target(), settings=EngineSettings(kv_tokens=512))
        results = engine.generate(list(requests))
        super().__init__("tree", {r.id: r.token_ids for r in results})

    def _draft(self, sequence: Any, limit: Any) -> Any:
        tree = eagle3_module.DraftTree(sequence.tokens[-1])
        coming = list(self._answers[sequence.id][sequence.num_output :])[: min(limit.depth, 4)]
        if coming:
            tree.add(0, (coming[0] + 1) % tiny.VOCAB)
        node = 0
        for token in coming:
            node = tree.add(node, token)
        return tree


def test_a_head_of_its_own_is_not_overwritten_by_the_targets() -> None:
    right = make("dflash", draft_vocab_size=40)
    weights = make("dflash", draft_vocab_size=40).context.model
    assert as_the_network_says(run_of(right, *REQUESTS), REQUESTS, weights=weights)

    wrong = make("dflash", draft_vocab_size=40)
    wrong.context.model.head.lm_head.weight.copy_(
        target().model.get_output_embeddings().weight[:40]
    )
    assert not as_the_network_says(run_of(wrong, *REQUESTS), REQUESTS, weights=weights)
    wrong = make("dflash", draft_vocab_size=40)
    wrong.context.model.head = None  # takes the target's
    assert not as_the_network_says(run_of(wrong, *REQUESTS), REQUESTS, weights=weights)


@pytest.mark.parametrize("arm", ["eagle3", "dflash"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_d2t_is_an_offset_and_not_an_id(
    arm: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [ask("a", text(1, 20), 14, temperature=temperature, seed=3)]
    changes = {"draft_vocab": 40} if arm == "eagle3" else {"draft_vocab_size": 40}
    run = run_of(make(arm, **changes), *requests)
    assert as_the_network_says(run, requests)
    offsets = run.watched[arm].inner.context.model.head.d2t.tolist()
    assert any(offsets)
    known = {d + offset for d, offset in enumerate(offsets)}
    assert {token for d in run.drafts for path in d.paths for token in path} <= known

    for mapping in (lambda self, ids: self.d2t[ids], lambda self, ids: ids):
        monkeypatch.setattr(DraftHead, "target_ids", mapping)
        assert not as_the_network_says(run_of(make(arm, **changes), *requests), requests)


@pytest.mark.parametrize("anchor", [False, True])
def test_slot_0_is_the_embedded_bonus_token_and_not_a_mask(
    anchor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"sample_from_anchor": anchor}
    assert as_the_network_says(run_of(make("dflash", **changes), *REQUESTS), REQUESTS)
    monkeypatch.setattr(
        DFlashModel,
        "block_tokens",
        lambda self, bonus: bonus.new_full(
            (len(bonus), self.config.block_size), self.config.mask_token_id
        ),
    )
    assert not as_the_network_says(run_of(make("dflash", **changes), *REQUESTS), REQUESTS)


def test_dflash_context_ends_before_the_bonus_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_the_network_says(run_of(make("dflash"), *REQUESTS), REQUESTS)
    monkeypatch.setattr(DFlashContext, "block", early(DFlashContext.block, 1))
    assert not as_the_network_says(run_of(make("dflash"), *REQUESTS), REQUESTS)


def early(block: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """A block forward that believes the context some rows shorter than it is."""

    def believing(self: Any, sequences: Any, depths: Any) -> Any:
        shorter = [
            SimpleNamespace(
                num_cached=s.num_cached - rows,
                extent=s.extent,
                tokens=s.tokens,
                request=s.request,
                seed=s.seed,
            )
            for s in sequences
        ]
        return block(self, shorter, depths)

    return believing


def test_eagle_pairs_a_feature_with_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_the_network_says(run_of(make("eagle3"), *REQUESTS), REQUESTS)
    consume = Eagle3Context._consume

    def unshifted(self: Any, backlog: Any) -> Any:
        shifted = [
            SimpleNamespace(tokens=[0, *s.tokens[:-1]], extent=s.extent, contexts=s.contexts)
            for s in backlog.sequences
        ]
        return consume(self, replace(backlog, sequences=shifted))

    monkeypatch.setattr(Eagle3Context, "_consume", unshifted)
    assert not as_the_network_says(run_of(make("eagle3"), *REQUESTS), REQUESTS)


# 9: prefixes --------------------------------------------------------------------------------------


def conversation(run: Run) -> list[Any]:
    """Two turns, and a prompt that only begins like them."""
    first = run.finish(ask("first", text(1, 50), 12))[0]
    second = run.finish(ask("second", [*text(1, 50), *first.token_ids, *text(2, 9)], 12))[0]
    branch = run.finish(ask("branch", [*text(1, 50)[:44], *text(3, 9)], 12))[0]
    again = run.finish(ask("again", text(1, 50), 12))[0]
    return [first, second, branch, again]


@pytest.mark.parametrize("arms", [("eagle3",), ("dflash",), ("eagle3", "dflash"), ("ddtree",)])
def test_prefixes_are_reused_as_without_drafters_but_for_what_is_counted(
    arms: tuple[str, ...],
) -> None:
    plain = Run("none", {})
    wanted = conversation(plain)

    def drafted(settle: bool = True) -> tuple[Run, list[Any]]:
        run = Run(ScheduleRouter(arms, 1), {arm: make(arm) for arm in arms})
        if not settle:
            run.engine._scheduler._settle = lambda sequence: None
        return run, conversation(run)

    run, got = drafted()
    assert [r.token_ids for r in got] == [r.token_ids for r in wanted]
    lost = run.engine.totals.positions_recomputed
    assert sum(r.cached_tokens for r in got) == sum(r.cached_tokens for r in wanted) - lost
    assert run.engine.totals.positions_prefilled == plain.engine.totals.positions_prefilled + lost
    # EAGLE-3's row of a position depends on the token behind it: one position per branch.
    differences = [w.cached_tokens - g.cached_tokens for g, w in zip(got, wanted, strict=True)]
    assert max(differences) <= (1 if "eagle3" in arms else 0)
    assert got[2].cached_tokens >= 43
    assert not any(r.stats.notes for r in got)
    assert {record.drafter for r in got for record in r.stats.rounds} <= set(arms)

    # Set again: a drafter that did not follow an ended request cannot serve those that build on it.
    if len(arms) > 1:
        _, worse = drafted(settle=False)
        assert any("reused prefix came without" in n for r in worse for n in r.stats.notes)


def test_a_prefix_of_one_that_still_runs_brings_drafters_that_slept() -> None:
    class OneEach(ScheduleRouter):
        def route(self, sequences: Any) -> list[str]:
            return ["eagle3" if s.id == "owner" else "dflash" for s in sequences]

    requests = [ask("owner", text(1, 40), 40), ask("borrower", [*text(1, 40), 7, 8], 20)]

    def drafted(settle: bool) -> Run:
        drafters = {arm: make(arm) for arm in ("eagle3", "dflash")}
        run = Run(OneEach(("eagle3", "dflash")), drafters)
        if not settle:
            run.engine._scheduler._settle = lambda sequence: None
        run.engine.add(requests[0])
        for _ in range(8):
            run.step()
        assert run.running[0].contexts["dflash"].rows == 0
        run.finish(requests[1])
        assert run.results["borrower"].cached_tokens == 39
        return run

    run = drafted(settle=True)
    assert as_the_network_says(run, requests)
    stats = run.results["borrower"].stats
    assert not stats.notes
    assert {r.drafter for r in stats.rounds} == {"dflash"}
    assert drafted(settle=False).results["borrower"].stats.notes


def test_a_row_that_depends_on_the_token_behind_the_prefix_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    branch = ask("branch", [*text(1, 50)[:44], *text(3, 9)], 12)

    def drafted(lookahead: int) -> Run:
        run = Run("eagle3", {"eagle3": make("eagle3")})
        run.engine._scheduler.lookahead = lookahead
        run.finish(ask("first", text(1, 50), 12))
        run.drafts.clear()
        run.finish(branch)
        assert run.results["branch"].cached_tokens == 44 - lookahead
        return run

    assert as_the_network_says(drafted(1), [branch])
    assert drafted(1).engine.totals.positions_recomputed == 1
    assert not as_the_network_says(drafted(0), [branch])


@pytest.mark.parametrize("arm", ["eagle3", "dflash", "ddtree"])
def test_drafting_writes_into_no_prefix_that_others_share(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def intact() -> bool:
        """Whether two sequences that share a copied prefix leave all earlier rows as they are."""
        run = Run(arm, {arm: make(arm)})
        run.engine.add(ask("owner", text(1, 40), 50))
        for _ in range(8):
            run.step()
        run.engine.add(ask("borrower", [*text(1, 40), 7, 8], 50))
        for _ in range(2):
            run.step()
        owner, borrower = run.running
        assert borrower.cached_tokens >= 39
        assert owner.extent is not None
        assert borrower.extent is not None
        arenas = run.engine._cache._arenas
        held = {
            s.id: [
                (a, s.extent, a.narrow(2, s.extent.start, n).clone(), n)
                for at, a in enumerate(arenas)
                if s.extent is not None
                # The target's keys and values, and the rows that the drafter has consumed.
                for n in [s.num_cached if at < 2 else rows_of(s)]
            ]
            for s in (owner, borrower)
        }
        for _ in range(10):
            run.step()
        assert len(run.running) == 2
        return all(
            torch.equal(arena.narrow(2, extent.start, n), before)
            for parts in held.values()
            for arena, extent, before, n in parts
        )

    def rows_of(sequence: Any) -> int:
        (state,) = sequence.contexts.values()
        return int(state.rows)

    assert intact()
    if arm == "eagle3":
        step = Eagle3Context.next_step
        monkeypatch.setattr(
            Eagle3Context,
            "next_step",
            lambda self, hidden, tokens, positions, targets, rows: step(
                self, hidden, tokens, positions, targets - 3, rows
            ),
        )
    else:
        monkeypatch.setattr(DFlashContext, "block", early(DFlashContext.block, 8))
    assert not intact()


# 10: windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_sliding_window_is_rolled_back_with_its_text(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly every draft is rejected, and the text is many times as long as the window. All steps
    of a draft see what the last context row sees, and their ancestors."""
    layer = tiny_drafters.layers(sliding=(True,), sliding_window=3)
    requests = [ask("a", text(1, 20), 30)]

    def drafted() -> Run:
        return run_of(make("eagle3", layer=layer), *requests, architecture=architecture)

    run = drafted()
    assert as_the_network_says(run, requests, architecture)
    assert run.results["a"].stats.num_accepted_draft_tokens < 30

    # Set again: distances are counted in rows of the arena, where siblings lie side by side.
    row = Eagle3Drafter._row

    def without_positions(self: Any, *args: Any) -> Any:
        found = row(self, *args)
        found.tail_positions = None
        return found

    monkeypatch.setattr(Eagle3Drafter, "_row", without_positions)
    assert not as_the_network_says(drafted(), requests, architecture)


# 11: limits ---------------------------------------------------------------------------------------

LIMIT = 60


@pytest.mark.parametrize("arm", ["eagle3", "dflash", "ddtree"])
@pytest.mark.parametrize("past", [-30, -2, -1, 0, 1, 2, 20])
def test_a_text_beyond_the_drafters_limit_is_decoded_plainly(
    arm: str, past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`past`: by how much the first round would reach beyond the drafter's last position."""
    deepest = 0
    turn = Rotary.forward

    def watching(self: Any, positions: Any, dtype: Any) -> Any:
        nonlocal deepest
        deepest = max(deepest, int(positions.max()) + 1)
        return turn(self, positions, dtype)

    monkeypatch.setattr(Rotary, "forward", watching)
    layer = tiny_drafters.layers(num_layers=1, max_positions=LIMIT)
    drafter = make(arm, layer=layer)
    span = drafter.context.span
    assert span == (DEPTH - 1 if arm == "eagle3" else 6)
    request = ask("a", text(1, LIMIT - span + past), 40)
    run = Run(arm, {arm: drafter})
    result = run.finish(request)[0]
    assert result.token_ids == Run("none", {}).finish(request)[0].token_ids
    rounds = result.stats.rounds
    for r in rounds:
        committed = len(request.prompt_ids) + r.position - 1
        assert r.drafter == (arm if committed + span <= LIMIT else "none")
    last = [r for r in rounds if r.drafter == arm]
    assert bool(last) == (past <= 0)
    assert rounds[-1].drafter == "none"
    (note,) = result.stats.notes
    assert note.startswith(f"{drafter.context.name} switched off from output token ")
    assert f"max_position_embeddings of {LIMIT}" in note
    assert deepest <= LIMIT


def test_without_the_limit_positions_would_run_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    deepest = 0
    turn = Rotary.forward

    def watching(self: Any, positions: Any, dtype: Any) -> Any:
        nonlocal deepest
        deepest = max(deepest, int(positions.max()) + 1)
        return turn(self, positions, dtype)

    monkeypatch.setattr(Rotary, "forward", watching)
    monkeypatch.setattr(CatchUp, "_watch_limits", lambda self, sequence: None)
    layer = tiny_drafters.layers(max_positions=LIMIT)
    run_of(make("eagle3", layer=layer), ask("a", text(1, 40), 40))
    assert deepest > LIMIT


def test_the_other_drafter_goes_on_where_one_has_reached_its_limit() -> None:
    drafters = {
        "eagle3": make("eagle3", layer=tiny_drafters.layers(max_positions=50)),
        "dflash": make("dflash"),
    }
    run = Run(ScheduleRouter(("eagle3", "dflash"), 4), drafters)
    requests = [ask("a", text(1, 30), 60), ask("b", text(2, 80), 20)]
    a, b = run.finish(*requests)
    assert [r.drafter for r in b.stats.rounds].count("eagle3") == 0
    assert {r.drafter for r in a.stats.rounds} == {"eagle3", "dflash", "none"}
    assert {r.drafter for r in b.stats.rounds} == {"dflash", "none"}
    assert len(a.stats.notes) == len(b.stats.notes) == 1
    assert as_the_network_says(run, requests)
    # A short prompt that builds on the long one is served by both again.
    (c,) = run.finish(ask("c", [*text(1, 30), 9], 10))
    assert c.cached_tokens >= 29
    assert {r.drafter for r in c.stats.rounds} == {"eagle3", "dflash"}
    assert as_the_network_says(run, [*requests, ask("c", [], 10)])


@pytest.mark.parametrize("arm", ["eagle3", "dflash", "ddtree"])
def test_a_text_beyond_the_targets_limit_is_an_error_that_says_so(arm: str) -> None:
    run = Run(arm, {arm: make(arm)})
    with pytest.raises(ContextLengthError, match=r"exceed the target's context of 512"):
        run.engine.add(ask("a", text(1, 500), 13))
    (result,) = run.finish(ask("a", text(1, 500), 12))
    assert len(result.token_ids) == 12


# Tree rows ----------------------------------------------------------------------------------------


def test_rows_of_a_tree_do_not_stay_in_the_drafters_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert as_the_network_says(run_of(make("eagle3"), *REQUESTS), REQUESTS)
    draft = Eagle3Drafter.draft

    def keeping(self: Any, sequences: Any, limits: Any) -> Any:
        trees = draft(self, sequences, limits)
        for sequence in sequences:
            sequence.contexts["eagle3"].rows += 1  # the first drafted row passes for a true one
        return trees

    monkeypatch.setattr(Eagle3Drafter, "draft", keeping)
    assert not as_the_network_says(run_of(make("eagle3"), *REQUESTS), REQUESTS)


def test_what_is_consumed_are_target_features_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context row is made from features of the buffer, once."""
    made: list[tuple[str, int, int]] = []
    consume = DraftContext.consume

    def watching(self: Any, sequences: Any) -> None:
        made.extend((s.id, s.contexts[self.name].rows, s.num_cached) for s in sequences)
        consume(self, sequences)

    monkeypatch.setattr(DraftContext, "consume", watching)
    run_of(make("eagle3"), *REQUESTS)
    for request in REQUESTS:
        spans = [(start, end) for key, start, end in made if key == request.id]
        assert spans[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(spans))
