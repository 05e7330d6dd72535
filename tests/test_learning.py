"""A run that teaches nothing stops within two real steps; files that do not hold what was learnt are found."""

import pytest
import toy
import torch
from config import load_recipe
from device import Place
from hypothesis import given, settings
from hypothesis import strategies as st
from learning import LearningCheck, check_saved_weights
from model import load_model, read_base_model, trainable_parameters
from safetensors.torch import load_file, save_file


class Adapter(torch.nn.Module):
    """A frozen matrix with a LoRA pair beside it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.lora_A = torch.nn.Parameter(torch.randn(2, 4))
        self.lora_B = torch.nn.Parameter(torch.zeros(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.frozen + self.lora_B @ self.lora_A).T


class Training:
    """The trainer's order of calls around an optimiser step."""

    def __init__(self, model: torch.nn.Module, *, trained: list[str] | None = None):
        self.model, self.check = model, LearningCheck(model, lambda: self.skipped)
        chosen = [parameter for name, parameter in trainable_parameters(model) if trained is None or name in trained]
        self.optimizer = torch.optim.SGD(chosen, lr=0.1)

    def step(self, *, learning_rate: float = 0.1, skipped: bool = False, spoil=lambda model: None) -> None:
        self.model(torch.ones(3, 4)).square().sum().backward()
        spoil(self.model)
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.check.on_pre_optimizer_step(None, None, None, optimizer=self.optimizer)
        if not skipped:
            self.optimizer.step()
        self.skipped = skipped
        self.check.on_optimizer_step(None, None, None, optimizer=self.optimizer)
        self.model.zero_grad()


def test_a_healthy_run_passes_although_a_stands_still_at_first():
    training = Training(Adapter())
    before = training.model.lora_A.clone()
    training.step()
    assert torch.equal(training.model.lora_A, before), "its gradient is exactly zero while B is"
    for _ in range(3):
        training.step()
    assert training.check.steps == 2


def test_a_b_matrix_that_does_not_move_stops_the_run_after_the_first_step():
    with pytest.raises(RuntimeError, match=r"^step 1 with learning rate 0\.1 did not change 1 trained tensors: lora_B$"):
        Training(Adapter(), trained=["lora_A"]).step()


def test_an_a_matrix_that_does_not_move_stops_the_run_after_the_second_step():
    training = Training(Adapter(), trained=["lora_B"])
    training.step()
    with pytest.raises(RuntimeError, match=r"^step 2 .* did not change 1 trained tensors: lora_A$"):
        training.step()


def test_without_adapters_every_tensor_must_have_moved_after_the_second_step():
    model = torch.nn.Linear(4, 2)
    training = Training(model, trained=["weight"])
    training.step()
    with pytest.raises(RuntimeError, match=r"^step 2 .* did not change 1 trained tensors: bias$"):
        training.step()


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["lora_A", "lora_B"])
@pytest.mark.parametrize("healthy_steps", [0, 1])
def test_a_gradient_that_is_missing_or_not_finite_stops_the_run_by_name(name, value, healthy_steps):
    training = Training(Adapter())
    for _ in range(healthy_steps):
        training.step()

    def spoil(model):
        parameter = getattr(model, name)
        parameter.grad = None if value is None else torch.full_like(parameter, value)

    with pytest.raises(RuntimeError, match=f"^no finite gradient reaches 1 trained tensors: {name}$"):
        training.step(spoil=spoil)


@pytest.mark.parametrize("how", [{"learning_rate": 0.0}, {"skipped": True}])
def test_steps_that_cannot_move_anything_are_not_counted(how):
    training = Training(Adapter())
    for _ in range(3):
        training.step(**how)
    assert training.check.steps == 0
    training.step()
    training.step(**how)
    assert training.check.steps == 1
    training.step()
    assert training.check.steps == 2


def test_a_skipped_step_may_have_gradients_that_are_not_finite():
    training = Training(Adapter())
    training.step(skipped=True, spoil=lambda model: model.lora_B.grad.fill_(float("inf")))
    training.step()


def test_uncounted_steps_do_not_hide_a_run_that_teaches_nothing():
    training = Training(Adapter(), trained=["lora_A"])
    training.step(learning_rate=0.0)
    training.step(skipped=True)
    with pytest.raises(RuntimeError, match="did not change"):
        training.step()


def test_a_step_too_small_for_float32_to_show_is_no_fault():
    model = torch.nn.Linear(4, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    training = Training(model)
    for _ in range(2):
        training.step(learning_rate=1e-9, spoil=lambda model: model.weight.grad.sign_())
    assert torch.equal(model.weight, torch.ones(2, 4))


def test_after_two_steps_nothing_is_held_nor_looked_at():
    training = Training(Adapter())
    training.step()
    training.step()
    assert training.check.before == {}
    training.step(spoil=lambda model: model.lora_B.grad.fill_(float("nan")))


STEPS = st.lists(st.fixed_dictionaries({"learning_rate": st.sampled_from([0.0, 0.05, 0.1]), "skipped": st.booleans()}), max_size=8)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(trained=st.sampled_from([["lora_A"], ["lora_B"], ["lora_A", "lora_B"]]), steps=STEPS)
def test_rule_3_a_tensor_that_stands_still_stops_any_run_at_its_first_or_second_real_step(trained, steps):
    real = [n for n, step in enumerate(steps) if step["learning_rate"] and not step["skipped"]]
    # B moves at the first real step, A at the second, when B is no longer zero.
    due = {("lora_A",): real[0:1], ("lora_B",): real[1:2]}.get(tuple(trained), [])
    stopped = []
    training = Training(Adapter(), trained=trained)
    for n, step in enumerate(steps):
        try:
            training.step(**step)
        except RuntimeError:
            stopped.append(n)
            break
    assert stopped == due


# --- saved weights -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return toy.build_whisper(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(params=[[], ["--lora=null", "--model.quantization=none"]], ids=["adapter", "full"])
def trained(request, base_folder, tmp_path):
    """A toy model, shaken, saved in a folder; gives model, folder and a function for its loss."""
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{name: {base_folder}}}\ndata: {{train: a.jsonl, validation: b.jsonl}}\ntraining: {{output_dir: {tmp_path}}}\n"
    )
    recipe = load_recipe(["--config", str(tmp_path / "recipe.yaml"), *request.param])
    base = read_base_model(recipe.model, max_new_tokens=225, num_beams=1)
    model = load_model(recipe, base, Place("cpu"), compute_type=torch.float32).eval()
    for _, parameter in trainable_parameters(model):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "saved")

    def loss() -> float:
        features = torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(0))
        ids = torch.tensor([[257, 300, 4, 5]])
        with torch.no_grad():
            return model(input_features=features, decoder_input_ids=ids).logits.logsumexp(-1).sum().item()

    return model, tmp_path / "saved", loss


def test_saved_weights_that_give_the_same_loss_pass_and_are_the_models_again(trained):
    model, folder, loss = trained
    before = {name: parameter.clone() for name, parameter in trainable_parameters(model)}
    check_saved_weights(model, folder, loss)
    assert all(torch.equal(before[name], parameter) for name, parameter in trainable_parameters(model))


def test_a_saved_file_that_gives_another_loss_is_found(trained):
    model, folder, loss = trained
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    name = next(name for name in weights if "decoder.layers.1.self_attn.v_proj" in name)
    weights[name] = 2 * weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="the saved weights give a loss of"):
        check_saved_weights(model, folder, loss)
