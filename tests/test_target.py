"""The target: packed forwards equal plain ones, features are the model's own, and what cannot be
driven is refused by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import Tensor

from whiflash_agents.engine.attention import PackedRow
from whiflash_agents.engine.draft_tree import DraftTree
from whiflash_agents.engine.kv_cache import KVCache
from whiflash_agents.engine.target import Target, TargetBatch

# "mixed" has one layer of full attention and one with a sliding window.
ARCHITECTURES = ["llama", "qwen3", "mistral", "mixed"]


SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def causal(config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config).float()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(architecture: str) -> Any:
    """The same model, never touched by the engine."""
    return model(architecture)


def model(architecture: str) -> Any:
    if architecture != "mixed":
        return tiny.model(architecture)
    torch.manual_seed(8)
    config = transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1
    )
    net = causal(config).eval()
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.6 if "embed" in name or "head" in name else 0.25)
    return net


@cache
def target_of(architecture: str) -> Target:
    return tiny.target(architecture) if architecture != "mixed" else Target(model(architecture))


def text(salt: int, length: int) -> list[int]:
    return random.Random(salt).choices(range(3, tiny.VOCAB), k=length)


@torch.no_grad()
def plain_logits(net: Any, tokens: Sequence[int]) -> Tensor:
    return net(torch.tensor([list(tokens)])).logits[0]


class Sequences:
    """Sequences in one arena; each call to `forward` packs some new tokens of some of them."""

    def __init__(self, target: Target, rooms: Sequence[int]) -> None:
        self.target = target
        self.cache: KVCache = target.new_cache(2048)
        extents = [self.cache.allocate(room) for room in rooms]
        self.starts = [extent.start for extent in extents if extent is not None]
        self.past = [0] * len(rooms)

    def forward(self, news: dict[int, Sequence[int] | DraftTree]) -> dict[int, Tensor]:
        """The logits of all new tokens, by sequence. Trees are not committed, chunks are."""
        batch, firsts = TargetBatch(), {}
        for which, new in news.items():
            past = self.past[which]
            if isinstance(new, DraftTree):
                positions = [past + depth for depth in new.depths]
                row = PackedRow(self.starts[which], past, len(new))
                if not new.is_chain:
                    row.tree, row.tail_positions = new.visibility(), torch.tensor(positions)
                firsts[which] = batch.add(row, new.tokens, positions, logits_from=0)
            else:
                positions = list(range(past, past + len(new)))
                row = PackedRow(self.starts[which], past, len(new))
                firsts[which] = batch.add(row, new, positions, logits_from=0)
                self.past[which] += len(new)
        logits = self.target.forward(batch, self.cache).logits
        return {which: logits[firsts[which] :][: len(new)] for which, new in news.items()}


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-4)


def path_to(tree: DraftTree, node: int) -> list[int]:
    path = []
    while node != -1:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]


def bushy(salt: int, nodes: int, deepest: int) -> DraftTree:
    """A tree of mixed widths, with one path of `deepest` nodes below the root."""
    tree = DraftTree(text(salt, 1)[0])
    tree.add_path(text(salt + 1, deepest), max_nodes=nodes)
    draw = torch.Generator().manual_seed(salt)
    while len(tree) < nodes:
        parent = int(torch.randint(len(tree), (1,), generator=draw))
        if tree.depths[parent] < deepest:
            tree.add(parent, int(torch.randint(3, tiny.VOCAB, (1,), generator=draw)))
    assert not tree.is_chain
    return tree


# Packed forwards ---------------------------------------------------------------------------------


def test_packed_ragged_forwards_equal_the_plain_ones(architecture: str, reference: Any) -> None:
    lengths = [1, 9, 40, 70, 23]
    texts = [text(salt, length) for salt, length in enumerate(lengths)]
    wanted = [plain_logits(reference, tokens) for tokens in texts]
    running = Sequences(target_of(architecture), lengths)
    got: list[list[Tensor]] = [[] for _ in lengths]
    # Chunks of unequal sizes, such that first, middle and single-token rows meet in one forward.
    step = 0
    while any(past < length for past, length in zip(running.past, lengths, strict=True)):
        news: dict[int, Sequence[int] | DraftTree] = {}
        for which, tokens in enumerate(texts):
            past, count = running.past[which], (1, 5, 33, 36, 17)[(which + step) % 5]
            if past < len(tokens) and (which + step) % 3:
                news[which] = tokens[past : past + count]
        if news:
            for which, logits in running.forward(news).items():
                got[which].append(logits)
        step += 1
    for parts, logits in zip(got, wanted, strict=True):
        assert_close(torch.cat(parts), logits)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64])
@pytest.mark.parametrize("past", [0, 1, 6, 7, 8, 50])
def test_a_chunk_of_any_size_behind_any_past_equals_the_plain_forward(
    architecture: str, reference: Any, past: int, count: int
) -> None:
    tokens = text(past, past + count)
    running = Sequences(target_of(architecture), [len(tokens)])
    if past:
        running.forward({0: tokens[:past]})
    got = running.forward({0: tokens[past:]})[0]
    assert_close(got, plain_logits(reference, tokens)[past:])


def test_chains_trees_and_chunks_in_one_batch_equal_the_plain_forward_over_each_path(
    architecture: str, reference: Any
) -> None:
    # Mistral's window is 7: the first tree begins inside it and reaches across its edge, the
    # others stand behind a context that is longer; the deepest path outgrows the window itself.
    texts = [text(20, 4), text(21, 30), text(22, 12), text(23, 50), text(24, 15)]
    trees = {
        0: bushy(30, 20, 9),
        1: DraftTree.chain(7, text(31, 10)),
        2: bushy(32, 40, 11),
        3: bushy(33, 12, 3),
    }
    running = Sequences(target_of(architecture), [len(t) + 64 for t in texts])
    running.forward({which: tokens for which, tokens in enumerate(texts[:4])})
    running.forward({4: texts[4][:6]})
    got = running.forward({0: trees[0], 4: texts[4][6:], 1: trees[1], 2: trees[2], 3: trees[3]})
    for which, tree in trees.items():
        for node in range(len(tree)):
            wanted = plain_logits(reference, texts[which] + path_to(tree, node))[-1]
            assert_close(got[which][node], wanted)
    assert_close(got[4], plain_logits(reference, texts[4])[6:])


def test_an_accepted_tree_path_is_the_context_of_what_follows(
    architecture: str, reference: Any
) -> None:
    tokens = text(40, 20)
    tree = bushy(41, 30, 8)
    path = [0]
    while children := [i for i, p in enumerate(tree.parents) if p == path[-1]]:
        path.append(children[-1])
    assert path != list(range(len(path)))
    target = target_of(architecture)
    cache = target.new_cache(256)
    extent = cache.allocate(128)
    assert extent is not None
    running = Sequences(target, [1])
    running.cache, running.starts = cache, [extent.start]
    running.forward({0: tokens})
    running.forward({0: tree})
    cache.commit(extent, len(tokens), path)
    running.past[0] += len(path)
    accepted = [tree.tokens[node] for node in path]
    after = text(42, 5)
    got = running.forward({0: after})[0]
    assert_close(got, plain_logits(reference, tokens + accepted + after)[-5:])


def test_single_tokens_behind_a_context_longer_than_the_window(
    architecture: str, reference: Any
) -> None:
    tokens = text(50, 60)
    wanted = plain_logits(reference, tokens)
    running = Sequences(target_of(architecture), [60, 60])
    for position, token in enumerate(tokens):
        alone = running.forward({0: [token]})[0]
        assert_close(alone[0], wanted[position])
        if position % 2:  # and as one row of several
            both = running.forward({1: tokens[position - 1 : position + 1]})[1]
            assert_close(both, wanted[position - 1 : position + 1])


# Outputs -----------------------------------------------------------------------------------------


def one_row(start: int, tokens: Sequence[int], logits_from: int | None) -> TargetBatch:
    batch = TargetBatch()
    batch.add(PackedRow(start, 0, len(tokens)), tokens, range(len(tokens)), logits_from=logits_from)
    return batch


def test_logits_come_for_the_rows_that_were_asked_for(architecture: str, reference: Any) -> None:
    target = target_of(architecture)
    texts = [text(60, 8), text(61, 5), text(62, 3), text(63, 6)]
    froms = [7, None, 0, 4]
    batch, firsts = TargetBatch(), []
    cache = target.new_cache(512)
    for tokens, logits_from in zip(texts, froms, strict=True):
        extent = cache.allocate(len(tokens))
        assert extent is not None
        row = PackedRow(extent.start, 0, len(tokens))
        firsts.append(batch.add(row, tokens, range(len(tokens)), logits_from=logits_from))
    assert batch.logit_rows == [7, 13, 14, 15, 20, 21]
    assert [firsts[i] for i in (0, 2, 3)] == [0, 1, 4]
    output = target.forward(batch, cache)
    wanted = [
        plain_logits(reference, tokens)[start:]
        for tokens, start in zip(texts, froms, strict=True)
        if start is not None
    ]
    assert_close(output.logits, torch.cat(wanted))
    assert output.hidden.shape[0] == 6


def test_a_forward_without_wanted_logits_computes_none(architecture: str) -> None:
    target = target_of(architecture)
    output = target.forward(one_row(0, text(64, 9), None), target.new_cache(64))
    assert output.logits.shape == (0, tiny.VOCAB)
    assert output.hidden.shape[0] == 0


def test_hidden_times_lm_head_is_the_logits(architecture: str) -> None:
    target = target_of(architecture)
    output = target.forward(one_row(0, text(65, 9), 3), target.new_cache(64))
    with torch.no_grad():
        torch.testing.assert_close(target.head(output.hidden), output.logits)


@pytest.mark.parametrize("layers", [(0,), (1,), (2,), (0, 2), (2, 0, 1)])
def test_features_are_the_hidden_states_of_the_chosen_layers_and_nothing_else_is_kept(
    architecture: str, reference: Any, layers: tuple[int, ...]
) -> None:
    target = Target(model(architecture))
    kept: list[Any] = []
    target.model.register_forward_hook(lambda *args: kept.append(args[-1].hidden_states))
    tokens = text(66, 12)
    output = target.forward(one_row(0, tokens, 11), target.new_cache(64), capture=layers)
    with torch.no_grad():
        wanted = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert sorted(output.features) == sorted(layers)
    for layer in layers:
        assert_close(output.features[layer], wanted[layer][0])
    assert len(wanted) == 3
    assert [i for i, state in enumerate(kept[0]) if state is not None] == sorted(layers)


def test_without_capture_no_hidden_state_is_kept(architecture: str) -> None:
    target = Target(model(architecture))
    kept: list[Any] = []
    target.model.register_forward_hook(lambda *args: kept.append(args[-1].hidden_states))
    output = target.forward(one_row(0, text(67, 5), 0), target.new_cache(64))
    assert output.features == {}
    assert kept == [None]


def test_the_context_ends_where_longrope_would_change_the_frequencies_of_all_sequences() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 32,
    }
    config = transformers.Phi3Config(
        **SIZES, original_max_position_embeddings=32, rope_parameters=rope
    )
    torch.manual_seed(9)
    net = causal(config).eval()
    texts = [text(70, 32), text(71, 5)]
    wanted = [plain_logits(net, tokens) for tokens in texts]
    beyond = plain_logits(net, text(72, 33))
    assert not torch.allclose(plain_logits(net, text(72, 33)[:32]), beyond[:32], atol=1e-3)
    target = Target(net)
    assert target.max_context == 32 < config.max_position_embeddings
    got = Sequences(target, [32, 5]).forward(dict(enumerate(texts)))
    for which, logits in enumerate(wanted):
        assert_close(got[which], logits)
