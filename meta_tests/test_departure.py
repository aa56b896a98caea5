"""Tests of what a failure of a training run says: the first step and node outside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fixtures.faults import inject
from fixtures.golden import GoldenStore, Truth
from fixtures.training import departure, trajectory
from fixtures.training.policies import POLICIES
from fixtures.training.sensitivity import Sensitivities
from fixtures.training.trajectory_run import Run
from fixtures.training.truth import StepTruth

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sensitivities() -> Sensitivities:
    store = GoldenStore(Path(__file__).parent.parent / "golden")

    def load(name: str) -> Truth:
        return store.truth(*name.split("/"))

    return StepTruth.load(load).sensitivities


@pytest.mark.parametrize("name", POLICIES)
def test_no_node_is_named_without_a_fault(name: str, sensitivities: Sensitivities) -> None:
    assert departure.first_node(POLICIES[name], CPU, 0, sensitivities) == ""


@pytest.mark.parametrize(
    ("fault", "quantity", "place"),
    [
        ("layer_norm_eps_dropped", "output/blocks.0.norm1", "layer_norm"),
        ("attention_scale_forgotten", "output/blocks.0.attention", "attention"),
        ("gelu_tanh_for_erf", "output/blocks.0.mlp.gelu", "gelu"),
        ("cross_entropy_mean_over_all", "loss", "cross_entropy"),
        ("gelu_gradient_of_the_other_form", "gradient/blocks.1.mlp.up.bias", "backward of gelu"),
        ("run_another_mask_on_recompute", "gradient/blocks.1", "checkpoint_recompute"),
        ("scaler_unscale_skipped", "gradient/head.weight", "grad_scaler"),
        ("accumulate_mean_of_means", "gradient/head.weight", "gradient_accumulation"),
    ],
)
def test_first_node_outside_is_named(
    fault: str, quantity: str, place: str, sensitivities: Sensitivities
) -> None:
    with inject(fault):
        said = departure.first_node(POLICIES["fp32"], CPU, 0, sensitivities)
    assert quantity in said
    assert place in said


def run_with(touched: list[str], **errors: int) -> tuple[Run, dict[str, Tensor]]:
    """A run whose quantities leave their limits of 1 at the given steps, and those limits."""
    shape = (trajectory.STEPS, 37)
    distance = {"loss": torch.zeros(shape[0]), "gradient": torch.zeros(shape)}
    distance["parameter"] = torch.zeros(shape)
    limits = {key: torch.ones_like(value) for key, value in distance.items()}
    for key, step in errors.items():
        distance[key][step:] = 2.0
    empty = torch.empty(0)
    return Run(POLICIES["fp32"], distance, touched, *([empty] * 5)), limits


@pytest.mark.parametrize(
    ("touched", "errors", "expected"),
    [
        ([], {"parameter": 3, "gradient": 4}, "step 3 is the first outside; weight_update"),
        ([], {"loss": 5, "parameter": 6}, "step 5 is the first outside, by errors carried over"),
        ([], {}, "look at the evaluation"),
        (["exp_avg of x"], {"parameter": trajectory.OVERFLOW + 1}, "grad_scaler"),
        (["exp_avg of x"], {}, "changed exp_avg of x"),
        (["exp_avg of x"], {"parameter": 3}, "step 3 is the first outside; weight_update"),
    ],
)
def test_first_step_outside_is_named(
    touched: list[str], errors: dict[str, int], expected: str, sensitivities: Sensitivities
) -> None:
    run, limits = run_with(touched, **errors)
    assert expected in departure.first_departure(run, CPU, limits, sensitivities)
