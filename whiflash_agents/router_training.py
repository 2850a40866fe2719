"""What labels of traces teach routers: thresholds (`calibrate`) and weights (`train router`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiflash_agents.calibration import Calibration, Threshold, find_thresholds
from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.models import resolve_drafter
from whiflash_agents.settings import NETWORK_NAMES
from whiflash_agents.study_outputs import check_file, check_folder, used_files

if TYPE_CHECKING:
    from whiflash_agents.bench import Bench
    from whiflash_agents.bench_figures import BenchRow

KINDS = ("neural", "cost-aware")


def calibrate(
    bench: Bench, traces: Sequence[str | Path], folder: Path | None = None
) -> tuple[Calibration, Path]:
    """Find the thresholds for `bench`'s target and drafters on `traces`, and keep them in `folder`:
    in the DFlash drafter's, where runs look, by default. Returns them and their file.

    Raises:
        SettingsError: there are not both drafters, a router that is not `neural`, or no row with a
            round.
        OutputError: they cannot be kept; told before anything is loaded, if it is known by then.
        What `Bench.run` raises.
    """
    import torch

    from whiflash_agents.engine.routing.neural import load_router

    settings = bench.settings
    if (dflash := settings.drafter("dflash")) is None or settings.drafter("eagle3") is None:
        raise SettingsError(
            "calibrate finds the thresholds between eagle3 and dflash; give both "
            "(--eagle3, --dflash)"
        )
    weights = settings.router_weights("neural")
    if settings.routing.router_weights is not None and bench.trained_router() != "neural":
        raise SettingsError(
            f"router_weights={weights}: they are for router {bench.trained_router()}, which has no "
            "threshold; calibrate takes those of router neural (train router --kind neural), or "
            "none"
        )
    if folder is None:
        folder = resolve_drafter(dflash, "dflash")
        check_folder(folder, option="the DFlash drafter's folder")
    else:
        check_folder(folder, option="output")
    bench.run(traces)
    rows = [
        (labels, row.category)
        for labels, row in zip(bench.labels, _rows(bench), strict=True)
        if labels.num_rounds
    ]
    if not rows:
        raise SettingsError(
            "no turn of these traces has a round to look at (their responses are one token long); "
            "give other traces, or more --max-tokens"
        )
    labels, categories = [r[0] for r in rows], [r[1] for r in rows]
    costs = bench.costs()
    entropies = [row.entropy.tolist() for row in labels]
    neural: dict[str, Threshold] = {}
    if weights is not None:
        assert bench.models is not None
        target = bench.models.target
        router = load_router(weights, hidden_size=target.hidden_size, device=target.device)
        with torch.inference_mode():
            values = [router.head(row.hidden.to(target.device)).tolist() for row in labels]
        neural = find_thresholds(labels, values, categories, costs)
    models = bench.made_for()
    found = Calibration(
        models={part: model.name for part, model in models.items()},
        identity={part: model.identity for part, model in models.items()},
        rows=len(labels),
        entropy=find_thresholds(labels, entropies, categories, costs),
        neural=neural,
    )
    return found, found.save(folder)


def _rows(bench: Bench) -> list[BenchRow]:
    """The rows that were generated.

    Raises:
        SettingsError: there are none.
    """
    if not bench.rows:
        raise SettingsError(
            f"no turn could be generated, so there is nothing to learn from: {bench.failures}"
        )
    return bench.rows


def train_router(
    bench: Bench,
    traces: Sequence[str | Path],
    output: str | Path,
    *,
    kind: str,
    seed: int = 0,
    overwrite: bool = False,
    config: str | Path | None = None,
) -> dict[str, Any]:
    """Label `traces` with `bench`'s drafters, fit a router of `kind` and write it to `output`.

    `neural` is the published head: the difference of eagle3 and dflash. `cost-aware` foresees the
    acceptance length of every drafter that is given.

    Args:
        config: the file of settings; like traces, models and a router given, it is not overwritten.

    Returns:
        the report: fit, R², and tokens per round routed, of the best single arm and of the oracle.

    Raises:
        SettingsError: an unknown kind, drafters missing, or too few rows.
        OutputError: the file exists and `overwrite` is not given, is an input, or cannot be
            written; told before anything is loaded.
    """
    from whiflash_agents.engine.routing.neural import NeuralRouter, RouterHead, save_router
    from whiflash_agents.engine.routing.neural_acceptance import AcceptanceHead, save_acceptance
    from whiflash_agents.engine.training.fitting import FitSettings
    from whiflash_agents.engine.training.router import train_acceptance, train_difference

    if kind not in KINDS:
        raise SettingsError(f"kind={kind!r}: expected {' or '.join(KINDS)}")
    drafters = map(bench.settings.drafter, NETWORK_NAMES)
    if kind == "neural" and any(drafter is None for drafter in drafters):
        raise SettingsError(
            "router neural chooses between eagle3 and dflash; give both (--eagle3, --dflash)"
        )
    check_file(
        output,
        option="output",
        inputs=used_files(bench.settings, traces, config),
        overwrite=overwrite,
    )
    bench.run(traces)
    _rows(bench)
    assert bench.models is not None  # it ran
    settings = FitSettings(seed=seed)
    hidden_size = bench.models.target.hidden_size
    if kind == "neural":
        head = RouterHead(hidden_size)
        report = train_difference(head, bench.labels, ("eagle3", "dflash"), settings)
        save_router(NeuralRouter(head), output, bench.made_for())
        return report.as_dict()
    arms = bench.arms()
    network = AcceptanceHead(hidden_size, arms)
    acceptance = train_acceptance(network, bench.labels, settings)
    save_acceptance(network, output, bench.made_for())
    return acceptance.as_dict()
