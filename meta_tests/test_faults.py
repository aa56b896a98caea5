"""Deliberate faults: each does what it says, stays where it belongs, and leaves no trace."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import adam as optim_adam
from torch.utils import checkpoint
from torch.utils.data._utils import worker
from torch.utils.data.distributed import DistributedSampler

import fixtures.faults
from fixtures import environment
from fixtures.audit import checkpoints as audit_checkpoints
from fixtures.audit import fingerprint
from fixtures.audit.protocol import Calibrated
from fixtures.distributed.pool import RankPool
from fixtures.distributed.ranks import Rank
from fixtures.faults import FAULTS, inject
from fixtures.faults.detection import Detection, Seen, as_json, markexpr, problems, table
from fixtures.faults.fault import Fault
from fixtures.hardware_models import matrix_units
from fixtures.nodes import AREA_IDS, NODE_IDS
from fixtures.training import framework, loading, seeding

CHECKS = Path(__file__).parents[1] / "precision_tests"

# Where faults may patch. A fault that patches elsewhere names its place here.
PATCHED: tuple[Any, ...] = (
    torch,
    F,
    dist,
    nn.utils,
    nn.parallel.DistributedDataParallel,
    torch.amp.GradScaler,
    optim_adam,
    checkpoint,
    framework,
)
PATCHED += (DistributedSampler, loading, worker, nn.init, seeding, matrix_units, state_dict_loader)
PATCHED += (audit_checkpoints, fingerprint, Calibrated, environment)

all_faults = pytest.mark.parametrize("name", FAULTS)


# --- the catalogue ------------------------------------------------------------------------------


def test_names_are_unique_and_every_module_is_in_the_catalogue() -> None:
    modules = pkgutil.iter_modules(fixtures.faults.__path__, "fixtures.faults.")
    names = [
        fault.name
        for module in modules
        if not module.name.endswith("__main__")
        for fault in getattr(importlib.import_module(module.name), "FAULTS", ())
    ]
    assert sorted(names) == sorted(FAULTS)
    assert all(FAULTS[name].name == name for name in FAULTS)


@all_faults
def test_belongs_to_a_node_that_has_checks(name: str) -> None:
    assert FAULTS[name].node in NODE_IDS + AREA_IDS
    assert list(CHECKS.glob(f"test_{FAULTS[name].node}*.py"))
    assert FAULTS[name].what


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with (
        pytest.raises(ValueError, match=r"unknown fault 'gelu'; known: .*gelu_tanh_for_erf"),
        inject("gelu"),
    ):
        pass


# --- no trace -----------------------------------------------------------------------------------


def state() -> list[dict[str, int]]:
    """What each name in the patched places is bound to."""
    return [{key: id(value) for key, value in vars(place).items()} for place in PATCHED]


@all_faults
def test_patches_torch_and_restores_it_exactly(name: str) -> None:
    before = state()
    with inject(name):
        assert state() != before
    assert state() == before


@all_faults
def test_restores_torch_after_an_exception(name: str) -> None:
    before = state()
    with pytest.raises(ZeroDivisionError), inject(name):
        raise ZeroDivisionError
    assert state() == before


# --- what each does, in one process ---------------------------------------------------------------


def gelu(fault: str, x: float, approximate: str = "none") -> tuple[float, float]:
    """The value and the gradient in fp32."""
    leaf = torch.tensor([x], requires_grad=True)
    with inject(fault) if fault else nullcontext():
        value = F.gelu(leaf, approximate=approximate)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.item(), gradient.item()


def test_gelu_tanh_for_erf_is_the_tanh_form() -> None:
    assert gelu("gelu_tanh_for_erf", 1.25) == gelu("", 1.25, "tanh") != gelu("", 1.25)


def test_gelu_input_rounded_loses_the_last_bit() -> None:
    assert gelu("gelu_input_rounded", 1 + 2**-23) == gelu("", 1.0) != gelu("", 1 + 2**-23)
    assert gelu("gelu_input_rounded", 1 + 2**-22) == gelu("", 1 + 2**-22)


def test_gelu_decomposed_in_bf16_returns_bf16_values() -> None:
    value, _ = gelu("gelu_decomposed_in_bf16", 1.25)
    assert torch.tensor(value).bfloat16().item() == value != gelu("", 1.25)[0]


def test_gelu_gradient_of_the_other_form_keeps_the_value() -> None:
    value, gradient = gelu("gelu_gradient_of_the_other_form", 1.25)
    assert (value, gradient) == (gelu("", 1.25)[0], gelu("", 1.25, "tanh")[1])


def unscaled(fault: str, gradient: float, *, step: bool = False) -> float:
    """The gradient after ``unscale_`` with the scale 4, or what SGD of rate 1 subtracts."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([gradient])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with inject(fault) if fault else nullcontext():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        if step:
            scaler.step(optimizer)
    return -parameter.item() if step else parameter.grad.item()


@pytest.mark.parametrize(
    ("fault", "result", "stepped"),
    [
        ("", 3.0, 3.0),
        ("scaler_unscale_skipped", 12.0, 12.0),
        ("scaler_unscale_twice", 0.75, 0.75),
        ("scaler_unscale_after_clip", 12.0, 3.0),
    ],
)
def test_scaler_unscales(fault: str, result: float, stepped: float) -> None:
    assert unscaled(fault, 12.0) == result
    assert unscaled(fault, 12.0, step=True) == stepped


def test_scaler_division_in_fp16_rounds() -> None:
    assert unscaled("scaler_division_in_fp16", 4 + 2**-12) == 1.0
    assert unscaled("", 4 + 2**-12) == 1 + 2**-14


def test_scaler_growth_1_9_grows_by_that() -> None:
    with inject("scaler_growth_1_9"):
        assert torch.amp.GradScaler("cpu").get_growth_factor() == 1.9


# --- what each does, over two ranks --------------------------------------------------------------


def seen_by_rank(rank: Rank) -> dict[str, str]:
    def reduced(value: float, op: Any = dist.ReduceOp.SUM, dtype: Any = torch.float32) -> str:
        tensor = torch.tensor([value], dtype=dtype)
        dist.all_reduce(tensor, op=op)
        return str(tensor.item())

    mine = 1.0 + 2.0 * rank.index
    return {
        "sum": reduced(mine),
        "mean": reduced(mine, dist.ReduceOp.AVG),
        "nan": reduced(math.nan if rank.index else 1.0),
        "last bits": reduced(1 + 2**-12),
        "float64": reduced(mine, dist.ReduceOp.AVG, torch.float64),
        "norm": norm_of_shards([3.0, 4.0][rank.index]),
        "steps": str(steps_with([1.0, math.inf][rank.index])),
    }


def sharded(gradient: float) -> nn.Parameter:
    """A parameter of two elements, one on each rank, whose gradient here is the one given."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, [Shard(0)]))
    parameter.grad = DTensor.from_local(torch.tensor([gradient]), mesh, [Shard(0)])
    return parameter


def norm_of_shards(gradient: float) -> str:
    norm = nn.utils.clip_grad_norm_([sharded(gradient)], 100.0)
    return str((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())


def steps_with(gradient: float) -> bool:
    parameter = sharded(gradient)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    return bool(parameter.detach().to_local().any())  # type: ignore[attr-defined]


SOUND = {
    "sum": "4.0",
    "mean": "2.0",
    "nan": "nan",
    "last bits": str(2 + 2**-11),
    "float64": "2.0",
    "norm": "5.0",
    "steps": "False",
}
CHANGED = {  # on rank 0
    "": {},
    "reduce_sum_for_average": {"mean": "4.0"},
    "reduce_local_norm": {"norm": "3.0"},
    "reduce_nan_to_zero": {"nan": "1.0"},
    "reduce_rank_skipped": {
        "sum": "1.0",
        "mean": "0.5",
        "nan": "1.0",
        "last bits": str(1 + 2**-12),
    },
    "reduce_in_bf16": {"last bits": "2.0"},
    "scaler_found_inf_not_shared": {"steps": "True"},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(max_ranks=2) as pool:
        yield pool


@pytest.mark.parametrize("fault", CHANGED)
def test_over_ranks_changes_what_it_says_and_nothing_else(pool: RankPool, fault: str) -> None:
    pool.context = ("fixtures.faults:inject", fault) if fault else None
    assert pool.run(seen_by_rank, 2)[0] == SOUND | CHANGED[fault]


# --- sentinels and the score ---------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(CHECKS.glob("test_*.py")), ids=lambda path: path.stem)
def test_every_node_has_one_sentinel(path: Path) -> None:
    if path.stem.removeprefix("test_") not in NODE_IDS:
        return
    module = importlib.import_module(f"precision_tests.{path.stem}")
    marks = {
        name: [mark.name for mark in getattr(test, "pytestmark", ())]
        for name, test in vars(module.TestOp).items()
    }
    assert sum("sentinel" in names for names in marks.values()) == 1


GREEN = Seen(cases=2, red=0, errors=0, promises=(), first="")
RED = Seen(cases=4, red=2, errors=0, promises=("op",), first="gelu/op/forward/cpu")
CONTROL = Detection("", "", {"gelu": GREEN, "all_reduce": GREEN})


@pytest.mark.parametrize(
    ("gelu_saw", "other_saw", "caught", "right", "said"),
    [
        (RED, GREEN, True, True, ""),
        (GREEN, GREEN, False, False, "is missed by gelu (2 cases, 0 ended by an exception)"),
        (RED, RED, True, False, "turns all_reduce red too (gelu/op/forward/cpu)"),
        (Seen(4, 2, 2, ("op",), "x"), GREEN, False, False, "2 ended by an exception"),
    ],
    ids=["right", "missed", "elsewhere", "exception"],
)
def test_what_counts_as_caught(
    gelu_saw: Seen, other_saw: Seen, caught: bool, right: bool, said: str
) -> None:
    found = Detection("tanh", "gelu", {"gelu": gelu_saw, "all_reduce": other_saw})
    assert (found.caught, found.right) == (caught, right)
    lines = problems(CONTROL, [found])
    assert bool(lines) is not right
    assert said in "".join(lines)


def test_red_without_a_fault_is_a_problem() -> None:
    control = Detection("", "", {"gelu": RED})
    assert "gelu is red without any fault" in problems(control, [])[0]


def test_table_and_json_of_the_score() -> None:
    found = [Detection("gelu_tanh_for_erf", "gelu", {"gelu": RED, "all_reduce": GREEN})]
    assert table(CONTROL, found)[2:] == [
        "(none)             green            green",
        "gelu_tanh_for_erf  RED op (2 of 4)  green",
    ]
    content = as_json(found, FAULTS, full=False)
    assert content["score"] == {
        "faults": 1,
        "caught": 1,
        "caught_at_the_right_node_only": 1,
        "missed": 0,
    }
    assert content["faults"]["gelu_tanh_for_erf"]["seen"]["gelu"]["first"] == RED.first


def test_compiled_checks_run_where_a_fault_needs_them_and_in_the_full_table() -> None:
    eager = Fault("a", "gelu", "", nullcontext)
    compiled = Fault("b", "end_to_end", "", nullcontext, compiled=True)
    fast = "not compiled and (gelu or sentinel)"
    assert markexpr([eager], full=False) == fast
    assert markexpr([compiled, eager], full=False) == (
        "not compiled and (end_to_end or gelu or sentinel) or compiled and (end_to_end)"
    )
    assert markexpr([eager], full=True) == " or ".join(NODE_IDS)
    assert markexpr([compiled], full=True) == " or ".join([*NODE_IDS, "end_to_end"])
