"""A call in a fresh process: its result comes back, and a crash is told as what it was."""

from __future__ import annotations

import os
import signal

from fixtures import fresh_process

HONEST: fresh_process.Alteration = ("", {})


def where(name: str) -> tuple[int, str]:
    print("here")
    return os.getpid(), os.environ[name]


def end(code: int) -> None:
    if code < 0:
        os.kill(os.getpid(), -code)
    raise SystemExit(code)


def is_injected() -> bool:
    import torch

    return torch.nn.functional.gelu.__module__ != torch._C._nn.gelu.__module__


def test_a_result_comes_from_another_process() -> None:
    ended = fresh_process.start(where, "A", environ={"A": "b"}, alteration=HONEST).wait()
    assert (ended.how, ended.output) == ("returned", "here\n")
    pid, value = ended.result
    assert (pid == os.getpid(), value) == (False, "b")


def test_a_crash_is_a_result() -> None:
    both = [fresh_process.start(end, c, environ={}, alteration=HONEST) for c in (3, -11)]
    exited, crashed = [process.wait() for process in both]
    assert (exited.how, exited.result) == ("exited with 3", None)
    assert crashed.how == f"was ended by {signal.SIGSEGV.name}"


def test_a_fault_is_in_it_too() -> None:
    fault = ("gelu_tanh_for_erf", {})
    ended = [
        fresh_process.start(is_injected, environ={}, alteration=alteration).wait().result
        for alteration in (HONEST, fault)
    ]
    assert ended == [False, True]
