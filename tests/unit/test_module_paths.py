"""Module paths as values: the forms that the compiler records, and what encloses a node."""

import pytest
from torch import fx, nn

from autohete_fx.capture.paths import dotted, module_stack, scopes, split_path


@pytest.mark.parametrize(
    ("recorded", "name"),
    [
        ("L['self'].model.layers.0", "model.layers.0"),
        ("L['self']._modules['model']._modules['layers']._modules['0']", "model.layers.0"),
        ("G['model'].layers[3].mlp", "layers.3.mlp"),
        ('L["m"].blocks["early"]', "blocks.early"),
        ("L['self']._orig_mod.h.1", "h.1"),
        (
            "L['self'].__dict__['_modules']['base_model'].__dict__['_modules']['model'].layers.0",
            "base_model.model.layers.0",
        ),
        ("layers.0.attn", "layers.0.attn"),
        ("L['function'].__closure__[0].cell_contents.__closure__[1].cell_contents.layers.0", "layers.0"),
        ("L['args'][0]._modules['model'].layers.0", "model.layers.0"),
        ("L['m']", ""),
        ("", ""),
    ],
)
def test_every_recorded_form_gives_the_users_name(recorded: str, name: str):
    assert dotted(split_path(recorded)) == name


def test_equal_paths_of_two_models_stay_apart():
    assert split_path("L['a'].layers.0") != split_path("L['b'].layers.0")


def node_with(**meta: object) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta.update(meta)
    return node


def test_scopes_name_indexed_containers_and_calls():
    stack = {"1": ("L['m']", nn.Module), "2@3": ("L['m'].layers.0", nn.Linear), "4": ("L['m'].table", "a.Table")}
    found = list(scopes(module_stack(node_with(nn_module_stack=stack))))
    root = "L['m']"
    expected = [((root,), ""), ((root, "layers"), ""), ((root, "layers", "0"), "3"), ((root, "table"), "")]
    assert found == expected


def test_backward_nodes_carry_the_forward_stack():
    stack = {"1": ("L['m'].head", nn.Linear)}
    (call,) = module_stack(node_with(fwd_nn_module_stack=stack))
    assert (dotted(call.path), call.type_name) == ("head", "torch.nn.modules.linear.Linear")
    assert module_stack(node_with()) == ()
