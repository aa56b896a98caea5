"""A model of one's own, in one process: ``pytest --model package.module:factory``.

The step of the model is held to the same step in float64, made on the spot: the loss, the output
of each module and the gradient of each parameter, within the flow bound of its own operations.
What must not change the step at all (a second run, activation checkpointing, saving and loading)
is exact. Theory, assumptions and the factory's contract: docs/your_model.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures import compiling
from fixtures.check import Check
from fixtures.collection import exists
from fixtures.devices import Device
from fixtures.distributed.pool import RankPool
from fixtures.numerics.formats import BF16, FP16, FP32, Format
from fixtures.own_model import comparisons, factory, rank_jobs
from fixtures.own_model.factory import (
    COUPLES_EXAMPLES,
    DOES_NOT_REPEAT,
    DRAWS_IN_EVAL,
    STOPS_GRADIENTS,
    UserModel,
    if_meant,
    meant,
)
from fixtures.own_model.recording import Recorded
from fixtures.own_model.step import (
    MICRO_BATCHES,
    Step,
    Tensors,
    Truth,
    errors,
    fresh,
    recorded_step,
    repeatable,
    run_step,
    truth_of,
)
from fixtures.own_model.trial import running

formats = pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=lambda fmt: fmt.name)
SOURCE = "docs/your_model.md; Hsu, Kakade, Zhang 2012"


def autocast_of(fmt: Format) -> torch.dtype | None:
    return None if fmt is FP32 else fmt.dtype


def flat(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.detach().double().cpu().flatten() for tensor in tensors.values()])


def first_difference(a: Step, b: Step) -> str:
    """The first module, in the order of the forward pass, or else gradient that differs."""
    one, other = a.quantities(), b.quantities()
    if one.keys() != other.keys():
        return f"only one has {sorted(one.keys() ^ other.keys())[0]}"
    same = (name for name in one if not torch.equal(one[name].cpu(), other[name].cpu()))
    return next(same, "none")


def hold(check: Check, got: Step, want: Step, limits: dict[str, float], theorem: str) -> None:
    """Holds decisions, outputs, loss and gradients to the bound; names the first that leaves it."""
    found, wanted = got.quantities(), want.quantities()
    off = errors(found, wanted)
    known = {name: limits.get(name, 0.0) for name in off}
    off = {**{name: apart for name, (apart, _) in want.apart.items()}, **off}
    known |= {name: limit for name, (_, limit) in want.apart.items()}
    beyond = [name for name in off if not off[name] <= known[name]]

    def hint() -> str:
        text = f"first to leave its bound, in the order of the step: {beyond[0]}"
        of = {name: known[f"gradient of {name}"] for name in want.gradients}
        factor = comparisons.common_factor(got.gradients, want.gradients, of)
        return text + (f"; all gradients are the truth's times {factor:.4g}" if factor else "")

    check.within_figures(off, known, flat(found), theorem=theorem, source=SOURCE, hint=hint)


def is_inside(off: dict[str, float], limits: dict[str, float]) -> bool:
    return all(off[name] <= limits[name] for name in off)


def skip_if_meant(user: UserModel, word: str) -> None:
    """A check that the model breaks on purpose is UNVERIFIED."""
    if reason := meant(user, word):
        pytest.skip(reason)


def observed_step(user: UserModel, device: torch.device, fmt: Format) -> tuple[Step, Recorded]:
    """The step with its draws and decisions; in fp16 under the largest loss scale that no
    gradient overflows with."""
    for exponent in range(16, -1, -1) if fmt is FP16 else (0,):
        step, recorded = recorded_step(user, device, autocast_of(fmt), scale=2.0**exponent)
        if all(bool(g.isfinite().all()) for g in step.gradients.values()):
            break
    return step, recorded


# --- the step against float64 -------------------------------------------------------------------


@formats
def test_step_is_that_of_float64(
    check: Check, user: UserModel, device: Device, fmt: Format
) -> None:
    """Loss, module outputs, gradients; in 16 bits under autocast."""
    with running(f"a step under autocast in {fmt.name}"):
        got, recorded = observed_step(user, device.torch, fmt)
    truth = truth_of(user, device.torch)
    want = truth.of(recorded, fmt, got.scale)
    limits = truth.limits(fmt, scale=got.scale)
    hold(check, got, want, limits, f"flow of the model in {fmt.name}")


def test_every_gradient_can_be_verified(check: Check, user: UserModel, device: Device) -> None:
    """What is 0 lies inside every bound: a head that starts at 0 hides all that lies before it."""
    gradients = truth_of(user, device.torch).step.gradients
    trained = [name for name, p in user.model.named_parameters() if p.requires_grad]
    silent = [name for name in trained if name not in gradients or not gradients[name].any()]
    if silent:
        shown = ", ".join(silent[:3]) + (", ..." if len(silent) > 3 else "")
        pytest.skip(
            f"{len(silent)} of {len(trained)} parameters get no gradient, or exactly 0, and "
            f"nothing is verified of them: {shown}; let the factory take a few steps first, if "
            "they start behind weights of 0"
        )
    check.exact(silent, [])


def test_gradients_are_derivatives(check: Check, user: UserModel, device: Device) -> None:
    """autograd against difference quotients of the loss, both in float64."""
    skip_if_meant(user, STOPS_GRADIENTS)
    found, limits = comparisons.derivatives(user, device.torch)
    check.within_figures(
        found,
        limits,
        torch.tensor(list(found.values()), dtype=torch.float64),
        theorem="difference quotient",
        source="fixtures/numerics/derivative_bounds.py",
        hint=lambda: (
            "the backward pass does not match the forward pass: a wrong backward formula, a "
            "detached branch, a recomputation with other random numbers; "
            + if_meant(STOPS_GRADIENTS)
        ),
    )


def test_update_is_that_of_float64(check: Check, user: UserModel, device: Device) -> None:
    """Two steps of the optimizer with the gradients of the step, fp32 against float64."""
    model = fresh(user, device.torch)
    gradients = run_step(user, model, watch=False).gradients
    got = comparisons.updated(user, fresh(user, device.torch), gradients)
    want, limits = comparisons.update_truth(truth_of(user, device.torch), gradients)
    check.within_figures(
        errors(got, want), limits, flat(got), theorem="flow of the update in fp32", source=SOURCE
    )


def test_micro_batches_add_up(
    check: Check, user: UserModel, device: Device, pytestconfig: pytest.Config
) -> None:
    """Weighted by their targets, to the batch that they make up: float64, dropout off."""
    skip_if_meant(user, COUPLES_EXAMPLES)
    if len(user.batches) == 1:
        pytest.skip("there is one batch: nothing adds up")
    try:
        one, weights = comparisons.whole_batch(user)
    except ValueError as error:
        pytest.skip(f"the batches cannot be joined into one: {error}")
    # Its outputs are larger: left out.
    whole = Truth(one, device.torch, {0: 1.0}, train=False, decides=True)
    with running("a step of the batches joined along dimension 0"):
        draws = whole.recorded.draws
    if draws:
        pytest.skip("the model draws random numbers in eval mode")
    got, off, limits = comparisons.added_up(user, device.torch, weights, whole)
    if not is_inside(off, limits):
        explain_parts(user, device, whole, pytestconfig)
    check.within_figures(
        off,
        limits,
        flat(got.quantities()),
        theorem="flow of both in fp64",
        source=SOURCE,
        hint=lambda: if_meant(COUPLES_EXAMPLES),
    )


def explain_parts(
    user: UserModel, device: Device, whole: Truth, pytestconfig: pytest.Config
) -> None:
    """Of batches that do not add up: UNVERIFIED where the reason is no defect of the model."""
    with RankPool(max_ranks=2) as pool:  # of CPU ranks, for this alone: it is no check of ranks
        called = pool.run(rank_jobs.collectives_of_loss, 2, pytestconfig.option.model)[0]
    if called:
        pytest.skip(f"the loss is over the rows of all ranks: it calls {', '.join(called)}")
    if user.valid is not None:
        return
    indices = range(min(len(user.batches), MICRO_BATCHES))
    weights = comparisons.fitted_weights(user, device.torch, indices, whole)
    _, off, limits = comparisons.added_up(user, device.torch, weights, whole)
    if is_inside(off, limits):
        shares = ", ".join(f"{weight:.4g}" for weight in weights.values())
        pytest.skip(
            "the loss is a mean over something else than rows, such as the targets that are not "
            f"padding: the batches add up with the weights {shares}; say what it counts with "
            "UserModel.valid"
        )


# --- what must change nothing -------------------------------------------------------------------


def test_factory_repeats(
    check: Check, user: UserModel, device: Device, pytestconfig: pytest.Config
) -> None:
    """Each rank calls it: it must make the same parameters and batches."""
    again = factory.load(pytestconfig.option.model)
    check.exact(factory.digest(again), factory.digest(user))


@formats
def test_step_repeats(check: Check, user: UserModel, device: Device, fmt: Format) -> None:
    """Two runs with the same seeds, bit by bit."""
    skip_if_meant(user, DOES_NOT_REPEAT)
    with repeatable(device.torch), running(f"a deterministic step in {fmt.name}"):
        first, second = (
            run_step(user, fresh(user, device.torch), autocast=autocast_of(fmt)) for _ in range(2)
        )
    remedy = {"remedy": if_meant(DOES_NOT_REPEAT)}
    difference = first_difference(second, first)
    check.exact(difference, "none", name="first-difference", figures=remedy)


def test_eval_draws_nothing(check: Check, user: UserModel, device: Device) -> None:
    skip_if_meant(user, DRAWS_IN_EVAL)
    _, recorded = recorded_step(user, device.torch, train=False)
    remedy = {"remedy": if_meant(DRAWS_IN_EVAL)}
    check.exact(len(recorded.draws), 0, name="random-operations", figures=remedy)


@formats
def test_checkpointing_changes_no_gradient(
    check: Check, user: UserModel, device: Device, fmt: Format
) -> None:
    """Each block recomputed in backward, dropout on: equal bits."""
    if not factory.blocks(user.model):
        pytest.skip("the model has no blocks that could be recomputed")
    skip_if_meant(user, DOES_NOT_REPEAT)
    models = (fresh(user, device.torch), rank_jobs.checkpointed(fresh(user, device.torch)))
    with repeatable(device.torch), running("a step with its blocks recomputed in backward"):
        without, with_ = (
            run_step(user, model, autocast=autocast_of(fmt), watch=False) for model in models
        )
    check.exact(first_difference(with_, without), "none", name="first-difference")


def test_saved_and_loaded_it_goes_on_as_before(
    check: Check, user: UserModel, device: Device, tmp_path: Path
) -> None:
    """Through torch.distributed.checkpoint, between the first and the second step."""
    skip_if_meant(user, DOES_NOT_REPEAT)
    model = fresh(user, device.torch)
    optimizer = user.new_optimizer(model)
    with repeatable(device.torch), running("saving, loading or going on"):
        rank_jobs.train(user, model, optimizer)
        rank_jobs.save(model, optimizer, tmp_path / "saved")
        loaded = fresh(user, device.torch)
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.zero_()
        other = user.new_optimizer(loaded)
        rank_jobs.load(loaded, other, tmp_path / "saved")
        went_on = rank_jobs.train(user, model, optimizer), rank_jobs.train(user, loaded, other)
    check.exact(first_difference(went_on[1], went_on[0]), "none", name="first-difference")
    states = [rank_jobs.whole_state(m, o) for m, o in ((model, optimizer), (loaded, other))]
    check.exact(sorted(states[0].keys() - states[1].keys()), [], name="lost")
    check.exact(flat({n: states[1][n] for n in states[0]}), flat(states[0]), name="state-after")


@pytest.mark.compiled
@exists(lambda device, threads: device.type == "cpu" or threads == "one-thread")
@pytest.mark.parametrize("threads", compiling.THREADS)
def test_compiled_step_is_that_of_float64(
    check: Check, user: UserModel, device: Device, threads: str
) -> None:
    """torch.compile of the model, with eager's random numbers."""
    import torch._dynamo.utils
    import torch._inductor.config

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    draws = torch._inductor.config.patch(fallback_random=True)
    on_threads = compiling.on_threads(compiling.THREADS[threads])
    with running("the compiled step"), on_threads, draws:
        compiled: Any = torch.compile(fresh(user, device.torch))
        step = run_step(user, compiled, watch=False)
    torch.set_flush_denormal(False)  # fixtures/compiling.py says why
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    check.exact(graphs > 0, True, name="was-compiled")  # at all: graphs may break
    got = Step(step.loss, rank_jobs.clean(step.gradients))
    truth = truth_of(user, device.torch)
    want = Step(truth.step.loss, truth.step.gradients)
    hold(check, got, want, truth.limits(FP32, seen=False), "flow of the model in fp32")
