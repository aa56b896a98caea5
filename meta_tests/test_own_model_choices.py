"""``--model``: what a model does on purpose is not red, and a failure names the word for it."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from fixtures.numerics.formats import FP16
from fixtures.own_model import factory, rank_jobs
from fixtures.own_model.comparisons import carried_over, common_factor, derivatives
from fixtures.own_model.factory import COUPLES_EXAMPLES, UserModel, UserModelError, load, meant
from fixtures.own_model.recording import aten, draws
from fixtures.own_model.step import (
    Truth,
    errors,
    fresh,
    recorded_step,
    repeatable,
    run_step,
)
from meta_tests.running import ROOT, Ended, Repository, copy_repository
from precision_tests.test_model import is_inside

CPU = torch.device("cpu")
MODELS = "meta_tests.choosing_models"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    made = copy_repository(tmp_path_factory.mktemp("choices"), "model", "model_ranks")
    for name in ("choosing_models", "own_models"):
        shutil.copy(ROOT / "meta_tests" / f"{name}.py", made.root / f"{name}.py")
    return made


def checked(repository: Repository, spec: str, which: str) -> Ended:
    return repository.run("-m", "model and not compiled", "--model", spec, "-k", which)


# --- losses over more than one example ----------------------------------------------------------


def test_a_loss_that_couples_examples_fails_with_the_word_that_says_so(
    repository: Repository,
) -> None:
    ended = checked(repository, "choosing_models:contrastive", "add_up")
    assert ended.code == 1, ended.text
    assert "a balancing or contrastive loss, which is no mean over examples" in ended.text
    assert "UserModel(deliberate=('couples examples',))" in ended.text
    ended = checked(repository, "choosing_models:declared", "add_up")
    assert (ended.code, "the model says of itself: couples examples" in ended.text) == (0, True)


def test_a_balancing_loss_is_read_from_the_configuration() -> None:
    class Config:
        output_router_logits, router_aux_loss_coef = True, 0.02

    model = nn.Linear(1, 1)
    user = UserModel(model, lambda m, x: m(x).mean(), [torch.ones(1, 1)])
    assert meant(user, COUPLES_EXAMPLES) == ""
    model.config = Config()  # type: ignore[assignment]
    assert "router_aux_loss_coef = 0.02" in meant(user, COUPLES_EXAMPLES)
    Config.output_router_logits = False
    assert meant(user, COUPLES_EXAMPLES) == ""


def test_other_weights_than_rows_are_found_and_asked_for(repository: Repository) -> None:
    """Batches of 18 targets, of which 0, 1, 2, 3 do not count."""
    ended = checked(repository, "own_models:uncounted_targets", "add_up")
    assert ended.code == 0, ended.text
    assert "the batches add up with the weights 0.2727, 0.2576, 0.2424, 0.2273" in ended.text
    assert "say what it counts with UserModel.valid" in ended.text


def test_a_loss_over_all_ranks_is_that_of_their_rows_joined(repository: Repository) -> None:
    ended = checked(repository, "choosing_models:gathered", "add_up or w2")
    assert ended.code == 0, ended.text
    assert "the loss is over the rows of all ranks: it calls c10d::allgather_" in ended.text
    ended = checked(repository, "choosing_models:lost_factor", "w2")
    assert ended.code == 1, ended.text
    assert "flow of the model over 2 ranks, their rows joined" in ended.text
    assert "all gradients are the truth's times 0.5" in ended.text


# --- blocks -------------------------------------------------------------------------------------


def test_a_cache_among_its_arguments_does_not_grow_when_a_block_is_recomputed() -> None:
    user = load(f"{MODELS}:caching")
    plain, again = fresh(user, CPU), rank_jobs.checkpointed(fresh(user, CPU))
    one, other = (run_step(user, model, watch=False) for model in (plain, again))
    assert one.loss == other.loss
    assert all(torch.equal(one.gradients[n], g) for n, g in other.gradients.items())


def test_a_block_is_recomputed_with_the_buffers_that_it_was_called_with() -> None:
    user = load(f"{MODELS}:drifting")
    plain, again = fresh(user, CPU), rank_jobs.checkpointed(fresh(user, CPU))
    one, other = (run_step(user, model, watch=False) for model in (plain, again))
    assert all(torch.equal(one.gradients[n], g) for n, g in other.gradients.items())
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), again.buffers(), strict=True))


def test_what_a_step_changes_is_no_noise_of_the_next_run() -> None:
    """Each run starts from the factory's buffers: no limit is wider, no quotient is off."""
    user = load(f"{MODELS}:drifting")
    truth = Truth(user, CPU)
    assert truth.everywhere.sizes["loss"] < 10.0 * truth.step.loss
    found, limits = derivatives(user, CPU)
    assert is_inside(found, limits)


def test_micro_batches_that_change_the_next_are_no_fault_of_ranks(repository: Repository) -> None:
    assert carried_over(load("meta_tests.own_models:all_kinds")) == []  # batch norm's statistics
    ended = checked(repository, "choosing_models:drifting", "w2-ddp")
    assert ended.code == 0, ended.text
    assert "a micro-batch changes 0.calls, 1.calls, and the loss of the next" in ended.text


def test_what_a_block_is_given_is_copied_and_its_tensors_are_not() -> None:
    x, module = torch.ones(1), nn.Linear(1, 1)
    given = {"list": [x, (x, [module])], "kind": factory.UserModelError}
    given["self"] = given
    made = rank_jobs._copied(given, {})
    assert made is not given
    assert made["self"] is made
    assert made["list"] is not given["list"]
    assert made["list"][0] is x
    assert made["list"][1][1] == [module]
    assert made["kind"] is factory.UserModelError


@pytest.mark.parametrize(
    ("spec", "which", "text"),
    [
        ("remembering", "checkpointing and fp32", "(config.use_cache = False)"),
        ("calls_parts", "w2-fully_shard", "let UserModel.wrap shard what is called as a whole"),
        ("reads_an_attribute", "w2-ddp", "let forward return what the loss needs"),
    ],
)
def test_a_program_that_raises_in_one_check_is_unverified_and_asked_for(
    repository: Repository, spec: str, which: str, text: str
) -> None:
    ended = checked(repository, f"choosing_models:{spec}", which)
    assert (ended.code, text in ended.text) == (22, True), ended.text
    assert "REGRESSION" not in ended.text


# --- kernels of a GPU, as far as a CPU can tell ---------------------------------------------------


def rnn(dropout: float, train: bool) -> tuple[object, ...]:
    """Arguments of cuDNN's recurrent layers, of which only two matter here."""
    x = torch.zeros(1, 1, 1)
    shape = (2, 1, 0, 1, False)  # mode, hidden size, projected size, layers, batch first
    return (x, [x], 4, None, x, None, *shape, dropout, train, False, [], None)


def test_a_recurrent_layer_draws_where_it_has_dropout_alone() -> None:
    cudnn, attention = aten._cudnn_rnn.default, aten._scaled_dot_product_efficient_attention.default
    assert torch.Tag.nondeterministic_seeded in cudnn.tags
    assert not draws(cudnn, rnn(0.0, True), {})
    assert not draws(cudnn, rnn(0.5, False), {})
    with pytest.raises(UserModelError, match="draws inside its kernel"):
        draws(cudnn, rnn(0.5, True), {})
    query = torch.zeros(1, 1, 1, 1)
    assert not draws(attention, (query, query, query, None, False), {})
    with pytest.raises(UserModelError, match="set the dropout inside to 0"):
        draws(attention, (query, query, query, None, False), {"dropout_p": 0.1})


def test_equal_bits_ask_cuda_for_deterministic_kernels_and_not_the_cpu() -> None:
    with repeatable(CPU):
        assert not torch.are_deterministic_algorithms_enabled()
    with repeatable(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_with_a_model_sets_the_workspace_of_cublas(repository: Repository) -> None:
    spec = "choosing_models:with_a_workspace"
    ended = repository.run("--model", spec, "--collect-only", "-q", CUBLAS_WORKSPACE_CONFIG="")
    assert "KeyError" not in ended.text
    assert "the factory raised ValueError: ''" in ended.text  # what is set stays
    ended = checked(repository, spec, "eval_draws")
    assert ended.code == 0, ended.text


def test_parameters_behind_weights_of_zero_are_not_verified(repository: Repository) -> None:
    ended = checked(repository, "choosing_models:zero_head", "can_be_verified")
    assert ended.code == 0, ended.text
    assert "2 of 3 parameters get no gradient, or exactly 0, and nothing is verified" in ended.text
    assert "0.weight, 0.bias; let the factory" in ended.text
    assert "PASS" in checked(repository, "own_models:sound", "can_be_verified").text


def test_subnormal_gradients_lie_inside_their_bound_and_outside_one_without_underflow() -> None:
    user = load(f"{MODELS}:layer_scale")
    got, recorded = recorded_step(user, CPU, torch.float16, scale=2.0**4)
    truth = Truth(user, CPU)
    off = errors(got.quantities(), truth.of(recorded).quantities())
    with_it, without = (truth.limits(FP16, scale=scale) for scale in (got.scale, 2.0**60))
    assert all(off[name] <= with_it[name] for name in off)
    assert any(off[name] > without[name] for name in off)


def test_a_factor_of_all_gradients_is_found_and_of_one_is_none() -> None:
    want = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    limits = dict.fromkeys(want, 2.0**-20)
    assert common_factor({n: 4.0 * g for n, g in want.items()}, want, limits) == 4.0
    assert common_factor({**want, "b": 4.0 * want["b"]}, want, limits) is None
    assert common_factor({n: 0.0 * g for n, g in want.items()}, want, limits) is None
