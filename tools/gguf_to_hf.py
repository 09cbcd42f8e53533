#!/usr/bin/env python3
"""Turns a GGUF file of a llama-family model into a Hugging Face folder.

    python tools/gguf_to_hf.py MODEL.gguf OUT_DIR

Every tensor is dequantised to f32 and rounded once to bf16 (to nearest, ties to even); the q and k
rows go back from the order of llama.cpp's rope (pairs side by side) to the Hugging Face order (two
halves of a head). Config, tokenizer and chat template come from the file's own metadata. The folder
appears whole or not at all: it is written beside OUT_DIR and renamed, and `conversion.json` names
the source, so a second call with the same source returns at once.
Needs numpy and gguf; `tokenizers`, when present, loads the result as a check.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize

CONVERTER_VERSION = 1  # part of conversion.json: raise it when the bytes written here change
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # GGUF token types

# How a GGUF pre-tokenizer name is said in a tokenizer.json.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS = {
    # Digits one by one, before the byte-level split.
    "smollm": {"type": "Sequence",
               "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
    "gpt-2": BYTE_LEVEL,
}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class ConversionError(Exception):
    """The user's to mend; the text begins with the file or folder concerned."""


class Metadata:
    """The key-value part of a GGUF file; a missing key is an error that names file and key."""

    def __init__(self, path, reader):
        self.path = path
        self.fields = reader.fields

    def get(self, key, default=None):
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key):
        value = self.get(key)
        if value is None:
            raise ConversionError(f"{self.path}: metadata key '{key}' is missing; a complete GGUF "
                                  "file of a llama-family model is wanted")
        return value


def to_bf16(values):
    """f32 array -> uint16 array of bf16 bits, rounded to nearest, ties to even. NaN is refused."""
    if not np.isfinite(values).all():
        raise ConversionError("a value is not finite")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def unpermute(rows, num_heads):
    """[heads * dim, in]: pairs (2i, 2i+1) of a head -> halves (i, i + dim/2)."""
    out, width = rows.shape
    return rows.reshape(num_heads, out // num_heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def hf_name(gguf_name):
    """Hugging Face name of a tensor, or None if this converter does not know it."""
    if gguf_name in OTHER_NAMES:
        return OTHER_NAMES[gguf_name]
    parts = gguf_name.split(".")  # blk.N.attn_q.weight
    if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    return None


def read_tensors(path, reader, config):
    """Name -> (shape, function returning bf16 bits); each tensor is dequantised when it is written."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        if name is None:
            raise ConversionError(f"{path}: tensor '{tensor.name}' is not part of a plain llama "
                                  "model; this converter would lose it")
        shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF counts the fastest first

        def load(tensor=tensor, name=name, shape=shape):
            values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            projection = name.split(".")[-2]
            if projection in heads:
                values = unpermute(values, heads[projection])
            try:
                return to_bf16(values)
            except ConversionError as fault:
                raise ConversionError(f"{path}: tensor '{tensor.name}': {fault}") from None

        tensors[name] = (shape, load)
    wanted = 2 + 9 * config["num_hidden_layers"] + (not config["tie_word_embeddings"])
    if len(tensors) != wanted:
        raise ConversionError(f"{path}: holds {len(tensors)} tensors, {wanted} wanted for "
                              f"{config['num_hidden_layers']} layers; the file is cut or of another kind")
    return tensors


def model_config(path, meta, reader):
    architecture = meta.need("general.architecture")
    if architecture != "llama":
        raise ConversionError(f"{path}: general.architecture is '{architecture}', only 'llama' is "
                              "converted here")
    if any(key.startswith("llama.rope.scaling.") and key != "llama.rope.scaling.finetuned"
           for key in meta.fields):
        raise ConversionError(f"{path}: has llama.rope.scaling.* keys, which are not converted here")
    hidden = meta.need("llama.embedding_length")
    heads = meta.need("llama.attention.head_count")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.need("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "head_dim": meta.get("llama.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": round(hidden ** -0.5, 8),
        "intermediate_size": meta.need("llama.feed_forward_length"),
        "max_position_embeddings": meta.need("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": meta.need("llama.block_count"),
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        # Stored as f32; the shortest decimal of that f32 is the number that was meant.
        "rms_norm_eps": float(str(np.float32(meta.need("llama.attention.layer_norm_rms_epsilon")))),
        "rope_scaling": None,
        "rope_theta": float(str(np.float32(meta.get("llama.rope.freq_base", 10000.0)))),
        "tie_word_embeddings": not any(t.name == "output.weight" for t in reader.tensors),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(meta.need("tokenizer.ggml.tokens")),
    }
    rotated = meta.get("llama.rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise ConversionError(f"{path}: llama.rope.dimension_count is {rotated}, head size is "
                              f"{config['head_dim']}; partial rotation is not converted here")
    return config


def end_tokens(meta, config):
    """Ids that end an answer: the file's EOS, then the document separator if it is another token."""
    tokens = meta.need("tokenizer.ggml.tokens")
    ids = [config["eos_token_id"]]
    if "<|endoftext|>" in tokens and tokens.index("<|endoftext|>") not in ids:
        ids.append(tokens.index("<|endoftext|>"))
    return ids


def tokenizer_json(path, meta):
    if meta.need("tokenizer.ggml.model") != "gpt2":
        raise ConversionError(f"{path}: tokenizer.ggml.model is '{meta.need('tokenizer.ggml.model')}', "
                              "only byte-level BPE ('gpt2') is converted here")
    pre = meta.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in PRE_TOKENIZERS:
        raise ConversionError(f"{path}: tokenizer.ggml.pre is '{pre}', known: "
                              + ", ".join(sorted(PRE_TOKENIZERS)))
    tokens = meta.need("tokenizer.ggml.tokens")
    types = meta.need("tokenizer.ggml.token_type")
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": kind == CONTROL}
             for i, (token, kind) in enumerate(zip(tokens, types)) if kind in (CONTROL, USER_DEFINED)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta.need("tokenizer.ggml.merges")],
        },
    }


def token_texts(meta):
    """Role -> text of the special tokens that the file names."""
    tokens = meta.need("tokenizer.ggml.tokens")
    roles = {"bos_token": "bos_token_id", "eos_token": "eos_token_id",
             "pad_token": "padding_token_id", "unk_token": "unknown_token_id"}
    return {role: tokens[meta.get(f"tokenizer.ggml.{key}")] for role, key in roles.items()
            if meta.get(f"tokenizer.ggml.{key}") is not None}


def tokenizer_config(meta, tokenizer, config):
    decoder = {str(token["id"]): {k: v for k, v in token.items() if k != "id"}
               for token in tokenizer["added_tokens"]}
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        **token_texts(meta),
        "chat_template": meta.need("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        # The plain class: a GPT-2 class would build its own pre-tokenizer and lose the digit rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_safetensors(path, tensors):
    """tensors: name -> (shape, function returning uint16 bf16 bits). Written one at a time."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors):
        shape, _ = tensors[name]
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in sorted(tensors):
            file.write(tensors[name][1]().tobytes())


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def flush(folder):
    """All bytes of the folder on the disk, so that the rename which follows cannot outrun them."""
    for path in [*folder.iterdir(), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def write_folder(source, folder, stamp):
    try:
        reader = GGUFReader(source)
    except (ValueError, OSError) as fault:
        raise ConversionError(f"{source}: not a readable GGUF file ({fault})") from None
    meta = Metadata(source, reader)
    config = model_config(source, meta, reader)
    tokenizer = tokenizer_json(source, meta)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": end_tokens(meta, config),
        "pad_token_id": config["pad_token_id"],
    })
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", tokenizer_config(meta, tokenizer, config))
    write_json(folder / "special_tokens_map.json", token_texts(meta))
    (folder / "chat_template.jinja").write_text(meta.need("tokenizer.chat_template"), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", read_tensors(source, reader, config))
    try:
        from tokenizers import Tokenizer
    except ImportError:
        pass
    else:
        Tokenizer.from_file(str(folder / "tokenizer.json"))
    write_json(folder / "conversion.json", stamp)


def convert(source, out):
    """Writes `out` from `source`; returns False when it was there already."""
    if not source.is_file():
        raise ConversionError(f"{source}: no such file; a GGUF file is wanted")
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") \
            else hashlib.sha256(file.read())
    stamp = {"source": source.name, "source_bytes": source.stat().st_size,
             "source_sha256": digest.hexdigest(), "converter_version": CONVERTER_VERSION}
    written = out / "conversion.json"
    if out.exists():
        if not written.is_file():
            raise ConversionError(f"{out}: exists and was not made by this converter; "
                                  "remove it or name another folder")
        if json.loads(written.read_text()) == stamp:
            return False
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, old = out.with_name(out.name + ".partial"), out.with_name(out.name + ".old")
    for left_over in (partial, old):
        shutil.rmtree(left_over, ignore_errors=True)
    partial.mkdir()
    write_folder(source, partial, stamp)
    flush(partial)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    return True


def main(arguments):
    if len(arguments) != 2:
        print("usage: gguf_to_hf.py MODEL.gguf OUT_DIR", file=sys.stderr)
        return 2
    source, out = Path(arguments[0]), Path(arguments[1])
    try:
        made = convert(source, out)
    except (ConversionError, OSError) as fault:
        print(f"gguf_to_hf: {fault}", file=sys.stderr)
        return 1
    print(f"{out}: {'written from ' + source.name if made else 'is up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
