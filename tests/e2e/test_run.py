"""Which module ``autohete run`` compiles, and that it trains the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autohete_fx import cli
from autohete_fx.integrations.watching import Watched

OPTIONS = {"inner_backend": "eager", "profile": "analytic"}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Outer(nn.Module):
    """Holds the model, as a trainer's module does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def trained(make: Callable[[], tuple[list[Tensor], Callable[[Tensor], Tensor]]]) -> list[Tensor]:
    """Losses and parameters of a loop that knows nothing of us."""
    params, loss_of = make()
    optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = loss_of(torch.randn(4, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in params)]


def same_under_run(
    make: Callable[[], tuple[list[Tensor], Callable[[Tensor], Tensor]]],
) -> Watched:
    expected = trained(make)
    with Watched(OPTIONS, only_same_kernels=False) as run:
        given = trained(make)
    for mine, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert "bit by bit" in run.trained[0].replaced
    return run


def whole() -> Any:
    model = Outer(Inner())
    return list(model.parameters()), model


def inside() -> Any:
    """The loop calls the module inside, as a method of a trainer's module does."""
    model = Outer(Inner())
    return list(model.parameters()), lambda x: model.inner(x).square().mean()


def wrapped_later() -> Any:
    """The module that is called exists only after the optimizer."""
    model = Inner()
    return list(model.parameters()), lambda x: Outer(model)(x)


def of_pytorch() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return list(model.parameters()), lambda x: model(x).square().mean()


def evaluated_first() -> Any:
    """A call without gradients decides nothing, be it of a part or of a whole."""
    model = Outer(Inner())

    def loss_of(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.inner(x)
        return model(x)

    return list(model.parameters()), loss_of


@pytest.mark.parametrize(
    ("make", "compiled"),
    [
        (whole, "test_run.Outer"),
        (inside, "test_run.Inner"),
        (wrapped_later, "test_run.Inner"),
        (of_pytorch, "torch.nn.modules.container.Sequential"),
        (evaluated_first, "test_run.Outer"),
    ],
)
def test_the_module_that_the_loop_calls_is_compiled(make: Callable[[], Any], compiled: str):
    run = same_under_run(make)
    assert run.trained[0].compiled.endswith(compiled)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit.trace:FutureWarning")
@pytest.mark.parametrize("make", [Inner, lambda: of_pytorch()[1].__closure__[0].cell_contents], ids=["own", "torchs"])
def test_torchscript_traces_what_was_compiled(make: Callable[[], nn.Module]):
    with Watched(OPTIONS, only_same_kernels=False) as run:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        x = torch.randn(4, 8)
        assert torch.equal(torch.jit.trace(model, x)(x), model(x))
    assert run.trained[0].compiled


def test_each_of_two_models_is_compiled_for_its_optimizer():
    def losses() -> tuple[Tensor, list[nn.Module]]:
        models = [Outer(Inner()), Inner()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, fused=True) for model in models]
        total = torch.zeros(())
        for step in range(2):
            torch.manual_seed(step)
            loss = models[0](models[1](torch.randn(4, 8)))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        return total, models

    expected, _ = losses()
    with Watched(OPTIONS, only_same_kernels=False) as run:
        given, models = losses()
    torch.testing.assert_close(given, expected)
    assert [note.compiled.rpartition(".")[2] for note in run.trained] == ["Outer", "Inner"]
    assert all(model._compiled_call_impl is not None for model in models)


def test_a_second_optimizer_of_a_compiled_model_is_replaced_too_and_a_closure_works():
    model = Outer(Inner())
    with Watched(OPTIONS, only_same_kernels=False) as run:
        for make in (torch.optim.Adam, torch.optim.AdamW, torch.optim.LBFGS):
            optimizer: Any = make(model.parameters(), lr=1e-3)

            def closure(optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = model(torch.ones(4, 8))
                loss.backward()
                return loss

            assert torch.is_tensor(optimizer.step(closure))
    assert [note.compiled.rpartition(".")[2] for note in run.trained] == ["Outer"] * 3
    assert [note.replaced.partition(",")[0] for note in run.trained] == ["autohete_fx.Adam", "autohete_fx.AdamW", ""]


PROGRAM = """
import sys
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x))).square().mean()

model = Model()
if sys.argv[2:]:
    model.compile(backend=sys.argv[2])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    torch.manual_seed(step)
    model(torch.randn(4, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save([p.detach() for p in model.parameters()], sys.argv[1])
"""


@pytest.mark.slow
def test_run_under_inductor_differs_from_plain_no_more_than_inductor_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The optimizer's implementation is PyTorch's choice in the program, and the fused one under ours."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)

    def trained_by(*arguments: str) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", [str(path), str(tmp_path / "saved.pt"), *arguments])
            exec(compile(PROGRAM, str(path), "exec"), {"__name__": "__main__"})
        return torch.cat([p.flatten() for p in torch.load(tmp_path / "saved.pt")])

    eager, inductor = trained_by(), trained_by("inductor")
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--option", "profile=analytic", str(path), str(tmp_path / "saved.pt")])
    told = capsys.readouterr().err
    assert ended.value.code == 0 and "model: compiled Model" in told and "last bits" in told
    given = torch.cat([p.flatten() for p in torch.load(tmp_path / "saved.pt")])
    limit = 2 * float((inductor - eager).abs().max()) + 1e-6  # a few units in the last place of the updates
    assert float((given - eager).abs().max()) <= limit
