"""The published policies decide by their formulas; files of trained routers fit or are refused."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from whiflash_agents.engine.errors import CheckpointError, OutputError, SettingsError
from whiflash_agents.engine.routing.base import NONE
from whiflash_agents.engine.routing.entropy import EntropyRouter
from whiflash_agents.engine.routing.neural import (
    NeuralRouter,
    RouterHead,
    load_router,
    save_router,
)
from whiflash_agents.engine.routing.signals import Signals

HIDDEN = 32


def sequence(
    name: str = "a", entropy: float | None = None, hidden: torch.Tensor | None = None
) -> Any:
    known = None if entropy is None and hidden is None else Signals(entropy or 0.0, 1.0, hidden)
    return SimpleNamespace(id=name, tokens=[1, 2, 3], signals=known)


class Around:
    """Surroundings in which some arms cannot serve some sequences."""

    def __init__(self, *refused: tuple[str, str]) -> None:
        self.refused = refused

    def available(self, arm: str, sequence: Any) -> bool:
        return (arm, sequence.id) not in self.refused


def entropy_router(threshold: float, *refused: tuple[str, str]) -> EntropyRouter:
    router = EntropyRouter(threshold=threshold)
    router.bind(Around(*refused))  # type: ignore[arg-type]
    return router


def neural_router(seed: int = 0, threshold: float = 0.0) -> NeuralRouter:
    torch.manual_seed(seed)
    router = NeuralRouter(RouterHead(HIDDEN), threshold)
    router.bind(Around())  # type: ignore[arg-type]
    return router


def test_entropy_above_the_threshold_takes_the_autoregressive_arm_and_at_it_the_block_arm() -> None:
    above = math.nextafter(1.25, 2.0)
    sequences = [sequence(entropy=h) for h in (0.0, 1.25, above, 7.0)]
    assert entropy_router(1.25).route(sequences) == ["dflash", "dflash", "eagle3", "eagle3"]


def test_entropy_router_starts_with_the_block_arm_before_any_signal() -> None:
    assert entropy_router(-1.0).route([sequence()]) == ["dflash"]


def test_entropy_router_leaves_a_sequence_to_the_other_arm_and_then_to_none() -> None:
    hard, easy = sequence("hard", entropy=2.0), sequence("easy", entropy=0.1)
    router = entropy_router(1.0, ("eagle3", "hard"), ("dflash", "easy"))
    assert router.route([hard, easy]) == ["dflash", "eagle3"]
    router = entropy_router(1.0, *((arm, "hard") for arm in ("eagle3", "dflash")))
    assert router.route([hard, easy]) == [NONE, "dflash"]


def test_entropy_router_names_arms_and_the_signal_it_needs_and_predicts_nothing() -> None:
    router = EntropyRouter("ptd", "ddtree", threshold=0.5)
    assert router.arms == ("ptd", "ddtree")
    assert router.signals == {"entropy"}
    assert router.predicted(sequence(entropy=1.0)) is None


def by_formula(head: RouterHead, hidden: torch.Tensor) -> float:
    """`Linear(d, d/8) -> GELU -> Linear(d/8, 1)` written out in float64."""
    first, _, _, last = head.layers
    inner = first.weight.double() @ hidden.double() + first.bias.double()
    inner = inner * 0.5 * (1.0 + torch.erf(inner / math.sqrt(2.0)))
    return (last.weight.double()[0] @ inner + last.bias.double()[0]).item()


def test_neural_router_compares_what_its_network_predicts_with_the_threshold() -> None:
    router = neural_router()
    assert [m.__class__.__name__ for m in router.head.layers] == [
        "Linear", "GELU", "Dropout", "Linear",
    ]  # fmt: skip
    assert router.head.layers[0].weight.shape == (HIDDEN // 8, HIDDEN)
    rows = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1)) * 3
    sequences = [sequence(str(i), hidden=row.bfloat16()) for i, row in enumerate(rows)]
    expected = [by_formula(router.head, row.bfloat16().float()) for row in rows]
    values = router.values(sequences)
    assert values == pytest.approx(expected, abs=1e-5)
    router.threshold = sorted(expected)[20]  # half of them above
    chosen = router.route(sequences)
    for arm, value in zip(chosen, expected, strict=True):
        if abs(value - router.threshold) > 1e-4:
            assert arm == ("eagle3" if value > router.threshold else "dflash")
    assert {*chosen} == {"eagle3", "dflash"}


def test_neural_router_takes_the_block_arm_at_the_threshold_itself() -> None:
    router = neural_router()
    row = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2))
    (value,) = router.values([sequence(hidden=row)])
    assert value is not None
    router.threshold = value
    assert router.route([sequence(hidden=row)]) == ["dflash"]
    router.threshold = math.nextafter(value, -math.inf)
    assert router.route([sequence(hidden=row)]) == ["eagle3"]


def test_neural_router_asks_its_network_once_for_all_sequences_with_a_signal() -> None:
    router = neural_router(threshold=-math.inf)
    calls: list[tuple[tuple[int, ...], torch.dtype, bool]] = []
    router.head.register_forward_pre_hook(
        lambda _, args: calls.append((*args, torch.is_inference_mode_enabled()))  # type: ignore
    )
    rows = torch.randn(2, HIDDEN).half()
    chosen = router.route(
        [sequence("a", hidden=rows[0]), sequence("b"), sequence("c", hidden=rows[1])]
    )
    assert chosen == ["eagle3", "dflash", "eagle3"]
    ((given, inference),) = calls
    assert (tuple(given.shape), given.dtype, inference) == ((2, HIDDEN), torch.float32, True)  # type: ignore
    assert not router.head.training
    assert router.route([sequence()]) == ["dflash"]
    assert len(calls) == 1


def test_a_saved_neural_router_decides_the_same_when_loaded(tmp_path: Path) -> None:
    router = neural_router(seed=3, threshold=0.125)
    save_router(router, tmp_path / "new" / "router.safetensors")
    loaded = load_router(tmp_path / "new" / "router.safetensors", hidden_size=HIDDEN)
    assert (loaded.arms, loaded.threshold) == (("eagle3", "dflash"), 0.125)
    sequences = [sequence(hidden=row) for row in torch.randn(8, HIDDEN)]
    assert loaded.values(sequences) == router.values(sequences)


@pytest.mark.parametrize("threshold", [math.nan])
def test_a_threshold_that_is_no_number_is_refused(threshold: float) -> None:
    with pytest.raises(SettingsError, match=r"router 'entropy': threshold is nan"):
        EntropyRouter(threshold=threshold)


@pytest.mark.parametrize("arms", [("eagle3", "eagle3"), ("eagle3", NONE)])
def test_arms_that_are_not_two_drafters_are_refused(arms: tuple[str, str]) -> None:
    with pytest.raises(SettingsError, match="chooses between two drafters, got 'eagle3'"):
        EntropyRouter(*arms, threshold=0.0)
    with pytest.raises(SettingsError, match="an autoregressive and a block arm"):
        NeuralRouter(RouterHead(HIDDEN), arms=("eagle3",))


def rewrite(path: Path, *, header: str | None = None, **tensors: torch.Tensor | None) -> None:
    """Change a router's file: its header, or some tensors (None removes one)."""
    with safe_open(path, "pt") as content:
        metadata = content.metadata()
        kept = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        kept.pop(name.replace("__", "."), None)
        if tensor is not None:
            kept[name.replace("__", ".")] = tensor
    if header is not None:
        metadata = {"whiflash_router": header}
    save_file(kept, path, metadata)


FIELDS = '{"kind": "neural", "hidden_size": 32, "arms": ["a", "b"], "threshold": 0.0}'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"header": FIELDS.replace("neural", "acceptance")},
            ("'kind'", "'acceptance'", "'neural'"),
        ),
        ({"header": FIELDS.replace("0.0", '"high"')}, ("'threshold'", "'high'", "a number")),
        ({"header": FIELDS.replace("0.0", "NaN")}, ("'threshold'", "nan", "a number")),
        ({"header": FIELDS.replace('["a", "b"]', '"ab"')}, ("'arms'", "'ab'", "list of names")),
        ({"header": FIELDS.replace('"b"', '"a"')}, ("'arms'", "['a', 'a']", "two names")),
        ({"header": "[]"}, ("whiflash_router", "[]", "JSON object")),
        ({"header": "{"}, ("whiflash_router", "'{'", "JSON object")),
        ({"layers__3__bias": None}, ("'layers.3.bias'", "missing")),
        ({"layers__0__weight": torch.zeros(4, 31)}, ("'layers.0.weight'", "[4, 31]", "[4, 32]")),
        ({"layers__3__bias": torch.tensor([math.nan])}, ("'layers.3.bias'", "not finite")),
        ({"more": torch.zeros(1)}, ("'more'", "not expected", "layers.0.weight")),
    ],
)
def test_router_files_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    path = tmp_path / "router.safetensors"
    save_router(neural_router(), path)
    rewrite(path, **change)
    with pytest.raises(CheckpointError) as refused:
        load_router(path, hidden_size=HIDDEN)
    for word in (str(path), *words):
        assert word in str(refused.value)


def test_a_router_for_another_target_is_refused_with_both_sizes(tmp_path: Path) -> None:
    save_router(neural_router(), tmp_path / "router.safetensors")
    with pytest.raises(CheckpointError, match=r"'hidden_size' is 32, expected 64 \(the target's"):
        load_router(tmp_path / "router.safetensors", hidden_size=64)


def test_missing_and_damaged_router_files_are_refused_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors' is not there"):
        load_router(tmp_path / "none.safetensors", hidden_size=HIDDEN)
    (tmp_path / "damaged.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_router(tmp_path / "damaged.safetensors", hidden_size=HIDDEN)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        save_router(neural_router(), tmp_path / "file" / "router.safetensors")


def test_a_router_file_replaces_the_one_before_it_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "router.safetensors"
    save_router(neural_router(threshold=1.0), path)
    save_router(neural_router(threshold=2.0), path)
    assert load_router(path, hidden_size=HIDDEN).threshold == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["router.safetensors"]
