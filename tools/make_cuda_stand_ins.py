#!/usr/bin/env python3
"""Makes empty stand-ins for the CUDA libraries that the torch wheel's Python module links.

    python tools/make_cuda_stand_ins.py SITE_PACKAGES TORCH_LIB_DIR

`import torch` of the CUDA wheel loads libtorch_cuda.so, which names cuBLAS, cuDNN, NCCL and others:
2.5 GB that work on a CPU never calls. For each such library that no installed wheel brings this writes a
shared object of the same name whose functions stop the process and say so, together with a .pth file
that loads them when Python starts. Only for the oracle's environment on a machine without a GPU; the
program `tandem` links none of this. Needs binutils (readelf, nm) and a C compiler.
"""

import re
import subprocess
import sys
from pathlib import Path

# The libraries of the wheel that torch's Python module pulls in.
ROOTS = ["libtorch_python.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so",
         "libc10_cuda.so"]
# Who owns a function whose reference carries no version: by its name's beginning.
PREFIXES = {"nccl": "libnccl", "curand": "libcurand", "cufile": "libcufile", "cuFile": "libcufile",
            "cusparseLt": "libcusparseLt", "nvshmem": "libnvshmem_host"}
REAL = ("libcudart.so", "libcupti.so")  # installed for real: libtorch_cpu.so itself calls them


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def is_cuda(soname):
    return re.match(r"lib(cu|nccl|nvshmem|nvrtc|nvJit)", soname) and not soname.startswith(REAL)


def read_needs(torch_lib):
    """soname -> set of function names that torch takes from it."""
    needs = {}
    for root in ROOTS:
        path = str(torch_lib / root)
        for soname in re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", path)):
            if is_cuda(soname):
                needs.setdefault(soname, set())
    for root in ROOTS:
        for line in output("nm", "-D", "--undefined-only", str(torch_lib / root)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if is_cuda(version):
                needs.setdefault(version, set()).add(name)
                continue
            for prefix, library in PREFIXES.items():
                if name.startswith(prefix):
                    owner = next((so for so in needs if so.startswith(library + ".so")), None)
                    if owner:
                        needs[owner].add(name)
    return needs


def write_stand_in(folder, soname, functions):
    lines = ["#include <stdio.h>", "#include <stdlib.h>"]
    lines += [f'void {name}(void) {{ fputs("{name}: only a stand-in of {soname} is installed here; '
              f'this environment computes on the CPU\\n", stderr); abort(); }}'
              for name in sorted(functions)]
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{soname}", "-x", "c", "-",
                    "-o", str(folder / soname)], input="\n".join(lines) + "\n", text=True, check=True)


LOADER = '''"""Loads the stand-ins for CUDA libraries beside this file; see tools/make_cuda_stand_ins.py."""
import ctypes
import pathlib

for path in sorted(pathlib.Path(__file__).with_name("cuda_stand_ins").glob("*.so*")):
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
'''


def main(arguments):
    if len(arguments) != 2:
        print("usage: make_cuda_stand_ins.py SITE_PACKAGES TORCH_LIB_DIR", file=sys.stderr)
        return 2
    site, torch_lib = Path(arguments[0]), Path(arguments[1])
    if not (torch_lib / "libtorch_cuda.so").is_file():
        print(f"{torch_lib}: holds no libtorch_cuda.so; the lib folder of the torch package is wanted",
              file=sys.stderr)
        return 1
    folder = site / "cuda_stand_ins"
    folder.mkdir(parents=True, exist_ok=True)
    real = {path.name for path in torch_lib.parent.parent.glob("nvidia/*/lib/*.so*")}
    needs = {name: used for name, used in read_needs(torch_lib).items() if name not in real}
    for soname, functions in needs.items():
        write_stand_in(folder, soname, functions)
    (site / "load_cuda_stand_ins.py").write_text(LOADER)
    (site / "cuda_stand_ins.pth").write_text("import load_cuda_stand_ins\n")
    print(f"{folder}: {len(needs)} stand-ins ({sum(map(len, needs.values()))} functions)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
