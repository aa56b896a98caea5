"""A call in a fresh process: its result comes back, and a crash is told as what it was."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from fixtures import fresh_process

HONEST: fresh_process.Alteration = ("", {})


def where(name: str) -> tuple[int, str]:
    print("here")
    return os.getpid(), os.environ[name]


def end(code: int) -> None:
    if code < 0:
        os.kill(os.getpid(), -code)
    raise SystemExit(code)


def start_one_and_die(marker: str) -> None:
    started = fresh_process.start(outlive, marker, environ={}, alteration=HONEST)
    deadline = time.monotonic() + 60
    while started and not Path(marker).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def outlive(marker: str) -> None:
    Path(marker).write_text(str(os.getpid()))
    time.sleep(60)


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


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    parent = fresh_process.start(start_one_and_die, str(marker), environ={}, alteration=HONEST)
    parent.process.wait()  # its output stays open as long as its own child lives
    child, deadline = int(marker.read_text()), time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()
    assert parent.wait().how == "was ended by SIGKILL"
