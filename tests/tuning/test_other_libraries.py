"""The five lines, and a Solver, inside the libraries that people use; each test needs one of them installed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bilevel

QUICK = {"epochs": 2, "inner_steps": 1, "warmup": 0, "progress": False}


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers", reason="transformers is not installed")


def tokens(count=6, length=5, classes=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 30, (count, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    labels = torch.arange(count) % classes if classes else torch.where(mask.bool(), ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def tiny(transformers, kind):
    small = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "bert":
        config = transformers.BertConfig(**small, intermediate_size=16, max_position_embeddings=16, num_labels=3)
        return transformers.BertForSequenceClassification(config)
    if kind == "bert-words":
        config = transformers.BertConfig(**small, intermediate_size=16, max_position_embeddings=16)
        return transformers.BertForMaskedLM(config)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2, n_positions=16)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("kind", "classes", "name"),
    [
        ("bert", 3, "cross_entropy"),
        ("bert-words", None, "cross_entropy"),
        ("gpt2", None, "cross entropy of the next word"),
        ("t5", None, "cross_entropy"),
    ],
)
def test_networks_of_transformers(transformers, kind, classes, name):
    """Batches of a tokenizer, and the loss that the network computes itself."""
    torch.manual_seed(0)
    net = tiny(transformers, kind)
    train = [transformers.BatchEncoding(tokens(classes=classes))]
    valid = [tokens(classes=classes, seed=1)]
    method = bilevel.DeltaSTN(perturb="batch") if kind == "t5" else "delta_stn"
    result = bilevel.tune(net, train, valid, label_smoothing=True, method=method, **QUICK)
    assert result.solver.response.per_example == (kind != "t5")
    assert {"label_smoothing"} < set(result.hyper)
    assert any(key.startswith("dropout.") for key in result.hyper)
    assert result.problem.user_losses["inner_loss"].criterion.name == name
    net.load_state_dict(result.state_dict)
    net.eval()
    with torch.no_grad():
        expected = float(net(**valid[0]).loss)
    assert result.solver.evaluate(valid) == pytest.approx(expected, rel=1e-3)


def test_a_network_with_a_loss_of_another_kind_is_refused(transformers):
    net = tiny(transformers, "bert")
    forward = net.forward

    def odd(**inputs):
        output = forward(**inputs)
        output.loss = output.loss + 3
        return output

    net.forward = odd
    with pytest.raises(ValueError, match="is none of the usual ones of its logits: pass loss=lambda"):
        bilevel.tune(net, [tokens(classes=3)], [tokens(classes=3, seed=1)], **QUICK)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, 5, generator=generator), torch.arange(12) % 3


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def test_tensordict_batches():
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")
    x, y = batch()
    made = tensordict.TensorDict({"input": x, "labels": y}, batch_size=[12])
    result = bilevel.tune(mlp(), [made], [made.clone()], loss=F.cross_entropy, **QUICK)
    assert result.stopped == "epochs"


def test_loaders_of_accelerate():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    loader = DataLoader(TensorDataset(*batch()), batch_size=6, shuffle=True)
    valid = DataLoader(TensorDataset(*batch(1)), batch_size=12)
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, train, valid = accelerator.prepare(net, loader, valid)
    net = accelerator.unwrap_model(prepared)
    result = bilevel.tune(net, train, valid, loss=F.cross_entropy, optimizer=optimizer, **QUICK)
    assert result.stopped == "epochs"


def test_a_solver_inside_a_lightning_module(tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Tuned(lightning.LightningModule):
        """Lightning runs the epochs, the loaders and the logging; the solver makes the steps."""

        def __init__(self, problem, valid_loader):
            super().__init__()
            self.automatic_optimization = False
            self.solver = bilevel.Solver(problem, inner_optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
            self.valid_loader, self.valid = valid_loader, iter(())

        def training_step(self, batch, index):
            self.log("inner_loss", self.solver.inner_step(batch))
            if index % 2 == 1:
                valid = next(self.valid, None)
                if valid is None:
                    self.valid = iter(self.valid_loader)
                    valid = next(self.valid)
                step = self.solver.outer_step(batch, valid)
                self.log_dict({"outer_loss": step.loss, **{k: v.mean() for k, v in self.solver.hyper.items()}})

        def validation_step(self, batch, index):
            self.log("validation_loss", self.solver.evaluate([batch]), batch_size=len(batch[0]))

        def configure_optimizers(self):
            return []

        def on_save_checkpoint(self, checkpoint):
            checkpoint["solver"] = self.solver.state_dict()

        def on_load_checkpoint(self, checkpoint):
            self.solver.load_state_dict(checkpoint["solver"])

    net = mlp()
    problem = bilevel.tune(net, [batch()], [batch(1)], loss=F.cross_entropy, steps=1, warmup=0).problem
    train = DataLoader(TensorDataset(*batch()), batch_size=3)
    valid = DataLoader(TensorDataset(*batch(1)), batch_size=12)
    module = Tuned(problem, valid)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=2, enable_checkpointing=False, default_root_dir=tmp_path, **quiet)
    with pytest.warns():  # of lightning, about the number of workers
        trainer.fit(module, train, valid)
    assert (module.solver.inner_steps, module.solver.outer_steps) == (8, 4)
    assert "validation_loss" in trainer.callback_metrics
    trainer.save_checkpoint(tmp_path / "run.ckpt", weights_only=False)
    other = Tuned(problem, valid)
    other.on_load_checkpoint(torch.load(tmp_path / "run.ckpt", weights_only=False))
    assert torch.equal(other.solver.vector, module.solver.vector)
    net.load_state_dict(module.solver.module_state_dict)


def test_a_solver_inside_a_trainer_of_transformers(transformers, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    net = tiny(transformers, "bert")
    rows = [{key: value[i] for key, value in tokens(count=8, classes=3).items()} for i in range(8)]
    held_out = DataLoader(rows, batch_size=8)
    problem = bilevel.tune(net, [tokens(classes=3)], [tokens(classes=3, seed=1)], steps=1, warmup=0).problem

    class TunedTrainer(transformers.Trainer):
        """The Trainer runs the epochs, the loaders and the logging; the solver makes the steps."""

        solver = bilevel.Solver(problem, inner_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0))
        valid = iter(())

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.solver.inner_step(inputs)
            if self.solver.inner_steps % 2 == 0:
                valid = next(self.valid, None)
                if valid is None:
                    self.valid = iter(held_out)
                    valid = next(self.valid)
                self.solver.outer_step(inputs, valid)
                self.log({name: float(value) for name, value in self.solver.hyper.items()})
            return loss

        def create_optimizer_and_scheduler(self, num_training_steps):
            """The solver has its own optimizers; this one never gets a gradient."""
            self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = TunedTrainer(model=net, args=arguments, train_dataset=rows)
    trainer.train()
    assert (trainer.solver.inner_steps, trainer.solver.outer_steps) == (4, 2)
    logged = [row["label_smoothing"] for row in trainer.state.log_history if "label_smoothing" in row]
    assert logged == []
    logged = [row for row in trainer.state.log_history if any(key.startswith("weight_decay.") for key in row)]
    assert len(logged) == 2
    net.load_state_dict(trainer.solver.module_state_dict)
