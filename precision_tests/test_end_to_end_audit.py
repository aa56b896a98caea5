"""Training that is watched: fingerprints of the gradients, alarms, and the way back.

What goes wrong: a gradient changes its sign, its scale or its direction by little, in one layer, on
one rank, in one step; the loss shows it late or never. Or the watcher itself changes the run, stops
some ranks and not others, or goes back to a state that is not the one that was.

A fault is planted into the gradient of one parameter in one step. Held exactly: a watched run has
the bits of one that is not; the alarm comes in that step and names that parameter, on all ranks;
after the return the run ends with the bits of the clean one, dropout masks included. What a step
does not show is left to the other levels: a slow growth of one parameter to the trend, what
becomes of a changed sign to the probe. Fingerprints taken on shards are those of the whole
(docs/theory/audit.md).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from fixtures import fresh_process
from fixtures.audit import fingerprint, fixed
from fixtures.audit.checkpoints import path_of
from fixtures.audit.fingerprint import Fingerprint
from fixtures.audit.probes import prediction_figures
from fixtures.check import Check
from fixtures.devices import Device
from fixtures.distributed import wrapping as wrappers
from fixtures.distributed.ranks import Rank, RunRanks
from fixtures.distributed.wrapping import Tensors, Wrapping
from fixtures.numerics import audit_bounds
from fixtures.numerics.formats import FP32
from fixtures.training import audited
from fixtures.training.audited import CHANGES, Carrier, Drift, Planted, Ran, Rerounded
from fixtures.training.wrapped_checks import changed

WRAPPINGS = {
    "ddp": Wrapping("ddp"),
    "fully_shard": Wrapping("fully_shard"),
    "fully_shard-2x2": Wrapping("fully_shard", replicas=2),
    "fsdp1": Wrapping("fsdp1"),
    "fsdp1-flat": Wrapping("fsdp1", flat=True),
}
ALONE = Wrapping("none")
CPU = torch.device("cpu")
WHERE = "blocks.1.attention.query.weight"
STEPS, WHEN, SAVED = 130, 120, 50  # the fault comes in step 120; checkpoints at 0, 50, 100
RANK_STEPS, RANK_WHEN, RANK_SAVED = 6, 5, 3  # over ranks: a clean run is compared with at once
ON_RANKS = "blocks.1.mlp.down.bias"  # of which the last rank holds a part, however it is cut

SLOWLY = 101  # the step from which a parameter grows by half a per cent each
WINDOW = 4  # steps of the trend; the drift is in the second whole window at the latest
PROBED = 110
OTHERS = 8  # clean runs that round differently, from step 100 to 110

# What no history shows: it does not leave the range in which gradients of batches differ.
NEEDS_CLEAN_RUN = ("negated", "times-1.05", "doubled", "rotated")


GetRun = Callable[..., Ran]


def ends(runs: Sequence[Ran]) -> list[dict[str, Tensors]]:
    return wrappers.copies_of([run.end for run in runs])


@pytest.fixture(scope="module")
def clean_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audited") / "clean"


@pytest.fixture(scope="module")
def watched(clean_folder: Path) -> GetRun:
    """Runs of one process, under the audit; the clean one is made once, and recorded."""
    clean = clean_folder
    trend = {"window": WINDOW, "warmup_windows": 24}

    @cache
    def run(
        device: torch.device,
        planted: Planted | Drift | Rerounded | None = None,
        compared: bool = False,
        kl: float | None = None,
        steps: int = STEPS,
    ) -> Ran:
        """The clean run; or one that parts from its last checkpoint, with a fault, compared with
        its trail, or with its predictions within ``kl``."""
        own = clean.with_name(f"{planted}-{compared}-{kl}")
        probe = {} if kl is None else {"reference": run(device).logits}
        limits = trend if kl is None else {**trend, "probe_limits": {"kl": kl}}
        if planted:
            run(device)  # the clean one: the faulty ones part from its last checkpoint
            last = path_of(clean, WHEN // SAVED * SAVED)
            shutil.copytree(last, own / last.name)
        return audited.run(
            Rank(0, 1, device),
            ALONE,
            audited.initial(),
            steps,
            str(own if planted else clean),
            planted,
            str(clean) if compared else "",
            probed=PROBED,
            limits=limits,
            **probe,
            save_every=SAVED,
            record=planted is None,
            resume=planted is not None,
        )

    return run


def check_undone(
    check: Check,
    runs: Sequence[Ran],
    clean: Sequence[Ran],
    alarm: tuple[int, str, str],
    saved: int,
) -> None:
    """Every rank knows the alarm (step, level, parameter), went back to the same step, and ended as
    if nothing had been."""
    step, back = alarm[0], alarm[0] // saved * saved
    for rank, run in enumerate(runs):
        named = {(step, level, name) for step, _, level, name in run.alarms}
        name = f"rank{rank}"
        check.exact(named, {alarm}, name=f"{name}-alarms")
        did = [(step, "alarm", None), (step, "rolled back", back)]
        check.exact(run.events, did, name=f"{name}-did")
        check.exact(run.order.count(step), 2, name=f"{name}-turns")
    same = [
        run.losses.items() <= other.losses.items() for run, other in zip(runs, clean, strict=True)
    ]
    check.exact(same, [True] * len(runs), name="losses")
    check.exact(changed(ends(clean), ends(runs)), [], name="end")


# --- one process ----------------------------------------------------------------------------------


def test_watching_changes_no_bit(check: Check, device: Device, watched: GetRun) -> None:
    """Full fingerprints at steps 0 and 100, light ones at the others, three checkpoints."""
    plain = audited.run(Rank(0, 1, device.torch), ALONE, audited.initial(), STEPS)
    run = watched(device.torch)
    check.exact(changed(ends([plain]), ends([run])), [], name="end")
    check.exact(run.losses, plain.losses, name="losses")
    check.exact(run.events, [], name="events")


@pytest.mark.parametrize("change", NEEDS_CLEAN_RUN)
def test_fault_is_named_and_undone(
    check: Check, device: Device, watched: GetRun, change: str
) -> None:
    """Against a clean run of this environment."""
    planted = Planted(change, WHERE, WHEN)
    run = watched(device.torch, planted, True)
    check_undone(check, [run], [watched(device.torch)], (WHEN, "step", WHERE), SAVED)


@pytest.mark.parametrize("change", [name for name in CHANGES if name not in NEEDS_CLEAN_RUN])
def test_gross_fault_is_named_and_undone_without_a_clean_run(
    check: Check, device: Device, watched: GetRun, change: str
) -> None:
    """By the run's own history alone."""
    run = watched(device.torch, Planted(change, WHERE, WHEN))
    check_undone(check, [run], [watched(device.torch)], (WHEN, "step", WHERE), SAVED)


def test_fault_is_named_against_the_trail_of_other_instructions(
    check: Check, watched: GetRun, clean_folder: Path, tmp_path: Path
) -> None:
    """The clean run took this CPU's instructions, this one takes torch's default ones: its distance
    is no alarm, a gradient of 1.05 times its size is. No bit of the two runs is compared."""
    watched(CPU)
    planted = Planted("times-1.05", WHERE, WHEN)
    ended = fresh_process.start(
        audited.run_elsewhere,
        *(audited.initial(), STEPS, str(tmp_path / "run"), planted, str(clean_folder)),
        environ={"ATEN_CPU_CAPABILITY": "default"},
        alteration=("", {}),
    ).wait()
    assert ended.result is not None, f"a run in a fresh process {ended.how}:\n{ended.output}"
    capability, run = ended.result
    if capability == torch.backends.cpu.get_cpu_capability():
        pytest.skip(f"torch has no other instructions for this CPU than {capability}")
    check.exact(
        [(step, level, name) for step, _, level, name in run.alarms],
        [(WHEN, "step", WHERE)],
        name="alarms",
    )
    check.exact(run.events, [(WHEN, "alarm", None), (WHEN, "rolled back", 100)], name="did")
    check.exact(run.order, [*range(WHEN + 1), *range(100, STEPS)], name="turns")


def test_slow_growth_is_named_by_the_trend_alone(
    check: Check, device: Device, watched: GetRun
) -> None:
    """Within two windows, before the next checkpoint would be safe."""
    run = watched(device.torch, Drift(WHERE, SLOWLY, 0.005))
    seen = min((step for step, *_ in run.alarms), default=STEPS)
    check.exact(seen < SLOWLY + 2 * WINDOW, True, name="promised")
    check_undone(check, [run], [watched(device.torch)], (seen, "trend", WHERE), SAVED)


def test_changed_sign_is_seen_by_the_probe_alone(
    check: Check, device: Device, watched: GetRun
) -> None:
    """One gradient's sign, in one step, without a trail: nine steps later the model predicts what
    no clean run did that rounds differently."""
    clean = watched(device.torch)
    others = [watched(device.torch, Rerounded(seed), steps=PROBED + 1) for seed in range(OTHERS)]
    figures = [prediction_figures(other.logits, clean.logits)["kl"] for other in others]
    limit = audit_bounds.of_clean_runs(figures, audit_bounds.FALSE_ALARM)
    check.exact([other.events for other in others], [[]] * OTHERS, name="others")
    run = watched(device.torch, Planted("negated", WHERE, SLOWLY), kl=limit)
    check_undone(check, [run], [clean], (PROBED, "end_to_end", ""), SAVED)


# --- over ranks -----------------------------------------------------------------------------------

RANKED = [(2, name) for name in WRAPPINGS if "2x2" not in name]
RANKED += [(4, name) for name in ("fully_shard", "fully_shard-2x2")]
ranked = pytest.mark.parametrize(
    ("world_size", "implementation"), RANKED, ids=[f"w{w}-{name}" for w, name in RANKED]
)


@ranked
def test_all_ranks_stop_and_go_back_together(
    check: Check, ranks: RunRanks, tmp_path: Path, world_size: int, implementation: str
) -> None:
    """The gradient that the last rank holds is doubled there alone."""
    wrapping = WRAPPINGS[implementation]
    inputs = (wrapping, audited.initial(), RANK_STEPS)
    options = {"save_every": RANK_SAVED}
    clean = ranks(audited.run, world_size, *inputs, str(tmp_path / "clean"), record=True, **options)
    where = "blocks.1._flat_param" if wrapping.flat else ON_RANKS
    planted = Planted("doubled", where, RANK_WHEN, world_size - 1)
    folders = (str(tmp_path / "faulty"), planted, str(tmp_path / "clean"))
    runs = ranks(audited.run, world_size, *inputs, *folders, **options)
    check_undone(check, runs, clean, (RANK_WHEN, "step", where), RANK_SAVED)


@ranked
def test_fingerprint_of_shards_is_that_of_the_whole(
    check: Check, ranks: RunRanks, world_size: int, implementation: str
) -> None:
    """Nothing is gathered for it; the parts are put together here, in one process."""
    wrapping = WRAPPINGS[implementation]
    prints, held = zip(
        *ranks(audited.printed, world_size, wrapping, audited.initial()), strict=True
    )
    copies = wrappers.copies_of(held)
    for rank, (got, own) in enumerate(zip(prints, held, strict=True)):
        whole = audited.as_held(copies[own.place.copy]["gradient"], own.layout)
        want = fingerprint.take(Carrier(whole), 0, full=True)
        name = f"rank{rank}"
        for what in ("checksum", "top", "tied"):
            check.exact(each(got, what), each(want, what), name=f"{name}-{what}")
        check.within(
            audited.sums(got),
            audited.sums(want),
            audited.sums_bound(whole),
            name=f"{name}-sums",
        )


def each(of: Fingerprint, what: str) -> dict[str, object]:
    return {name: getattr(measure, what) for name, measure in of.measures.items()}


# --- what a fingerprint tells apart ---------------------------------------------------------------


NATURE = {
    "negated": ("sign",),
    "times-1.05": ("scale",),
    "doubled": ("scale",),
    "rotated": ("direction",),
}


@pytest.mark.parametrize("change", NATURE)
@pytest.mark.parametrize("where", [WHERE, "head.weight"])
def test_fingerprint_reports_what_a_cosine_does_not(check: Check, change: str, where: str) -> None:
    """A change of one layer, reported there and nowhere else, where every element of the others
    was rounded to float32 once more; and what the change was."""
    gradients = audited.gradients_in_float64()
    reference = fingerprint.take(Carrier(gradients), 0, full=True)
    rounded = {name: gradient.float().double() for name, gradient in gradients.items()}
    rounded[where] = CHANGES[change](gradients[where])
    carrier = Carrier(rounded)
    got = fingerprint.take(carrier, 0, full=True)
    u, chance = FP32.unit_roundoff, audit_bounds.FALSE_ALARM
    reported = fingerprint.beyond(reference, got, u, chance)
    check.exact(list(reported), [where], name="reported")
    check.exact(fingerprint.nature(reported[where], u, chance), NATURE[change], name="nature")
    cosine = torch.cosine_similarity(one_vector(reference), one_vector(got), dim=0)
    check.exact(bool(cosine < fixed.Limits().cosine), False, name="cosine-reports")


def one_vector(of: Fingerprint) -> torch.Tensor:
    """Norms, indices of the largest elements, shares of the spectrum, whatever their units."""
    rows = [(m.log10_norm, *m.top[:10], *m.spectrum) for m in of.measures.values()]
    return torch.tensor([number for row in rows for number in row], dtype=torch.float64)
