"""The golden store in real runs: damage is found; truth is proposed, blessed and verified."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from meta_tests.running import Repository, change_json, copy_repository, read_json

TRUTH = Path("golden", "truth")
FILE = TRUTH / "grad_scaler.safetensors"
ONE_CASE = ("-k", "defaults")


def tree(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def git(repository: Repository, *arguments: str) -> None:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    command = ["git", "-C", str(repository.root), *identity, *arguments]
    subprocess.run(command, check=True, capture_output=True)


# --- damage -------------------------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    """The last of the first number in a safetensors file."""
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda root: flip_a_bit(root / FILE), f"{FILE} is not what manifest.json says"),
    "truncated": (
        lambda root: (root / FILE).write_bytes((root / FILE).read_bytes()[:-1]),
        f"{FILE} is not what manifest.json says",
    ),
    "missing": (lambda root: (root / FILE).unlink(), f"{FILE} is missing or unreadable"),
    "orphaned": (
        lambda root: (root / TRUTH / "gelo.safetensors").touch(),
        f"{TRUTH}/gelo.safetensors is orphaned: the manifest does not list it; remove it",
    ),
    "schema": (
        lambda root: change_json(root / TRUTH / "manifest.json", schema=0),
        f"{TRUTH}/manifest.json has golden schema 0, this suite reads 1",
    ),
    "no manifest": (
        lambda root: (root / TRUTH / "manifest.json").unlink(),
        f"{TRUTH}/manifest.json is missing; restore it from git",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_store_ends_with_23_and_names_the_file(tmp_path: Path, damage: str) -> None:
    repository = copy_repository(tmp_path, "grad_scaler")
    spoil, text = DAMAGE[damage]
    spoil(repository.root)
    ended = repository.run(*ONE_CASE)
    assert ended.code == 23
    assert f"golden store: {repository.root}/{text}" in ended.text.replace("\n", " ")
    assert "passed" not in ended.text


# --- generators ---------------------------------------------------------------------------------


def test_a_generator_may_change_but_not_what_it_makes(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "grad_scaler")
    checks = "precision_tests/test_grad_scaler.py"
    division = "return dividend / divisor\n"
    repository.edit(checks, division, f"assert divisor > 0\n    {division}")
    assert repository.run("-k", "test_unscale and 65536").code == 0
    repository.edit(checks, division, "return dividend / divisor * (1 + 2.0**-20)\n")
    ended = repository.run("-k", "defaults or (test_unscale and 65536)", "--record", "record")
    assert ended.code == 23
    told = "the generator of truth grad_scaler/division changed and makes other values"
    assert told in ended.text
    assert "golden store:\n" in ended.text
    assert "1 failed, 1 passed" in ended.text
    assert read_json(repository.root / "record" / "verdict.json")["exit_code"] == 23


def test_verification_makes_the_truth_again_and_sees_a_changed_store(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "grad_scaler")
    sound = repository.run("--golden=verify", "-k", "grad_scaler")
    assert sound.code == 0
    assert re.search(r"grad_scaler/division: same bytes \(\d{6} values\)", sound.text)
    assert "golden truth made again" in sound.text
    assert "passed" not in sound.text

    # A store that agrees with its manifest, so that only making it again can tell.
    flip_a_bit(repository.root / FILE)
    manifest = repository.root / TRUTH / "manifest.json"
    files = read_json(manifest)["files"]
    files[FILE.name]["sha256"] = hashlib.sha256((repository.root / FILE).read_bytes()).hexdigest()
    change_json(manifest, files=files)
    changed = repository.run("--golden=verify", "-k", "grad_scaler")
    assert changed.code == 23
    assert re.search(
        r"grad_scaler/division: 1 of \d{6} values moved by up to 1 ulp: NOT REPRODUCED",
        changed.text,
    )
    nothing = repository.run("--golden=verify", "-k", "no_such_check")
    assert nothing.code == 5


# --- proposals ----------------------------------------------------------------------------------


def test_a_proposal_is_looked_at_blessed_and_then_the_baseline(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "grad_scaler")
    git(repository, "init", "-q")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "All")
    before = tree(repository.root / "golden")
    checks, division = "precision_tests/test_grad_scaler.py", "return dividend / divisor\n"
    repository.edit(checks, division, "return dividend / divisor * (1 + 2.0**-24)\n")
    dirty = repository.run("--golden=propose", *ONE_CASE)
    assert dirty.code == 24
    assert "two fresh processes agree bit for bit" in dirty.text
    assert "verdict: golden references were proposed" in dirty.text
    refused = repository.run("--golden=bless", "--reason", "another factor")
    assert refused.code == 4
    assert "the proposal was made on a dirty tree" in refused.text

    git(repository, "commit", "-q", "-a", "-m", "Another factor")
    proposed = "reports/runs/proposed"
    assert repository.run("--golden=propose", *ONE_CASE, f"--record={proposed}").code == 24
    assert repository.run("exit-code", proposed, module="reports").code == 24
    staged = tree(repository.root / "golden" / ".staging")
    assert {
        k: v for k, v in tree(repository.root / "golden").items() if ".staging" not in k
    } == before
    shown = repository.run("--golden=diff")
    assert shown.code == 0
    assert re.search(r"grad_scaler/division 3: \d+ of \d+ moved, by up to [\d.]+ ulp", shown.text)
    assert "no earlier record of this device" in shown.text

    assert repository.run("--golden=bless", "--reason", "another factor").code == 0
    after = tree(repository.root / "golden")
    log = json.loads(after.pop("log.jsonl"))
    assert log["reason"] == "another factor"
    assert any("grad_scaler/division 3:" in line for line in log["changes"])
    assert after == {k: v for k, v in staged.items() if k != "proposal.json"}

    following = repository.run("-k", "test_unscale or defaults")
    assert following.code == 0
    environment = re.search(r"precision: baseline golden/observed (cpu/\w{12})\n", following.text)
    assert environment is not None

    # A narrower proposal keeps what was observed of other cases. This one skips its second process.
    narrow = ("--golden=propose", "-k", "large_gradients")
    assert repository.run(*narrow, PRECISION_REHEARSAL="rehearsal").code == 24
    observed = repository.root / "rehearsal" / "observed" / environment[1] / "cases.json"
    names = [case["name"] for case in read_json(observed)["cases"]]
    assert names == ["defaults", "large-gradients-do-not-back-off"]

    (repository.root / "golden" / "observed" / environment[1] / "tensors.safetensors").unlink()
    damaged = repository.run(*ONE_CASE)
    assert damaged.code == 23
    assert f"observed/{environment[1]}/tensors.safetensors cannot be read" in damaged.text


def test_a_proposal_outside_git_cannot_be_blessed(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks("class TestOp:\n    def test_it(self, check): check.exact(1, 1)\n")
    proposed = repository.run("--golden=propose")
    assert proposed.code == 24
    assert "it cannot be blessed: the proposal was made outside git" in proposed.text
    before = tree(repository.root / "golden")
    refused = repository.run("--golden=bless", "--reason", "why not")
    assert refused.code == 4
    assert "the proposal was made outside git" in refused.text
    assert tree(repository.root / "golden") == before


UNFIT = {
    "outside": ("check.exact(1, 2)", 1, "an observed value lies outside its bound"),
    "random": (
        "check.observe(os.urandom(8).hex())",
        21,
        "observed other bits in weight_update/op/it",
    ),
    "interrupted": ("os.kill(os.getpid(), signal.SIGINT)", 2, "the run was interrupted"),
}


@pytest.mark.parametrize("fate", UNFIT)
def test_an_unfit_proposal_is_withdrawn_and_the_store_untouched(tmp_path: Path, fate: str) -> None:
    repository = copy_repository(tmp_path)
    before = tree(repository.root / "golden")
    act, code, text = UNFIT[fate]
    repository.write_checks(
        f"""
        class TestOp:
            def test_first(self, check):
                check.exact(1, 1)

            def test_it(self, check):
                {act}
        """
    )
    ended = repository.run("--golden=propose")
    assert ended.code == code
    assert f"proposal withdrawn: {text}" in ended.text or text in ended.text
    assert tree(repository.root / "golden") == before


def test_truth_that_is_not_finite_is_not_proposed(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    before = tree(repository.root / "golden")
    repository.write_checks(
        """
        from fixtures.golden import Golden, Truth

        def quotient():
            return Truth(inputs={}, values={"q": torch.tensor([1.0, torch.inf])})

        GOLDEN = (Golden("weight_update", "quotient", quotient, {}, "exact", "exact"),)

        class TestOp:
            def test_it(self, check):
                check.exact(1, 1)
        """
    )
    ended = repository.run("--golden=propose")
    assert ended.code == 23
    assert (
        "truth weight_update/quotient: q[1] is inf, which its finite mask does not say"
        in ended.text
    )
    assert "Traceback" not in ended.text
    assert tree(repository.root / "golden") == before
