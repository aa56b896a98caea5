"""``make gpu``: sweeps find a planted error, steps end in time, the page is whole at any moment."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fixtures.first_minutes import __main__ as driver
from fixtures.first_minutes import accuracy, kernels, models, summary
from fixtures.first_minutes.accuracy import FUNCTIONS, Accuracy, sweep
from fixtures.first_minutes.steps import MINUTES, Step, steps, workers_for
from fixtures.first_minutes.summary import Outcome, Page
from fixtures.journal import Journal
from fixtures.numerics.formats import BF16, FP16, FP32, FP64, Format
from fixtures.numerics.gelu_bounds import Elementary
from fixtures.own_model import factory
from fixtures.record import Case, Record
from fixtures.verdict import Judgement, Verdict
from meta_tests.running import ROOT, environment

CPU = torch.device("cpu")
EVERY = {"chunk": 2**12, "chunks": 512}  # of fp32's arguments: the first of each binade


def planted(name: str, at: Tensor, ulps: int) -> accuracy.Function:
    """A function that is wrong by so many ulps at one argument."""

    def function(x: Tensor) -> Tensor:
        y = FUNCTIONS[name](x.double()).to(x.dtype)
        return torch.where(x == at, (y.view(torch.int32) + ulps).view(torch.float32), y)

    return function


class TestSweep:
    @pytest.mark.parametrize("name", ["erf", "tanh", "log", "rsqrt"])
    def test_finds_a_planted_error_of_three_ulps_and_its_argument(self, name: str) -> None:
        chunks = list(accuracy.arguments(FP32, CPU, EVERY["chunk"], EVERY["chunks"]))
        at = next(x for chunk in chunks for x in chunk[1234:1235] if 0.2 < x < 1.0)
        found = sweep(planted(name, at, 3), FUNCTIONS[name], FP32, CPU, **EVERY)
        assert found.at == float(at)
        assert 2.5 <= found.ulps <= 3.5
        exact = FUNCTIONS[name](at.double())
        assert (found.want, found.got) == (float(exact), float(planted(name, at, 3)(at)))
        sound = sweep(planted(name, at, 0), FUNCTIONS[name], FP32, CPU, **EVERY)
        assert sound.ulps <= 0.5 + 2.0**-27

    @pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_takes_16_bit_whole(self, fmt: Format, name: str) -> None:
        def rounded(x: Tensor) -> Tensor:
            return FUNCTIONS[name](x.double()).to(x.dtype)

        found = sweep(rounded, FUNCTIONS[name], fmt, CPU)
        assert found.arguments == {"bf16": 65_280, "fp16": 63_488}[fmt.name]
        assert max(found.ulps, found.subnormal_ulps) <= 0.5 + 2.0**-12  # to float, then rounded

    def test_takes_every_argument_of_fp32_once(self) -> None:
        assert list(accuracy.starts(2**26, None)) == list(range(-(2**31), 2**31, 2**26))
        assert list(accuracy.starts(2**26, 2)) == [-(2**31), 0]

    def test_flushed_results_are_counted_and_leave_the_normal_range_alone(self) -> None:
        x = torch.tensor([-100.0, -90.0, -1.0, 2.0**-130])

        def flushes(x: Tensor) -> Tensor:
            y = torch.exp(x)
            return torch.where(y < FP32.smallest_normal, 0.0, y)

        found = accuracy.accuracy(x, flushes(x), torch.exp(x.double()), FP32)
        assert found.flushed == 2
        assert found.ulps <= 1
        assert (found.subnormal_at, found.subnormal_ulps > 1000) == (-90.0, True)

    @pytest.mark.parametrize(
        ("x", "got", "ulps"),
        [
            (89.0, math.inf, 0.0),
            (88.0, math.inf, math.inf),
            (89.0, FP32.max, 1.0),
            (1.0, math.nan, math.inf),
            (math.inf, 3.0, 0.0),
        ],
        ids=["overflows", "too early", "never", "nan", "no finite argument"],
    )
    def test_what_is_not_finite_is_wrong_where_it_should_be_finite(
        self, x: float, got: float, ulps: float
    ) -> None:
        argument = torch.tensor([x])
        exact = torch.exp(argument.double())
        found = accuracy.accuracy(argument, torch.tensor([got]), exact, FP32)
        early = 2.0**128 - float(exact)
        wanted = early / 2.0**103 if (x, got) == (88.0, math.inf) else ulps
        assert found.ulps == pytest.approx(wanted)

    def test_an_infinity_that_is_exact_is_right_and_its_sign_counts(self) -> None:
        x = torch.tensor([0.0, -0.0])
        exact = torch.rsqrt(x.double())
        right = torch.tensor([math.inf, -math.inf])
        assert accuracy.accuracy(x, right, exact, FP32).ulps == 0
        assert accuracy.accuracy(x, right.abs(), exact, FP32).ulps > 1e6

    def test_prints_rows_and_a_row_of_the_table_that_can_be_pasted(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(accuracy, "CHUNK", 2**12)
        monkeypatch.setattr(accuracy, "CHUNKS", 2)
        assert accuracy.main(["--device", "cpu", "--chunks", "1"]) == 0
        text = capsys.readouterr().out
        assert "1 of 2 chunks: no row of ELEMENTARY follows" in text
        assert text.count("| fp32 | 4,096 |") == len(FUNCTIONS)

        found = {name: Accuracy(ulps=1.2345, at=0.5) for name in FUNCTIONS}
        lines = accuracy.elementary_row("h100", "NVIDIA H100, torch 2.13.0", found)
        pasted = eval("{" + "\n".join(lines) + "}", {"Elementary": Elementary})["h100"]
        assert (pasted.erf_ulps, pasted.exp_ulps, pasted.tanh_ulps) == (1.24, 1.24, 1.24)
        assert pasted.measured.startswith("NVIDIA H100, torch 2.13.0: erf 1.2345 at 0x1.0")


@pytest.mark.parametrize("reason", ["", "no compiler"])
def test_a_row_says_that_no_compiled_code_was_swept(
    reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "CHUNK", 2**12)
    monkeypatch.setattr(accuracy, "CHUNKS", 1)
    monkeypatch.setattr(accuracy, "missing_compiler", lambda device: reason)
    monkeypatch.setattr(accuracy, "compiled", lambda function: function)
    assert accuracy.main(["--device", "cpu", "--compiled"]) == 0
    text = capsys.readouterr().out
    assert ("eager code alone: erf" in text) is bool(reason)
    assert ("compiled code is left out: no compiler" in text) is bool(reason)


def test_what_bounds_assume_is_held_to_what_was_seen() -> None:
    limits = accuracy.assumed()
    found = {name: Accuracy(ulps=limit, relative=limit) for name, (limit, *_) in limits.items()}
    assert found.keys() == FUNCTIONS.keys()
    lines, above = accuracy.judged(found)
    assert (len(lines), above) == (2 + len(FUNCTIONS), [])
    for relative in (3.01, math.inf):
        lines, above = accuracy.judged(found | {"log": Accuracy(relative=relative)})
        assert above == ["log"]
        assert lines[-2].endswith("| 3 | u | cross_entropy | ABOVE |")
    lines, above = accuracy.judged(found | {"erf": Accuracy(ulps=2.51)})
    assert (above, lines[2]) == (["erf"], "| erf | 2.5100 | 2.5 | ulp | gelu | ABOVE |")


def test_two_ulps_of_rsqrt_below_a_power_of_two_are_two_unit_roundoffs() -> None:
    """And four just above one: bounds count by their relative size."""
    x = torch.tensor([0.2500004, 0.9999996, 0.0, 1.0])
    exact = torch.rsqrt(x.double())
    got = torch.rsqrt(x.double()).float()
    got[:2] = (got[:2].view(torch.int32) - 2).view(torch.float32)
    found = accuracy.accuracy(x, got, exact, FP32)
    assert 1.5 < found.ulps <= 2.5
    just_below_2 = accuracy.accuracy(x[:1], got[:1], exact[:1], FP32)
    assert 1.5 < just_below_2.ulps <= 2.5
    assert just_below_2.relative == pytest.approx(just_below_2.ulps, rel=1e-5)
    just_above_1 = accuracy.accuracy(x[1:2], got[1:2], exact[1:2], FP32)
    assert just_above_1.relative == pytest.approx(2 * just_above_1.ulps, rel=1e-5)
    both = just_below_2.and_of(just_above_1)
    assert both.relative == just_above_1.relative == found.relative
    wrong = accuracy.accuracy(x[:1], x[:1] * 0, exact[:1] * 0 + math.nan, FP32)
    assert wrong.relative == math.inf


def test_kernels_are_shown_with_the_error_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(kernels.product_rows(CPU))
    assert len(rows) == len(kernels.SWITCHES) * len(kernels.TERMS) * 2
    assert all(float(row[-1]) <= 1 for row in rows)
    some = [
        kernels.attended(CPU, "math", fmt, fmt.dtype, (33, 33), kind)
        for fmt, kind in ((FP32, "blind rows"), (FP64, "blind rows"), (FP64, "NaN in a key"))
    ]
    assert kernels._distance(some[0][0], some[1][0]) < 1e-6
    assert some[2][0].isnan().sum() == 33 * kernels.FEATURES  # of one head of two


@pytest.mark.parametrize("tool", [accuracy, kernels], ids=["accuracy", "kernels"])
def test_without_a_gpu_a_tool_says_so(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tool.main([]) == 22
    assert "UNVERIFIED: torch sees no GPU; --device cpu" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["decoder", "gru"])
def test_models_are_usable(name: str) -> None:
    user = factory.load(f"{models.__name__}:{name}")
    assert math.isfinite(float(user.loss(user.model, user.batches[0]).detach()))


class TestSteps:
    def test_fit_into_their_time_and_write_into_one_folder(self, tmp_path: Path) -> None:
        planned = steps("h100", tmp_path)
        assert sum(step.limit_s for step in planned) <= 60 * MINUTES
        assert len({step.name for step in planned}) == len(planned)
        for step in planned:
            records = [word for word in step.command if word.startswith("--record=")]
            assert records == [f"--record={tmp_path / step.name}"] * step.records
            if step.command[1] != "pytest":
                assert importlib.util.find_spec(step.command[1])
        again = next(step for step in planned if step.name == "4-again")
        assert f"--baseline={tmp_path / '3-checks'}" in again.command

    @pytest.mark.parametrize(
        ("gib", "workers"),
        [([139.0], 8), ([4.75], 1), ([9.5], 3), ([79.0] * 8, 8), ([4.75, 4.75], 2), ([], 8)],
        ids=["whole", "slice-1g", "slice-2g", "eight", "two-slices", "none"],
    )
    def test_share_the_memory_of_a_gpu_or_of_a_slice_of_one(
        self, gib: list[float], workers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
        assert workers_for(gib) == workers
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
        assert workers_for(gib) == min(workers, 2)
        planned = steps("h100", ROOT, workers=workers)
        given = [s.command[s.command.index("-n") + 1] for s in planned if "-n" in s.command]
        assert set(given) == {str(workers)}

    def test_a_driver_that_hangs_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(driver, "LOOK_S", 0.5)
        found = driver.look(os.environ, "import time; time.sleep(60)")
        assert found == "torch or the driver gave no answer in 0 s: does nvidia-smi?"

    def test_load_no_torch(self) -> None:
        code = "import sys; sys.modules['torch'] = None; import fixtures.first_minutes.__main__"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

    def test_without_a_gpu_there_is_nothing_to_find_out(self) -> None:
        command = [sys.executable, "-m", "fixtures.first_minutes"]
        ended = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        assert ended.returncode == 22
        assert "sees no GPU, so there is nothing to find out here" in ended.stdout
        assert "--pretend h100" in ended.stdout

    def test_a_page_is_written_before_and_after_each(self, tmp_path: Path) -> None:
        page_file = tmp_path / summary.NAME
        show = f"print(open({str(page_file)!r}).read())"
        planned = [
            Step("1-first", "fails", ("-c", "print('said'); raise SystemExit(22)"), 60),
            Step("2-shown", "shows the page", ("-c", show), 60, shown=True),
        ]
        page = Page(tmp_path, ["* a machine"], planned, {})
        assert driver.run_all(page, 60) == 22
        seen = (tmp_path / "2-shown.txt").read_text()
        assert "| 1-first | fails | 22 |" in seen
        assert "| 2-shown | shows the page | running |" in seen
        assert "* a machine" in seen
        text = page_file.read_text()
        assert "```\nsaid\n```" in text
        assert "| 2-shown | shows the page | 0 |" in text

    def test_what_takes_too_long_is_ended_with_all_that_it_started(self, tmp_path: Path) -> None:
        child = "import time; time.sleep(100)"
        parent = (
            "import subprocess, sys, time\n"
            f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)\n"
            "try: time.sleep(100)\n"
            "except KeyboardInterrupt: print('interrupted', flush=True)"
        )
        planned = [
            Step("1-long", "sleeps", ("-c", parent), 2),
            Step("2-late", "comes too late", ("-c", ""), 60),
        ]
        page = Page(tmp_path, [], planned, {})
        assert driver.run_all(page, 1.5) == 22
        assert page.outcomes["1-long"].why.startswith("ended: over ")
        assert page.outcomes["2-late"].why == "not begun: the time was up"
        pid, said = (tmp_path / "1-long.txt").read_text().split()
        assert said == "interrupted"
        deadline = time.monotonic() + 5
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            if "zombie" in Path(f"/proc/{pid}/status").read_text():
                break
            time.sleep(0.05)
        else:
            assert not Path(f"/proc/{pid}").exists()

    def test_an_interruption_reaches_the_step_and_ends_the_run(self, tmp_path: Path) -> None:
        child = (
            "import os, signal, time\n"
            "try:\n    os.kill(os.getppid(), signal.SIGINT); time.sleep(100)\n"
            "except KeyboardInterrupt: print('wrote what it had', flush=True)"
        )
        planned = [
            Step("1-stopped", "is stopped", ("-c", child), 60),
            Step("2-never", "never runs", ("-c", ""), 60),
        ]
        assert driver.run_all(Page(tmp_path, [], planned, {}), 60) == 2
        text = (tmp_path / summary.NAME).read_text()
        assert "| 1-stopped | is stopped | interrupted |" in text
        assert "wrote what it had" in text
        assert "| 2-never | never runs | not begun |" in text

    @pytest.mark.parametrize(
        ("codes", "worst"),
        [([0, 0], 0), ([22, 1], 1), ([1, 21], 21), ([0, None], 22), ([4, 0], 4), ([], 0)],
    )
    def test_the_worst_code_is_the_end(self, codes: list[int | None], worst: int) -> None:
        outcomes = {str(i): Outcome(code, 1.0) for i, code in enumerate(codes)}
        assert driver.worst_of(outcomes) == worst


class TestPage:
    STEP = Step("4-again", "again", ("-m", "pytest", "--record=x"), 1)

    def test_of_a_run_that_was_killed_it_shows_what_the_journal_kept(self, tmp_path: Path) -> None:
        case = Case("gelu", "op", "forward", "h100", margin=0.75, bound="erf")
        run = Journal(tmp_path / self.STEP.name)
        run.add(case, Record({}, {}))
        text = "\n".join(summary.found_by(self.STEP, tmp_path))
        assert "1 cases: 1 PASS (0 known faults); cut short" in text
        assert "| gelu/op/forward/h100 | 0.75 |" in text
        run.remove()

    def test_without_a_record_it_says_so_and_shows_the_end_of_the_output(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "4-again.txt").write_text("ERROR: the reason\n")
        text = "\n".join(summary.found_by(self.STEP, tmp_path))
        assert "No record: " in text
        assert "ERROR: the reason" in text

    def test_what_cannot_be_shown_does_not_end_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(folder: Path) -> None:
            raise KeyError("a field of a record")

        monkeypatch.setattr(summary, "_recorded", broken)
        (tmp_path / "4-again.txt").write_text("what it printed\n")
        page = Page(tmp_path, [], [self.STEP], {self.STEP.name: Outcome(0, 1.0)})
        page.write()
        text = (tmp_path / summary.NAME).read_text()
        assert "No record: KeyError('a field of a record')" in text
        assert "what it printed" in text

    def test_it_lists_what_moved_what_is_red_and_why_something_is_unverified(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case = Case("gelu", "op", "forward", "h100", margin=0.5)
        detail = "bits moved by up to 2 ulp in an unchanged environment, and again"
        found = [
            Judgement(case, Verdict.NONDETERMINISTIC, detail, ulps=2.0),
            Judgement(case, Verdict.REGRESSION, "outside its bound by a factor of 3\n  more"),
            Judgement(case, Verdict.UNVERIFIED, "no compiler"),
        ]
        monkeypatch.setattr(summary, "_recorded", lambda folder: (Record({}, {}), found))
        text = "\n".join(summary.found_by(self.STEP, tmp_path))
        assert "1 cases moved:" in text
        assert f"| gelu/op/forward/h100 | NONDETERMINISTIC | 2 | {detail} |" in text
        assert "* REGRESSION gelu/op/forward/h100: outside its bound by a factor of 3\n" in text
        assert "* UNVERIFIED (1): no compiler" in text
