"""Makes the golden files: tiny random models and the numbers that transformers gives for them.

Run with the oracle's interpreter (torch and transformers):

    .venv-oracle/bin/python tools/make_tiny_models.py            # tests/golden/tiny/<name>/
    .venv-oracle/bin/python tools/make_tiny_models.py --smollm2  # tests/golden/smollm2_expected.json

Each tiny model is a Hugging Face folder (config.json, generation_config.json, model.safetensors in
f32) with an expected.json beside it:

    sequences[]: input_ids, logprobs (one per next token), loss (their mean, negated), and
                 gradient_norms of that loss by Hugging Face parameter name
    greedy:      input_ids, tokens (24, the end of text is ignored), least_margin (the smallest
                 distance between best and second logit met on the way; seeds with a narrow one are
                 passed over, so that equal tokens can be demanded)

All numbers: eager attention, float32, CPU. The folders come from seeds: a second run writes the same
weights. Both styles of config.json are covered on purpose, see MODELS.
"""

import argparse
import json
import pathlib

import numpy
import torch
import transformers
from safetensors.numpy import save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
GREEDY_TOKENS = 24
LEAST_MARGIN = 2e-3

# rope_theta/rope_scaling/torch_dtype: older style; rope_parameters/dtype: transformers 5.
MODELS = {
    # Sizes that no vector width divides, heads wider than hidden_size / heads, three to a group.
    "llama_odd": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97,
        "hidden_size": 42, "intermediate_size": 54, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float32",
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    },
    # The original context is 64: the longer sequences reach the scaled frequencies.
    "llama3_rope": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 101,
        "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0,
                            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                            "original_max_position_embeddings": 64},
        "dtype": "float32", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": [2, 3],
    },
    # Every bias a llama can have, linear rope.
    "llama_bias_linear": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 89,
        "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2,
        "num_attention_heads": 5, "num_key_value_heads": 5, "attention_bias": True,
        "mlp_bias": True, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0},
        "tie_word_embeddings": False, "torch_dtype": "float32", "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2,
    },
    # For tensor parallelism: four ranks share two key/value heads, each has 6 columns of o_proj and 11
    # of down_proj.
    "llama_parallel": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96,
        "hidden_size": 28, "intermediate_size": 44, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "attention_bias": True,
        "mlp_bias": True, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
        "torch_dtype": "float32", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 103,
        "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 32,
        "use_sliding_window": False, "max_window_layers": 2, "tie_word_embeddings": False,
        "torch_dtype": "float32", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 107,
        "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "layer_types": ["full_attention", "full_attention"], "tie_word_embeddings": False,
        "dtype": "float32", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": [2, 3],
    },
    "qwen3_tied_yarn": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 109,
        "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 3,
        "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 14,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "attention_bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                         "original_max_position_embeddings": 64},
        "tie_word_embeddings": True, "torch_dtype": "float32", "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2,
    },
    # Every layer sees 24 tokens; heads of 10.
    "mistral": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 83,
        "hidden_size": 30, "intermediate_size": 42, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "sliding_window": 24, "tie_word_embeddings": False, "torch_dtype": "float32",
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    },
    # The window of the first Phi-3, no long rope.
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 79,
        "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
        "original_max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": None, "sliding_window": 33, "tie_word_embeddings": False,
        "torch_dtype": "float32", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 2,
    },
    # Long rope: the longest sequence takes the long factors, the others the short ones.
    "phi3_longrope": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 73,
        "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 512,
        "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
                         "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 8.0]},
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "float32",
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 2,
    },
    # The second and the fourth layer are not turned.
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "vocab_size": 71,
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "no_rope_layers": [1, 0, 1, 0], "no_rope_layer_interval": 2,
        "layer_types": ["full_attention"] * 4, "sliding_window": None,
        "use_sliding_window": False, "attention_bias": False, "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
        "tie_word_embeddings": True, "dtype": "float32", "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
    },
    "olmo2": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 67,
        "hidden_size": 36, "intermediate_size": 46, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "rope_scaling": None,
        "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "float32",
        "hidden_act": "silu", "eos_token_id": 2, "pad_token_id": 1,
    },
    "glm4": {
        "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "vocab_size": 61,
        "hidden_size": 32, "intermediate_size": 42, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5, "attention_bias": True, "tie_word_embeddings": False,
        "torch_dtype": "float32", "hidden_act": "silu", "eos_token_id": [2, 3],
        "pad_token_id": 2,
    },
    # Older style: two local layers for a global one, which alone has the scaled rope.
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 64,
        "hidden_size": 30, "intermediate_size": 38, "num_hidden_layers": 4,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 14,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "sliding_window": 20,
        "sliding_window_pattern": 3, "rope_theta": 100000.0, "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "query_pre_attn_scalar": 20,
        "attention_bias": False, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "torch_dtype": "float32",
        "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": [1, 3],
        "pad_token_id": 0,
    },
    # The same family as transformers 5 writes it; a head of its own.
    "gemma3_untied": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 59,
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "sliding_window": 31,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "query_pre_attn_scalar": 8, "attention_bias": False, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "use_bidirectional_attention": False,
        "tie_word_embeddings": False, "dtype": "float32",
        "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1,
        "pad_token_id": 0,
    },
}
SEQUENCE_LENGTHS = [2, 7, 33, 150]

SMOLLM2_CHATS = [
    [{"role": "user", "content": "What is 7 + 5? Reply with the number only."}],
    [{"role": "system", "content": "You are terse."},
     {"role": "user", "content": "Name three primes above 100."},
     {"role": "assistant", "content": "101, 103, 107."},
     {"role": "user", "content": "And the next two?"}],
]
SMOLLM2_TEXTS = [
    "The capital of France is",
    "In 1865 the chemist wrote that a snake, biting its own tail, had shown him the ring of six "
    "carbon atoms. Whether the dream was real is doubted today; the ring is not. Every textbook "
    "draws it as a hexagon with a circle inside, and every student learns that the circle stands "
    "for electrons that belong to no single bond.",
]


def dump(value, indent=0):
    """JSON with every array of numbers on one line."""
    pad = "\n" + " " * (indent + 1)
    end = "\n" + " " * indent
    if isinstance(value, dict):
        items = [f"{json.dumps(k)}: {dump(v, indent + 1)}" for k, v in value.items()]
        return "{" + ",".join(pad + item for item in items) + end + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + ",".join(pad + dump(item, indent + 1) for item in value) + end + "]"
    return json.dumps(value)


def rounded(value):
    """A float32 to the nine digits that name it."""
    return float(f"{float(value):.9g}")


def score(model, input_ids, gradients=True):
    model.zero_grad(set_to_none=True)
    ids = torch.tensor([input_ids])
    logits = model(input_ids=ids, use_cache=False).logits  # float32, or float64 for the demo model
    logprobs = torch.log_softmax(logits[0, :-1], dim=-1)
    picked = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    loss = -picked.mean()
    row = {"input_ids": input_ids, "logprobs": [rounded(x) for x in picked.detach()],
           "loss": rounded(loss.detach())}
    if gradients:
        loss.backward()
        row["gradient_norms"] = {
            name: rounded(p.grad.double().norm()) for name, p in model.named_parameters()
        }
    return row


@torch.no_grad()
def greedy(model, input_ids):
    ids, fresh, cache = list(input_ids), list(input_ids), None
    least = float("inf")
    for _ in range(GREEDY_TOKENS):
        step = model(input_ids=torch.tensor([fresh]), cache=cache, use_cache=True)
        cache = step.cache
        best = torch.topk(step.logits[0, -1].float(), 2)
        least = min(least, float(best.values[0] - best.values[1]))
        fresh = [int(best.indices[0])]
        ids += fresh
    return {"input_ids": input_ids, "tokens": ids[len(input_ids):], "least_margin": rounded(least)}


def random_weights(config, generator):
    """Weights large enough that attention is not flat and next tokens differ."""
    shapes = {
        name: tuple(p.shape)
        for name, p in transformers.AutoModelForCausalLM.from_config(config).named_parameters()
    }
    weights = {}
    # Gemma's norms multiply by 1 + weight, and its embeddings come out scaled up.
    gemma = config.model_type == "gemma3_text"
    for name, shape in shapes.items():
        values = generator.standard_normal(shape)
        if name.endswith("norm.weight"):
            values = (0.0 if gemma else 1.0) + 0.2 * values
        elif name.endswith(".bias"):
            values = 0.3 * values
        elif name == "model.embed_tokens.weight":
            values = (0.12 if gemma else 0.7) * values
        else:
            values = values * 1.3 / numpy.sqrt(shape[-1])
        weights[name] = values.astype(numpy.float32)
    return weights


def load(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def make_tiny(name, config, out):
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    eos = config["eos_token_id"]
    generation = {"bos_token_id": 1, "eos_token_id": eos, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for seed in range(100):
        generator = numpy.random.default_rng([seed, *name.encode()])
        weights = random_weights(transformers.AutoConfig.from_pretrained(folder), generator)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        model = load(folder)
        continuation = greedy(model, generator.integers(4, config["vocab_size"], 9).tolist())
        varied = len(set(continuation["tokens"])) > 6
        if continuation["least_margin"] > LEAST_MARGIN and varied:
            break
    else:
        raise SystemExit(f"{name}: no seed keeps the two best logits apart")
    sequences = [generator.integers(0, config["vocab_size"], n).tolist() for n in SEQUENCE_LENGTHS]
    (folder / "expected.json").write_text(dump({
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, "
                     "eager attention, float32, CPU",
        "sequences": [score(model, ids) for ids in sequences],
        "greedy": continuation,
    }) + "\n")
    print(f"{name}: seed {seed}, {sum(w.size for w in weights.values())} parameters")


def make_smollm2(model_folder, path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    # Its activations are so uneven that float32 itself is 2e-5 off in the loss: the oracle is float64.
    model = load(model_folder).double()
    prompts = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for chat in SMOLLM2_CHATS
    ] + SMOLLM2_TEXTS
    rows = []
    for number, text in enumerate(prompts):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        row = {"text": text} | score(model, ids, gradients=number == 0)
        row["greedy"] = {k: v for k, v in greedy(model, ids).items() if k != "input_ids"}
        rows.append(row)
        print(f"{len(ids)} tokens: {tokenizer.decode(row['greedy']['tokens'])!r}, "
              f"margin {row['greedy']['least_margin']}")
    path.write_text(dump({
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, "
                     "eager attention, bf16 weights computed in float64, CPU",
        "model": pathlib.Path(model_folder).name,
        "sequences": rows,
    }) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests" / "golden")
    parser.add_argument("--smollm2", action="store_true", help="the numbers of the demo model instead")
    parser.add_argument("--model", default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--only", help="one tiny model by name")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if options.smollm2:
        make_smollm2(options.model, options.out / "smollm2_expected.json")
        return
    for name, config in MODELS.items():
        if options.only in (None, name):
            make_tiny(name, config, options.out / "tiny")


if __name__ == "__main__":
    main()
