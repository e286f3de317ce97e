"""Parts of the caches' keys: of ours, which keeps plans, and of AOTAutograd's and Inductor's, which keep code.

In: a graph with its inputs, the options, this package's own source and the state of the process. Out: texts and digests that are
equal in two processes where the same plan and the same code serve.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import fx

from autohete_fx.capture.inputs import GraphInput, device_of
from autohete_fx.capture.paths import module_stack
from autohete_fx.compiler.pass_identity import pass_identity
from autohete_fx.internals import versions
from autohete_fx.internals.configs import functorch_config, inductor_config
from autohete_fx.options import Options, UserPasses
from autohete_fx.runtime.held import whole_of

_INDUCTOR_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def graph_digest(gm: fx.GraphModule, inputs: Sequence[GraphInput], options: Options, *, with_sizes: bool = True) -> str:
    """A digest of the graph, its inputs' layouts and the options that shape code; the same in every process.

    Args:
        with_sizes: of inputs whose sizes may change, those that they have now.
    """
    traced = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    shaped = [
        value if not with_sizes and isinstance(value, torch.Tensor) else i.tensor
        for i, value in zip(inputs, traced, strict=True)
    ]
    layouts = [
        (
            i.name,
            str(i.tensor.dtype),
            tuple(map(str, of.shape)),
            tuple(map(str, of.stride())),
            i.tensor.requires_grad,
            described_parts(i.tensor),
        )
        if i.tensor is not None and of is not None
        else (i.name,)
        for i, of in zip(inputs, shaped, strict=True)
    ]
    parts = [
        described_code(gm),
        layouts,
        option_fields(options),
        torch.is_grad_enabled(),
        str(device_of(inputs)),
        torch.__version__,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def described_code(gm: fx.GraphModule) -> list[tuple[object, ...]]:
    """The operations of a graph and the modules that they are of, with those of its subgraphs.

    A graph's own code only names them, such as the bodies of checkpoints.
    """
    graphs = [(name, graph) for name, graph in gm.named_modules() if isinstance(graph, fx.GraphModule)]
    return [
        (name, graph.code, [(node.name, module_stack(node)) for node in graph.graph.nodes]) for name, graph in graphs
    ]


def described_parts(param: torch.Tensor) -> str:
    """How ranks divide a DTensor parameter of which this rank holds a part; empty for any other tensor."""
    whole = whole_of(param)
    return "" if whole is None else f"{tuple(whole.shape)} {getattr(whole, 'placements', ())}"


def option_fields(options: Options) -> tuple[tuple[str, str], ...]:
    """The options that shape generated code, as (name, text) pairs that are equal in every process; for cache keys.

    The plan is not among them. Compiled code depends on the plan that was *used*, whether it was given or solved for, so the
    caller adds that plan's digest. Budgets and limits act through the plan alone. Warns where a user's pass has no identity
    that outlives this process.
    """
    passes = ((f"passes.{f.name}", getattr(options.passes, f.name)) for f in fields(UserPasses))
    return (
        ("inner_backend", options.inner_backend),
        ("micro_batches", str(options.micro_batches)),
        *((point, ",".join(pass_identity(user_pass) for user_pass in chosen)) for point, chosen in passes),
    )


def described_options(options: Options) -> dict[str, object]:
    """The options that ranks which hold a model together must be given alike; where files are kept may differ. Passes go by their
    names: those without an identity that outlives this process have no other."""
    passes = {
        f.name: [getattr(p, "__qualname__", type(p).__name__) for p in getattr(options.passes, f.name)]
        for f in fields(UserPasses)
    }
    return {
        "memory_budget": options.memory_budget,
        "host_budget": options.host_budget,
        "allow": sorted(options.allow),
        "micro_batches": options.micro_batches,
        "in_flight": options.in_flight,
        "inner_backend": options.inner_backend,
        "profile": options.profile,
        "plan": options.plan.digest if options.plan else None,
        "solver_time_limit_s": options.solver_time_limit_s,
        "passes": passes,
    }


def surroundings(device: torch.device) -> tuple[object, ...]:
    """State of the process that shapes the joint graph or its code: a plan made under another does not fit.

    PyTorch's own cache keys hold the same. Inductor's options for custom passes are not in its portable configuration.
    """
    user_passes = [versions.custom_passes(getattr(inductor_config, name)) for name in _INDUCTOR_PASSES]
    configs = (inductor_config, functorch_config)
    return (
        [sorted(config.save_config_portable(ignore_private_configs=False).items()) for config in configs],
        [[pass_identity(p) for p in passes] for passes in user_passes],
        [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted({"cpu", device.type})],
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        # Which operator attention becomes.
        [getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in _ATTENTION_KERNELS],
    )
