#!/usr/bin/env python3
"""Holds kernels to their words: a .cu file means the same under nvcc and in the simulator, so it knows nothing of either."""
import pathlib, re, sys

BANNED = [
    (r"^\s*#\s*(if|ifdef|ifndef|elif|else)\b", "a preprocessor branch"),
    (r"<<<", "a launch of its own (launch() of frit/simt/launch.h)"),
    (r"\bcuda[A-Z]\w*", "CUDA's run time"),
    (r"\basm\b", "inline PTX"),
    (r"\b__\w+", "a device intrinsic (a word of frit/simt)"),
    (r"\bFRIT_CUDA\b|\bbuilt_with_cuda\b|\bDevice::k", "which of the two it runs on"),
    (r"\b(threadIdx|blockIdx|blockDim|gridDim)\b", "CUDA's built-in variables"),
]
root = pathlib.Path(__file__).resolve().parent.parent
bad, files = [], 0
for path in sorted(p for pattern in ("*.cu", "*-inl.h") for p in (root / "frit").rglob(pattern)):
    folder = path.relative_to(root / "frit").parts[0]
    if folder not in ("ops", "simt") or path.name.endswith("_test.cu"):
        continue
    files += 1
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code = line.split("//")[0]
        if '#include "' in code or "#pragma once" in code:
            continue
        for pattern, what in BANNED:
            if re.search(pattern, code):
                bad.append(f"{path.relative_to(root)}:{number}: {what}: {line.strip()[:100]}")
if files == 0:
    bad.append("no kernel file found")
print("\n".join(bad) if bad else f"{files} kernel files use words of frit/simt alone: ok")
sys.exit(1 if bad else 0)
