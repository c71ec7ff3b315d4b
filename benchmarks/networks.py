"""Networks of transformers under ``bilevel.tune``: which respond with a perturbation of its own for each example.

    python benchmarks/networks.py --out docs/results/networks.txt
    python benchmarks/networks.py --networks BERT Swin

Each network is a small random configuration in double precision. The five lines tune it for some steps on random data,
its own dropout and weight decay included. The outcome is one of

- ``each example``: every example has a perturbation of its own;
- ``share one``: all examples of a batch share one, with the reason that the warning gives;
- ``refused``: an error, with its first line; ``centered_stn`` is tried then.

Where each example has its own, the response is made random and the outputs of the network in eval mode, and their
gradients in the response, are compared with those of one example at a time, whose weights are plain tensors: *error* is
the largest difference. Texts have an ``attention_mask`` whose last entry is zero for some examples.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import bilevel
from bilevel.tuning.unpack import call, unpacker

B, T, WORDS = 4, 6, 30
TEXT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CLASSES: dict[str, Any] = {"num_labels": 3}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32,
}  # fmt: skip
IMAGES: dict[str, Any] = {"image_size": 16, "num_channels": 3} | CLASSES
PATCHES = {
    name: TEXT[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
}
WINDOWS: dict[str, Any] = {"patch_size": 2, "window_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}

NETWORKS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "BERT, classes": ("BertForSequenceClassification", "BertConfig", TEXT | CLASSES, "classes"),
    "BERT, masked words": ("BertForMaskedLM", "BertConfig", TEXT, "words"),
    "RoBERTa": ("RobertaForSequenceClassification", "RobertaConfig", TEXT | CLASSES, "classes"),
    "DistilBERT": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": WORDS, "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 16} | CLASSES,
        "classes",
    ),
    "ALBERT": ("AlbertForSequenceClassification", "AlbertConfig", TEXT | CLASSES | {"embedding_size": 8}, "classes"),
    "ELECTRA": ("ElectraForSequenceClassification", "ElectraConfig", TEXT | CLASSES | {"embedding_size": 8}, "classes"),
    "DeBERTa-v2": (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        TEXT | CLASSES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
        "classes",
    ),
    "GPT-2, words": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": WORDS, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32},
        "words",
    ),
    "GPT-2, classes": (
        "GPT2ForSequenceClassification",
        "GPT2Config",
        {"vocab_size": WORDS, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32, "pad_token_id": 0} | CLASSES,
        "classes",
    ),
    "OPT": ("OPTForCausalLM", "OPTConfig", TEXT | {"ffn_dim": 16, "word_embed_proj_dim": 8}, "words"),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", TEXT, "words"),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", TEXT | {"num_key_value_heads": 2}, "words"),
    "Mistral": ("MistralForCausalLM", "MistralConfig", TEXT | {"num_key_value_heads": 2}, "words"),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", TEXT | {"num_key_value_heads": 2, "head_dim": 4}, "words"),
    "Mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        TEXT | {"num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2},
        "words",
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, "words"),
    "Phi": ("PhiForCausalLM", "PhiConfig", TEXT, "words"),
    "Bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": WORDS, "hidden_size": 8, "n_layer": 1, "n_head": 2},
        "words",
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        | {"decoder_start_token_id": 0},
        "words",
    ),
    "BART": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, "words"),
    "ViT": ("ViTForImageClassification", "ViTConfig", IMAGES | PATCHES | {"patch_size": 4}, "images"),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", IMAGES | PATCHES | {"patch_size": 4}, "images"),
    "DINOv2": ("Dinov2ForImageClassification", "Dinov2Config", IMAGES | PATCHES | {"patch_size": 4}, "images"),
    "Swin": ("SwinForImageClassification", "SwinConfig", IMAGES | WINDOWS, "images"),
    "ConvNeXt": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        CLASSES | {"num_stages": 2, "hidden_sizes": [4, 8], "depths": [1, 1], "patch_size": 2},
        "images",
    ),
    "ResNet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        CLASSES | {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"},
        "images",
    ),
}
"""By name: the class, the class of its configuration, its arguments, and the kind of data."""
SINGLE = ("Mixtral",)
"""In single precision: its product of the experts has no other."""


def batch_of(kind: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Random data, as a tokenizer or an image processor makes them."""
    if kind == "images":
        x = torch.randn(B, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": x, "labels": torch.randint(3, (B,), generator=generator)}
    ids = torch.randint(3, WORDS, (B, T), generator=generator)
    mask = torch.ones(B, T, dtype=torch.int64)
    mask[: B // 2, -1] = 0
    ids[: B // 2, -1] = 0
    labels = ids.clone() if kind == "words" else torch.randint(3, (B,), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def numbers(output: Any) -> Tensor:
    """The logits of a network, a row for each example."""
    logits: Tensor = output["logits"]
    return logits.flatten(1)


def error_of(solver: bilevel.Solver, batch: dict[str, Tensor], *, linearized: bool) -> float:
    """The largest difference to one example at a time, relative to the largest number."""
    response: Any = solver.response
    params = [param for param in response.theta.parameters() if param.requires_grad]
    with torch.no_grad():
        for param in params:
            param.add_(0.1 * torch.randn_like(param))
    assert solver.problem.module is not None
    inputs, labels = unpacker(solver.problem.module)(batch)
    inputs = inputs | ({"labels": labels} if "decoder_input_ids" in call_names(solver.problem.module) else {})
    noise = torch.randn(B, len(solver.vector), dtype=solver.vector.dtype)
    options = {"freeze_weights": True, "linearized": linearized}
    with solver.problem.evaluating():
        found = numbers(call(response.affine(noise, **options), inputs))
        single = [pytree.tree_map(lambda t, i=i: t[i : i + 1], inputs) for i in range(B)]
        expected = torch.cat([numbers(call(response.affine(noise[i], **options), single[i])) for i in range(B)])
    along = torch.randn_like(found)
    pairs = [(found, expected)]
    slopes = (torch.autograd.grad((y * along).sum(), params, allow_unused=True) for y in (found, expected))
    pairs += [(a, b) for a, b in zip(*slopes, strict=True) if a is not None and b is not None]
    return max(float((a - b).detach().abs().max() / b.detach().abs().max().clamp_min(1e-9)) for a, b in pairs)


def call_names(net: torch.nn.Module) -> list[str]:
    """The arguments of a network."""
    import inspect

    return [*inspect.signature(net.forward).parameters]


def tried(transformers: Any, name: str, method: str = "delta_stn") -> tuple[str, str]:
    """The outcome, and an error or a reason."""
    kind, config, arguments, data = NETWORKS[name]
    torch.manual_seed(0)
    dtype = torch.float32 if name in SINGLE else torch.float64
    net = getattr(transformers, kind)(getattr(transformers, config)(**arguments)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    train, valid = ([batch_of(data, generator) for _ in range(2)] for _ in range(2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            result = bilevel.tune(net, train, valid, steps=3, progress=False, method=method)
        except Exception as error:
            if method != "centered_stn":
                other, _ = tried(transformers, name, "centered_stn")
                return f"refused; centered_stn: {other}", str(error).splitlines()[0][:100]
            return "refused", str(error)
    shared = [str(w.message) for w in said if w.category is bilevel.PerturbationWarning]
    if shared:
        return "share one", shared[0].split("each its own: ")[-1].split(": ")[0]
    try:
        return "each example", f"{error_of(result.solver, train[0], linearized=method == 'delta_stn'):.0e}"
    except NotImplementedError:  # with plain weights, PyTorch has no forward mode for the product of the experts
        return "each example", f"{error_of(result.solver, train[0], linearized=False):.0e}, not linearised"


def main() -> None:
    """A line for each network."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [name for name in NETWORKS if any(name.startswith(start) for start in options.networks)]
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__}",
        f"{'network':20} {'outcome':16} error",
    ]
    for name in chosen:
        outcome, detail = tried(transformers, name)
        lines.append(f"{name:20} {outcome:16} {detail}")
        print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
