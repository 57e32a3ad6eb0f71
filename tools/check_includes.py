#!/usr/bin/env python3
"""Holds the direction of includes: each folder of frit/ may include itself and the folders left of it."""
import pathlib, re, sys

ORDER = "core memory backend simt ops layers models data infer train explain".split()
root = pathlib.Path(__file__).resolve().parent.parent
bad = []
for path in sorted((root / "frit").rglob("*")):
    if path.suffix not in (".h", ".cc", ".cu"):
        continue
    folder = path.relative_to(root / "frit").parts[0]
    if folder not in ORDER:
        bad.append(f"{path.relative_to(root)}: folder {folder} is not in the order {' <- '.join(ORDER)}")
        continue
    parts = path.relative_to(root / "frit").parts
    if path.suffix == ".cu" and folder not in ("ops", "simt") and parts[:2] not in (("backend", "cuda"), ("backend", "sim")):
        bad.append(f"{path.relative_to(root)}: .cu files live under frit/ops, frit/simt, frit/backend/cuda and frit/backend/sim")
    device = path.suffix == ".cu" or parts[:2] in (("backend", "cuda"), ("backend", "sim"), ("ops", "case.cc"))
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if "FRIT_CUDA" in line and not device:
            bad.append(f"{path.relative_to(root)}:{number}: FRIT_CUDA is not defined here: ask built_with_cuda()")
        match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not match:
            continue
        target = match.group(1).split("/")
        if target[0] != "frit" or len(target) < 3:
            bad.append(f"{path.relative_to(root)}:{number}: include {match.group(1)} does not start at the root (frit/...)")
        elif target[1] not in ORDER or ORDER.index(target[1]) > ORDER.index(folder):
            bad.append(f"{path.relative_to(root)}:{number}: {folder} may not include {target[1]}")
print("\n".join(bad) if bad else "includes point left only: ok")
sys.exit(1 if bad else 0)
