"""The whole step under torch.compile: gradients, loss, caches, recomputation, randomness.

What goes wrong: a compiled graph with a right loss has wrong gradients; a kernel for odd sizes
reads beyond a row, or crashes; what a cache on disk holds computes something else; a recomputation
inside the graph drops other elements than forward did; a seed means nothing; eager code is not what
it was before.

Theorem: the flow bound holds for every order of summation and every fusion, for those only leave
roundings out. The backend aot_eager runs eager kernels: on the CPU its bits are eager's.

Truth: the float64 trace of the step; for odd widths the float64 formulas and sensitivities,
computed on the spot.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fixtures import compiling, environment, fresh_process, stash
from fixtures.check import Check
from fixtures.collection import exists
from fixtures.devices import Device
from fixtures.golden import LoadTruth
from fixtures.numerics import dropout_bounds
from fixtures.numerics.formats import FP32, FP64
from fixtures.training import compiled_step, data
from fixtures.training.compiled_step import DrawingBlock, Tensors, run_compiled, twice
from fixtures.training.policies import POLICIES, run_step
from fixtures.training.reference import REFERENCE
from fixtures.training.sensitivity import errors, sensitivities, step_bound_for
from fixtures.training.step import Config, StepResult, build
from fixtures.training.trace import is_zero_gradient
from fixtures.training.truth import CONFIG, StepTruth

pytestmark = pytest.mark.compiled

# No width is a multiple of a vector register, of a head, or of another.
ODD = Config(vocabulary=263, length=31, width=33, heads=3, mlp_width=131, blocks=1, batch=6)
DRAWS = 8  # of noise, for the sensitivities of the odd step
# Else two cold caches may hold two kernels: on a GPU inductor chooses a reduction's by time.
SAME_CODE = {"TORCHINDUCTOR_DETERMINISTIC": "1"}
SOURCE = "docs/theory/reference_step.md; Hsu, Kakade, Zhang 2012"


def named(loss: float, gradients: Tensors) -> Tensors:
    """Loss and gradients under the names of the flow bound's quantities."""
    found = {"loss": torch.tensor(loss, dtype=torch.float64)}
    return found | {f"gradient/{name}": gradient.cpu() for name, gradient in gradients.items()}


def in_a_row(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])


def of_step(step: StepResult) -> Tensors:
    return named(step.loss, step.gradients)


class TestCompiled:
    # A graph of inductor's costs half a minute: the one under autocast is that of odd widths.
    @exists(lambda device, threads: device.type == "cpu" or threads == "one-thread")
    @pytest.mark.parametrize(
        ("policy", "implementation", "threads"),
        [
            ("fp32", "inductor", "one-thread"),
            ("fp32", "inductor", "two-threads"),
            ("fp32", "aot_eager", "one-thread"),
            ("bf16_autocast", "aot_eager", "one-thread"),
        ],
    )
    def test_loss_and_gradients(
        self,
        check: Check,
        truth: LoadTruth,
        device: Device,
        policy: str,
        implementation: str,
        threads: str,
    ) -> None:
        stored = StepTruth.load(truth)
        want = named(float(stored.trace.values["step0/loss"]), stored.gradients)
        limits = step_bound_for(POLICIES[policy], stored.sensitivities, CONFIG, truth=FP32)
        limits = {name: limits[name] for name in want}
        step = (POLICIES[policy], CONFIG, stored.micro_batches, device.torch)
        with compiling.on_threads(compiling.THREADS[threads]):
            before = of_step(run_step(*step, stored.parameters))
            got = of_step(run_compiled(*step, implementation, stored.parameters))
            after = of_step(run_step(*step, stored.parameters))
        check.exact(in_a_row(after), in_a_row(before), name="eager-stays")
        theorem = f"flow of the step in {policy}"
        check.within_figures(
            errors(got, want),
            limits,
            in_a_row(got),
            theorem=theorem,
            source=SOURCE,
            inputs=stored.trace.digest,
        )
        if implementation == "aot_eager" and device.type == "cpu":
            check.exact(in_a_row(got), in_a_row(before), name="as-eager")
        else:
            check.within_figures(
                errors(got, before),
                twice(limits),
                in_a_row(got),
                theorem=f"{theorem}, twice",
                source=SOURCE,
                name="near-eager",
            )

    def test_subnormals_stay(self, check: Check, device: Device) -> None:
        """What loads compiled code computes with subnormals as it did before."""
        before = environment.flushes_denormals()
        graph = torch.compile(torch.square, fullgraph=True, dynamic=False)
        graph(torch.ones(3, device=device.torch))
        check.exact(environment.flushes_denormals(), before)

    def test_caches_and_processes(
        self, check: Check, device: Device, tmp_path: Path, pytestconfig: pytest.Config
    ) -> None:
        """Cold cache, the same one warm, and another cold one, each in a process of its own."""

        def started(cache: str) -> fresh_process.Started:
            return fresh_process.start(
                compiled_step.block_and_cache_hits,
                CONFIG,
                device.torch,
                environ=SAME_CODE | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache)},
                alteration=pytestconfig.stash[stash.ALTERATION],
            )

        both = [started("one"), started("other")]
        ended = {name: run.wait() for name, run in zip(("cold", "fresh"), both, strict=True)}
        ended["warm"] = started("one").wait()
        for name, process in ended.items():
            print(process.output)
            check.exact(process.how, "returned", name=f"{name}-ends")
        found = {name: process.result for name, process in ended.items()}
        for name in ("fresh", "warm"):
            eager, compiled, *_ = found[name]
            check.exact(eager, found["cold"][0], name=f"eager-{name}")
            check.exact(compiled, found["cold"][1], name=name)
        if found["warm"][3]:
            pytest.skip(f"torch {torch.__version__} passes its cache by: no graph came from disk")
        hits = {name: hits > 0 for name, (_, _, hits, _) in found.items()}
        check.exact(hits, {"cold": False, "fresh": False, "warm": True}, name="cache-hits")

    @pytest.mark.parametrize("drawn_by", ["inductor", "eager"])
    def test_randomness_and_recomputation(
        self, check: Check, device: Device, drawn_by: str
    ) -> None:
        """Of a checkpointed block with two dropouts; ``fallback_random`` draws as eager does."""
        block = DrawingBlock(CONFIG, device.torch)
        graph = block.compiled(fallback_random=drawn_by == "eager")
        first, backward = block.masks(graph, 1)
        check.exact(backward.int(), first.int(), name="recomputed")
        again, _ = block.masks(graph, 1)
        other, _ = block.masks(graph, 2)
        check.exact(again.int(), first.int(), name="again")
        check.exact(torch.equal(first[0], first[1]), False, name="two-dropouts-differ")
        check.exact(torch.equal(other, first), False, name="another-seed-differs")
        check.exact(block.run(graph, 1), block.run(graph, 1), name="results-again")
        kept = torch.cat([first.flatten(), other.flatten()])
        found = dropout_bounds.counts_of(kept, CONFIG.dropout)
        want, bound = dropout_bounds.binomial(found)
        place = found.names
        check.within(found.counts, want, bound, name="counts", where=lambda at: place[at[0]])
        if drawn_by == "eager":
            eager, _ = block.masks(block.forward, 1)
            check.exact(first.int(), eager.int(), name="as-eager")

    def test_odd_widths(
        self, check: Check, device: Device, tmp_path: Path, pytestconfig: pytest.Config
    ) -> None:
        """In a process of its own: a kernel that crashes on a tail is a result."""
        policy = "bf16_autocast"  # norms, residual stream and loss are fp32 in it
        cpu = torch.device("cpu")
        batches = data.batches(ODD, REFERENCE, 1)[0]
        model = build(ODD, REFERENCE, cpu)
        parameters = {name: value.detach() for name, value in model.named_parameters()}
        process = fresh_process.start(
            compiled_step.step_on_cpu,
            *(ODD, policy, batches, parameters, device.torch),
            environ={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            alteration=pytestconfig.stash[stash.ALTERATION],
        )
        exact = run_step(POLICIES["fp64"], ODD, batches, cpu, parameters)
        want = {
            name: torch.zeros_like(value) if is_zero_gradient(name) else value
            for name, value in of_step(exact).items()
        }
        responses = sensitivities(ODD, batches, parameters, draws=DRAWS)
        ended = process.wait()
        print(ended.output)
        check.exact(ended.how, "returned", name="ends")
        limits = step_bound_for(POLICIES[policy], responses, ODD, truth=FP64)
        got = named(*ended.result)
        check.within_figures(
            errors(got, want),
            {name: limits[name] for name in want},
            in_a_row(got),
            theorem=f"flow of the step in {policy}",
            source=SOURCE,
        )
