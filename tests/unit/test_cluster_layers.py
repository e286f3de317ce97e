"""Where any model can be cut, what its stages hold, and their initial weights."""

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor, nn

from autohete_fx.cluster.model.batches import batch_of, call
from autohete_fx.cluster.model.building import build_noting_order, build_part
from autohete_fx.cluster.model.layers import map_layers
from autohete_fx.cluster.stages.stage import build_stage
from autohete_fx.errors import ClusterError
from tests.tiny_models import GPT, VOCAB

TOKENS, CPU = 8, torch.device("cpu")
IDS = torch.zeros(2, TOKENS, dtype=torch.int64)
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64, "hidden_size": 32}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=48, num_key_value_heads=2, **SIZES)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(intermediate_size=48, num_key_value_heads=2, head_dim=8, **SIZES)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    ),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(hidden_size=32, n_layer=3, n_head=4, vocab_size=64)),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0, **SIZES)),
    "by hand, tied": lambda: without_dropout(GPT(3, tied=True)),
    "by hand, no list": lambda: without_dropout(NoList()),
    "by hand, transposing": lambda: transposing(),
}


class Transposed(nn.Module):
    """A layer whose output is not contiguous."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        return self.inner(*args).transpose(1, 2).contiguous().transpose(1, 2)


def transposing() -> nn.Module:
    model = without_dropout(GPT(3, tied=True))
    model.layers = nn.ModuleList(Transposed(layer) for layer in model.layers)
    return model


class NoList(nn.Module):
    """Layers that are attributes of their own."""

    def __init__(self) -> None:
        super().__init__()
        inner = GPT(3, tied=True)
        self.embed, self.norm, self.head = inner.embed, inner.norm, inner.head
        self.first, self.second, self.third = inner.layers

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.third(self.second(self.first(self.embed(ids))))))


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def loss_of(out: object, batch: dict[str, Tensor]) -> Tensor:
    logits = getattr(out, "logits", out)
    assert isinstance(logits, Tensor)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("cuts", [[2, 3], pytest.param([1, 4], marks=pytest.mark.slow)])
def test_stages_of_a_model_have_its_loss_and_its_gradients(
    family: str, cuts: list[int], monkeypatch: pytest.MonkeyPatch
):
    build = FAMILIES[family]
    ids = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    names = {"ids": ids} if family.startswith("by hand") else {"ids": ids, "input_ids": ids, "attention_mask": mask}
    batch = batch_of(names)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        layer_map = map_layers(build, batch)
        assert layer_map.num_layers == 5
        torch.manual_seed(11)
        whole = build().train()
        expected = loss_of(call(whole, batch), names)
        expected.backward()
        ends = [0, *cuts, 5]
        stages = [
            build_stage(build, layer_map, range(first, stop), loss=loss_of, share=1.0, device=CPU, seed=11)
            for first, stop in itertools.pairwise(ends)
        ]
    finally:
        torch.set_default_dtype(before)
    received, passed = (), []
    for stage in stages:
        stage.reads(batch)
        out = stage(*received, **{f"batch_{name}": tensor for name, tensor in names.items()})
        assert out.is_contiguous()
        passed.append((out, received))
        received = (out.detach().requires_grad_(),)
    assert torch.equal(passed[-1][0], expected)
    grad: Tensor | None = None
    for out, read in reversed(passed):
        out.backward(grad)
        grad = read[0].grad if read else None
    params = dict(whole.named_parameters())
    for name, param in params.items():
        parts = [
            held.grad for stage in stages if (held := stage.named().get(name)) is not None and held.grad is not None
        ]
        assert (
            (sum(parts) if parts else None) is None
            if param.grad is None
            else torch.allclose(sum(parts), param.grad, 0, 1e-15)
        )
    assert all(len(stage.held) < len(params) for stage in stages), "no stage holds the model"


@pytest.mark.parametrize(
    ("given", "words"),
    [(torch.ones(1), "a tensor of shape (1,)"), (None, "a NoneType"), ((torch.ones(()),), "a tuple")],
)
def test_a_loss_that_is_no_number_is_told(given: object, words: str):
    build, batch = FAMILIES["by hand, tied"], batch_of({"ids": IDS})
    layer_map = map_layers(build, batch)
    stage = build_stage(build, layer_map, range(5), loss=lambda *_: given, share=1.0, device=CPU, seed=11)  # pyright: ignore
    stage.reads(batch)
    with pytest.raises(ClusterError, match=re.escape(f"loss gave {words}. Expected was a tensor without dimensions")):
        stage(batch_ids=IDS)


class SharesBias(nn.Module):
    """Every layer reads one table outside of the layers: all stages hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(2, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias(torch.ones(1, dtype=torch.int64))
        for layer in self.layers:
            x = layer(x) + bias
        return x


@pytest.mark.parametrize("in_files", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stage_reads_its_own_weights_of_safetensors_alone(
    in_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bytes that are read, and tensors that are there while a stage is built, are counted."""
    build, batch = FAMILIES["llama"], batch_of({"input_ids": IDS})
    saved = {name: param.detach().clone() for name, param in build().named_parameters()}
    for at in range(in_files):
        save_file(dict(list(saved.items())[at::in_files]), tmp_path / f"model-{at}.safetensors")
    layer_map, read = map_layers(build, batch), []
    opened = safetensors.safe_open

    class Counted:
        def __init__(self, *args: object, **kwargs: object) -> None:
            self._file = opened(*args, **kwargs)

        def __enter__(self) -> "Counted":
            self._file.__enter__()
            return self

        def __exit__(self, *args: object) -> None:
            self._file.__exit__(*args)

        def keys(self) -> list[str]:
            return list(self._file.keys())

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Counted)
    weights = tmp_path if in_files > 1 else tmp_path / "model-0.safetensors"
    for layers in (range(2), range(2, 4), range(4, 5)):
        stage = build_stage(build, layer_map, layers, loss=loss_of, share=1.0, device=CPU, weights=weights)
        held = layer_map.held(layers)
        assert sorted(read) == sorted(held) and 0 < len(held) < len(saved)
        assert all(torch.equal(param, saved[name]) for name, param in stage.named().items())
        storages = {
            param.untyped_storage().data_ptr(): param.untyped_storage().nbytes() for param in stage.parameters()
        }
        own = sum(saved[name].nbytes for name in held)
        assert own <= sum(storages.values()) < own + 256, "others' parameters are without memory"
        read.clear()
    (tmp_path / "model-0.safetensors").unlink()
    with pytest.raises(ClusterError, match=r"has no (tensor|weights)"):
        build_stage(build, layer_map, range(2), loss=loss_of, share=1.0, device=CPU, weights=weights)


def test_a_parameter_that_several_layers_read_is_held_by_all_their_stages():
    layer_map = map_layers(SharesBias, batch_of(torch.zeros(2, 4)))
    assert layer_map.readers["bias.weight"] >= {2, 3} and layer_map.readers["layers.0.weight"] == {1}
    assert "bias.weight" in layer_map.held(range(2, 3)) and "layers.1.weight" not in layer_map.held(range(0, 2))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_initial_weights_of_a_part_are_those_of_the_whole(family: str):
    build = FAMILIES[family]
    torch.manual_seed(5)
    whole = dict(build().to(torch.bfloat16).named_parameters())
    _, order = build_noting_order(lambda: build().to(torch.bfloat16))
    for wanted in (list(whole), list(whole)[1::2], list(whole)[-1:], []):
        part = dict(build_part(lambda: build().to(torch.bfloat16), order, wanted, 5).named_parameters())
        assert {name for name, param in part.items() if not param.is_meta} == set(wanted)
        assert all(torch.equal(part[name], whole[name]) for name in wanted)
        assert all(
            param.shape == whole[name].shape and param.dtype == whole[name].dtype for name, param in part.items()
        )


class Copying(nn.Module):
    """Layers that get their first values from others while the model is built."""

    def __init__(self, how: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        if how == "clones":  # of a layer that the model then loses
            self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).layers
        elif how == "clones of the first":
            self.layers = nn.ModuleList([layer, *(copy.deepcopy(layer) for _ in range(2))])
        else:
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
            )
        if how == "parametrized":
            for each in self.layers:
                nn.utils.parametrizations.weight_norm(each.linear1)
        elif how == "loaded":
            self.layers[2].load_state_dict(self.layers[0].state_dict())
        elif how == "computed":
            self.layers[2].linear1.weight.data += 0.5 * self.layers[0].linear1.weight.data.exp()
        elif how == "assigned":
            self.layers[2].linear1.weight = nn.Parameter(self.layers[0].linear1.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "how", ["clones", "clones of the first", "parametrized", "loaded", "computed", "assigned", "none"]
)
def test_values_that_a_model_copies_while_it_is_built_are_those_of_the_whole(how: str):
    torch.manual_seed(5)
    whole = dict(Copying(how).named_parameters())
    _, order = build_noting_order(lambda: Copying(how))
    for number in range(3):
        wanted = {name for name in whole if name.startswith(f"layers.{number}.")}
        part = dict(build_part(lambda: Copying(how), order, wanted, 5).named_parameters())
        assert {name for name, param in part.items() if not param.is_meta} == wanted
        assert all(torch.equal(part[name], whole[name]) for name in wanted)


def test_only_a_model_that_copies_is_built_again_with_memory_for_all():
    built: list[str] = []

    def build(how: str) -> nn.Module:
        built.append(how)
        return Copying(how)

    for how in ("none", "clones", "loaded"):
        names = [name for name in build_noting_order(lambda how=how: build(how))[1] if name.startswith("layers.2")]
        order = build_noting_order(lambda how=how: Copying(how))[1]
        build_part(lambda how=how: build(how), order, names or {"layers.2.linear1.weight"}, 5)
    assert [built.count(how) for how in ("none", "clones", "loaded")] == [2, 2, 3]


def test_a_model_that_was_there_before_is_refused_and_keeps_its_values():
    model = Copying("none")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ClusterError, match=r"'layers.0.*' was made before the call.*Build it inside build_model"):
        map_layers(lambda: model, batch_of(torch.zeros(2, 4, 8)))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_parts_in_evaluation_mode_stay_in_it_and_stand_ins_have_the_attributes_of_their_parts():
    def build() -> nn.Module:
        model = Copying("none")
        model.layers[1].requires_grad_(False).eval()
        return model

    layer_map = map_layers(build, batch_of(torch.zeros(2, 4, 8)))
    stage = build_stage(build, layer_map, range(2, 5), loss=loss_of, share=1.0, device=CPU)
    modules = dict(stage.named_modules())
    first, second, third = (modules[f"model.layers.{number}"] for number in range(3))
    assert (first.training, second.training, third.training) == (True, False, True)
    assert (
        type(first).__name__ == "StandIn"
        and first.self_attn.batch_first
        and "self_attn" not in dict(first.named_children())
    )
    with pytest.raises(AttributeError):
        first.nothing_of_that_name  # noqa: B018


class WithPositions(nn.Module):
    """A buffer whose values follow from what parameters before it draw."""

    def __init__(self, drawn: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("positions", torch.randn(4) if drawn else torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("drawn", [True, False])
def test_a_stage_that_is_restored_has_the_buffers_that_it_began_with(drawn: bool):
    def build() -> nn.Module:
        return WithPositions(drawn)

    torch.manual_seed(7)
    whole = build()
    layer_map = map_layers(build, batch_of(torch.zeros(2, 4)))
    saved = {name: param.detach() + 1.0 for name, param in whole.named_parameters()}
    layers = range(layer_map.num_layers)
    stage = build_stage(
        build, layer_map, layers, loss=loss_of, share=1.0, device=CPU, weights=saved.__getitem__, seed=7
    )
    assert all(torch.equal(param, saved[name]) for name, param in stage.named().items())
    (positions,) = stage.buffers()
    assert torch.equal(positions, whole.positions)
