"""Low-rank adapters: what merging does, what is refused, and that training one learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from whiflash_agents.engine.adapter import (
    CONFIG,
    WEIGHTS,
    merge_adapter,
    read_adapter,
    save_adapter,
)
from whiflash_agents.engine.errors import CheckpointError, SettingsError
from whiflash_agents.engine.training.adapter import AdapterObjective, LowRankAdapter
from whiflash_agents.engine.training.loop import TrainingLoop
from whiflash_agents.engine.training.schedule import TrainSettings
from whiflash_agents.engine.training.texts import TrainingText

IDS = torch.tensor([[5, 9, 2, 7, 7, 1]])


def plain_model() -> Any:
    return tiny.model("llama")


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits[0]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Of `plain_model()`, with a B that is not zero."""
    trained = LowRankAdapter(plain_model(), rank=2, alpha=6.0)
    for pair in trained.pairs.values():
        nn.init.normal_(pair.b, std=0.2)  # type: ignore[arg-type]
    save_adapter(trained.named_pairs(), trained.alpha, tmp_path / "adapter", base="tiny")
    return tmp_path / "adapter"


def test_merging_computes_what_the_pairs_computed_beside_the_model(tmp_path: Path) -> None:
    model = plain_model()
    trained = LowRankAdapter(model, rank=2, alpha=6.0)
    before = logits(model)
    with trained.applied():
        assert torch.equal(logits(model), before)  # B begins with zeros
    for pair in trained.pairs.values():
        nn.init.normal_(pair.b, std=0.2)  # type: ignore[arg-type]
    with trained.applied():
        beside = logits(model)
    assert torch.equal(logits(model), before)  # and leaves no trace
    assert (beside - before).abs().max() > 0.01
    save_adapter(trained.named_pairs(), trained.alpha, tmp_path, base="tiny")
    merge_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), beside, atol=1e-5, rtol=1e-5)


def test_the_output_head_and_the_embedding_stay(adapter: Path) -> None:
    model = plain_model()
    head, embedding = model.lm_head.weight.clone(), model.model.embed_tokens.weight.clone()
    merge_adapter(model, adapter)
    assert torch.equal(model.lm_head.weight, head)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    _, pairs = read_adapter(adapter)
    kinds = {name.rsplit(".", 1)[-1] for name in pairs}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"r": 3}, "does not go with r=3"),
        ({"r": 0}, "r=0"),
    ],
)
def test_what_would_be_other_arithmetic_is_refused_by_name(
    adapter: Path, change: dict[str, Any], told: str
) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=told):
        merge_adapter(plain_model(), adapter)


def test_tensors_that_lack_or_are_too_many_are_refused_and_nothing_is_merged(
    adapter: Path,
) -> None:
    model = plain_model()
    before = logits(model)
    tensors = load_file(adapter / WEIGHTS)
    name = next(n for n in tensors if n.endswith("lora_B.weight"))
    save_file({n: t for n, t in tensors.items() if n != name}, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"lora_B\.weight.* is missing"):
        merge_adapter(model, adapter)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.ones(2)}, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match="is not expected"):
        merge_adapter(model, adapter)
    pair = {n: tensors[n].clone() for n in (name, name.replace("lora_B", "lora_A"))}
    strange = {n.replace("layers.0", "layers.9"): t for n, t in pair.items()}
    save_file(tensors | strange, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"layers\.9.*belongs to another model"):
        merge_adapter(model, adapter)
    assert torch.equal(logits(model), before)


def test_no_adapter_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"cannot be read.*{CONFIG}"):
        merge_adapter(plain_model(), tmp_path)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0.0}])
def test_numbers_that_make_no_adapter_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="expected at least 1"):
        LowRankAdapter(plain_model(), **wrong)


def test_training_learns_the_responses_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = plain_model()
    before = logits(model)
    # What follows 5 is told by the token before it, which the model cannot know beforehand.
    texts = [TrainingText(f"t{a}", (a, 5, a + 1, a + 2, 3), ((2, 5),)) for a in range(10, 26, 2)]
    adapter = LowRankAdapter(model, rank=4, alpha=16.0)
    objective = AdapterObjective(model, adapter)
    generator = torch.Generator()
    first = sum(objective.loss(t, generator).total.item() for t in texts)
    settings = TrainSettings(
        epochs=60, texts_per_batch=4, peak_learning_rate=2e-2, autocast="float32"
    )
    done = TrainingLoop(objective, texts, settings, tmp_path).run()
    last = sum(objective.loss(t, generator).total.item() for t in texts)
    assert done.finished
    assert last < 0.2 * first
    assert done.figures["accuracy"] > 0.9
    assert torch.equal(logits(model), before)


def test_only_responses_count_and_long_texts_are_refused() -> None:
    model = plain_model()
    objective = AdapterObjective(model, LowRankAdapter(model), max_length=6)
    text = TrainingText("t", (1, 2, 3, 4, 5, 6), ((2, 4), (5, 6)))
    loss = objective.loss(text, torch.Generator())
    with torch.no_grad():
        chances = model(input_ids=torch.tensor([text.token_ids])).logits[0].log_softmax(-1)
    expected = -sum(chances[t - 1, text.token_ids[t]] for t in (2, 3, 5))
    assert loss.total.item() == pytest.approx(float(expected), rel=1e-4)
    assert loss.weight == 3.0
    with pytest.raises(SettingsError, match="7 tokens, more than 6"):
        objective.loss(TrainingText("t", (1, 2, 3, 4, 5, 6, 7), ((2, 4),)), torch.Generator())
