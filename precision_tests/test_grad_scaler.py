"""The gradient scaler: scale the loss, unscale the gradients, skip the step on inf or NaN.

What goes wrong: gradients are unscaled never, twice, or after they were clipped; the scale leaves
the powers of two, so that scaling rounds; a step with a non-finite gradient is taken, or skipped
on one rank only, or writes optimizer state; the scale reaches 0.

Theorem: for a power of two s and no overflow or underflow, s x and x (1/s) are exact (IEEE 754),
so parameters do not depend on the scale. For any other scale unscaling multiplies by the fp32
reciprocal: two roundings, |err| <= gamma_2 |g/s| (Higham, Accuracy and Stability, Lemma 3.1).

Truth: the quotient of each finite fp16 value by the scale, rounded once to fp32 (float64, and
mpmath where it cannot decide). State machine: closed form of the documented rule.

Claims of the ledger: 1 (a hidden truncation of 0.3 %: none, power-of-two scaling is exact), 2
(drift of a bias caused by the scale: bits do not depend on it), 27 (the defaults), 28 (a large
gradient norm does not trigger anything; only inf and NaN do), 29 (unscaling is a multiplication by
the fp32 reciprocal, fp16 gradients are refused), 30 (backoff keeps powers of two), 31 and 32
(division by 32767.8 and 65536: two roundings at most), 33 (a loss-dependent divisor changes
gradients 65536-fold), 34 (166 overflows take the scale to 0).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fixtures.check import Check
from fixtures.devices import Device
from fixtures.distributed import sharding
from fixtures.distributed.ranks import Rank, RunRanks
from fixtures.golden import Golden, LoadTruth, Truth
from fixtures.numerics import bounds, references
from fixtures.numerics.formats import FP16, FP32, FP64, Format, all_values
from fixtures.switches import deterministic_algorithms
from fixtures.training import flow

# Beside a power of two, far from one, and the default. fp32 holds what is meant by 32767.8.
SCALES = {
    "32767.8": float(np.float32(32767.8)),
    "32768.5": 32768.5,
    "3": 3.0,
    "65536": 65536.0,
}
DEFAULTS = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5}
DEFAULTS |= {"growth_interval": 2000, "_growth_tracker": 0}


# --- golden cases -------------------------------------------------------------------------------


def division_truth() -> Truth:
    """Every finite fp16 value divided by each scale."""
    gradients = all_values(FP16)
    gradients = gradients[torch.isfinite(gradients)]
    dividends = gradients.double().numpy()
    quotients = {}
    for name, scale in SCALES.items():
        exact = partial(_over, mpmath.mpf(scale))
        rounded = references.round_once(partial(_over, scale), exact, dividends, 1.0)
        quotients[name] = torch.from_numpy(rounded)
    return Truth(inputs={"gradients": gradients}, values=quotients)


def _over(divisor: Any, dividend: Any) -> Any:
    return dividend / divisor


GOLDEN = (
    Golden(
        node="grad_scaler",
        name="division",
        generate=division_truth,
        arguments={},
        precision="float64, rounded once to fp32 (Ziv; mpmath, 50 digits)",
        bound="gamma_2",
        uses=(_over, references),
    ),
)


# --- the operation and its bound ----------------------------------------------------------------


def scaler_on(device: Device, **arguments: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(device.torch.type, **arguments)
    scaler.scale(torch.ones((), device=device.torch))  # the scale lives where the loss does
    return scaler


def holding(gradients: Tensor) -> tuple[nn.Parameter, Optimizer]:
    """A parameter with that gradient, and an optimizer for it."""
    parameter = nn.Parameter(torch.zeros_like(gradients))
    parameter.grad = gradients.clone()
    return parameter, torch.optim.SGD([parameter], lr=1.0)


def unscaled(gradients: Tensor, scale: float, device: Device) -> Tensor:
    parameter, optimizer = holding(gradients.to(device.torch))
    scaler_on(device, init_scale=scale).unscale_(optimizer)
    assert parameter.grad is not None
    return parameter.grad


def scale_after(steps: list[bool], interval: int) -> tuple[float, int]:
    """Scale and growth tracker after steps that overflowed (True) or not: the documented rule."""
    exponent, tracker = 16, 0
    for overflowed in steps:
        tracker = 0 if overflowed else tracker + 1
        exponent -= overflowed
        if tracker == interval:
            exponent, tracker = exponent + 1, 0
    return 2.0**exponent, tracker


def take_step(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, parameter: nn.Parameter, gradient: Tensor
) -> None:
    parameter.grad = gradient.clone()
    scaler.step(optimizer)
    scaler.update()


# --- promise: bound -----------------------------------------------------------------------------


class TestBound:
    @given(
        gradient=st.floats(width=32, allow_nan=False, allow_infinity=False),
        exponent=st.integers(-10, 24),
    )
    def test_power_of_two_scaling_is_exact(
        self, check: Check, device: Device, gradient: float, exponent: int
    ) -> None:
        """Where neither s g nor g leaves the normal range."""
        g = torch.tensor([gradient])
        scaled = g * 2.0**exponent
        in_range = torch.isfinite(scaled) & (
            torch.minimum(g.abs(), scaled.abs()) >= FP32.smallest_normal
        )
        g = g[in_range | (g == 0)]
        got = unscaled(g * 2.0**exponent, 2.0**exponent, device)
        check.exact(got.cpu(), g)

    @example(gradients=[1.0, 1.9999999, 65504.0], scale=3.0)
    @example(gradients=[1.0, 1.9999999, 65504.0], scale=32767.8)
    @example(gradients=[1.0000001, 5.9e-8], scale=1.0000001)
    @given(
        gradients=st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=32),
        scale=st.floats(2.0**-10, 2.0**24, width=32),
    )
    def test_unscaling_by_any_scale(
        self, check: Check, device: Device, gradients: list[float], scale: float
    ) -> None:
        g, scale = torch.tensor(gradients), float(np.float32(scale))
        want = g.double() / scale
        check.within(unscaled(g, scale, device), want, bounds.reciprocal_product(want, FP32))

    @given(steps=st.lists(st.booleans(), max_size=40))
    def test_scale_stays_a_power_of_two(
        self, check: Check, device: Device, steps: list[bool]
    ) -> None:
        """Growth and backoff by their closed form, with an interval that the examples reach."""
        scaler = scaler_on(device, growth_interval=3)
        parameter, optimizer = holding(torch.zeros(1, device=device.torch))
        for overflowed in steps:
            gradient = torch.tensor([math.inf if overflowed else 0.0], device=device.torch)
            take_step(scaler, optimizer, parameter, gradient)
        state = scaler.state_dict()
        check.exact((state["scale"], state["_growth_tracker"]), scale_after(steps, 3))


# --- promise: op --------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda parameters, **kind: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **kind),
    "adam": lambda parameters, **kind: torch.optim.Adam(parameters, lr=0.1, **kind),
    "adamw": lambda parameters, **kind: torch.optim.AdamW(parameters, lr=0.1, **kind),
}
KINDS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}

optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS)
implementations = pytest.mark.parametrize("implementation", KINDS)


def spread(count: int) -> Tensor:
    """Numbers from -2 to 2 that fp32 holds exactly, whatever kernel makes them."""
    return (torch.arange(count, dtype=torch.float32) % 33 - 16) / 8


class Run:
    """Two parameters under an optimizer and a scaler, with scaled gradients handed in."""

    def __init__(self, device: Device, optimizer: str, kind: str, scale: float = 65536.0) -> None:
        values = spread(37).to(device.torch)
        self.parameters = [nn.Parameter(values[:size].clone()) for size in (37, 5)]
        self.optimizer = OPTIMIZERS[optimizer](self.parameters, **KINDS[kind])
        self.scaler = scaler_on(device, init_scale=scale)

    def step(self, number: int, broken: float | None = None) -> None:
        """Step ``number``; ``broken`` replaces one element of the second gradient."""
        for index, parameter in enumerate(self.parameters):
            size = parameter.numel()
            gradient = spread(size).to(parameter.device) / 2.0 ** (1 + number + index)
            parameter.grad = gradient * self.scaler.get_scale()
        if broken is not None:
            gradient = self.parameters[1].grad
            assert gradient is not None
            gradient[3] = broken
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> Tensor:
        """Parameters and all optimizer state in one tensor."""
        parts = [parameter.detach().flatten() for parameter in self.parameters]
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            values = (torch.as_tensor(state[key]) for key in sorted(state))
            parts += [value.float().flatten().to(parameter.device) for value in values]
        return torch.cat(parts).cpu()


class TestOp:
    @pytest.mark.sentinel
    @pytest.mark.parametrize("scale", SCALES)
    def test_unscale(self, check: Check, truth: LoadTruth, device: Device, scale: str) -> None:
        case = truth("division")
        want = case.values[scale]
        got = unscaled(case.inputs["gradients"].float(), SCALES[scale], device)
        bound = bounds.reciprocal_product(want, FP32) + bounds.stored_reference(want)
        check.within(got, want, bound, inputs=case.digest)

    @implementations
    @optimizers
    def test_parameters_do_not_depend_on_the_scale(
        self, check: Check, device: Device, optimizer: str, implementation: str
    ) -> None:
        plain, scaled = (Run(device, optimizer, implementation, s) for s in (1.0, 2.0**24))
        for number in range(3):
            plain.step(number)
            scaled.step(number)
        check.exact(scaled.state(), plain.state())

    @pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan], ids=["inf", "-inf", "nan"])
    @implementations
    @optimizers
    def test_nonfinite_gradient_skips_the_step(
        self, check: Check, device: Device, optimizer: str, implementation: str, broken: float
    ) -> None:
        """Parameters and optimizer state as before, and the scale halved."""
        run = Run(device, optimizer, implementation)
        run.step(0)
        before = run.state()
        run.step(1, broken)
        check.exact(run.state(), before)
        check.exact(run.scaler.get_scale(), 32768.0, name="scale")

    @implementations
    @optimizers
    def test_skipped_first_step_leaves_no_trace(
        self, check: Check, device: Device, optimizer: str, implementation: str
    ) -> None:
        """A good step after it gives what that step gives alone."""
        alone, after = (Run(device, optimizer, implementation) for _ in range(2))
        with deterministic_algorithms():  # fills uninitialised memory with NaN
            after.step(0, math.nan)
            alone.step(1)
            after.step(1)
        check.exact(after.state(), alone.state())

    def test_defaults(self, check: Check, device: Device) -> None:
        check.exact(scaler_on(device).state_dict(), DEFAULTS)

    def test_large_gradients_do_not_back_off(self, check: Check, device: Device) -> None:
        """Only inf and NaN do: a norm beyond the scale is no overflow."""
        scaler = scaler_on(device)
        parameter, optimizer = holding(torch.zeros(4, device=device.torch))
        take_step(scaler, optimizer, parameter, torch.full((4,), 1.4e6, device=device.torch))
        check.exact(scaler.get_scale(), 65536.0)

    def test_unscale_precedes_clipping(self, check: Check, device: Device) -> None:
        """The norm that is clipped is that of the unscaled gradients."""
        gradients = torch.tensor([3.0, 4.0], device=device.torch)
        parameter, optimizer = holding(gradients * 65536.0)
        scaler = scaler_on(device)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_([parameter], max_norm=10.0)
        assert parameter.grad is not None
        check.exact(float(norm), 5.0, name="norm")
        check.exact(parameter.grad.cpu(), gradients.cpu())

    def test_refuses_to_unscale_twice_or_fp16(self, check: Check, device: Device) -> None:
        scaler = scaler_on(device)
        _, optimizer = holding(torch.ones(1, device=device.torch, dtype=torch.float16))
        check.raises(ValueError, lambda: scaler.unscale_(optimizer), name="fp16")
        _, optimizer = holding(torch.ones(1, device=device.torch))
        scaler.unscale_(optimizer)
        check.raises(RuntimeError, lambda: scaler.unscale_(optimizer), name="twice")

    def test_state_dict_round_trip(self, check: Check, device: Device) -> None:
        first, second = scaler_on(device, growth_interval=5), scaler_on(device)
        parameter, optimizer = holding(torch.zeros(1, device=device.torch))
        take_step(first, optimizer, parameter, torch.full_like(parameter, math.inf))
        saved = copy.deepcopy(first.state_dict())
        second.load_state_dict(saved)
        check.exact(second.state_dict(), {**DEFAULTS, "scale": 32768.0, "growth_interval": 5})

    def test_scale_never_reaches_zero(self, check: Check, device: Device) -> None:
        """However many steps overflow in a row: at 0 the reciprocal is inf, the weights NaN."""
        scaler = scaler_on(device)
        parameter, optimizer = holding(torch.zeros(1, device=device.torch))
        for _ in range(200):
            take_step(scaler, optimizer, parameter, torch.full_like(parameter, math.inf))
        check.exact(scaler.get_scale() > 0, True)


# --- promise: flow ------------------------------------------------------------------------------


def skip_together(rank: Rank, broken_rank: int) -> tuple[dict[str, Tensor], float]:
    """Parameters and scale after a step in which one rank's own shard of a gradient holds inf."""
    model = sharding.shard(unsharded_model(), blocks=[], rank=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(rank.device.type)
    rows = torch.ones(4, 8, device=rank.device)
    scaler.scale(model(rows).sum()).backward()
    if rank.index == broken_rank:
        gradient = next(model.parameters()).grad
        assert isinstance(gradient, DTensor)
        gradient.to_local()[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    return sharding.full_parameters(model), scaler.get_scale()


def unsharded_model() -> nn.Linear:
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.copy_(spread(64).reshape(8, 8))
        model.bias.copy_(spread(8))
    return model


flow_formats = pytest.mark.parametrize("fmt", [FP16, FP32, FP64], ids=lambda fmt: fmt.name)
flow_ranks = pytest.mark.parametrize("world_size", [2, 4], ids=lambda w: f"w{w}")


class TestFlow:
    """The step's gradients, scaled, rounded to the format as its backward leaves them, unscaled."""

    @flow_formats
    def test_one_process(self, check: Check, truth: LoadTruth, device: Device, fmt: Format) -> None:
        flow.check_one_process(check, truth, "grad_scaler", fmt, device.torch)

    @flow_formats
    @flow_ranks
    def test_fully_sharded(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        flow.check_ranks(check, truth, ranks, flow.fully_sharded, world_size, "grad_scaler", fmt)

    @flow_ranks
    def test_overflow_on_one_rank_skips_the_step_on_all(
        self, check: Check, ranks: RunRanks, world_size: int
    ) -> None:
        """Under fully_shard only the rank that holds the shard sees the inf."""
        before = {name: p.detach() for name, p in unsharded_model().named_parameters()}
        for broken in range(world_size):
            for rank, (after, scale) in enumerate(ranks(skip_together, world_size, broken)):
                name = f"broken{broken}-rank{rank}"
                check.exact(scale, 32768.0, name=f"{name}-scale")
                check.exact(after["weight"], before["weight"], name=name)
