#!/usr/bin/env python3
"""How long new weights take from a trainer process to an engine process, both on this machine:
Tandem's ways beside torch.distributed (Gloo) broadcasting the same tensors, and the machine's own
memcpy as the ceiling. All in one run, in turn, since machines are noisy; medians.

    .venv-oracle/bin/python bench/transfer.py [--model DIR] [--rounds 5] [--json FILE]

Tandem's figure is perf/update_weights_time of real runs: from the optimizer's last write until the
engine serves, checksums at both ends and the driver's calls included; of its parts, verify (the
trainer's checksums) and move (the engine's included) overlap. The peer's is the broadcast alone.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
WAYS = {
    "p2p, memory": ["--update-weight-transfer-mode", "p2p"],
    "p2p, sockets": ["--update-weight-transfer-mode", "p2p", "--no-update-weight-shared-memory"],
    "broadcast, memory": [],
    "broadcast, sockets": ["--no-update-weight-shared-memory"],
}


def shapes_of(model):
    """Shapes of the model's tensors, from the header of its safetensors files."""
    shapes = []
    for path in sorted(pathlib.Path(model).glob("*.safetensors")):
        with open(path, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        shapes += [t["shape"] for name, t in header.items() if name != "__metadata__"]
    return shapes


def peer(rank, port, model, rounds, out):
    """One process of the torch.distributed pair; rank 1 writes seconds to `out`."""
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tensors = [torch.ones(s, dtype=torch.bfloat16) for s in shapes_of(model)]
    flat = torch.ones(sum(t.numel() for t in tensors), dtype=torch.bfloat16)
    seconds = {"tensor by tensor": [], "one flat buffer": []}
    for _ in range(rounds + 1):
        for name, parts in (("tensor by tensor", tensors), ("one flat buffer", [flat])):
            dist.barrier()
            start = time.perf_counter()
            for t in parts:
                dist.broadcast(t, 0)
            seconds[name].append(time.perf_counter() - start)
    copies = []
    other = torch.empty_like(flat)
    for _ in range(rounds + 1):
        start = time.perf_counter()
        other.copy_(flat)
        copies.append(time.perf_counter() - start)
    seconds["memcpy (ceiling)"] = copies
    if rank == 1:
        pathlib.Path(out).write_text(json.dumps({k: v[1:] for k, v in seconds.items()}))
    dist.barrier()


def run_peer(model, rounds, folder):
    port = 20000 + os.getpid() % 20000
    out = folder / "peer.json"
    pair = [subprocess.Popen([sys.executable, __file__, "--peer", str(r), "--port", str(port),
                              "--model", model, "--rounds", str(rounds), "--json", out])
            for r in range(2)]
    if any(p.wait(timeout=600) for p in pair):
        sys.exit("the torch.distributed pair failed")
    return json.loads(out.read_text())


def run_tandem(model, rounds, flags, folder):
    run = folder / "run"
    subprocess.run(["rm", "-rf", run], check=True)
    done = subprocess.run(
        [str(x) for x in [ROOT / "build/tandem", "train", "--hf-checkpoint", model,
         "--prompt-data", ROOT / "examples/addition/train.jsonl", "--input-key", "prompt",
         "--label-key", "label", "--apply-chat-template", "--rm-type", "last-number",
         "--num-rollout", rounds, "--rollout-batch-size", 1, "--n-samples-per-prompt", 2,
         "--rollout-max-response-len", 2, "--dtype", "bfloat16", "--threads-per-rank", 1,
         "--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1, "--run-dir", run, *flags]],
        capture_output=True, text=True, timeout=1800, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "models/SmolLM2-135M-Instruct"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer is not None:
        return peer(args.peer, args.port, args.model, args.rounds, args.json)
    result = {"model": pathlib.Path(args.model).name, "peer": {}, "tandem": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for title, seconds in run_peer(args.model, args.rounds, folder).items():
            result["peer"][title] = statistics.median(seconds)
        for title, flags in WAYS.items():
            rows = run_tandem(args.model, args.rounds, flags, folder)
            result["tandem"][title] = {
                part: statistics.median(r[f"perf/update_weights_{part}_time"] for r in rows)
                for part in ("announce", "move", "verify", "swap")}
            result["tandem"][title]["all"] = statistics.median(
                r["perf/update_weights_time"] for r in rows)
            result["bytes"] = rows[-1]["perf/update_weights_bytes"]
    print(f"{result['bytes'] / 1e6:.0f} MB of {result['model']}, bf16; milliseconds, medians")
    for title, seconds in result["peer"].items():
        print(f"  torch.distributed {title:22} {seconds * 1e3:8.1f}")
    for title, parts in result["tandem"].items():
        print(f"  tandem {title:33} {parts['all'] * 1e3:8.1f}   (announce {parts['announce'] * 1e3:.1f}, "
              f"move {parts['move'] * 1e3:.1f}, verify {parts['verify'] * 1e3:.1f}, "
              f"swap {parts['swap'] * 1e3:.1f})")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
