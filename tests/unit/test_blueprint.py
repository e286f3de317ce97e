"""Models by name, by configuration file and by factory: built without memory, and refused with what to do."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autohete_fx.errors import OptionError
from autohete_fx.whatif.architectures import ARCHITECTURES
from autohete_fx.whatif.blueprint import Blueprint, Sketch, read_model
from tests.main_job import slow

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def read(text: str, batch: int = 2, seq: int = 8, dtype: torch.dtype | None = None) -> Blueprint:
    return read_model(text, batch=batch, seq=seq, dtype=dtype)


def build(blueprint: Blueprint, num_layers: int | None = None) -> Sketch:
    return blueprint.build(FakeTensorMode(), num_layers)


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


BILLIONS = {
    "gpt2-xl": 1.56, "gpt-22b": 22.1, "llama-2-7b": 6.74, "llama-2-13b": 13.0, "llama-3-8b": 8.03, "llama-3.2-1b": 1.24,
    "mistral-7b": 7.25, "qwen2.5-7b": 7.62, "qwen3-0.6b": 0.6, "qwen3-8b": 8.19, "gemma-2b": 2.51, "gemma-3-1b": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", [n if n in ("gpt2-xl", "llama-3-8b") else slow(n) for n in BILLIONS])
def test_known_models_have_the_parameters_that_their_names_promise(name: str):
    """The counts are those of the published models; 44 GB of weights take no memory here."""
    parameters = list(build(read(name)).module.parameters())
    assert all(isinstance(p, FakeTensor) and p.dtype is torch.bfloat16 for p in parameters)
    assert sum(p.numel() for p in parameters) / 1e9 == pytest.approx(BILLIONS[name], rel=0.02)


def test_every_name_is_a_configuration():
    for name in ARCHITECTURES:
        assert read(name).num_layers


def test_a_configuration_file_is_built_as_deep_as_asked(tmp_path: Path):
    blueprint = read(write(tmp_path, "config.json", json.dumps(TINY)), dtype=torch.float32)
    assert (blueprint.num_layers, blueprint.period) == (3, 1)
    sketch = build(blueprint, 2)
    assert len(sketch.module.get_submodule("model.layers")) == 2 and sketch.module.training
    assert {p.dtype for p in sketch.module.parameters()} == {torch.float32}
    assert [tuple(i.shape) for i in sketch.inputs] == [(2, 8)]


def test_layer_types_repeat():
    assert read("gemma-3-1b").period == 6
    sketch = build(read("gemma-3-1b"), 8)
    assert sketch.module.config.layer_types.count("full_attention") == 1


FACTORIES = """
import torch
from torch import nn

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x).square().mean()

def module():
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
def with_inputs():
    return Loss(), (torch.randn(3, 4),)
def with_named_inputs():
    return Loss(), {"x": torch.randn(5, 4)}
def with_another_name():
    return Loss(), {"y": torch.randn(5, 4)}
def tied():
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
    model[1].weight = model[0].weight
    return model
def converted():
    model = tied()
    model[0].register_buffer("scale", torch.ones(3))
    assert model.to(torch.float16).bfloat16() is model
    return model
class Output:
    def __init__(self, logits):
        self.loss, self.logits = None, logits
RATE = torch.full((), 0.5)
class Returning(nn.Module):  # as models of transformers are, with constants as in vision models, and tensors wherever there are any
    def __init__(self, make):
        super().__init__()
        self.make, self.embed, self.head = make, nn.Embedding(50, 16), nn.Linear(16, 50)
        self.scale, self.more = torch.ones(16), {"scales": [torch.ones(16)]}
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3, device="cpu")]
    def forward(self, tokens):
        return self.make(self.head(self.embed(tokens) * self.scale * self.more["scales"][0] * RATE))
def with_logits():
    return Returning(Output)
def with_names():
    return Returning(lambda logits: {"logits": logits, "loss": logits.mean()})
def with_a_loss_beside():
    return Returning(lambda logits: (logits, logits.mean()))
def on_a_device():
    return Returning(Output).to("cuda").cpu().cuda()
def nested():
    return Nested(), ({"x": [torch.randn(3, 4)]},)
class Nested(Loss):
    def forward(self, batch):
        return super().forward(batch["x"][0])
@torch.compile
def act(x):
    return x.sin()
def compiled():
    model = nn.Sequential(torch.compile(nn.Embedding(50, 16)), nn.Linear(16, 50))
    model[1].register_forward_hook(lambda module, inputs, output: act(output))
    model[1].compile()
    return torch.compile(model)
def unknown_shapes():
    return nn.Sequential(nn.Embedding(50, 16), nn.LazyLinear(50))
def two_scalars():
    return Returning(lambda logits: (logits.mean(), logits.sum()))
def no_module():
    return 3
def nothing():
    return ()
def wrong_inputs():
    return Loss()
def no_loss():
    return nn.Linear(4, 4), torch.randn(3, 4)
def broken():
    return torch.zeros(3).tolist()
"""


def test_factories_give_modules_and_inputs(tmp_path: Path):
    file = write(tmp_path, "models.py", FACTORIES)
    sketch = build(read(f"{file}:module"))
    assert sketch.inputs[0].shape == sketch.batch == (2, 8) and sketch.inputs[0].dtype is torch.int64
    assert all(isinstance(p, FakeTensor) for p in sketch.module.parameters())
    sketch = build(read(f"{file}:with_named_inputs"))
    assert sketch.inputs[0].shape == (5, 4) and sketch.loss(*sketch.inputs).shape == ()
    assert sketch.batch == (5, 1), "no token ids: each example is one"
    sketch = build(read(f"{file}:with_inputs", dtype=torch.bfloat16))
    assert sketch.inputs[0].shape == (3, 4)
    assert {p.dtype for p in sketch.module.parameters()} == {torch.bfloat16}
    tied = build(read(f"{file}:tied", dtype=torch.bfloat16)).module
    assert len(list(tied.parameters())) == 1
    for name in ("with_logits", "with_names", "with_a_loss_beside", "on_a_device", "nested", "compiled"):
        sketch = build(read(f"{file}:{name}"))
        with torch.compiler.set_stance("force_eager"):
            assert sketch.loss(*sketch.inputs).shape == (), name
        assert type(sketch.module).__name__ in ("Returning", "Nested", "Sequential"), name
    converted = build(read(f"{file}:converted")).module
    assert [t.dtype for t in (*converted.parameters(), *converted.buffers())] == [torch.bfloat16] * 2


def test_what_is_no_model_is_refused_with_what_to_do(tmp_path: Path):
    file = write(tmp_path, "models.py", FACTORIES)
    for text, reason in (
        ("Qwen/Qwen3-8B-Base", r"did you mean 'qwen3-8b'\?.*hf download Qwen/Qwen3-8B-Base config.json"),
        ("lama-2-7b", r"unknown model 'lama-2-7b'; did you mean 'llama-2-7b'\?.*file.py:factory"),
        (str(tmp_path / "absent.json"), "cannot read the configuration .*No such file"),
        (write(tmp_path, "broken.json", "{"), "is not JSON.*config.json"),
        (write(tmp_path, "bare.json", "{}"), "has no model_type"),
        (write(tmp_path, "new.json", '{"model_type": "abacus"}'), "no configuration that transformers knows"),
        (write(tmp_path, "text.json", '{"model_type": "llama", "hidden_size": "big"}'), "expected int, got str"),
        (
            write(tmp_path, "heads.json", '{"model_type": "llama", "num_attention_heads": 7}'),
            "not a multiple of the number",
        ),
        (
            write(tmp_path, "minus.json", '{"model_type": "gpt2", "vocab_size": -1}'),
            "cannot be built as a causal .*negative",
        ),
        (
            write(tmp_path, "none.json", '{"model_type": "gpt2", "n_layer": 0}'),
            "num_hidden_layers 0; expected the config",
        ),
        (write(tmp_path, "pair.json", '{"model_type": "clip"}'), "num_hidden_layers None; expected the config"),
        (write(tmp_path, "seq2seq.json", '{"model_type": "t5"}'), "cannot be built as a causal language model"),
        (file, "names no function; expected file.py:factory"),
        (f"{file}:two_scalar", "unknown function 'two_scalar'; did you mean 'two_scalars'"),
        (f"{file}:broken", "could not be built.*tensors have no data"),
        (f"{file}:unknown_shapes", "cannot be had without data.*known shapes"),
        (f"{file}:two_scalars", "returns tuple; expected a scalar loss, alone, as a tuple's only scalar"),
        (f"{file}:no_module", "returned int; expected a torch.nn.Module"),
        (f"{file}:nothing", "returned tuple; expected a torch.nn.Module"),
        (f"{file}:wrong_inputs", r"cannot be called with a tensor of shape \(2, 8\).*return \(module, inputs\)"),
        (f"{file}:with_another_name", "unexpected keyword argument 'y'; inputs are a tuple, or a dictionary of named"),
        (f"{file}:no_loss", r"returns a tensor of shape \(3, 4\); expected a scalar loss"),
        (f"{tmp_path}/absent.py:make", "is no file that can be found; expected one of Python"),
    ):
        with pytest.raises(OptionError, match=reason):
            build(read(text))
    with pytest.raises(OptionError, match="--seq 2000 is longer than the 1024 positions of 'gpt2'"):
        read("gpt2", seq=2000)


def test_configurations_need_transformers_and_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError, match=r"pip install transformers.*file\.py:factory"):
        read("gpt2")
