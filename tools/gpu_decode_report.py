#!/usr/bin/env python3
"""Joins what tools/gpu_decode.sh measured: decoding by Frit, by PyTorch's transformers and by CTranslate2 on one GPU, side by side.

gpu_decode_report.py agree --results FOLDER --beam N   counts sentences whose ids differ: GPU against CPU, and against transformers; ends with 1 if any does
gpu_decode_report.py halves --results FOLDER           what 16 bits change, and whether --products rows gives every batch the same; ends with 1 if not
gpu_decode_report.py join --results FOLDER --out bench/results/gpu-decode.json
gpu_decode_report.py --table FILE.json                 prints Markdown tables for docs/benchmarks.md

Times of fixed lengths are medians of whole calls, in ms. Memory of Frit: weights, keys and values, state, temporaries and what the GPU's libraries hold; of
PyTorch: what its allocator had allocated at most.
"""
import argparse, json, os, pathlib, re, sys

GOALS = {"mt-base-32x32-beam4-b1": 8, "mt-base-32x32-beam4-b8": 8.5, "mt-base-32x32-beam4-b32": 10, "mt-base-32x32-beam4-b128": 16, "mt-big-32x32-beam4-b1": 11,
         "mt-big-32x32-beam4-b32": 17}


def read(path, default=None):
    return json.loads(path.read_text()) if path.exists() else default


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)


def lines_of(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else None


def objects(path):
    """All JSON objects of a text, whatever lies between them."""
    text, decoder, at, found = path.read_text(errors="replace") if path.exists() else "", json.JSONDecoder(), 0, []
    while (at := text.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
            found.append(value)
        except ValueError:
            at += 1
    return found


def differing(a, b):
    """Numbers of the lines that differ, from 1. All if the files have not the same number of lines."""
    if len(a) != len(b):
        return list(range(1, max(len(a), len(b)) + 1))
    return [i + 1 for i, (x, y) in enumerate(zip(a, b)) if x != y]


def put(path, row, key):
    rows = [r for r in read(path, []) if r[key] != row[key]]
    write(path, rows + [row])
    print(json.dumps(row))


def agree(a):
    text = a.results / "text"
    gpu, cpu, torch = (lines_of(text / f"{name}_beam{a.beam}") for name in ("gpu", "cpu", "torch"))
    row = {"beam": a.beam}
    if gpu is None:
        sys.exit(f"beam {a.beam}: the GPU's translations are not there")
    if not gpu:
        sys.exit(f"beam {a.beam}: no sentence was translated")
    row["sentences"] = len(gpu)
    for name, other in (("cpu", cpu), ("transformers", torch)):
        if other is not None:
            row[f"differ_from_{name}"] = differing(gpu, other)
    put(a.results / "agree.json", row, "beam")
    sys.exit(any(row.get(f"differ_from_{name}") for name in ("cpu", "transformers")))


def halves(a):
    text, bad = a.results / "text", False
    whole = lines_of(text / "fp32")
    for dtype in ("fp32", "fp16", "bf16"):
        mine, rows, small = (lines_of(text / f"{dtype}{tail}") for tail in ("", "_rows", "_rows_small"))
        if mine is None or whole is None:
            continue
        bleu = objects(a.results / "logs" / f"bleu_{dtype}.log")
        row = {"dtype": dtype, "sentences": len(mine), "differ_from_fp32": len(differing(mine, whole)), "bleu": bleu[-1].get("bleu") if bleu else None}
        if rows is not None and small is not None:
            row["rows_differ_between_batches"] = len(differing(rows, small))
            bad = bad or row["rows_differ_between_batches"] > 0
        put(a.results / "halves.json", row, "dtype")
    sys.exit(bad)


def mib(row):
    return round(sum(row.get(k, 0) for k in ("weights_mib", "cache_mib", "state_mib", "arena_mib", "library_mib")), 1)


def ctranslate2_text(r):
    """The fastest number of workers' figures, with one worker's latency."""
    runs = [found[-1] for path in sorted((r / "logs").glob("ctranslate2_text*.log")) if (found := [o for o in objects(path) if "tokens_per_s" in o])]
    if not runs:
        return None
    best = dict(max(runs, key=lambda run: run["tokens_per_s"]))
    alone = [run for run in runs if run["latency_lines"]]
    for key in ("latency_lines", "latency_ms_p50", "latency_ms_p99"):
        best[key] = alone[0][key] if alone else None
    return {**best, "output_tokens_per_s": best["tokens_per_s"], "all_tokens_per_s": {run["workers"]: run["tokens_per_s"] for run in runs}}


def join(a):
    r = a.results
    result = {"what": "decoding on a GPU, beside PyTorch's transformers and CTranslate2, one run of tools/gpu_decode.sh", "command": "tools/gpu_decode.sh",
              "system": read(r / "machine.json", {})}
    result["date"], result["machine"] = result["system"].get("date", ""), result["system"].get("gpu", "")
    if (r / "tests.txt").exists():
        result["tests"] = {name: "passed" if code == "0" else f"exit code {code}" for name, code in map(str.split, (r / "tests.txt").read_text().splitlines())}
    for name in ("agree", "halves"):
        if (rows := read(r / f"{name}.json")) is not None:
            result[name] = rows
    ours = {row["case"]: row for row in objects(r / "logs" / "rows.log") if "case" in row}
    theirs = {row["case"]: row for row in read(r / "torch_rows.json", [])}
    ctranslate2 = {row["case"]: row for row in read(r / "ctranslate2_rows.json", [])}
    result["rows"] = []
    for case in dict.fromkeys([*ours, *theirs, *ctranslate2]):
        row = {"case": case, "goal_ms": GOALS.get(case), "frit": ours.get(case), "transformers": theirs.get(case), "ctranslate2": ctranslate2.get(case)}
        if row["frit"]:
            row["frit"]["mib"] = mib(row["frit"])
            for peer, times in (("transformers", "times"), ("ctranslate2", "times_ctranslate2")):
                if row[peer] and "ms" in row[peer]:
                    row[times] = round(row[peer]["ms"] / row["frit"]["ms"], 2)
        result["rows"].append(row)
    text = objects(r / "logs" / "text.log")
    err = r / "logs" / "disk.err"
    result["text"] = {"frit": text[-1] if text else None, "disk_to_disk": err.read_text().strip().splitlines()[-1:] if err.exists() else None,
                      "transformers": (read(r / "torch_text.json") or [None])[0], "ctranslate2": ctranslate2_text(r)}
    survivors = objects(r / "logs" / "survivors.log")
    if survivors:
        result["survivors"] = {k: survivors[-1].get(k) for k in ("survivors_mean", "survivors_most", "survivors_rows", "beam", "sentences", "dtype")}
    hars, torch_hars = read(r / "hars.json"), read(r / "torch_hars.json")
    if hars or torch_hars:
        result["hars"] = {"frit": hars, "torch": torch_hars}
    result["table"] = readme_rows(result)
    write(a.out, result)
    print(table(result))


def readme_rows(result):
    """What README.md and docs/benchmarks.md show (tools/readme_numbers.py): the rows with a goal and the text, beside the faster of the peers."""
    rows = []
    for r in result["rows"]:
        f, peers = r["frit"], [(r[name]["ms"], name) for name in ("transformers", "ctranslate2") if r.get(name) and "ms" in r[name]]
        if not f or not r["goal_ms"]:
            continue
        model, lengths, beam, batch = re.fullmatch(r"(\S+)-(\d+x\d+)-beam(\d+)-b(\d+)", r["case"]).groups()
        row = {"order": 40 + len(rows), "what": f"translation on a GPU, {f['dtype']}, {model}, beam {beam}, {batch} sentence{'s' if batch != '1' else ''}, {lengths.replace('x', ' -> ')}",
               "unit": "ms", "better": "lower", "frit": round(f["ms"], 2), "goal": f"{r['goal_ms']} ms", "readme": True}
        if peers:
            ms, name = min(peers)
            row |= {"peer": ms, "peer_name": {"transformers": "transformers", "ctranslate2": "CTranslate2"}[name]}
        rows.append(row)
    f = result["text"].get("frit")
    for title, key, unit, better in (("translation of a test set on a GPU, 3+3 layers, beam 4", "output_tokens_per_s", "output tokens/s", "higher"),
                                     ("one sentence on a GPU, 3+3 layers, beam 4, median", "latency_ms_p50", "ms", "lower")):
        peers = [(peer[key], name) for who, name in (("transformers", "transformers"), ("ctranslate2", "CTranslate2")) if (peer := result["text"].get(who)) and peer.get(key)]
        if f and f.get(key):
            row = {"order": 40 + len(rows), "what": title, "unit": unit, "better": better, "frit": round(f[key], 2), "readme": True}
            if peers:
                row["peer"], row["peer_name"] = (max if better == "higher" else min)(peers)
            rows.append(row)
    return rows


def number(value, form="{:.2f}"):
    return "" if value is None else form.format(value)


def table(result):
    out = []
    if result.get("tests"):
        failed = [k for k, v in result["tests"].items() if v != "passed"]
        out.append(f"tests: {len(result['tests'])} programs and tables, " + (f"failed: {', '.join(failed)}" if failed else "all passed"))
    if result.get("agree"):
        out += ["", "| beam | sentences | fp32: differ from the CPU | from transformers |", "|---|---|---|---|"]
        count = lambda row, name: len(row[f"differ_from_{name}"]) if f"differ_from_{name}" in row else ""
        out += [f"| {r['beam']} | {r['sentences']} | {count(r, 'cpu')} | {count(r, 'transformers')} |" for r in sorted(result["agree"], key=lambda r: r["beam"])]
    if result.get("halves"):
        out += ["", "| dtype | sentences | differ from fp32 | BLEU | --products rows: differ between batch sizes |", "|---|---|---|---|---|"]
        out += [f"| {r['dtype']} | {r['sentences']} | {r['differ_from_fp32']} ({100 * r['differ_from_fp32'] / max(1, r['sentences']):.1f} %) | {number(r['bleu'])} | "
                f"{r.get('rows_differ_between_batches', '')} |" for r in result["halves"]]
    if result.get("rows"):
        out += ["", "| case | Frit, ms | goal | transformers, ms | times | CTranslate2, ms | times | Frit, MiB | transformers, MiB |", "|---|---|---|---|---|---|---|---|---|"]
        for r in result["rows"]:
            f, t, c = r["frit"] or {}, r["transformers"] or {}, r.get("ctranslate2") or {}
            out.append(f"| {r['case']} | {number(f.get('ms'))} | {r['goal_ms'] or ''} | {number(t.get('ms')) or t.get('error', '')} | {number(r.get('times'))} | "
                       f"{number(c.get('ms')) or c.get('error', '')} | {number(r.get('times_ctranslate2'))} | "
                       f"{f.get('mib', '')} | {t.get('peak_mib') or ''} |")
    f, t, c = (result["text"].get(who) for who in ("frit", "transformers", "ctranslate2"))
    if f or t or c:
        f, t, c = f or {}, t or {}, c or {}
        out += ["", "| the test set | Frit | transformers | CTranslate2 |", "|---|---|---|---|"]
        for title, key in (("output tokens/s, all at once", "output_tokens_per_s"), ("one by one, p50, ms", "latency_ms_p50"), ("p99, ms", "latency_ms_p99")):
            out.append(f"| {title} | {number(f.get(key))} | {number(t.get(key))} | {number(c.get(key))} |")
        out.append(f"| GPU memory, MiB | {number(f.get('gpu_mib'))} | {number(t.get('peak_mib'))} | |")
        if result["text"].get("disk_to_disk"):
            out.append(f"\nA long file from disk to disk: {result['text']['disk_to_disk'][0]}")
    if result.get("survivors"):
        s = result["survivors"]
        out.append(f"\nHARS keeps {number(s['survivors_mean'])} logits a row on the mean, {number(s['survivors_most'], '{:.0f}')} at most, of {s['survivors_rows']} rows (beam {s['beam']}).")
    if result.get("hars"):
        out += ["", "| selection | us |", "|---|---|"]
        out += [f"| Frit {r['case']} | {number(r.get('us'))} |" for r in (result["hars"]["frit"] or {}).get("rows", []) if "us" in r and not r["forced"]]
        out += [f"| PyTorch {r['shape']}, {r['how']} | {number(r.get('us_median')) or r.get('error', '')} |" for r in result["hars"]["torch"] or []]
    return "\n".join(out)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", nargs="?", choices=["agree", "halves", "join"])
    p.add_argument("--results", type=pathlib.Path)
    p.add_argument("--beam", type=int)
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--table", type=pathlib.Path)
    a = p.parse_args()
    if a.table:
        print(table(read(a.table)))
    elif not a.what or not a.results:
        p.error("give agree, halves or join with --results, or --table FILE")
    else:
        {"agree": agree, "halves": halves, "join": join}[a.what](a)


if __name__ == "__main__":
    main()
