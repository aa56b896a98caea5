"""``make zoo``: the ten models are there, take a step, and the table says what a run found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.own_model.factory import load
from fixtures.own_model.trial import require_trainable
from fixtures.own_model.zoo import KINDS, __main__, language, vision

PLAIN = ("language:encoder", "language:encoder_decoder", "vision:convolutional")


@pytest.mark.parametrize("kind", KINDS)
def test_each_model_takes_its_plain_step(kind: str) -> None:
    spec = f"fixtures.own_model.zoo.{kind}"
    require_trainable(spec, load(spec))


@pytest.mark.parametrize("kind", PLAIN)
def test_without_transformers_torch_s_own_layers_serve(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (language, vision):
        monkeypatch.setattr(module, "TRANSFORMERS", False)
    spec = f"fixtures.own_model.zoo.{kind}"
    user = load(spec)
    assert type(user.model).__module__.startswith("fixtures.own_model.zoo")
    require_trainable(spec, user)


def test_the_table_counts_verdicts_and_gives_the_reason_of_what_did_not_pass(
    tmp_path: Path,
) -> None:
    cases = {
        "model/whole/a/cpu": {"verdict": "PASS", "detail": ""},
        "model/whole/b/cpu": {"verdict": "UNVERIFIED", "detail": "no compiler\nhere"},
    }
    (tmp_path / "verdict.json").write_text(json.dumps({"cases": cases}))
    found = __main__.read(tmp_path)
    assert found == ("1 PASS, 1 UNVERIFIED", ["UNVERIFIED model/whole/b/cpu: no compiler"])
    assert __main__.read(tmp_path / "nowhere") == ("", [])


@pytest.mark.parametrize(
    ("said", "models"),
    [("error: unrecognized arguments: --gone", 1), ("ERROR: --model a:b: parameters", len(KINDS))],
)
def test_options_that_pytest_refuses_are_told_once(
    said: str, models: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = [sys.executable, "-S", "-c", f"raise SystemExit(print({said!r}) or 4)"]
    run = subprocess.run

    def refuse(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return run(refused, **options)

    monkeypatch.setattr(subprocess, "run", refuse)
    assert __main__.main(["--gone"]) == 4
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count(said) == models
