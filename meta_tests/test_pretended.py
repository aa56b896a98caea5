"""The pretended GPU refuses what CUDA refuses, computes as CUDA does, and is not taken for one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.numerics.formats import BF16, FP16, Format
from fixtures.pretended import autocast, chips, install, kernels, optimizers, welford
from fixtures.pretended.chips import PretendError
from meta_tests.running import ROOT, Ended, Repository, copy_repository

aten = torch.ops.aten
BOTH = {"CUDA_VISIBLE_DEVICES": "0,1"}
half_formats = pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)


# --- whole runs ---------------------------------------------------------------------------------

HEALTHY = {
    "number": "x * torch.tensor(2.0)",
    "copy": "x + torch.arange(4.0, device=device.torch)",
    "index": "2 * x[torch.arange(4)]",
    "in_place": "x.add_(x)",
    "filled": "torch.stack([x, x], out=torch.empty(0, device=device.torch)).sum(0)",
    "data": "setattr(x, 'data', 2 * x) or x",
    "format": "torch.nn.ParameterList([x]).to(torch.bfloat16)[0].detach().float() * 2",
    "file": "2 * torch.load(saved(x))",
    "list": "torch.tensor((2 * x).tolist())",
    "into_cpu": "torch.empty(4).copy_(2 * x)",
    "chosen": "torch.where(x >= 0, 2 * x, torch.tensor(1.0))",
    "masked": "(2 * x).masked_fill(x < 0, torch.tensor(1.0))",
    "several": "torch._foreach_mul([x], torch.tensor(2.0))[0]",
    "by_numpy": "torch.from_numpy(2 * x.cpu().numpy()).to(device.torch)",
}
MISTAKES = {
    "not_moved": ("x + torch.arange(4.0)", "Expected all tensors to be on the same device"),
    "number_not_moved": (
        "torch.stack([*(2 * x)[:3], torch.tensor(6.0)])",
        "pretended:0 and cpu! (aten.stack.default; on the cpu: ())",
    ),
    "gradient_not_moved": (
        "torch.autograd.grad(2 * x.requires_grad_(), x, torch.arange(4.0))[0]",
        "invalid gradient: expected device pretended:0 but got cpu",
    ),
    "nothing_moved": (
        "2 * torch.arange(4.0)",
        "4 elements were measured, and 0 came from the pretended GPU",
    ),
    "numpy": ("torch.from_numpy(2 * x.numpy())", "can't convert pretended:0 device type tensor"),
    "cpu_generator": (
        "torch.rand(4, device=device.torch, generator=torch.Generator())",
        "Expected a 'pretended' device type for generator but found 'cpu'",
    ),
    "its_generator": (
        "torch.rand(4, generator=torch.Generator(device.torch)).to(device.torch)",
        "Expected a 'cpu' device type for generator but found 'pretended'",
    ),
}


def checks(lines: Mapping[str, str]) -> str:
    """A check for each line, which has to give twice the numbers 0 to 3."""
    saved = "\ndef saved(x):\n    torch.save(x, 'x.pt')\n    return 'x.pt'\n"
    return (
        saved
        + "\nclass TestOp:\n"
        + "\n".join(
            f"    def test_{name}(self, check, device):\n"
            f"        x = torch.arange(4.0).to(device.torch)\n"
            f"        check.exact(({line}).cpu(), torch.tensor([0.0, 2.0, 4.0, 6.0]))\n"
            for name, line in lines.items()
        )
    )


def rehearse(tmp_path: Path, source: str, *arguments: object) -> tuple[Repository, Ended]:
    repository = copy_repository(tmp_path)
    repository.write_checks(source)
    own = ("-m", "h100", "--pretend", "h100", "--record", "record")
    return repository, repository.run(*own, *arguments, CUDA_VISIBLE_DEVICES="0,1")


def test_what_cuda_takes_passes_and_every_line_says_that_the_gpu_is_pretended(
    tmp_path: Path,
) -> None:
    repository, ended = rehearse(tmp_path, checks(HEALTHY))
    assert ended.code == 0, ended.text
    assert f"{len(HEALTHY)} passed" in ended.text
    assert re.search(r"precision: h100: torch .* PRETENDED H100", ended.text)
    assert "precision: PRETENDED GPU: this run says nothing of a real one" in ended.text
    assert "verdict: PRETENDED GPU, not a real one: every verified case holds" in ended.text
    record = repository.root / "record"
    assert "PRETENDED H100" in (record / "cases.json").read_text()
    refused = repository.run("-m", "h100", "--pretend", "h100", "--baseline", record)
    assert refused.code == 4
    assert "PRETENDED GPU: it cannot be a baseline" in refused.text
    assert repository.run("render", record, module="reports").code == 0
    assert "PRETENDED GPU: All" in (record / "report.html").read_text()


def test_mistakes_that_cuda_refuses_are_red(tmp_path: Path) -> None:
    _, ended = rehearse(tmp_path, checks({name: line for name, (line, _) in MISTAKES.items()}))
    assert ended.code == 3, ended.text  # an error of the run, not of numbers
    assert f"{len(MISTAKES)} failed" in ended.text
    for _, said in MISTAKES.values():
        assert said in ended.text


def test_nothing_is_made_golden_on_it(tmp_path: Path) -> None:
    _, ended = rehearse(tmp_path, checks(HEALTHY), "--golden=propose")
    assert ended.code == 4
    assert "leave out --pretend" in ended.text


@pytest.mark.parametrize("mark", ["ranks", "compiled"])
def test_what_it_has_no_cases_of_is_said(tmp_path: Path, mark: str) -> None:
    _, ended = rehearse(tmp_path, checks(HEALTHY), "-m", f"h100 and {mark}")
    assert ended.code == 5, ended.text
    assert "a pretended GPU has none of ranks, compiled, gpu_only (docs/pretended.md)" in ended.text


def test_two_are_two_in_the_list_and_each_worker_is_pinned_to_one(tmp_path: Path) -> None:
    check = """
        @pytest.mark.parametrize("turn", range(4))
        class TestOp:
            def test_pinned(self, check, device, turn):
                open("seen", "a").write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
                torch.ones(1, device=device.torch)
                check.exact(device.count, 2)
                check.exact(device.torch.index, 0, name="index")
    """
    repository = copy_repository(tmp_path)
    repository.write_checks(check)
    arguments = ("-m", "h100", "--pretend", "h100,h100", "-n", "2")
    ended = repository.run(*arguments, CUDA_VISIBLE_DEVICES="1,0")
    assert ended.code == 0, ended.text
    assert sorted((repository.root / "seen").read_text().split()) == ["0", "0", "1", "1"]


def test_a_model_runs_on_two_by_two_workers(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "model")
    shutil.copy(ROOT / "meta_tests" / "own_models.py", repository.root / "own_models.py")
    ended = repository.run(
        *("-m", "h100 and model and not compiled and not ranks", "-k", "fp32", "-n", "2"),
        *("--pretend", "h100,h100", "--model", "own_models:sound"),
        **BOTH,
    )
    assert ended.code == 0, ended.text
    assert re.search(r"model +whole +PASS", ended.text)


def test_a_brief_run_has_the_sentinels_and_one_case_of_every_operation_and_format(
    tmp_path: Path,
) -> None:
    check = """
        of = pytest.mark.parametrize
        @of("size", [1, 2])
        @of("fmt", ["bf16", "fp32"])
        @of("operation", [torch.add, torch.mul])
        class TestOp:
            def test_any(self, check, device, operation, fmt, size):
                check.exact(operation(torch.ones(1, device=device.torch), 1).numel(), 1)

            @pytest.mark.sentinel
            def test_fast(self, check, device, operation, fmt, size):
                check.exact(operation(torch.ones(1, device=device.torch), 1).numel(), 1)
    """
    _, ended = rehearse(tmp_path, check, "--brief")
    assert ended.code == 0, ended.text
    assert "12 passed" in ended.text


# --- what it is called --------------------------------------------------------------------------


def test_chips_have_the_capability_of_their_family() -> None:
    one, other = chips.gpus_of("h100, A100")
    assert (one.name, one.capability, one.pretended) == ("PRETENDED H100", (9, 0), True)
    assert (other.name, other.capability) == ("PRETENDED A100", (8, 0))


def test_an_unknown_chip_is_refused_by_name() -> None:
    with pytest.raises(PretendError, match="no chip 'h1000'; chips are: v100, t4"):
        chips.gpus_of("h1000")


def test_the_variable_is_read_once_as_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0,7,0")
    try:
        chips.ask_for(chips.gpus_of("h100,a100"))
        seen = chips.visible()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert [gpu.name for gpu in seen] == ["PRETENDED A100", "PRETENDED H100"]
        assert chips.visible() == seen
    finally:
        chips.ask_for(())


def test_a_torch_without_devices_in_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import backend_registration

    monkeypatch.setattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    with pytest.raises(PretendError, match=r"has no devices in Python; they came with torch 2\.9"):
        install.install(chips.gpus_of("h100"))
    assert not chips.asked()


# --- CUDA's algorithms --------------------------------------------------------------------------


@half_formats
def test_embedding_gradients_round_once_for_32_indices(fmt: Format) -> None:
    """One large term, then small ones that are lost one by one and not in a sum of 31."""
    small = fmt.unit_roundoff / 2
    rows = torch.full((64, 1), small)
    rows[0] = 1
    got = kernels.run(
        aten.embedding_dense_backward.default,
        (rows.to(fmt.dtype), torch.zeros(64, dtype=torch.long), 1, -1, False),
        {},
    )
    first = torch.tensor(1 + 31 * small).to(fmt.dtype)
    assert got.item() == (first + torch.tensor(32 * small).to(fmt.dtype)).item()


@half_formats
@pytest.mark.parametrize(("width", "each_rounds"), [(32, False), (33, True)])
def test_gradients_of_indices_round_each_time_in_wide_rows(
    fmt: Format, width: int, each_rounds: bool
) -> None:
    small = fmt.unit_roundoff / 2
    values = torch.full((64, width), small, dtype=fmt.dtype)
    values[0] = 1
    got = kernels.run(
        aten._index_put_impl_.default,
        (torch.zeros(3, width, dtype=fmt.dtype), [torch.full((64,), 2)], values, True, True),
        {},
    )
    whole = torch.tensor(1 + 63 * small).to(fmt.dtype)
    assert set(got[2].tolist()) == {1.0 if each_rounds else whole.item()}
    assert not got[:2].any()


def test_a_number_is_inverted_before_it_divides() -> None:
    x = torch.arange(1.0, 200.0)
    got = kernels.divided(x, 49.0)
    assert torch.equal(got, x * (1 / torch.tensor(49.0)))
    assert not torch.equal(got, x / 49.0)


@pytest.mark.parametrize("width", [7, 16, 1030, 4096])
def test_welford_gives_mean_and_variance(width: int) -> None:
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(1)) + 10
    mean, rstd = welford.moments(rows, 1e-5)
    exact = rows.double()
    assert (mean - exact.mean(1, True)).abs().max() < 1e-5
    variance = exact.var(1, correction=0, keepdim=True)
    assert (rstd * (variance + 1e-5).sqrt() - 1).abs().max() < 1e-5


def test_layer_norm_refuses_weights_in_another_format() -> None:
    """As ``data_ptr<T>()`` does in layer_norm_kernel.cu."""
    x, weight = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4)
    with pytest.raises(RuntimeError, match="expected scalar type"):
        kernels.run(aten.native_layer_norm.default, (x, [4], weight, None, 1e-5), {})


def test_a_fused_step_in_16_bit_rounds_once_and_refuses_other_strides() -> None:
    parameter = torch.full((2, 2), 1.0, dtype=torch.bfloat16)
    gradient = torch.full((2, 2), 2.0**-8, dtype=torch.bfloat16)
    options = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    step = optimizers.FUSED[aten._fused_sgd_.default]
    step([parameter], [gradient], [], lr=1.0, weight_decay=2.0**-8, is_first_step=True, **options)
    assert parameter[0, 0].item() == 1 - 2 * 2.0**-8
    with pytest.raises(RuntimeError, match="params, grads, momentum_buffer_list must have same"):
        step(
            *([parameter], [gradient.t()[:, :1].expand(2, 2)], []),
            **{"lr": 1.0, "weight_decay": 0.0, "is_first_step": True, **options},
        )


@pytest.mark.parametrize(("cell", "fused"), [(nn.GRUCell, "gru"), (nn.LSTMCell, "lstm")])
def test_recurrent_cells_and_their_gradients_are_those_of_torch(cell: Any, fused: str) -> None:
    torch.manual_seed(1)
    own = cell(3, 5, dtype=torch.float64)
    x, state, other = torch.randn(2, 3).double(), torch.randn(2, 5).double(), torch.randn(2, 5)
    state.requires_grad_()
    hidden = (state, other.double()) if fused == "lstm" else state
    want = own(x, hidden)
    first = want[0] if fused == "lstm" else want
    slope = torch.randn(2, 5).double()
    grads = torch.autograd.grad(first, [state, own.bias_ih, own.bias_hh], slope)
    gates = (x @ own.weight_ih.T, state @ own.weight_hh.T)
    biases = (own.bias_ih, own.bias_hh)
    run = partial(kernels.run, kwargs={})
    with torch.no_grad():
        op = getattr(aten, f"_thnn_fused_{fused}_cell").default
        if fused == "lstm":
            got, cy, saved = run(op, (*gates, hidden[1], *biases))
            back = aten._thnn_fused_lstm_cell_backward_impl.default
            dgates, _, dbias = run(back, (slope, None, hidden[1], cy, saved, True))
            found = (dgates @ own.weight_hh, dbias, dbias)
        else:
            got, saved = run(op, (*gates, state, *biases))
            back = aten._thnn_fused_gru_cell_backward.default
            _, of_hidden, dstate, *dbiases = run(back, (slope, saved, True))
            found = (of_hidden @ own.weight_hh + dstate, *dbiases)
    for mine, torchs in zip((got, *found), (first, *grads), strict=True):
        assert torch.allclose(mine, torchs)


def test_autocast_knows_what_cuda_registers() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    known = {f"aten::{name}" for names in autocast.policies().values() for name in names}
    assert {name for name in registered if "cudnn" not in name} == known
