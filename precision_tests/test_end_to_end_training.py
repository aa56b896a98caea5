"""The whole training step over 40 steps, in every precision policy, against the float64 formulas.

What goes wrong: a fault that no single operation shows. The loss is fine and the gradients are not;
a skipped step leaves its momentum; a small bias grows from step to step; two builds that agree on
every loss write different text.

Theorem: a run lies as far from the truth as float64 runs with modelled rounding noise do, by
policy, step and parameter; Student's t makes limits of that, at 1e-9 over all entries
(docs/theory/end_to_end.md). A 16-bit run shows faults of 16-bit size; the runs in fp32 and float64
are the microscope.

Truth: the reference run in float64, made once per process and held to what is stored. Step 17
overflows on purpose and must leave no trace. After the last step 100 corner-case prompts (empty,
one byte, longest, repeated, bytes that the text hardly has, equal keys) are continued greedily.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from fixtures.check import Check
from fixtures.devices import Device
from fixtures.golden import LoadTruth
from fixtures.switches import deterministic_algorithms
from fixtures.training import (
    data,
    departure,
    generation,
    trajectory,
    trajectory_limits,
    trajectory_truth,
)
from fixtures.training.policies import POLICIES, Policy
from fixtures.training.trajectory_run import Run, run
from fixtures.training.truth import StepTruth

GOLDEN = trajectory_truth.GOLDEN

SOURCE = "docs/theory/end_to_end.md; Szekely, Bakirov 2003"
GetRun = Callable[[Policy, torch.device], Run]

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)


@pytest.fixture(scope="module")
def run_of() -> GetRun:
    """Each policy is trained once for all checks of it."""
    made = cache(lambda name, device: run(POLICIES[name], device))
    return lambda policy, device: made(policy.name, device)


class TestTruth:
    """The reference run, made on the spot, is the one that is stored."""

    def test_inputs_are_those_stored(self, check: Check, truth: LoadTruth) -> None:
        case = truth("trajectory")
        made = trajectory_truth.inputs()
        same = {name: torch.equal(made[name], stored) for name, stored in case.inputs.items()}
        check.exact(same, dict.fromkeys(made, True), inputs=case.digest)

    def test_reference_is_as_stored(self, check: Check, truth: LoadTruth) -> None:
        """Within the response to float64's roundings and one rounding to fp32."""
        case, made = truth("trajectory"), trajectory.reference()
        check.within_figures(
            *trajectory_limits.stored_distance(truth),
            made.steps.losses,
            theorem="response of a training run to the roundings of fp64, truth stored in fp32",
            source=SOURCE,
            inputs=case.digest,
        )
        stored = case.values["prompts/lengths"]
        check.exact(made.generated.lengths, stored, name="lengths", inputs=case.digest)


@every_policy
class TestTraining:
    """Every step of the run; a failure names the first step and the first node outside."""

    @pytest.mark.parametrize("quantity", ["loss", "gradient", "parameter"])
    def test_distance_from_truth(
        self,
        check: Check,
        truth: LoadTruth,
        device: Device,
        run_of: GetRun,
        policy: Policy,
        quantity: str,
    ) -> None:
        """Relative; 2-norms by parameter. The gradient of the key bias, which is 0, absolute."""
        check_distance(check, truth, run_of(policy, device.torch), device, quantity)

    def test_step_that_overflows_leaves_no_trace(
        self, check: Check, device: Device, run_of: GetRun, policy: Policy
    ) -> None:
        """Neither in the parameters nor in the optimizer's state."""
        got = run_of(policy, device.torch)
        check.exact(got.touched, [])
        skipped = got.gradient.view(trajectory.STEPS, -1)[trajectory.OVERFLOW]
        check.exact(bool(skipped.isfinite().all()), False, name="overflows")

    def test_again_equal_bits(
        self, check: Check, device: Device, run_of: GetRun, policy: Policy
    ) -> None:
        """On CUDA with deterministic algorithms, but for attention's: it has one block of keys."""
        if device.type == "cuda":
            with deterministic_algorithms():
                first, again = run(policy, device.torch), run(policy, device.torch)
        else:
            first, again = run_of(policy, device.torch), run(policy, device.torch)
        for quantity in ("loss", "gradient", "parameter", "logits", "lengths"):
            check.exact(getattr(again, quantity), getattr(first, quantity), name=quantity)


@every_policy
class TestPrompts:
    """100 corner-case prompts after the last step."""

    @pytest.mark.parametrize("quantity", ["kl", "logits"])
    def test_distance_from_truth(
        self,
        check: Check,
        truth: LoadTruth,
        device: Device,
        run_of: GetRun,
        policy: Policy,
        quantity: str,
    ) -> None:
        """sqrt(2 KL(truth || run)) of the token after each prompt; the largest error of a logit
        wherever the truth decides on a token."""
        check_distance(check, truth, run_of(policy, device.torch), device, quantity)

    def test_most_probable_token(
        self, check: Check, truth: LoadTruth, device: Device, run_of: GetRun, policy: Policy
    ) -> None:
        """The truth's own wherever the gap to the next one exceeds the limit of the logits."""
        got, want = run_of(policy, device.torch), trajectory.reference()
        limits = trajectory_limits.limits(policy, truth)["logits"]
        chosen, right = got.logits.argmax(-1), want.logits.argmax(-1)
        ties = generation.undecided(want.logits, limits)
        tied = ties.gather(-1, chosen[..., None])[..., 0]
        decisions = want.generated.decisions
        wrong = decisions & (chosen != right) & ~tied
        check.exact(wrong.nonzero().tolist(), [], inputs=truth("trajectory").digest)
        agreed = int((decisions & (chosen == right)).sum())
        decided = int((decisions & ~ties.any(-1)).sum())
        counts = {"agreed": agreed, "decided": decided, "of": int(decisions.sum())}
        check.observe(counts, name="counts")

    def test_lengths(
        self, check: Check, truth: LoadTruth, device: Device, run_of: GetRun, policy: Policy
    ) -> None:
        """Of what is generated: the truth's, up to what ties of its decisions allow; and their
        standard deviation over the prompts."""
        got, want = run_of(policy, device.torch), trajectory.reference()
        limits = trajectory_limits.limits(policy, truth)["logits"]
        shortest, longest = generation.length_range(want.generated, want.logits, limits)
        right = want.generated.lengths
        allowed = torch.maximum(right - shortest, longest - right).double()
        names = list(data.prompts(trajectory.CONFIG))
        errors = dict(zip(names, (got.lengths - right).abs().tolist(), strict=True))
        bounds = dict(zip(names, allowed.tolist(), strict=True))
        spread = got.lengths.double().std(correction=0) - right.double().std(correction=0)
        errors["spread"] = float(spread.abs())
        bounds["spread"] = generation.spread_limit(allowed)
        check.within_figures(
            errors,
            bounds,
            got.lengths,
            theorem="lengths up to the first tie of a decision",
            source=SOURCE,
            inputs=truth("trajectory").digest,
        )


def check_distance(check: Check, truth: LoadTruth, got: Run, device: Device, quantity: str) -> None:
    limits = trajectory_limits.limits(got.policy, truth)
    sensitivities = StepTruth.load(truth).sensitivities
    check.within_figures(
        *trajectory_limits.worst_by_row(quantity, got.distance[quantity], limits[quantity]),
        getattr(got, "logits" if quantity == "kl" else quantity),
        theorem=f"response of a training run to the roundings of {got.policy.name}",
        source=SOURCE,
        inputs=truth("trajectory").digest,
        hint=lambda: departure.first_departure(got, device.torch, limits, sensitivities),
    )
