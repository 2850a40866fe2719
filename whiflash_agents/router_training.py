"""What labels of traces teach routers: thresholds (`calibrate`) and weights (`train router`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiflash_agents.calibration import Calibration, Threshold, find_thresholds
from whiflash_agents.engine.errors import OutputError, SettingsError

if TYPE_CHECKING:
    from whiflash_agents.bench import Bench

KINDS = ("neural", "cost-aware")


def calibrate(bench: Bench, traces: Sequence[str | Path]) -> Calibration:
    """Find the thresholds for `bench`'s target and drafters on `traces`.

    Raises:
        SettingsError: there are not both drafters, or no row with a round.
        What `Bench.run` raises.
    """
    import torch

    from whiflash_agents.engine.routing.neural import load_router

    drafters = bench.settings.drafters
    if drafters.eagle3 is None or drafters.dflash is None:
        raise SettingsError(
            "calibrate finds the thresholds between eagle3 and dflash; give both "
            "(--eagle3, --dflash)"
        )
    bench.run(traces)
    rows = [
        (labels, row.category)
        for labels, row in zip(bench.labels, bench.rows, strict=True)
        if labels.num_rounds
    ]
    if not rows:
        raise SettingsError("no turn of these traces has a round to look at; give other traces")
    labels, categories = [r[0] for r in rows], [r[1] for r in rows]
    costs = bench.costs()
    entropies = [row.entropy.tolist() for row in labels]
    neural: dict[str, Threshold] = {}
    weights = bench.settings.routing.router_weights
    if weights is not None:
        assert bench.models is not None
        target = bench.models.target
        router = load_router(weights, hidden_size=target.hidden_size, device=target.device)
        with torch.inference_mode():
            values = [router.head(row.hidden.to(target.device)).tolist() for row in labels]
        neural = find_thresholds(labels, values, categories, costs)
    return Calibration(
        target=bench.target_name,
        eagle3=bench.drafter_path("eagle3").name,
        rows=len(labels),
        entropy=find_thresholds(labels, entropies, categories, costs),
        neural=neural,
    )


def train_router(
    bench: Bench,
    traces: Sequence[str | Path],
    output: str | Path,
    *,
    kind: str,
    seed: int = 0,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Label `traces` with `bench`'s drafters, fit a router of `kind` and write it to `output`.

    `neural` is the published head: the difference of eagle3 and dflash. `cost-aware` foresees the
    acceptance length of every drafter that is given.

    Returns:
        the report: fit, R², and tokens per round routed, of the best single arm and of the oracle.

    Raises:
        SettingsError: an unknown kind, drafters missing, or too few rows.
        OutputError: the file exists and `overwrite` is not given, or cannot be written.
    """
    from whiflash_agents.engine.routing.neural import NeuralRouter, RouterHead, save_router
    from whiflash_agents.engine.routing.neural_acceptance import AcceptanceHead, save_acceptance
    from whiflash_agents.engine.training.fitting import FitSettings
    from whiflash_agents.engine.training.router import train_acceptance, train_difference

    if kind not in KINDS:
        raise SettingsError(f"kind={kind!r}: expected {' or '.join(KINDS)}")
    drafters = bench.settings.drafters
    if kind == "neural" and (drafters.eagle3 is None or drafters.dflash is None):
        raise SettingsError(
            "router neural chooses between eagle3 and dflash; give both (--eagle3, --dflash)"
        )
    if Path(output).exists() and not overwrite:
        raise OutputError(f"{output} exists already; give another file, or overwrite it")
    bench.run(traces)
    assert bench.models is not None  # it ran
    settings = FitSettings(seed=seed)
    hidden_size = bench.models.target.hidden_size
    if kind == "neural":
        head = RouterHead(hidden_size)
        report = train_difference(head, bench.labels, ("eagle3", "dflash"), settings)
        save_router(NeuralRouter(head), output)
        return report.as_dict()
    arms = bench.arms()
    network = AcceptanceHead(hidden_size, arms)
    acceptance = train_acceptance(network, bench.labels, settings)
    save_acceptance(network, output)
    return acceptance.as_dict()
