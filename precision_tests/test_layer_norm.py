"""LayerNorm, (x - mean) / sqrt(variance + eps) weight + bias, and RMSNorm, without the mean.

What goes wrong: eps is lost, put outside the root, or made so small that a row of equal elements
amplifies its gradient without limit; the variance is taken as the difference of two large numbers;
statistics or sums over the rows are kept in 16 bit; squares overflow.

Theorem: a mean and variance updated in blocks err by a few u max|x| and by u v plus the mean's
error times sqrt(v) (Chan, Golub, LeVeque 1983); the rest is a running error analysis, derived in
docs/theory/layer_norm.md. Amplification: ||dx|| <= max|weight| eps^(-1/2) ||dy|| for each row.

Truth: float64 with exactly rounded sums (fsum), stored in fp32. One set of inputs, exact in bf16
and fp16, serves every format.

Claims of the ledger: 82 (the smallest bf16 number stated 6.1e-5; that is fp16's smallest normal),
83 (eps = 1e-5 becomes 0 in bf16: it is added in fp32), 84 (a gradient 300 times larger due to bf16:
the limit is eps^(-1/2) = 316 in every format, 315 measured), 85 (1e-4 is not exact in bf16), 86
(finfo.tiny for eps: the limit is then 9.2e18), 87 (weight_norm is no substitute: LayerNorm does
not follow its input's scale), 88 (what the CPU keeps in 16 bit on the way back).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fixtures import compiling
from fixtures.check import Check, inputs_at
from fixtures.collection import exists
from fixtures.devices import Device
from fixtures.distributed.ranks import RunRanks
from fixtures.golden import Golden, LoadTruth, Truth
from fixtures.layer_norm import (
    EPS,
    ROWS,
    concatenated,
    gradients_of,
    in_float64,
    joined,
    kept_in,
    place_in,
    rows_of,
)
from fixtures.numerics import bounds, layer_norm_bounds
from fixtures.numerics.bounds import Bound
from fixtures.numerics.formats import BF16, FP16, FP32, FP64, Format, round_to
from fixtures.training import flow, philox

WIDTHS = (2, 7, 15, 16, 17, 33, 257)  # below, at and above the vector width
KINDS = ("plain", "offset", "constant", "small", "far")  # far: exact in fp32 only

# --- golden cases -------------------------------------------------------------------------------


def layer_norm_truth(kind: str) -> Truth:
    """By width: ``y``, ``dx``, ``dweight``, ``dbias`` of LayerNorm; ``rms_y`` ... of RMSNorm."""
    inputs: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for width in WIDTHS:
        rows = rows_of(kind, width)
        x, dy, weight, bias = rows["x"], rows["dy"], rows["weight"], rows["bias"]
        for name, tensor in rows.items():
            exact_in = torch.float32 if kind == "far" and name == "x" else torch.bfloat16
            inputs[f"{name}/{width}"] = tensor.to(exact_in)
        values[f"y/{width}"] = layer_norm_bounds.forward(x, weight, bias, EPS)
        found = layer_norm_bounds.gradients(x, weight, dy, EPS)
        none = torch.zeros_like(bias)
        found["rms_y"] = layer_norm_bounds.forward(x, weight, none, EPS, centred=False)
        rms = layer_norm_bounds.gradients(x, weight, dy, EPS, centred=False)
        found |= {"rms_dx": rms["dx"], "rms_dweight": rms["dweight"]}
        values |= {f"{name}/{width}": value for name, value in found.items()}
    return Truth(inputs, {name: value.float() for name, value in values.items()})


GOLDEN = tuple(
    Golden(
        node="layer_norm",
        name=kind,
        generate=layer_norm_truth,
        arguments={"kind": kind},
        precision="float64 with exactly rounded sums, rounded to fp32",
        bound="blocked mean and variance, running error analysis + rounding",
        uses=(rows_of, layer_norm_bounds, philox),
    )
    for kind in KINDS
)


# --- the operation and its bound ----------------------------------------------------------------

Operation = Callable[..., Tensor]


def eager(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def strided(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Rows that are columns of another tensor."""
    return F.layer_norm(x.T.contiguous().T, x.shape[-1:], weight, bias, eps)


def compiled(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return compiling.compiled(eager)(x, weight, bias, eps)


def rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def widths_for(operation: Operation) -> Iterable[int]:
    return (33,) if operation is compiled else WIDTHS  # each further graph costs seconds


def with_stored(bound: Bound, want: Tensor) -> Bound:
    return bound + bounds.stored_reference(want)


all_formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)
flow_formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32, FP64], ids=lambda fmt: fmt.name)

KINDS_AND_FORMATS = [
    (kind, fmt) for kind in KINDS for fmt in (BF16, FP16, FP32) if kind != "far" or fmt is FP32
]
all_kinds = pytest.mark.parametrize(
    ("kind", "fmt"), KINDS_AND_FORMATS, ids=lambda value: getattr(value, "name", value)
)
WAYS = (
    ("eager", "own", eager),
    ("fp32-affine", "fp32", eager),
    ("strided", "own", strided),
    ("compiled", "own", compiled),
)


def ways(kind: str, fmt: Format) -> Iterator[Any]:
    """Weight and bias in the input's format or in fp32; each compiled graph costs seconds."""
    for name, affine, operation in WAYS:
        if (affine == "fp32" and fmt is FP32) or (name == "compiled" and kind not in KINDS[:2]):
            continue
        marks = [pytest.mark.compiled] if name == "compiled" else []
        yield pytest.param(
            kind, fmt, affine, operation, id=f"{kind}-{fmt.name}-{name}", marks=marks
        )


# --- promise: bound -----------------------------------------------------------------------------

moderate = st.floats(-(2.0**40), 2.0**40, width=32) | st.floats(-4, 4, width=32)


def repeated(row: list[float]) -> dict[str, Tensor]:
    """Three rows from one: as it is, with an offset, and all equal; weight and gradient from it."""
    x = torch.tensor(row, dtype=torch.float32)
    shape = torch.linspace(-1, 2, len(row))
    return {
        "x": torch.stack([x, x + 1024.0, x[:1].expand_as(x)]).double(),
        "dy": torch.stack([shape, shape.flip(0), torch.ones_like(x)]).double(),
        "weight": shape.flip(0).double() + 0.125,
        "bias": shape.double(),
    }


class TestBound:
    """Holds for whatever rows can be found; in fp32, where no final rounding masks it."""

    @example(row=[1.0, 1.0000001, 0.9999999], eps=1e-5)
    @example(row=[3.0] * 17, eps=1e-12)
    @given(
        row=st.lists(moderate, min_size=2, max_size=40),
        eps=st.sampled_from([1e-12, 1e-8, 1e-5, 1e-3]),
    )
    @pytest.mark.parametrize("fmt", [FP32], ids=lambda fmt: fmt.name)
    def test_any_row(
        self, check: Check, device: Device, fmt: Format, row: list[float], eps: float
    ) -> None:
        rows = repeated(row)
        x, weight, bias = rows["x"], rows["weight"], rows["bias"]
        got = gradients_of(eager, rows, fmt, device, eps=eps)
        want = layer_norm_bounds.forward(x, weight, bias, eps)
        limit = layer_norm_bounds.forward_bound(x, weight, bias, eps, fmt)
        check.within(got["y"], want, limit, name="y", where=inputs_at(depth=1, x=x))
        wants = layer_norm_bounds.gradients(x, weight, rows["dy"], eps)
        limits = layer_norm_bounds.gradient_bounds(x, weight, rows["dy"], eps, fmt, fmt)
        for name, value in wants.items():
            check.within(got[name], value, limits[name], name=name)

    @pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-5, 1e-3])
    @pytest.mark.parametrize("affine", ["own", "none"])
    @all_formats
    def test_gradient_is_bounded_by_the_root_of_eps(
        self, check: Check, device: Device, fmt: Format, affine: str, eps: float
    ) -> None:
        """Rows that are constant or nearly so: ||dx|| <= max|weight| eps^(-1/2) ||dy|| + rounding.

        dy is small enough for fp16 to hold the result.
        """
        rows = rows_of("constant", 33)
        rows["x"][1::2] += torch.arange(33) % 2 * 2.0**-9
        rows["x"] = round_to(rows["x"], fmt)
        rows["dy"] *= 2.0**-9
        weight = rows["weight"] if affine == "own" else torch.ones(33, dtype=torch.float64)
        got = gradients_of(eager, rows, fmt, device, affine, eps)["dx"].cpu().double()
        most = layer_norm_bounds.amplification(weight, rows["dy"], eps)
        kept = kept_in(fmt, affine, device)
        limit = layer_norm_bounds.gradient_bounds(rows["x"], weight, rows["dy"], eps, fmt, kept)[
            "dx"
        ].limit
        allowed = most + torch.as_tensor(limit).norm(dim=-1)
        names = [f"row {index}" for index in range(ROWS)]
        check.within_figures(
            dict(zip(names, got.norm(dim=-1).tolist(), strict=True)),
            dict(zip(names, allowed.tolist(), strict=True)),
            got,
            theorem="max|weight| eps^(-1/2) ||dy||",
            source="docs/theory/layer_norm.md",
        )


# --- promise: op --------------------------------------------------------------------------------


class TestOp:
    # CUDA's kernel refuses a weight of another format (layer_norm_kernel.cu).
    @exists(lambda device, affine: device.type == "cpu" or affine != "fp32")
    @pytest.mark.sentinel
    @pytest.mark.parametrize(
        ("kind", "fmt", "affine", "implementation"),
        [way for kind, fmt in KINDS_AND_FORMATS for way in ways(kind, fmt)],
    )
    def test_golden(
        self,
        check: Check,
        truth: LoadTruth,
        device: Device,
        fmt: Format,
        kind: str,
        affine: str,
        implementation: Operation,
    ) -> None:
        """Forward and all three gradients."""
        case, widths = truth(kind), widths_for(implementation)
        got, wants, limits = {}, {}, {}
        for width in widths:
            rows = in_float64(case, width)
            got[width] = gradients_of(implementation, rows, fmt, device, affine)
            wants[width] = {n: case.values[f"{n}/{width}"] for n in got[width]}
            x, weight, bias, dy = (rows[name] for name in ("x", "weight", "bias", "dy"))
            block = -(-width // 8) if implementation is compiled else layer_norm_bounds.BLOCK
            limits[width] = layer_norm_bounds.gradient_bounds(
                x,
                weight,
                dy,
                EPS,
                fmt,
                kept_in(fmt, affine, device),
                affine=FP32 if affine == "fp32" else fmt,
                block=block,
                # The CPU's kernel sums over rows in 16 bit: see test_many_rows.
                summed_in=fmt if device.type == "cpu" and implementation is not compiled else None,
            )
            limits[width]["y"] = layer_norm_bounds.forward_bound(
                x, weight, bias, EPS, fmt, block=block
            )
        for name in ("y", "dx", "dweight", "dbias"):
            check.within(
                joined(got[width][name] for width in widths),
                joined(wants[width][name] for width in widths),
                concatenated(with_stored(limits[w][name], wants[w][name]) for w in widths),
                name=name,
                where=place_in(case, widths, name),
                inputs=case.digest,
            )

    @all_kinds
    def test_rms_norm(
        self, check: Check, truth: LoadTruth, device: Device, fmt: Format, kind: str
    ) -> None:
        case = truth(kind)
        got, wants, limits = [], [], []
        for width in WIDTHS:
            rows = in_float64(case, width)
            found = gradients_of(rms, rows, fmt, device)
            x, weight, dy = rows["x"], rows["weight"], rows["dy"]
            limit = layer_norm_bounds.gradient_bounds(x, weight, dy, EPS, fmt, FP32, centred=False)
            limit["y"] = layer_norm_bounds.forward_bound(
                x, weight, torch.zeros_like(weight), EPS, fmt, centred=False
            )
            for name in ("y", "dx", "dweight"):
                want = case.values[f"rms_{name}/{width}"]
                got.append(found[name])
                wants.append(want)
                limits.append(with_stored(limit[name], want))
        check.within(joined(got), joined(wants), concatenated(limits), inputs=case.digest)

    @pytest.mark.parametrize("part", ["dweight", "dbias"])
    @all_formats
    def test_many_rows(self, check: Check, device: Device, fmt: Format, part: str) -> None:
        """Gradients of weight and bias are sums over all rows, in fp32: 8192 ones are 8192."""
        x = torch.tensor([[1.0, -1.0, 1.0]], dtype=torch.float64).expand(8192, 3)
        ones = torch.ones(3, dtype=torch.float64)
        rows = {"x": x, "dy": torch.ones_like(x), "weight": ones, "bias": ones}
        kept = kept_in(fmt, "own", device)
        limits = layer_norm_bounds.gradient_bounds(x, ones, rows["dy"], EPS, fmt, kept)
        want = layer_norm_bounds.gradients(x, ones, rows["dy"], EPS)[part]
        check.within(gradients_of(eager, rows, fmt, device)[part], want, limits[part])

    @pytest.mark.parametrize("part", ["y", "dx", "dweight"])
    @all_formats
    def test_row_of_one_element(self, check: Check, device: Device, fmt: Format, part: str) -> None:
        """x - mean is 0: the output is the bias, and neither x nor weight has a gradient."""
        x = torch.tensor([[0.7], [100.0], [30000.0], [1e6]], dtype=torch.float64)
        x = round_to(x[: 3 if fmt is FP16 else 4], fmt)
        rows = {"x": x, "dy": torch.full_like(x, 0.75)}
        rows |= {"weight": torch.tensor([1.25]), "bias": torch.tensor([3.0])}
        got = gradients_of(eager, rows, fmt, device)[part].cpu()
        want = torch.full_like(got, 3.0 if part == "y" else 0.0)
        check.exact(got + 0.0, want)

    @pytest.mark.parametrize("operation", [eager, rms])
    @pytest.mark.parametrize("exponent", [-100, 59, 100], ids=lambda e: f"2^{e}")
    @pytest.mark.parametrize("fmt", [BF16, FP32], ids=lambda fmt: fmt.name)
    def test_scale_of_the_input(
        self, check: Check, device: Device, fmt: Format, exponent: int, operation: Operation
    ) -> None:
        """Up to the ends of the range, where the square of an element overflows fp32."""
        rows, centred = rows_of("plain", 33), operation is eager
        x, weight = rows["x"] * 2.0**exponent, rows["weight"]
        bias = rows["bias"] if centred else torch.zeros_like(weight)
        got = operation(*(t.to(device.torch, fmt.dtype) for t in (x, weight, bias)), EPS)
        want = layer_norm_bounds.forward(x, weight, bias, EPS, centred=centred)
        limit = layer_norm_bounds.forward_bound(x, weight, bias, EPS, fmt, centred=centred)
        check.within(got, want, limit)

    @all_formats
    def test_row_of_two_million_elements(self, check: Check, device: Device, fmt: Format) -> None:
        """Small integers, far from centred, whose sums are exact in any order."""
        x = (torch.arange(2**21 + 3) * 40503 % 65537 % 251 - 95).double()[None]
        one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        got = F.layer_norm(x.to(device.torch, fmt.dtype), x.shape[-1:], eps=EPS)
        want = layer_norm_bounds.forward(x, one, zero, EPS)
        check.within(got, want, layer_norm_bounds.forward_bound(x, one, zero, EPS, fmt))

    @pytest.mark.parametrize("width", [1024, 4096, 8192], ids=lambda n: f"width{n}")
    @all_formats
    def test_wide_rows(self, check: Check, device: Device, fmt: Format, width: int) -> None:
        """Of models, and of CUDA's vectorised kernel, which takes widths that 4 divides."""
        rows = rows_of("plain", width)
        x, weight, bias, dy = (rows[name] for name in ("x", "weight", "bias", "dy"))
        kept, summed = kept_in(fmt, "own", device), fmt if device.type == "cpu" else None
        wants = layer_norm_bounds.gradients(x, weight, dy, EPS)
        limits = layer_norm_bounds.gradient_bounds(x, weight, dy, EPS, fmt, kept, summed_in=summed)
        wants["y"] = layer_norm_bounds.forward(x, weight, bias, EPS)
        limits["y"] = layer_norm_bounds.forward_bound(x, weight, bias, EPS, fmt)
        for name, got in gradients_of(eager, rows, fmt, device).items():
            check.within(got, wants[name], limits[name], name=name)

    @all_formats
    def test_row_alone_or_in_a_batch(self, check: Check, device: Device, fmt: Format) -> None:
        rows = rows_of("plain", 257)
        x, weight, bias = (
            rows[name].to(device.torch, fmt.dtype) for name in ("x", "weight", "bias")
        )
        alone = torch.cat([eager(row[None].clone(), weight, bias, EPS) for row in x])
        check.exact(eager(x, weight, bias, EPS), alone)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
    @pytest.mark.parametrize("operation", [eager, rms])
    @all_formats
    def test_nonfinite_input_spoils_its_row_only(
        self, check: Check, device: Device, fmt: Format, operation: Operation, value: float
    ) -> None:
        x = torch.ones(3, 33, dtype=fmt.dtype, device=device.torch)
        x[1, 20] = value
        got = operation(x, torch.ones_like(x[0]), torch.zeros_like(x[0]), EPS).isnan()
        check.exact((got.any(1).tolist(), bool(got[1, 20])), ([False, True, False], True))


# --- promise: flow ------------------------------------------------------------------------------


class TestFlow:
    """Only LayerNorm runs torch's operation in the format; all the rest of the step is float64."""

    @flow_formats
    def test_one_process(self, check: Check, truth: LoadTruth, device: Device, fmt: Format) -> None:
        flow.check_one_process(check, truth, "layer_norm", fmt, device.torch)

    @flow_formats
    @pytest.mark.parametrize("world_size", [2, 4], ids=lambda w: f"w{w}")
    def test_fully_sharded(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        flow.check_ranks(check, truth, ranks, flow.fully_sharded, world_size, "layer_norm", fmt)
