"""Settings of the host: which change numbers, whether the environment id says so, how they stand.

Sixteen settings are prescribed for training images (fixtures/hardening/items.py). Those that can be
tried are: the same small computations run in fresh processes, with a setting and without it.

What goes wrong: a machine is hardened with settings that do nothing, and differs in one that does;
a switch that changes numbers is not in the environment id, so a changed number is taken for a
regression; a variable is set, under a name that nobody reads.

What each setting is, with sources, and the right one: docs/environment.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fixtures import fresh_process, stash
from fixtures.check import Check
from fixtures.environment import changed_fields
from fixtures.fresh_process import Ended
from fixtures.hardening import host
from fixtures.hardening.computations import Seen, measure, measure_switches
from fixtures.hardening.host import Host, State
from fixtures.hardening.items import ITEMS, Item
from fixtures.hardening.redirection import written_by_bash
from fixtures.hardening.settings import EXPERIMENTS, INERT, ONE_THREAD, QUIET, moved

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, str]]
"""A job, its arguments, and the variables of its process, beyond those of one thread."""

BY_CALL: Call = (measure_switches, (), {})
PLAIN: Call = (measure, (), QUIET)
BOUND: Call = (measure, (True,), INERT)


def run(alteration: fresh_process.Alteration, *calls: Call) -> list[Ended]:
    """Two processes at a time."""

    def ended(call: Call) -> Ended:
        job, arguments, variables = call
        environ = {**ONE_THREAD, **variables}
        return fresh_process.start(job, *arguments, environ=environ, alteration=alteration).wait()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ended, calls))


def returned(check: Check, name: str, ended: Ended) -> Any:
    print(ended.output)
    check.exact(ended.how, "returned", name=f"{name}-ends")
    return ended.result


class TestSettings:
    def test_no_number_hangs_on(self, check: Check, pytestconfig: pytest.Config) -> None:
        """Variables for crashes, logs, memory, caches, errors of NCCL, the build of torch; one CPU
        of many, and the time of day."""
        alteration = pytestconfig.stash[stash.ALTERATION]
        plain, bound = run(alteration, PLAIN, BOUND)
        before, now = returned(check, "plain", plain), returned(check, "all", bound)
        check.exact(now.threads, 1, name="threads-of-one-cpu")
        check.exact(self.culprits(alteration, before, now), [], name="bits")
        check.exact(changed_fields(before.fields, now.fields), {}, name="id")
        # PYTHONFAULTHANDLER=1 traps none of them.
        check.exact(now.exceptional, ("nan", "inf", "inf"), name="float-exceptions")
        talks = {name: "[I" in e.output for name, e in (("WARNING", plain), ("0", bound))}
        check.exact(talks, {"WARNING": False, "0": True}, name="log-level-prints-info")

    @staticmethod
    def culprits(alteration: fresh_process.Alteration, before: Seen, now: Seen) -> list[str]:
        """Which setting moved which computations, each tried alone; of none, none is tried."""
        if not moved(now.digests, before.digests):
            return []
        calls: list[Call] = [(measure, (), {name: value}) for name, value in INERT.items()]
        calls.append((measure, (True,), {}))
        alone = zip([*INERT, "one CPU"], run(alteration, *calls), strict=True)
        found = [
            f"{name}: {', '.join(moved(e.result.digests, before.digests))}"
            for name, e in alone
            if e.result and moved(e.result.digests, before.digests)
        ]
        return found or moved(now.digests, before.digests)

    def test_that_change_a_number_are_in_the_id(
        self, check: Check, pytestconfig: pytest.Config
    ) -> None:
        calls: list[Call] = [(measure, (), e.variables) for e in EXPERIMENTS]
        first, *others = run(pytestconfig.stash[stash.ALTERATION], BY_CALL, *calls)
        by_call: dict[str, Seen] = returned(check, "by-call", first)
        pairs = {name: (by_call[""], seen) for name, seen in by_call.items() if name}
        for experiment, ended in zip(EXPERIMENTS, others, strict=True):
            seen = returned(check, experiment.name, ended)
            pairs[experiment.name] = by_call[experiment.against], seen
        changed = {name: moved(b.digests, a.digests) for name, (a, b) in pairs.items()}
        fields = {name: changed_fields(a.fields, b.fields) for name, (a, b) in pairs.items()}
        check.exact([n for n in pairs if changed[n] and not fields[n]], [], name="unseen")
        recorded = {
            f"{e.name} {variable}": pairs[e.name][1].fields.get(variable)
            for e in EXPERIMENTS
            for variable in e.variables.keys() - ONE_THREAD
        }
        check.exact([name for name, value in recorded.items() if not value], [], name="unrecorded")
        check.exact((changed["as before"], fields["as before"]), ([], {}), name="set-back")
        flushed = by_call["subnormals flushed"].fields["flushes_denormals"]
        in_product = "product of 1e-40" in changed["subnormals flushed"]
        check.exact(in_product, flushed, name="subnormals")
        for name, computations in changed.items():
            print(f"{name}: {', '.join(computations) or 'nothing'}")
        check.observe(changed, name="what-each-changes")


class TestHost:
    @pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
    def test_host(self, check: Check, item: Item) -> None:
        self.judge(check, item.state(Host.here()))

    def test_host_overrides(self, check: Check) -> None:
        """What makes fp32 something else, whatever the program asks for."""
        self.judge(check, host.overrides(Host.here()))

    @staticmethod
    def judge(check: Check, state: State) -> None:
        check.report(state.here, name="here")
        check.exact(list(state.troubles), [], name="troubles")
        if state.unverified:
            pytest.skip(state.unverified)

    def test_one_redirection_to_several_files(self, check: Check) -> None:
        """As ``echo performance > .../cpu*/cpufreq/scaling_governor`` is on more than one CPU."""
        if shutil.which("bash") is None:
            pytest.skip("no bash on this host")
        ways = {"redirected": ("echo set > cpu*", ""), "tee": ("echo set | tee cpu*", "set\n")}
        for name, (command, written) in ways.items():
            check.exact(written_by_bash(command)[1], [written] * 2, name=name)
