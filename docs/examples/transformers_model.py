"""A GPT-2 of transformers, small and randomly initialised: nothing is downloaded.

pip install transformers
pytest precision_tests/test_model.py --model docs.examples.transformers_model:factory
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS = 61


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy of the next token."""
    logits = model(input_ids=batch["tokens"]).logits  # (B, T, V)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


def factory() -> tuple[nn.Module, Any, list[dict[str, Tensor]]]:
    """Model, loss function and batches. Seeds are set before each call: all ranks make the same."""
    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    batches = [{"tokens": torch.randint(TOKENS, (2, 12))} for _ in range(4)]
    return GPT2LMHeadModel(config), loss, batches
