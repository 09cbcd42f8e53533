"""tools/gguf_to_hf.py on a tiny GGUF file written here: each tensor's name, shape and bf16 bits, q and k
rows back in Hugging Face order, config and tokenizer from the metadata; a second call skips, a changed
source replaces the folder, what an interrupted call left is cleared, and each fault of the user is one
line that begins with the file. A permutation or rounding mistake gives a model that still talks, only
worse, so the numbers are compared exactly. Exit code 0 or 1."""

import json
import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "gguf_to_hf.py"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 8, 2, 1, 4, 12, 2
TOKENS = ["<|endoftext|>", "<|im_end|>", "a", "b", "1", "2", "ab", "12"]
faults = []


def check(condition, text):
    if not condition:
        faults.append(text)


def to_llama_order(rows, num_heads):
    """Row i of a head's first half goes to 2i, of its second half to 2i + 1: written out, row by row."""
    out = np.empty_like(rows)
    for head in range(num_heads):
        for i in range(HEAD_DIM // 2):
            out[head * HEAD_DIM + 2 * i] = rows[head * HEAD_DIM + i]
            out[head * HEAD_DIM + 2 * i + 1] = rows[head * HEAD_DIM + HEAD_DIM // 2 + i]
    return out


def make_weights(rng):
    """Hugging Face name -> f32 values as the model's author had them."""
    shapes = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for n in range(LAYERS):
        at = f"model.layers.{n}."
        shapes |= {at + "input_layernorm.weight": (HIDDEN,), at + "post_attention_layernorm.weight": (HIDDEN,),
                   at + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
                   at + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                   at + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                   at + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
                   at + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN), at + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
                   at + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q",
              "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
              "up_proj": "ffn_up", "down_proj": "ffn_down"}


def write_gguf(path, weights, architecture="llama", leave_out=None, extra=None):
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, values in weights.items():
        parts = name.split(".")
        if name == leave_out:
            continue
        if parts[1] == "layers":
            kind = parts[-2]
            if kind in ("q_proj", "k_proj"):
                values = to_llama_order(values, HEADS if kind == "q_proj" else KV_HEADS)
            writer.add_tensor(f"blk.{parts[2]}.{GGUF_NAMES[kind]}.weight", values)
        else:
            writer.add_tensor({"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[1]], values)
    if extra:
        writer.add_tensor(extra, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_safetensors(path):
    """name -> (shape, bf16 bits)."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    check((8 + size) % 8 == 0, "model.safetensors: the data does not begin at a multiple of 8")
    tensors, end = {}, 0
    for name, entry in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        check(entry["dtype"] == "BF16" and first == end, f"{name}: {entry} does not follow the one before")
        end = last
        tensors[name] = (tuple(entry["shape"]), np.frombuffer(data[8 + size + first:8 + size + last], np.uint16))
    check(8 + size + end == len(data), "model.safetensors: header and file differ in length")
    return tensors


def nearest_bf16(value):
    """bf16 bits of one f32, by looking at both neighbours: nearest, ties to the even one."""
    low = int(np.float32(value).view(np.uint32)) >> 16
    candidates = [low, low + 1]
    distances = [abs(float(np.uint32(c << 16).view(np.float32)) - float(value)) for c in candidates]
    if distances[0] == distances[1]:
        return candidates[0] if candidates[0] % 2 == 0 else candidates[1]
    return candidates[int(distances[1] < distances[0])]


def run(source, out):
    done = subprocess.run([sys.executable, TOOL, source, out], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def check_weights(out, weights):
    found = read_safetensors(out / "model.safetensors")
    check(found.keys() == weights.keys(), f"names differ: {sorted(found.keys() ^ weights.keys())}")
    for name, values in weights.items():
        shape, bits = found.get(name, ((), np.zeros(0, np.uint16)))
        wanted = np.array([nearest_bf16(v) for v in values.ravel()], dtype=np.uint16)
        check(shape == values.shape and np.array_equal(bits, wanted), f"{name}: shape or bits differ")


def check_fault(folder, weights, words, **kind):
    source = folder / "bad.gguf"
    write_gguf(source, weights, **kind)
    code, said = run(source, folder / "bad")
    check(code == 1 and said.startswith("gguf_to_hf: " + str(source)) and words in said and "Traceback" not in said,
          f"{kind}: exit code {code}, said {said!r}, wanted '{words}'")
    check(not (folder / "bad").exists(), f"{kind}: left a folder behind")


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        weights = make_weights(np.random.default_rng(7))
        weights["model.norm.weight"][:2] = [1 + 2 ** -8, 1 + 3 * 2 ** -8]  # halfway: down to even, up to even
        source, out = folder / "tiny.gguf", folder / "models" / "tiny"
        write_gguf(source, weights)
        (folder / "models" / "tiny.partial").mkdir(parents=True)  # as an interrupted call leaves it
        (folder / "models" / "tiny.partial" / "stale").write_text("x")

        code, said = run(source, out)
        check(code == 0 and "written" in said, f"first call: exit code {code}, {said!r}")
        check_weights(out, weights)
        check(not (out / "stale").exists() and not out.with_name("tiny.partial").exists(), "a stale file stayed")
        config = json.loads((out / "config.json").read_text())
        wanted = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
                  "intermediate_size": 12, "num_hidden_layers": 2, "rope_theta": 100000.0, "rms_norm_eps": 1e-5,
                  "vocab_size": 8, "tie_word_embeddings": True, "eos_token_id": 1}
        for key, value in wanted.items():
            check(config[key] == value, f"config.json: {key} is {config[key]!r}, {value!r} wanted")
        ends = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
        check(ends == [1, 0], f"generation_config.json: eos_token_id is {ends}")

        from tokenizers import Tokenizer
        ids = Tokenizer.from_file(str(out / "tokenizer.json")).encode("ab12<|im_end|>").ids
        check(ids == [6, 4, 5, 1], f"'ab12<|im_end|>' gives {ids}: digits one by one, special token whole")

        before = (out / "model.safetensors").stat().st_mtime_ns
        code, said = run(source, out)
        check(code == 0 and "up to date" in said, f"second call: exit code {code}, {said!r}")
        check((out / "model.safetensors").stat().st_mtime_ns == before, "second call wrote the weights again")
        weights["model.norm.weight"] += 1
        write_gguf(source, weights)
        run(source, out)
        check_weights(out, weights)

        check_fault(folder, weights, "general.architecture is 'bert'", architecture="bert")
        check_fault(folder, weights, "20 wanted", leave_out="model.norm.weight")
        check_fault(folder, weights, "rope_freqs", extra="rope_freqs.weight")
        weights["model.norm.weight"][0] = np.nan
        check_fault(folder, weights, "not finite")
        (folder / "mine").mkdir()
        code, said = run(source, folder / "mine")
        check(code == 1 and "was not made by this converter" in said, f"a foreign folder: {code}, {said!r}")

    for fault in faults:
        print(f"gguf_to_hf: {fault}")
    print(f"gguf_to_hf: {len(faults)} faults")
    return 1 if faults else 0


sys.exit(main())
