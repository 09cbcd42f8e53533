"""Makes a Hugging Face folder of a small random Llama: python make_random_model.py OUT --tokenizer DIR.

Config, tokenizer and template files come from DIR (with the sizes given), weights from a fixed seed.
For tests and for trying a command without waiting; the model knows nothing."""

import argparse
import json
import pathlib
import shutil

import numpy as np


def tensors(c):
    h, d = c["hidden_size"], c["head_dim"]
    q, kv, i = c["num_attention_heads"] * d, c["num_key_value_heads"] * d, c["intermediate_size"]
    yield "model.embed_tokens.weight", (c["vocab_size"], h)
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        yield p + "input_layernorm.weight", (h,)
        yield p + "self_attn.q_proj.weight", (q, h)
        yield p + "self_attn.k_proj.weight", (kv, h)
        yield p + "self_attn.v_proj.weight", (kv, h)
        yield p + "self_attn.o_proj.weight", (h, q)
        yield p + "post_attention_layernorm.weight", (h,)
        yield p + "mlp.gate_proj.weight", (i, h)
        yield p + "mlp.up_proj.weight", (i, h)
        yield p + "mlp.down_proj.weight", (h, i)
    yield "model.norm.weight", (h,)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--intermediate-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, help="the tokenizer's if it is not given")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    shutil.copytree(a.tokenizer, a.out, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((a.out / "config.json").read_text())
    config.update(hidden_size=a.hidden_size, intermediate_size=a.intermediate_size,
                  num_hidden_layers=a.layers, num_attention_heads=a.heads,
                  num_key_value_heads=a.kv_heads, head_dim=a.hidden_size // a.heads,
                  tie_word_embeddings=True, torch_dtype="float32")
    config.pop("dtype", None)
    if a.vocab_size:
        config["vocab_size"] = a.vocab_size
    (a.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    random = np.random.default_rng(a.seed)
    header, parts, end = {}, [], 0
    for name, shape in tensors(config):
        data = np.ones(shape, "<f4") if len(shape) == 1 else random.normal(0, 0.1, shape).astype("<f4")
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + data.nbytes]}
        end += data.nbytes
        parts.append(data.tobytes())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(a.out / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(parts)


if __name__ == "__main__":
    main()
