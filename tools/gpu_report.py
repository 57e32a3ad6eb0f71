#!/usr/bin/env python3
"""Joins what tools/gpu_check.sh measured into one JSON file and one table; tells which operators changed since.

gpu_report.py join --results FOLDER --out bench/results/gpu-ops.json
    FOLDER holds ours.json and errors.json (bench_gpu_ops), torch.json and torch_numerics.json (bench/peers), tests.txt (test_ops)
    and gpu.txt. What is missing is reported as missing.
gpu_report.py sanitizers --results FOLDER --out FILE.json
    adds to that file what compute-sanitizer said of each operator (memcheck.txt and racecheck.txt of FOLDER, as far as they exist)
gpu_report.py table FILE.json       prints the table
gpu_report.py stale FILE.json       lists operators whose sources differ from those that were checked on a GPU; ends with 0
"""
import argparse, datetime, hashlib, json, pathlib, re, sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def operators():
    text = (ROOT / "frit/ops/OPS.def").read_text()
    return [m[0] for m in re.findall(r"^FRIT_OP\((\w+), \w+, (true)\)", text, re.M)]


def hashes():
    """sha256 of what a kernel is made of: the operator's folder without tests, and the words it is written in."""
    def of(paths):
        h = hashlib.sha256()
        for p in sorted(paths):
            h.update(p.relative_to(ROOT).as_posix().encode() + b"\0" + p.read_bytes())
        return h.hexdigest()[:16]

    def shared(folder):
        """Kernels of other operators that this one's include."""
        found = set()
        for p in (ROOT / "frit/ops" / folder).glob("*.cu"):
            found |= {ROOT / name for name in re.findall(r'#include "(frit/ops/[^"]*-inl\.h)"', p.read_text())}
        return {p for p in found if p.parent.name != folder}

    simt = [p for p in (ROOT / "frit/simt").glob("*") if p.suffix in (".h", ".cu") and "test" not in p.name]
    result = {"simt": of(simt)}
    for op in operators():
        own = {p for p in (ROOT / "frit/ops" / op).glob("*") if p.suffix in (".h", ".cc", ".cu") and not re.search(r"_test|cpu|cases", p.name)}
        result[op] = of(own | shared(op))
    return result


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


def peer_row(row):
    """(row, shape) under which bench/peers/torch_ops.py measured what one of our rows is, or None."""
    op, case, backward = row["op"], row["case"], row["direction"] == "backward"
    size = re.match(r"\[?([0-9]+(?:x[0-9]+)*)", case)
    size = size[1] if size else ""
    parts = case.split("/")
    if "bf16" not in case and op not in ("beam_select", "optimizer"):
        return None
    direction = "backward" if backward else "forward"
    if op == "layer_norm" and re.fullmatch(r"[0-9x]+/bf16", case):
        return f"layer_norm {direction}", size
    if op == "softmax" and "stored" not in parts:
        rows, cols = map(int, size.split("x"))
        shape = {65536: f"8x16x512x{cols}", 131072: f"4x16x2048x{cols}"}.get(rows)
        return (f"softmax_dropout {direction}", shape) if shape else None
    if op == "bias_dropout_residual" and re.fullmatch(r"[0-9x]+/bf16/p0.1", case):
        return f"bias_dropout_residual {direction}", size
    if op == "bias_dropout_residual_norm" and re.fullmatch(r"[0-9x]+/bf16/p0.1", case):
        return f"bias_dropout_residual_norm {direction}", size
    if op == "bias_activation_dropout" and re.fullmatch(r"[0-9x]+/bf16/gelu(_new)?/p0.1", case):
        return ("bias_gelu_dropout " if "gelu_new" in parts else "bias_gelu_erf_dropout ") + direction, size
    if op == "criterion":
        return "criterion forward+backward", size
    if op == "beam_select" and "f32" in parts:
        return "beam_step", size
    if op == "embedding" and "p0.1" in parts and parts[-1] in ("random", "one_word"):
        return ("embedding_equal_ids " if parts[-1] == "one_word" else "embedding ") + direction, f"{size} {parts[1]}"
    if op == "column_sum":
        return "column_sum", size
    if op == "gradient_norm":
        return "gradient_norm", "1 tensor"
    if op == "optimizer" and ("f32" in case or "fp32" in case):
        return "adam", "193 tensors 209911808"
    if op == "optimizer" and "stochastic" in case:
        return "adam_16bit", "193 tensors 209911808"
    if op == "attention":  # PyTorch's rows have dropout 0.1 and as many keys as queries
        if "drop0.1" not in parts or parts[0][1:] != parts[1][1:]:
            return None
        shape = {"q32sequences,4096tokens": "32x8x128x64", "q128sequences,4096tokens": "128x8x32x64"}.get(parts[0])
        return (("attention_causal " if "causal" in parts else "attention ") + direction, shape) if shape and "N8D64" in parts else None
    return None


def peers_of(row, torch):
    name = peer_row(row)
    return [r for r in torch or [] if name and "error" not in r and r.get("us_median") and (r["row"], r["shape"]) == name]


def join(folder, out):
    ours, torch, tests = read(folder / "ours.json"), read(folder / "torch.json"), folder / "tests.txt"
    if ours is None:
        sys.exit("gpu_report: ours.json is missing: bench_gpu_ops did not finish")
    rows = ours["rows"]
    for row in rows:
        if "error" in row or row.get("forced"):
            continue
        peers = peers_of(row, torch)
        graph = [p for p in peers if p["timing"] == "graph"]
        users = [p for p in peers if p not in graph]
        for key, group in (("torch_graph", graph), ("torch_events", users)):
            if group:
                best = min(group, key=lambda p: p["us_median"])
                row[key] = {"us": best["us_median"], "how": best["how"]}
    result = {
        "what": "operators on a GPU beside a plain copy of the same bytes and PyTorch, one run of tools/gpu_check.sh",
        "date": datetime.date.today().isoformat(),
        "gpu": ours["gpu"],
        "system": (folder / "gpu.txt").read_text().strip() if (folder / "gpu.txt").exists() else "",
        "command": "tools/gpu_check.sh",
        "sources": hashes(),
        "tests": {op: "passed" if code == "0" else f"failed ({code})" for op, code in map(str.split, tests.read_text().splitlines())} if tests.exists() else "missing",
        "rows": rows,
        "torch": torch if torch is not None else "missing",
        "numerics": {"ours": read(folder / "errors.json") or "missing", "torch": read(folder / "torch_numerics.json") or "missing"},
    }
    result["table"] = summary(rows)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.rename(out)
    table(result)


def sanitizers(folder, out):
    result = read(out)
    if result is None:
        sys.exit(f"gpu_report: {out} is missing: join first")
    for tool in ("memcheck", "racecheck"):
        file = folder / f"{tool}.txt"
        if file.exists():
            result[tool] = {op: "clean" if code == "0" else f"failed ({code})" for op, code in map(str.split, file.read_text().splitlines())}
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.rename(out)


def summary(rows):
    """What docs/benchmarks.md shows: each row that PyTorch was measured for, beside the best of it."""
    table = []
    for r in rows:
        if "error" in r or r["forced"] or "torch_graph" not in r:
            continue
        goal = 90 if r["op"] in ("criterion", "beam_select") or (r["op"], r["direction"]) == ("layer_norm", "backward") else 95
        best = min((r[k] for k in ("torch_graph", "torch_events") if k in r), key=lambda t: t["us"])
        table.append({"order": 500 + len(table), "what": f"`{r['op']}` {r['case']} {r['direction']}", "unit": f"us ({100 * r['of_copy']:.0f} % of copy)",
                      "better": "lower", "frit": round(r["us"], 2), "peer": round(best["us"], 2), "peer_name": f"PyTorch, {best['how']}",
                      "goal": f"{goal} % of copy" if r["op"] != "attention" else "", "readme": False})
    return table


def table(result):
    print(f"{result['gpu']}, {result['date']}")
    print("| operator | case | direction | us (quartiles) | copy us | of copy | PyTorch, graph | as users see it |")
    print("|---|---|---|---|---|---|---|---|")
    for r in result["rows"]:
        if "error" in r:
            print(f"| {r['op']} | {r['case']} | | failed: {r['error']} | | | | |")
        elif not r["forced"]:
            peer = lambda k: f"{r[k]['us']:.1f} ({r[k]['how']}, {r[k]['us'] / r['us']:.2f}x)" if k in r else "-"
            print(f"| {r['op']} | {r['case']} | {r['direction']} | {r['us']:.2f} ({r['us_q1']:.2f}-{r['us_q3']:.2f}) | {r['copy_us']:.2f} | "
                  f"{100 * r['of_copy']:.0f} % | {peer('torch_graph')} | {peer('torch_events')} |")


def stale(result):
    now, then = hashes(), result.get("sources", {})
    changed = [op for op in now if now[op] != then.get(op)]
    if changed:
        print(f"not checked on a GPU since their last change ({result.get('date')}, {result.get('gpu')}): {', '.join(changed)}")
    else:
        print(f"all operators are as they were checked on {result.get('gpu')}, {result.get('date')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("join", "sanitizers"):
        p = commands.add_parser(name)
        p.add_argument("--results", type=pathlib.Path, required=True)
        p.add_argument("--out", type=pathlib.Path, required=True)
    for name in ("table", "stale"):
        commands.add_parser(name).add_argument("file", type=pathlib.Path)
    a = parser.parse_args()
    if a.command == "join":
        join(a.results, a.out)
    elif a.command == "sanitizers":
        sanitizers(a.results, a.out)
        return
    if not a.file.exists():
        print(f"{a.file} is not there: no operator was checked on a GPU yet")
        return
    (table if a.command == "table" else stale)(json.loads(a.file.read_text()))


main()
