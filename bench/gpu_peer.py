"""The peers of bench/gpu.sh on the same GPU, with random weights of the Qwen3-4B shape: transformers'
generate with a static cache and compiled, and a PyTorch FSDP2 training step on 2 x 4,096 tokens with
compiled layers, bf16 compute and f32 master weights; between two GPUs, torch.distributed's ways to move
that model's weights (and SmolLM2-135M's) over NCCL. One JSON object a figure.

    python bench/gpu_peer.py decode [BATCH...] | train | copy | transfer
"""

import json
import os
import statistics
import sys
import time

import torch


def qwen3():
    from transformers import Qwen3Config
    return Qwen3Config(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
                       num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                       max_position_embeddings=8192, rms_norm_eps=1e-6, rope_theta=1e6,
                       tie_word_embeddings=True, use_cache=True)


def show(**figure):
    print(json.dumps(figure), flush=True)


def make_model(dtype):
    from transformers import Qwen3ForCausalLM
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(qwen3())
    torch.set_default_dtype(torch.float32)
    return model


def decode(batches):
    model = make_model(torch.bfloat16).eval()
    for batch in batches:
        prompt = torch.randint(0, 151936, (batch, 128), device="cuda")
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.monotonic()
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=128,
                           min_new_tokens=128, do_sample=True, cache_implementation="static",
                           pad_token_id=0)
            torch.cuda.synchronize()
            times.append(time.monotonic() - start)
        show(part="decode", system="transformers, static cache, compiled", batch=batch,
             tokens_per_second=batch * 128 / statistics.median(times[1:]))


def train():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    model = make_model(torch.float32).train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.randint(0, 151936, (2, 4096), device="cuda")
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.monotonic()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.monotonic() - start)
    show(part="train", system="FSDP2, compiled layers", tokens_per_second=8192 / statistics.median(times[3:]))


def copy():
    source = torch.randint(0, 255, (8045436928,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.monotonic()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds = time.monotonic() - start
    show(part="update", system="torch device copy of the same bytes", ms=1e3 * seconds)


def shapes(vocab, hidden, inner, layers, q, kv, head_norms):
    found = [(vocab, hidden), (hidden,)]
    for _ in range(layers):
        found += [(hidden,), (q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (hidden,),
                  (inner, hidden), (inner, hidden), (hidden, inner), *head_norms]
    return found


def transfer_rank(rank, port):
    import torch.distributed as dist
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    gloo = dist.new_group(backend="gloo")
    large = shapes(151936, 2560, 9728, 36, 4096, 1024, [(128,), (128,)])
    small = shapes(49152, 576, 1536, 30, 576, 192, [])
    for model, sizes, dtype in [("Qwen3-4B, bf16", large, torch.bfloat16),
                                ("SmolLM2-135M, bf16", small, torch.bfloat16),
                                ("SmolLM2-135M, f32", small, torch.float32)]:
        tensors = [torch.ones(size, dtype=dtype, device="cuda") for size in sizes]
        flat = torch.ones(sum(t.numel() for t in tensors), dtype=dtype, device="cuda")

        def one_by_one():
            for tensor in tensors:
                dist.broadcast(tensor, 0)

        def send():
            dist.send(flat, 1) if rank == 0 else dist.recv(flat, 0)

        for way, move in [("broadcast, tensor by tensor", one_by_one),
                          ("broadcast, one flat buffer", lambda: dist.broadcast(flat, 0)), ("send and recv, one flat buffer", send)]:
            times = []
            for _ in range(8):
                torch.cuda.synchronize()
                dist.barrier(gloo)
                start = time.monotonic()
                move()
                torch.cuda.synchronize()
                dist.barrier(gloo)
                times.append(time.monotonic() - start)
            seconds = statistics.median(times[2:])
            if rank == 1:
                show(part="transfer", system="torch.distributed, NCCL", model=model, way=way, ms=1e3 * seconds,
                     gigabytes_per_second=flat.numel() * flat.element_size() / seconds / 1e9)
        del tensors, flat
    dist.destroy_process_group()


def transfer():
    if torch.cuda.device_count() < 2:
        show(**{"part": "transfer", "system": "peer", "not run": f"{torch.cuda.device_count()} GPU"})
    else:
        torch.multiprocessing.spawn(transfer_rank, args=(29512,), nprocs=2)


if __name__ == "__main__":
    part, rest = sys.argv[1], [int(word) for word in sys.argv[2:]]
    if part == "decode":
        decode(rest or [1, 64])
    elif part == "train":
        train()
    elif part == "transfer":
        transfer()
    else:
        copy()
