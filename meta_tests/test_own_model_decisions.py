"""``--model``: what a model decides is replayed, and held to what rounding explains."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fixtures.numerics.decision_bounds import turned_bound
from fixtures.numerics.formats import BF16, FP16, FP32, Format
from fixtures.own_model.comparisons import derivatives
from fixtures.own_model.decisions import formula_of, kind_of, named
from fixtures.own_model.factory import UserModelError, load
from fixtures.own_model.rounding import EVERYWHERE
from fixtures.own_model.step import Response, Truth, errors, fresh, recorded_step, run_step
from fixtures.own_model.substitutes import grouped_mm
from fixtures.own_model.ties import Operands
from meta_tests.running import ROOT, Repository, copy_repository
from precision_tests.test_model import is_inside, observed_step

MODELS = "meta_tests.deciding_models"
CPU = torch.device("cpu")
CHECKS = "precision_tests/test_model.py"


def margins(name: str, fmt: Format) -> dict[str, float]:
    """Errors over limits of the step; of decisions too."""
    user = load(f"{MODELS}:{name}")
    truth = Truth(user, CPU)
    got, recorded = observed_step(user, CPU, fmt)
    want = truth.of(recorded, fmt, got.scale)
    limits = truth.limits(fmt, scale=got.scale)
    off = errors(got.quantities(), want.quantities())
    decided = {name: apart / limit for name, (apart, limit) in want.apart.items() if apart}
    return decided | {name: error / limits[name] if error else 0.0 for name, error in off.items()}


# --- sound models -------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(
    "name",
    [
        *("cast_and_mask", "largest_mask", "experts", "grouped", "kinks", "soft_kinks"),
        *("quantized", "largest", "spline", "penalized"),
    ],
)
def test_a_step_that_decides_lies_inside_its_bound_and_not_far(
    monkeypatch: pytest.MonkeyPatch, name: str, fmt: Format
) -> None:
    """As one that does not: docs/theory/decisions.md has the figures."""
    if name == "grouped" and not hasattr(torch, "_grouped_mm"):
        pytest.skip("this release has no product of groups")
    monkeypatch.setattr("fixtures.own_model.step.DRAWS", 4)
    found = margins(name, fmt)
    assert max(found.values()) < 1
    rounded = sorted(m for name, m in found.items() if m and not name.startswith("decision"))
    assert 1 / 30 < rounded[len(rounded) // 2] < 1 / 5


def test_casts_of_the_model_do_not_part_the_runs() -> None:
    """Norm and residual stay fp32 under autocast: their noise is that of fp32 alone."""
    truth = Truth(load(f"{MODELS}:cast_and_mask"), CPU, {0: 1.0})
    recorded = truth.record(torch.bfloat16)
    low = {key[-3] for key, (_, sixteen) in recorded.operations.items() if sixteen}
    assert "aten::rsqrt" not in low
    assert {"aten::addmm", "aten::mm"} <= low
    assert truth.response(recorded, "sixteen", backward=False).sizes["output of embedding"] == 0.0


def test_decisions_of_the_run_are_those_of_its_truth() -> None:
    """Some of bf16's are not float64's own."""
    truth = Truth(load(f"{MODELS}:kinks"), CPU)
    recorded = truth.record(torch.bfloat16)
    replayed = truth.of(recorded, BF16).apart
    assert any(apart > 0.0 for apart, _ in replayed.values())
    assert truth.of(replace(recorded, decisions={}), BF16).apart == {}
    assert {name.split(", ")[1] for name in replayed} >= {
        *("relu_", "threshold_backward", "max_pool2d_with_indices", "amax", "clamp", "abs", "eq"),
    }


def test_a_maximum_among_what_is_scattered_is_one_of_it() -> None:
    """It does not err: on the way back it is found among the others by being equal."""
    truth = Truth(load(f"{MODELS}:largest"), CPU, {0: 1.0}, decides=True)
    assert 0.0 < truth.everywhere.sizes["gradient of layer.linear.weight"] < 10.0  # and no NaN


def test_a_loss_may_differentiate_the_model() -> None:
    found, limits = derivatives(load(f"{MODELS}:penalized"), CPU)
    assert is_inside(found, limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_formula_of_fake_quantisation_is_that_of_torch(dtype: torch.dtype) -> None:
    """Half past a step and beyond the ends too; enabled and not."""
    x = (torch.arange(-200, 200) / 32).to(dtype).view(-1, 4)
    scales, zeros = torch.tensor([0.5, 0.25, 0.125, 0.3]), torch.tensor([0, 1, -3, 7])
    one, zero = scales[:1], zeros[:1].int()
    aten = torch.ops.aten
    for func, *args in (
        (aten.fake_quantize_per_tensor_affine_cachemask.default, 0.25, 3, -8, 7),
        (aten.fake_quantize_per_channel_affine_cachemask.default, scales, zeros.int(), 1, -8, 7),
        *(
            (aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default, *given)
            for enabled in (0, 1)
            for given in [(one, zero, torch.tensor([enabled]), -8, 7)]
        ),
    ):
        formula = formula_of(func, (x, *args))
        assert formula is not None
        for got, want in zip(formula(x, *args), func(x, *args), strict=True):
            assert torch.equal(got, want), func


# --- wrong ones ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    made = copy_repository(tmp_path_factory.mktemp("deciding"), "model")
    for name in ("deciding_models.py", "own_models.py"):
        shutil.copy(ROOT / "meta_tests" / name, made.root / name)
    return made


@pytest.mark.parametrize(
    ("factory", "checks", "text"),
    [
        ("rounded_router", "step_is and fp32", "order of the step: decision of layer, topk"),
        ("rounded_mask", "step_is and fp32", "order of the step: decision of the model, gt"),
        ("shifted_mask", "derivatives", "the backward pass does not match the forward pass"),
    ],
)
def test_wrong_decision_is_red_by_name(
    repository: Repository, factory: str, checks: str, text: str
) -> None:
    ended = repository.run(CHECKS, "--model", f"deciding_models:{factory}", "-k", checks)
    assert ended.code == 1, ended.text
    assert text in ended.text, ended.text


def test_other_experts_than_rounding_explains_are_outside_the_bound() -> None:
    """One token of 18 goes to the two worst experts, in bf16."""
    user = load(f"{MODELS}:experts")
    truth = Truth(user, CPU)
    recorded = truth.record(torch.bfloat16)
    routed = next(key for key in recorded.decisions if "aten::topk" in key)
    others = torch.ones(18, 4).scatter(1, recorded.decisions[routed], 0.0)
    recorded.decisions[routed][0] = others.nonzero()[:, 1].view(18, 2)[0]
    apart, limit = truth.of(recorded, BF16).apart["decision of layer, topk"]
    assert apart > limit


def test_a_mask_that_its_kernel_gets_wrong_is_not_replayed() -> None:
    """The kernel of ReLU's backward passes gradients below 0.2 by."""
    user = load(f"{MODELS}:kinks")
    truth = Truth(user, CPU)
    limits = truth.limits(BF16)
    library = torch.library.Library("aten", "IMPL")

    def wrong(gradient: Tensor, result: Tensor, threshold: float) -> Tensor:
        return gradient * (result > 0.2)

    with pytest.warns(UserWarning, match="previous kernel"):
        library.impl("threshold_backward", wrong, "CPU")
    try:
        got, recorded = recorded_step(user, CPU, torch.bfloat16)
    finally:
        library._destroy()
    off = errors(got.quantities(), truth.of(recorded).quantities())
    assert off["gradient of conv.weight"] > limits["gradient of conv.weight"]


# --- decisions that nobody sees -----------------------------------------------------------------


def test_decisions_within_reach_of_rounding_may_turn_where_nobody_sees_them() -> None:
    user = load(f"{MODELS}:tie")
    truth = Truth(user, CPU)
    clean = truth.step.gradients["linear.bias"]
    assert clean[0] > 1.0 / 2  # the ReLU at 1e-9 is on
    turned = replace(truth.recorded, decisions={k: v.clone() for k, v in _decisions(truth)})
    for decided in turned.decisions.values():
        decided[..., 0] = True  # <= 0
    off = errors(truth.of(turned).gradients, truth.step.gradients)["linear.bias"]
    seen, unseen = (truth.limits(FP32, seen)["gradient of linear.bias"] for seen in (True, False))
    assert seen < off < unseen


def _decisions(truth: Truth) -> list[tuple[tuple[object, ...], Tensor]]:
    return list(truth.recorded.decisions.items())


def test_a_step_without_ties_has_one_limit() -> None:
    truth = Truth(load(f"{MODELS}:experts"), CPU)
    seen, unseen = truth.limits(FP32), truth.limits(FP32, False)
    assert {n: unseen[n] for n in seen if n.startswith("gradient")} == {
        n: limit for n, limit in seen.items() if n.startswith("gradient")
    }


# --- what has no bound --------------------------------------------------------------------------


def test_a_bound_that_is_not_a_number_is_an_error_of_the_suite() -> None:
    truth = Truth(load(f"{MODELS}:tie"), CPU)
    truth.__dict__[EVERYWHERE] = Response({"loss": float("nan")}, Operands())
    with pytest.raises(UserModelError, match="the bound of the loss is nan: an error of the suite"):
        truth.limits(FP32)


def test_without_a_float64_form_a_model_is_unverified(repository: Repository) -> None:
    ended = repository.run(CHECKS, "--model", "own_models:opaque", "-k", "step_is and fp32")
    assert "precision_meta.single.default cannot run in float64" in ended.text, ended.text
    assert "UNVERIFIED" in ended.text
    assert "REGRESSION" not in ended.text


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this release has no such product")
@pytest.mark.parametrize("ends", [[2, 5, 16], [2, 2, 7]], ids=["all", "with-rest"])
def test_product_of_groups_is_that_of_torch(ends: list[int]) -> None:
    a, wide, other = torch.randn(16, 8), torch.randn(8, 16), torch.randn(16, 4)
    weights, turned = torch.randn(3, 8, 4), torch.randn(3, 4, 8)
    offs = torch.tensor(ends, dtype=torch.int32)
    rows = slice(None, ends[-1])  # torch leaves the others as they were in memory
    for x, y, kept in ((a, weights, rows), (turned, wide, (..., rows)), (wide, other, ...)):
        got = torch._grouped_mm(x, y, offs=offs)
        want = grouped_mm(x.double(), y.double(), offs)
        assert torch.allclose(got[kept].double(), want[kept], atol=2.0**-18)


@pytest.mark.parametrize(
    ("name", "options", "x", "decided", "far"),
    [
        ("floor", {}, 1.9, 2.0, 0.1),
        ("ceil", {}, 1.2, 1.0, 0.2),
        ("round", {}, 1.6, 1.0, 0.1),
        ("trunc", {}, -1.1, 0.0, 0.1),
        ("sign", {}, 0.3, -1.0, 0.3),
        ("_to_copy", {"dtype": torch.int64}, 2.75, 3, 0.25),
        ("_to_copy", {"dtype": torch.int64}, -0.5, -1, 0.5),
        ("_to_copy", {"dtype": torch.bool}, 0.5, False, 0.5),
    ],
)
def test_whole_number_lies_as_far_as_its_operand_has_to_move(
    name: str, options: dict[str, torch.dtype], x: float, decided: float, far: float
) -> None:
    """0 for what float64 decides itself."""
    func = getattr(torch.ops.aten, name).default
    operand = torch.tensor([x, x], dtype=torch.float64)
    kind = kind_of(func, (operand,), options)
    assert kind is not None
    own = kind.decided(named(func, (operand,), options), func(operand, **options))
    decision = torch.stack([own[0], torch.tensor(decided, dtype=own.dtype)])
    apart = kind.apart(func, named(func, (operand,), options), own, decision)
    assert torch.allclose(apart, torch.tensor([0.0, far], dtype=torch.float64))


@pytest.mark.parametrize(("right", "side"), [(False, None), (True, None), (False, "right")])
def test_place_among_edges_lies_as_far_as_the_farthest_that_was_passed(
    right: bool, side: str | None
) -> None:
    edges = torch.tensor([[0.0, 1.0, 2.0, 4.0]], dtype=torch.float64)
    x = torch.tensor([[0.75, 0.75, 0.75, 1.0, 5.0]], dtype=torch.float64)
    func, options = torch.ops.aten.searchsorted.Tensor, {"right": right, "side": side}
    kind = kind_of(func, (edges, x), options)
    assert kind is not None
    arguments = named(func, (edges, x), options)
    own = kind.decide(func, arguments, kind.operand(arguments))
    assert torch.equal(own, torch.searchsorted(edges, x, right=right, side=side))
    decision = torch.tensor([[1, 0, 3, int(own[0, 3]), 3]])
    apart = kind.apart(func, arguments, own, decision)
    assert apart.tolist() == [[0.0, 0.75, 1.25, 0.0, 1.0]]


def test_runs_that_do_not_pair_up_differ() -> None:
    user = load(f"{MODELS}:experts")
    got = run_step(user, fresh(user, CPU)).quantities()
    fewer = {**got, "loss": got["loss"].repeat(2)}
    assert errors(fewer, got)["loss"] == float("inf")


def test_limit_of_turned_decisions_holds_for_whichever_they_are_and_not_by_far() -> None:
    """The m largest of many errors are as bad a choice as any."""
    generator = torch.Generator().manual_seed(1)
    errors_ = torch.randn(200, 1000, generator=generator).abs().sort(descending=True).values
    for count in (1, 10, 500):
        worst = float(errors_[:, :count].norm(dim=1).max())
        limit = turned_bound(torch.ones(count), 1000, false_alarm=1 / 200)
        assert worst < limit < 3 * worst
    one = turned_bound(torch.ones(1), 1000)
    assert turned_bound(torch.ones(1), 1000, choices=64) > one
    assert turned_bound(torch.ones(1), 1000, repeats=4) > one
    assert turned_bound(torch.ones(0), 1000) == 0.0
