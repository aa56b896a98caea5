"""``--model``: kernels of linear algebra and of bags lose more than a unit of their result."""

from __future__ import annotations

import pytest
import torch

from fixtures.numerics.formats import FP32
from fixtures.own_model.factory import load
from fixtures.own_model.step import Truth, errors
from precision_tests.test_model import observed_step

CPU = torch.device("cpu")
MODELS = "meta_tests.kernel_models"
SOUND = (
    *("inverse", "solve", "logdet", "eigenvalues", "orthogonal", "gaussian_process"),
    *("mean_bags", "sum_bags"),
)


def margins(name: str) -> list[float]:
    """Errors over limits of the step in fp32, in order."""
    truth = Truth(load(f"{MODELS}:{name}"), CPU)
    got, recorded = observed_step(truth.user, CPU, FP32)
    off, limits = (
        errors(got.quantities(), truth.of(recorded).quantities()),
        truth.limits(FP32),
    )
    return sorted(error / limits[name] for name, error in off.items())


@pytest.mark.parametrize("name", SOUND)
def test_a_step_lies_inside_its_bound_and_not_far(name: str) -> None:
    found = margins(name)
    assert found[-1] < 1
    assert found[-1] > 1 / 20


def test_a_matrix_that_is_rounded_is_not_inverted_right() -> None:
    assert margins("inverse_in_ten_bits")[-1] > 10
