"""Features of training texts: what the target computes, whole or in chunks, fresh or from disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from whiflash_agents.engine.errors import ContextLengthError, OutputError, SettingsError
from whiflash_agents.engine.memory import size_text
from whiflash_agents.engine.target import Target
from whiflash_agents.engine.training import feature_cache
from whiflash_agents.engine.training.feature_cache import MANIFEST, CachedFeatures
from whiflash_agents.engine.training.feature_source import ComputedFeatures, TextFeatures
from whiflash_agents.engine.training.texts import TrainingText, check_ids

LAYERS = (0, 1, 2)


def text(number: int = 0, size: int = 40) -> TrainingText:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, tiny.VOCAB, (size,), generator=generator).tolist()
    return TrainingText(f"t{number}", tuple(ids), ((size // 2, size),))


def same(one: TextFeatures, other: TextFeatures) -> bool:
    return (
        torch.equal(one.token_ids, other.token_ids)
        and list(one.features) == list(other.features)
        and all(torch.equal(one.features[k], other.features[k]) for k in one.features)
        and torch.equal(one.hidden, other.hidden)
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_features_are_the_hidden_states_of_a_plain_forward(architecture: str) -> None:
    target = tiny.target(architecture)
    found = ComputedFeatures(target, LAYERS, chunk=7)(text())
    plain = tiny.model(architecture)
    ids = torch.tensor([text().token_ids])
    entered = []
    plain.lm_head.register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0][0]))
    with torch.no_grad():
        output = plain(input_ids=ids, output_hidden_states=True)
    assert found.token_ids.tolist() == list(text().token_ids)
    for layer in LAYERS:
        expected = output.hidden_states[layer][0]
        assert torch.allclose(found.features[layer], expected, atol=1e-5), layer
    assert torch.allclose(found.hidden, entered[0], atol=1e-5)


def test_the_vectors_that_enter_the_head_are_found_where_no_hidden_state_is_them() -> None:
    model = tiny.model("llama")

    head = model.lm_head
    head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    found = ComputedFeatures(Target(model, name="halved"), (1, 2), chunk=9)(text())
    assert torch.allclose(found.hidden, found.features[2] * 0.5)


def test_chunks_change_nothing_and_layers_come_in_order() -> None:
    target = tiny.target()
    whole = ComputedFeatures(target, (2, 0))(text())
    parts = ComputedFeatures(target, (0, 2), chunk=1)(text())
    assert list(whole.features) == [0, 2]
    assert torch.allclose(whole.hidden, parts.hidden, atol=1e-5)
    assert torch.allclose(whole.features[2], parts.features[2], atol=1e-5)


def test_a_longer_text_after_a_shorter_one_gets_its_room() -> None:
    source = ComputedFeatures(tiny.target(), LAYERS)
    short = source(text(1, 10))
    long = source(text(2, 300))
    assert len(long.hidden) == 300
    assert same(source(text(1, 10)), short)


def test_features_can_be_trained_on_and_autocast_leaves_the_target_alone() -> None:
    source = ComputedFeatures(tiny.target(), LAYERS)
    layer = torch.nn.Linear(32, 4)
    layer(source(text()).hidden).sum().backward()  # inference tensors would refuse
    assert layer.weight.grad is not None
    plain = source(text())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(source(text()), plain)


def test_texts_that_the_target_cannot_read_are_refused() -> None:
    source = ComputedFeatures(tiny.target(), LAYERS)
    with pytest.raises(ContextLengthError, match="600 tokens"):
        source(text(0, 600))
    with pytest.raises(SettingsError, match=r"token 96 .* another tokenizer"):
        source(TrainingText("t", (5, 96), ((1, 2),)))
    with pytest.raises(SettingsError, match="has no tokens"):
        source(TrainingText("t", (), ()))
    with pytest.raises(SettingsError, match="hidden state 3"):
        ComputedFeatures(tiny.target(), (0, 3))


@pytest.mark.parametrize(
    ("tokens", "responses", "told"),
    [
        ((1, 2, 3), ((0, 2),), "each follow a token"),
        ((1, 2, 3), ((1, 1),), r"\[1, 1\)"),
        ((1, 2, 3), ((1, 4),), "text of 3 tokens"),
        ((1, 2, 3, 4), ((1, 3), (2, 4)), r"\[2, 4\)"),
        ((1, -2, 3), ((1, 3),), "-2 is below 0"),
        ((1, "x", 3), ((1, 3),), "expected integers"),
        ((1, 2, 3), ((1, 2, 3),), "pairs of integers"),
    ],
)
def test_a_text_is_checked(tokens: tuple, responses: tuple, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        TrainingText("t", tokens, responses)


def test_texts_need_ids_of_their_own() -> None:
    assert text().num_response_tokens == 20
    check_ids([text(1), text(2)])
    with pytest.raises(SettingsError, match="'t1'"):
        check_ids([text(1), text(2), text(1)])
    with pytest.raises(SettingsError, match="not empty"):
        TrainingText("", (1, 2), ((1, 2),))


# On disk -----------------------------------------------------------------------------------------


class Counted(ComputedFeatures):
    """Counts the texts that it really runs the target over."""

    calls = 0

    def __call__(self, text: TrainingText) -> TextFeatures:
        self.calls += 1
        return super().__call__(text)


def test_features_are_computed_once_and_read_back_bit_for_bit(tmp_path: Path) -> None:
    source = Counted(tiny.target(), LAYERS)
    cache = CachedFeatures(source, tmp_path / "f")
    texts = [text(1), text(2, 33)]
    fresh = [cache(each) for each in texts]
    again = CachedFeatures(source, tmp_path / "f")
    assert all(same(again(each), found) for each, found in zip(texts, fresh, strict=True))
    assert source.calls == 2
    renamed = TrainingText("other id", texts[0].token_ids, ((3, 4),))
    assert same(again(renamed), fresh[0])  # features are of tokens, whoever asks
    assert source.calls == 2


def test_nothing_is_written_before_the_first_text_and_the_estimate_holds(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    cache = CachedFeatures(ComputedFeatures(tiny.target(), LAYERS), folder)
    texts = [text(1, 200), text(2, 100)]
    told = cache.check_room(texts)
    assert not folder.exists()
    assert cache.estimate([*texts, texts[0]]) == told  # one file for both
    for each in texts:
        cache(each)
    taken = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    assert 0.98 * told < taken <= told
    assert cache.estimate(texts) == 0


def test_features_that_do_not_fit_the_disk_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CachedFeatures(ComputedFeatures(tiny.target(), LAYERS), tmp_path / "f")
    few = SimpleNamespace(total=10**9, used=0, free=2 * 10**7 + 1000)
    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda place: few)
    with pytest.raises(
        SettingsError, match=r" KiB in .*, where 19\.1 MiB are free; .*--features computed"
    ):
        cache.check_room([text()])
    assert not (tmp_path / "f").exists()


def test_sizes_are_told_in_a_unit_that_fits() -> None:
    told = {0: "0.0 KiB", 5 << 10: "5.0 KiB", 3 << 19: "1.5 MiB", 2**30 - 1: "1024.0 MiB"}
    told |= {2**30: "1.00 GiB", 5 << 40: "5,120.00 GiB"}
    assert {size: size_text(size) for size in told} == told


def test_a_folder_of_another_target_layers_or_dtype_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    CachedFeatures(ComputedFeatures(tiny.target(), LAYERS), folder)(text())
    changed = tiny.model("llama")
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight.add_(1e-3)
    for target, layers, told in (
        (Target(changed, name="tiny-llama"), LAYERS, "fingerprint"),
        (tiny.target("qwen3"), LAYERS, "fingerprint"),
        (tiny.target(), (0, 1), r"layers: \[0, 1, 2\], now \[0, 1\]"),
        (Target(tiny.model("llama").bfloat16(), name="tiny-llama"), LAYERS, "dtype: 'float32'"),
    ):
        with pytest.raises(SettingsError, match=told) as error:
            CachedFeatures(ComputedFeatures(target, layers), folder)
        assert "remove this one" in str(error.value)


def test_a_target_loaded_again_is_the_same_target(tmp_path: Path) -> None:
    tiny.model("llama").save_pretrained(tmp_path / "m")
    folder = tmp_path / "f"
    for name in ("one", "one"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
        CachedFeatures(ComputedFeatures(Target(model, name=name), LAYERS), folder)(text())
    assert len(list(folder.rglob("*.safetensors"))) == 1


def test_torn_files_are_computed_again(tmp_path: Path) -> None:
    source = Counted(tiny.target(), LAYERS)
    cache = CachedFeatures(source, tmp_path / "f")
    fresh = cache(text())
    (path,) = (tmp_path / "f").rglob("*.safetensors")
    whole = path.read_bytes()
    for torn in (b"", whole[:100], whole[:-1]):
        path.write_bytes(torn)
        assert same(cache(text()), fresh)
        assert path.read_bytes() == whole
    assert source.calls == 4
    shutil.copy(path, tmp_path / "kept")
    cache(text(1))
    (other,) = set((tmp_path / "f").rglob("*.safetensors")) - {path}
    shutil.copy(path, other)  # whole, and of another text
    assert same(cache(text(1)), source(text(1)))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    source = ComputedFeatures(tiny.target(), LAYERS)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("words")
    with pytest.raises(OutputError, match="no features"):
        CachedFeatures(source, mine)
    with pytest.raises(OutputError, match="is a file"):
        CachedFeatures(source, mine / "thesis.txt")
    (mine / MANIFEST).write_text(json.dumps(["?"]))
    with pytest.raises(OutputError, match="cannot be read"):
        CachedFeatures(source, mine)
