"""The tables that Part C is made of: what was found, what to do, why. Needs no torch.

Each setting was tried, or stands in the documentation that the reason names. Left out are findings
that no setting helps.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """One row.

    Attributes:
        patterns: ``*`` and ``?`` over case ids, names of environment fields, or reasons.
        do: the command or setting; ``{old}`` is the baseline's value, ``{mark}`` a device's mark.
        why: its reason.
        finding: what was found, where the pattern does not say it.
        names: what ``do`` takes for granted in torch, as dotted names.
    """

    patterns: tuple[str, ...]
    do: str
    why: str
    finding: str = ""
    names: tuple[str, ...] = ()


# --- a node outside its bounds: what tells its mechanism from others ------------------------------

FAILED: tuple[Remedy, ...] = (
    Remedy(
        ("seed_layers/*",),
        "torch.manual_seed(seed) before the first draw, also before the model is made",
        "it seeds the CPU's and every CUDA generator; a draw before it shifts all that follow",
        "Seeds and initialisation",
        ("torch.manual_seed",),
    ),
    Remedy(
        ("data_order/*",),
        "sampler.set_epoch(epoch) before each epoch, and a generator of its own for the loader",
        "DistributedSampler repeats its first order without it; a loader without a generator "
        "draws from the global one and shifts every later draw",
        "Data order",
        ("torch.utils.data.DistributedSampler.set_epoch",),
    ),
    Remedy(
        ("attention/*",),
        "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): ...",
        "computes by matmul and softmax: if the case holds under it, the fused kernel is at fault; "
        "a case named projection is F.linear's, which this leaves as it is",
        "Attention",
        ("torch.nn.attention.sdpa_kernel", "torch.nn.attention.SDPBackend.MATH"),
    ),
    Remedy(
        ("layer_norm/*",),
        "layer_norm(x.float()).to(x.dtype)",
        "an input in fp32 keeps mean, variance and the sums over rows in fp32",
        "Layer norm",
    ),
    Remedy(
        ("gelu/*",),
        "with torch.backends.mkldnn.flags(enabled=False): ...",
        "takes torch's own kernel on the CPU: if the case holds under it, oneDNN's is at fault",
        "GELU",
        ("torch.backends.mkldnn.flags",),
    ),
    Remedy(
        ("dropout_mask/*",),
        "torch._inductor.config.fallback_random = True, where the model is compiled",
        "a compiled graph draws other masks than eager code unless this is set",
        "Dropout mask",
        ("torch._inductor.config.fallback_random",),
    ),
    Remedy(
        ("cross_entropy/*",),
        "F.cross_entropy(logits.float(), target)",
        "exponentials, their sum and the mean then stay in fp32",
        "Cross entropy",
        ("torch.nn.functional.cross_entropy",),
    ),
    Remedy(
        ("checkpoint_recompute/*",),
        "checkpoint(..., use_reentrant=False, preserve_rng_state=True)",
        "the recomputation then restores the generator, and compares shapes and formats with the "
        "first forward (determinism_check='default')",
        "Checkpoint recompute",
        ("torch.utils.checkpoint.checkpoint",),
    ),
    Remedy(
        ("grad_scaler/*",),
        "scaler.unscale_(optimizer) once before clipping; log scaler.get_scale() each step",
        "gradients are clipped by their true norm; a scale that keeps halving shows overflow",
        "Gradient scaler",
        ("torch.amp.GradScaler.unscale_", "torch.amp.GradScaler.get_scale"),
    ),
    Remedy(
        ("gradient_accumulation/*",),
        "loss = F.cross_entropy(..., reduction='sum') / targets_of_all_micro_batches",
        "a mean of means weighs micro-batches alike, however many targets each has; keep the "
        "accumulated gradient in fp32",
        "Gradient accumulation",
        ("torch.nn.functional.cross_entropy",),
    ),
    Remedy(
        ("all_reduce/*",),
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
        "gradients are then summed over ranks in fp32; if the case holds, the 16-bit sum is at "
        "fault",
        "All-reduce",
        ("torch.distributed.fsdp.MixedPrecisionPolicy",),
    ),
    Remedy(
        ("weight_update/*",),
        "torch.optim.AdamW(..., foreach=False, fused=False)",
        "the plain loop over parameters: if the case holds under it, the fused or foreach kernel "
        "is at fault",
        "Weight update",
        ("torch.optim.AdamW",),
    ),
)

# --- a field of the environment that changed, where something moved -------------------------------

CHANGED: tuple[Remedy, ...] = (
    Remedy(
        ("torch", "torch_git"),
        "pip install torch=={old}",
        "keeps the old release until the moves below are understood and blessed",
    ),
    Remedy(
        ("isa",),
        "ATEN_CPU_CAPABILITY=avx2 (or default) on both sides",
        "torch's own CPU kernels then take the same vector width on both machines",
    ),
    # oneMKL Developer Guide, "Getting Started with Conditional Numerical Reproducibility"
    Remedy(
        ("cpu", "mkl", "MKL_*"),
        "MKL_CBWR=AVX2 on both sides",
        "MKL then takes one code path on every Intel CPU that has AVX2 (Conditional Numerical "
        "Reproducibility); other vendors' CPUs take MKL's own choice",
    ),
    # oneDNN Developer Guide 2024.2, "CPU Dispatcher Control" and "Floating-point Math Mode"
    Remedy(
        ("onednn", "ONEDNN_*", "DNNL_*", "mkldnn_enabled"),
        "ONEDNN_MAX_CPU_ISA=AVX2 on both sides; ONEDNN_DEFAULT_FPMATH_MODE unset or STRICT",
        "oneDNN then takes the same kernels, and does not round fp32 operands to bf16 or tf32",
    ),
    Remedy(
        ("threads",),
        "python -m pytest --threads {old}; in training OMP_NUM_THREADS={old}",
        "the number of threads decides how sums are split, and so how they round",
    ),
    Remedy(
        ("flushes_denormals",),
        "torch.set_flush_denormal(False)",
        "flushing turns numbers below the smallest normal into 0",
        names=("torch.set_flush_denormal",),
    ),
    Remedy(
        ("default_dtype",),
        "torch.set_default_dtype(torch.float32)",
        "tensors made without a dtype, and what is computed of them, follow it",
        names=("torch.set_default_dtype",),
    ),
    Remedy(
        ("deterministic_algorithms",),
        "torch.use_deterministic_algorithms(True) on both sides",
        "deterministic operations are other kernels, and round differently",
        names=("torch.use_deterministic_algorithms",),
    ),
    Remedy(
        ("sdpa_*",),
        "with torch.nn.attention.sdpa_kernel([...]): the same backends on both sides",
        "flash, memory-efficient, cuDNN and math attention add in different orders",
        names=("torch.nn.attention.sdpa_kernel",),
    ),
    Remedy(
        ("float32_matmul_precision", "tf32_*", "*_fp32_precision", "*TF32_OVERRIDE"),
        "torch.set_float32_matmul_precision('highest'); torch.backends.cudnn.allow_tf32 = False",
        "fp32 operands are then not rounded to TF32's 10 bits",
        names=("torch.set_float32_matmul_precision", "torch.backends.cudnn.allow_tf32"),
    ),
    Remedy(
        ("bf16_reduced_reduction", "fp16_reduced_reduction", "fp16_accumulation"),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False (allow_fp16_... "
        "for fp16; allow_fp16_accumulation = False)",
        "cuBLAS may otherwise add partial sums in 16 bit",
        names=(
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
            "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        ),
    ),
    Remedy(
        ("cudnn_benchmark", "cudnn_deterministic"),
        "torch.backends.cudnn.benchmark = False; torch.backends.cudnn.deterministic = True",
        "benchmarking may choose another algorithm in each process",
        names=("torch.backends.cudnn.benchmark", "torch.backends.cudnn.deterministic"),
    ),
    # cuBLAS documentation, 2.1.4 "Results Reproducibility"
    Remedy(
        ("CUBLAS*_WORKSPACE*",),
        "CUBLAS_WORKSPACE_CONFIG=:4096:8 on both sides, before CUDA starts",
        "cuBLAS may otherwise take other internal workspaces, and kernels, where streams run side "
        "by side",
    ),
    # github.com/NVIDIA/nccl at 5067397 (2.30), docs/userguide/source/env.rst
    Remedy(
        ("NCCL_*", "nccl", "hosts"),
        "NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_NVLS_ENABLE=0 on both sides, while you compare",
        "algorithm and protocol decide in which order ranks are added, NVLink SHARP adds in the "
        "switch; NCCL advises against NCCL_PROTO but for a search like this one. Set one at a "
        "time: what still moves has another cause",
    ),
    Remedy(
        ("gpu", "capability", "multiprocessors", "driver", "cuda", "cublas", "cudnn"),
        "make predict FROM=A100 TO=H100, with your two GPUs",
        "says which operations a change of GPU moves and why; cuBLAS promises equal bits only for "
        "the same architecture, number of multiprocessors and toolkit",
    ),
)

# --- known faults: what avoids each ---------------------------------------------------------------

KNOWN: tuple[Remedy, ...] = (
    Remedy(
        ("seed_layers/bound/law-*", "seed_layers/op/uniform-in-16-bit-*"),
        "draw in fp32 on the CPU, then .to(torch.bfloat16)",
        "fp32 draws use 24 bits of the generator's word and have no short tails",
    ),
    Remedy(
        ("checkpoint_recompute/op/recomputes-under-the-autocast-*",),
        "use_reentrant=False, or torch.autocast(..., cache_enabled=False)",
        "no weight that was cast without a graph is then used again with one",
        names=("torch.autocast",),
    ),
    Remedy(
        ("layer_norm/op/rms-norm-*",),
        "F.rms_norm(x.float(), ...).to(x.dtype)",
        "one rounding at the end instead of one at each step",
        names=("torch.nn.functional.rms_norm",),
    ),
    Remedy(
        ("all_reduce/op/clipping-sees-the-global-norm-*",),
        "model.clip_grad_norm_(max_norm) of FullyShardedDataParallel, or fully_shard",
        "the method reduces the norm over ranks; nn.utils.clip_grad_norm_ sees one shard only",
        names=("torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",),
    ),
    Remedy(
        (
            "weight_update/op/parameters-and-state-*/fused",
            "weight_update/op/an-update-beyond-half-an-ulp-*/fused",
            "weight_update/op/layouts-*/fused",
            "grad_scaler/op/skipped-first-step-*/fused",
        ),
        "fused=False for this optimizer, on the CPU",
        "the loop and the foreach form have not this fault",
        names=("torch.optim.SGD",),
    ),
    Remedy(
        ("cross_entropy/op/mean-of-many-rows/*",),
        "F.cross_entropy(logits.float(), target)",
        "the losses are then summed in fp32, where 20,000 of them do not overflow",
        names=("torch.nn.functional.cross_entropy",),
    ),
    Remedy(
        ("cross_entropy/flow/mean-over-a-sharded-batch-*",),
        "reduction='sum', divided by the number of valid targets of all ranks",
        "a sum over shards is right whatever their sizes; only the mean is not",
    ),
    Remedy(
        ("cross_entropy/flow/log-softmax-inside-loss-parallel/*",),
        "F.cross_entropy inside loss_parallel(), not log_softmax alone",
        "only the whole loss has its gradient defined there",
        names=("torch.distributed.tensor.parallel.loss_parallel",),
    ),
    Remedy(
        ("layer_norm/op/many-rows-*", "layer_norm/bound/gradient-is-bounded-by-*"),
        "layer_norm(x.float()).to(x.dtype), weights in fp32 too",
        "sums over rows, mean and rstd are then kept in fp32; on the CPU autocast does not do it",
    ),
    Remedy(
        ("layer_norm/op/scale-of-the-input-100-*",),
        "scale the input below 1e19 first, or norm it in float64",
        "squares of fp32 overflow from 1.8e19 up",
    ),
    Remedy(
        ("gelu/op/forward-erf-huge/*", "gelu/op/limit-at-infinity-plus-*"),
        "with torch.backends.mkldnn.flags(enabled=False): ...",
        "torch's own kernel has not this fault; it matters only above 1.7e38",
        names=("torch.backends.mkldnn.flags",),
    ),
    Remedy(
        ("gelu/op/gradient-tanh-huge/*",),
        "F.gelu(x), the erf form",
        "its gradient stays finite; it matters only above 1.8e19",
        names=("torch.nn.functional.gelu",),
    ),
    Remedy(
        ("attention/op/nan-in-nan-out-*",),
        "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): ...; or test loss.isfinite()",
        "the math form passes NaN on; the flash kernel of the CPU may hide it",
        names=("torch.nn.attention.sdpa_kernel",),
    ),
    Remedy(
        ("gradient_accumulation/op/sums-inside-one-backward/*",),
        "keep embedding weights in fp32, cast what they give: embedding(tokens).to(dtype)",
        "the gradient of a token that is seen often is then summed in fp32",
    ),
    Remedy(
        ("grad_scaler/op/scale-never-reaches-zero/*",),
        "stop when scaler.get_scale() falls below 1",
        "GradScaler has no lower limit; at 0 the next finite step makes weights NaN",
        names=("torch.amp.GradScaler.get_scale",),
    ),
    Remedy(
        ("checkpoint_recompute/op/changed-weights-are-detected/*",),
        "optimizer.step() only after backward()",
        "the recomputation uses the weights of then, and says nothing",
    ),
    Remedy(
        ("trainers/whole/resumed-order-*/cpu/accelerate",),
        "DataLoaderConfiguration(use_seedable_sampler=True)",
        "the order is then made anew from seed and epoch when a run resumes",
    ),
    Remedy(
        ("end_to_end/sharding/*/fsdp1-hybrid-4x1",),
        "torch.nn.parallel.DistributedDataParallel",
        "a mesh with one shard shards nothing, and makes FSDP1 skip the reduction between copies",
        names=("torch.nn.parallel.DistributedDataParallel",),
    ),
)

# --- what could not be verified: what makes it possible -------------------------------------------

UNVERIFIED: tuple[Remedy, ...] = (
    Remedy(
        ("no * device is visible*",),
        "python -m pytest -m {mark} --record=DIR, on a machine that has one",
        "the record travels: python -m reports compare OLD DIR judges it anywhere",
    ),
    Remedy(
        ("torch.compile needs a C++ compiler*",),
        "apt-get install g++ (or set CXX)",
        "inductor compiles its CPU kernels with it",
    ),
    Remedy(
        ("* is not installed: pip install *trainers*",),
        "pip install -e '.[trainers]'",
        "brings accelerate, transformers and lightning",
    ),
    Remedy(
        ("ZeRO-3 needs deepspeed*",),
        "pip install -e '.[zero]'",
        "brings deepspeed, to compare fully_shard with",
    ),
)
