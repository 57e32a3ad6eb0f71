#!/usr/bin/env python3
"""Joins what tools/gpu_check.sh measured into one JSON file and one table; tells which operators changed since.

gpu_report.py join --results FOLDER --out bench/results/gpu-ops.json
    FOLDER holds ours.json and errors.json (bench_gpu_ops), torch.json and torch_numerics.json (bench/peers), tests.txt (test_ops)
    and gpu.txt. What is missing is reported as missing.
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

    simt = [p for p in (ROOT / "frit/simt").glob("*") if p.suffix in (".h", ".cu") and "test" not in p.name]
    result = {"simt": of(simt)}
    for op in operators():
        result[op] = of(p for p in (ROOT / "frit/ops" / op).glob("*") if p.suffix in (".h", ".cc", ".cu") and not re.search(r"_test|cpu|cases", p.name))
    return result


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


# Our benchmark's case -> the peers' row and shape. Peers' rows are named by operator, direction and shape.
def torch_rows(torch):
    best = {}
    for r in torch or []:
        if "error" in r or not r.get("us_median"):
            continue
        best.setdefault((r["row"], json.dumps(r["shape"])), []).append(r)
    return best


def shape_of(case):
    return [int(n) for n in re.split(r"[x]", re.match(r"[0-9x]+", case)[0]) if n] if re.match(r"[0-9]+x", case) else None


def peers_of(row, torch):
    """The peers' records for one of our rows: same operator, direction and shape."""
    names = {
        ("layer_norm", "forward"): "layer_norm forward", ("layer_norm", "backward"): "layer_norm backward",
        ("softmax", "forward"): "softmax_dropout forward", ("softmax", "backward"): "softmax_dropout backward",
        ("bias_dropout_residual", "forward"): "bias_dropout_residual forward", ("bias_dropout_residual", "backward"): "bias_dropout_residual backward",
        ("bias_activation_dropout", "forward"): "bias_gelu_dropout forward", ("bias_activation_dropout", "backward"): "bias_gelu_dropout backward",
        ("criterion", "forward"): "criterion", ("beam_select", "forward"): "beam_step", ("column_sum", "forward"): "column_sum",
        ("embedding", "forward"): "embedding forward", ("embedding", "backward"): "embedding backward",
        ("gradient_norm", "forward"): "gradient_norm",
    }
    name = names.get((row["op"], row["direction"]))
    if not name:
        return []
    shape = shape_of(row["case"])
    found = []
    for r in torch or []:
        if "error" in r or not str(r.get("row", "")).startswith(name):
            continue
        theirs = r.get("shape")
        flat = [n for n in theirs if isinstance(n, int)] if isinstance(theirs, list) else [int(n) for n in re.findall(r"\d+", str(theirs))]
        cells = 1
        for n in flat:
            cells *= n
        ours = 1
        for n in shape or []:
            ours *= n
        if shape and (flat[:2] == shape[:2] or (len(flat) > 2 and flat[-1] == shape[-1] and cells == ours)):
            found.append(r)
    return found


def join(folder, out):
    ours, torch, tests = read(folder / "ours.json"), read(folder / "torch.json"), folder / "tests.txt"
    if ours is None:
        sys.exit("gpu_report: ours.json is missing: bench_gpu_ops did not finish")
    rows = ours["rows"]
    for row in rows:
        if "error" in row or row.get("forced"):
            continue
        peers = peers_of(row, torch)
        graph = [p for p in peers if "graph" in p.get("how", "") or "graph" in str(p.get("timing", ""))]
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
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.rename(out)
    table(result)


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
    p = commands.add_parser("join")
    p.add_argument("--results", type=pathlib.Path, required=True)
    p.add_argument("--out", type=pathlib.Path, required=True)
    for name in ("table", "stale"):
        commands.add_parser(name).add_argument("file", type=pathlib.Path)
    a = parser.parse_args()
    if a.command == "join":
        join(a.results, a.out)
        return
    if not a.file.exists():
        print(f"{a.file} is not there: no operator was checked on a GPU yet")
        return
    (table if a.command == "table" else stale)(json.loads(a.file.read_text()))


main()
