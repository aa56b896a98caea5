"""A user's own kernel: what may be replaced, what is refused, and that a wrong one turns red."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fixtures import record
from fixtures.implementations import (
    CALLS,
    REPLACEABLE,
    ImplementationError,
    described,
    load,
    parse,
    refused,
    replaced,
)
from fixtures.nodes import NODE_IDS
from meta_tests.running import ROOT, copy_repository, read_json
from reports import findings

EXAMPLES = str(ROOT / "docs" / "examples")


def run(tmp_path: Path, kernel: str, *arguments: str) -> Any:
    repository = copy_repository(tmp_path, "gelu")
    chosen = ("--implementation", f"gelu={kernel}", "--record=record")
    return repository, repository.run(*chosen, *arguments, PYTHONPATH=EXAMPLES)


def test_a_wrong_kernel_is_refused_with_its_worst_input(tmp_path: Path) -> None:
    _, ended = run(tmp_path, "gelu_kernel:gelu_two_casts", "-k", "test_gradient and eager and erf")
    assert ended.code == 1
    assert "precision: gelu is gelu_kernel:gelu_two_casts in the place of torch's" in ended.text
    assert "outside its bound by a factor of 80.18" in ended.text
    assert "x[48832] = -0.75 (-0x1.8000000000000p-1, bits 0xbf40): got 0.0009765625" in ended.text
    assert "--implementation=gelu=gelu_kernel:gelu_two_casts" in ended.text  # of the rerun


def test_a_sound_kernel_passes_where_it_does_what_is_asked(tmp_path: Path) -> None:
    """In ranks too; the rest is UNVERIFIED, and no known fault of torch is needed."""
    chosen = ("-m", "not compiled", "-k", "test_forward or limit or fully_sharded")
    repository, ended = run(tmp_path, "gelu_kernel:gelu", *chosen)
    assert ended.code == 0
    assert "known" not in ended.text.partition("REPAIRED")[0]
    for reason in ("the tanh form", "float64"):
        assert f"not implemented: {reason}" in ended.text
    fields = read_json(repository.root / "record" / "cases.json")["environment"]["cpu"]
    assert fields["implementation_gelu"].startswith("gelu_kernel:gelu ")


def test_a_wrong_kernel_turns_red_in_ranks(tmp_path: Path) -> None:
    (tmp_path / "wrong_kernel.py").write_text(
        "def gelu(x, approximate='none'):\n    return x * (1.702 * x).sigmoid()\n"
    )
    repository = copy_repository(tmp_path, "gelu")
    ended = repository.run(
        *("--implementation", "gelu=wrong_kernel:gelu", "-k", "fully_sharded and w2 and bf16"),
        PYTHONPATH=str(tmp_path),
    )
    assert (ended.code, "gelu flow fully-sharded-2" in ended.text) == (1, True)


BROKEN = """
import torch
def raises(x, approximate="none"):
    raise ValueError("no tile for this width")
def short(x, approximate="none"):
    return torch.nn.functional.gelu(x, approximate=approximate)[..., :-1]
"""


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("raises", "raised by broken:raises, which stands in the place of torch's gelu: ValueErr"),
        ("short", "broken:short returned (1,), torch's gelu has (2,) there"),
    ],
)
def test_a_broken_kernel_is_named_and_not_the_framework(
    tmp_path: Path, kernel: str, text: str
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    repository = copy_repository(tmp_path, "gelu")
    ended = repository.run(
        *("--implementation", f"gelu=broken:{kernel}", "--record=record"),
        *("-k", "limit_at_infinity and fp32 and erf"),
        PYTHONPATH=str(tmp_path),
    )
    assert (ended.code, text in ended.text) == (1, True), ended.text
    assert "no selected check called" not in ended.text
    of = findings.find(record.read(repository.root / "record"), title="a run")
    assert f"with broken:{kernel} as its gelu" in of.headline
    assert [a.why for a in of.actions if "your own kernel of gelu" in a.why]
    assert not [a for a in of.actions if "mkldnn" in a.do or "framework" in a.why]


def test_a_broken_kernel_is_named_by_the_ranks_too(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    ended = copy_repository(tmp_path, "gelu").run(
        *("--implementation", "gelu=broken:raises", "-k", "fully_sharded and w2 and fp32"),
        PYTHONPATH=str(tmp_path),
    )
    assert "raised ValueError: no tile for this width (raised by broken:raises" in ended.text


def test_what_a_kernel_s_module_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needing.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImplementationError, match="needs nowhere_at_all, which is not installed"):
        load("needing:gelu")
    with pytest.raises(ImplementationError, match="no module nowhere; run pytest from the folder"):
        load("nowhere.deep:gelu")


def test_a_kernel_that_no_check_calls_is_not_verified(tmp_path: Path) -> None:
    _, ended = run(tmp_path, "gelu_kernel:gelu", "-k", "float64_is_nowhere or nan_in and tanh")
    assert ended.code == 22
    assert "no selected check called the one of gelu" in ended.text


def test_a_check_with_explored_inputs_calls_it_too(tmp_path: Path) -> None:
    _, ended = run(tmp_path, "gelu_kernel:gelu", "-m", "bound and fp32", "-k", "TestBound and erf")
    assert "no selected check called" not in ended.text
    assert ended.code == 0, ended.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gelu"], "'gelu' is not of the form node=package.module:name"),
        (["gelu=module.function"], "is not of the form"),
        (["all_reduce=a:b"], "node 'all_reduce' takes no implementation; those that do: attention"),
        (["gelu=a:b", "gelu=a:c"], "gelu is given twice: a:b and a:c"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ImplementationError, match=re.escape(message)):
        parse(arguments)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("no_such_module:gelu", "there is no module no_such_module; run pytest from the folder"),
        ("math:gelu", "math:gelu: module math has no gelu; it has: acos, "),
        ("kernels/gelu.py:gelu", "kernels/gelu.py:gelu is not of the form package.module:name"),
        ("math:pi", "math:pi is a float, which cannot be called"),
        ("broken_kernel:gelu", "importing broken_kernel raised RuntimeError: no compiler"),
    ],
)
def test_what_cannot_be_had_is_refused(tmp_path: Path, kernel: str, message: str) -> None:
    repository = copy_repository(tmp_path, "gelu")
    (repository.root / "broken_kernel.py").write_text("raise RuntimeError('no compiler')\n")
    ended = repository.run("--implementation", f"gelu={kernel}")
    assert (ended.code, message in ended.text) == (4, True)


def test_only_a_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch and the suite raise NotImplementedError too: that is a failure, not a refusal."""
    monkeypatch.syspath_prepend(EXAMPLES)
    kernel = importlib.import_module("gelu_kernel")
    chosen = {"gelu": "gelu_kernel:gelu"}
    with pytest.raises(NotImplementedError) as by_kernel:
        kernel.gelu(torch.zeros(1), approximate="tanh")
    with pytest.raises(NotImplementedError) as by_torch:
        torch.zeros(1).to_sparse().bitwise_left_shift(1)
    assert refused(by_kernel.value, chosen)
    assert not refused(by_kernel.value, {})
    assert not refused(by_torch.value, chosen)


@pytest.mark.parametrize("node", REPLACEABLE)
def test_what_is_replaced_exists_and_comes_back(node: str) -> None:
    assert node in NODE_IDS
    module, name = REPLACEABLE[node]
    original = getattr(importlib.import_module(module), name)
    with replaced(node, lambda *_: 17):
        assert getattr(importlib.import_module(module), name)() == 17
    assert getattr(importlib.import_module(module), name) is original


def test_a_kernel_may_call_what_it_replaces_and_is_counted() -> None:
    before = CALLS["gelu"]
    with replaced("gelu", lambda x: F.gelu(x) + 1):
        assert F.gelu(torch.zeros(())) == 1
    assert CALLS["gelu"] == before + 1


def test_a_class_stands_for_a_class_and_is_counted() -> None:
    class Own(torch.optim.AdamW):
        pass

    before = CALLS["weight_update"]
    with replaced("weight_update", Own):
        assert isinstance(torch.optim.AdamW([torch.zeros(1)]), Own)
    assert CALLS["weight_update"] == before + 1


def test_a_class_may_name_what_it_replaces() -> None:
    class Based(torch.optim.AdamW):
        def __init__(self, parameters: list[torch.Tensor]) -> None:
            torch.optim.AdamW.__init__(self, parameters)

    class Holding:
        def __init__(self, parameters: list[torch.Tensor]) -> None:
            self.inner = torch.optim.AdamW(parameters)

    for kernel in (Based, Holding):
        with replaced("weight_update", kernel):
            assert isinstance(torch.optim.AdamW([torch.zeros(1)]), kernel)


def test_the_hash_is_of_the_file_that_defines_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a package's __init__ passes it on."""
    package = tmp_path / "kernel_package"
    package.mkdir()
    (package / "__init__.py").write_text("from kernel_package.inner import kernel\n")
    inner = package / "inner.py"
    inner.write_text("def kernel(x): return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    chosen = {"gelu": "kernel_package:kernel"}
    before = described(chosen)
    inner.write_text("def kernel(x): return 2 * x\n")
    assert described(chosen) != before


def test_the_environment_names_the_kernel_and_its_file() -> None:
    field = described({"gelu": "os:getcwd"})["implementation_gelu"]
    assert field.startswith("os:getcwd ")
    assert len(field.split()[1]) == 12


ONE_ROUNDING = """
import torch
import torch.nn.functional as F
def cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
                  reduction="mean", label_smoothing=0.0):
    log = torch.log_softmax(input.float(), -1)
    losses = F.nll_loss(log, target, ignore_index=ignore_index, reduction=reduction)
    return losses.to(input.dtype)
"""


def test_a_kernel_that_rounds_once_need_not_have_torch_s_bits(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(ONE_ROUNDING)
    ended = copy_repository(tmp_path, "cross_entropy").run(
        *("--implementation", "cross_entropy=once:cross_entropy", "-k", "same_bits and bf16"),
        PYTHONPATH=str(tmp_path),
    )
    assert (ended.code, "need not round where they do" in ended.text) == (22, True), ended.text
