"""What is said about the precision of training: is each statement still as docs/claims.md says?

Outside the gate: a statement that turns out otherwise says something about the statement, or that
the framework changed its ways. ``make claims`` or ``pytest -m claims`` runs it. Verdicts are held,
digits are recorded.
"""

from __future__ import annotations

import pytest

from fixtures.check import Check
from fixtures.claims.claim import Claim, Found, Ruling
from fixtures.claims.ledger import CLAIMS
from fixtures.devices import Device
from fixtures.distributed.ranks import RunRanks


def hold(check: Check, claim: Claim, found: Found) -> None:
    """Holds what was found to the ruling of the page."""
    ruling = found.ruling.value
    figures = {"number": claim.number, "says": claim.says, "ruling": ruling, "note": found.what}
    check.exact(ruling, claim.ruling.value, figures=figures)


@pytest.fixture(autouse=True)
def possible(claim: Claim) -> None:
    """UNVERIFIED where this machine lacks what trying a statement needs."""
    if missing := claim.needs():
        pytest.skip(missing)


def statements(way: str) -> pytest.MarkDecorator:
    chosen = [claim for claim in CLAIMS if getattr(claim, way)]
    return pytest.mark.parametrize("claim", chosen, ids=lambda claim: claim.name)


@statements("measure")
def test_in_one_process(check: Check, claim: Claim) -> None:
    assert claim.measure
    hold(check, claim, claim.measure())


@pytest.mark.takes_ranks(4)
@statements("over_ranks")
def test_over_ranks(check: Check, ranks: RunRanks, device: Device, claim: Claim) -> None:
    """The rulings are about gloo, on the CPU: what NCCL gives is recorded."""
    assert claim.over_ranks
    found = claim.over_ranks(ranks)
    if device.type == "cpu":
        hold(check, claim, found)
    else:
        check.observe({"ruling": found.ruling.value, "what": found.what})


@pytest.mark.gpu_only
@statements("on_gpu")
def test_on_a_gpu(check: Check, device: Device, claim: Claim) -> None:
    """No ruling is known of what no CPU can try: that of this GPU is recorded."""
    assert claim.on_gpu
    found = claim.on_gpu(device.torch)
    if claim.ruling is Ruling.NEEDS_GPU:
        check.observe({"ruling": found.ruling.value, "what": found.what})
    else:
        hold(check, claim, found)
