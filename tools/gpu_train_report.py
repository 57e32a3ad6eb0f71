#!/usr/bin/env python3
"""Joins what tools/gpu_train.sh measured: training steps of Frit and of PyTorch on one GPU, side by side.

gpu_train_report.py add --results FOLDER --group GROUP --case CASE --log FILE --code N [--lengths FILE] [--warm N] [--variant NAME]
    Takes the JSON object that `frit bench step` printed last into FILE and puts it into FOLDER/ours.json. --lengths: the batches it ran
    (bench/peers/make_batches.py), from which real tokens are counted. A run that failed (N not 0) is kept with its last line as the error.
gpu_train_report.py machine --results FOLDER [--frit PROGRAM]
    Writes FOLDER/machine.json: GPU, driver, versions, date. What the folder holds is one run.
gpu_train_report.py join --results FOLDER [FOLDER ...] --out bench/results/gpu-train.json
    Folders of several runs may be joined: where two have the same case, the later one's stands, and each row says whether both sides come from one run.
gpu_train_report.py --table FILE.json
    Prints Markdown tables for docs/benchmarks.md.

Times are milliseconds a step (forward, backward, update). fixed, sweep: sentences of one length; the median of all steps. real, memory: the mean over the same
batches, and where the peer ran fewer of them, scaled by their real tokens. Memory of Frit: parameters and optimizer + arena + what the GPU's libraries hold. Of
PyTorch: what its allocator had allocated at most, and what it had reserved.
"""
import argparse, datetime, json, os, pathlib, re, statistics, subprocess, sys

GROUPS = ("fixed", "sweep", "real", "memory")  # Frit beside PyTorch
BREAKDOWN = "breakdown"  # Frit with one thing switched off at a time
FIRST = "first"  # Frit's first step with what timing found before
NOT_REACHED = 75  # exit code of a row that there was no time for
# Goals of a step: ms, MiB.
GOALS = {
    "mt-base-128x32": (4.6, 1600), "mt-base-512x32": (15, 4300), "mt-big-128x32": (11.7, 3950), "mt-big-512x32": (42, 8400),
    "mt-base-real-4096": (4.5, None), "mt-base-real-16384": (12, None), "mt-big-real-4096": (10, None), "mt-big-real-16384": (34, None),
}


def read(path, default):
    return json.loads(path.read_text()) if path.exists() else default


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)


def last_object(text):
    """The last JSON object of a text that may have other lines around it; None if there is none."""
    decoder, found, at = json.JSONDecoder(), None, 0
    while (at := text.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
            found = value
        except ValueError:
            at += 1
    return found


def add(a):
    text = a.log.read_text(errors="replace") if a.log.exists() else ""
    row = last_object(text) if a.code == 0 else None
    if row is None or "ms_per_step" not in row:
        lines = [line for line in text.splitlines() if line.strip()]
        row = {"error": lines[-1][:300] if a.code == NOT_REACHED and lines else f"exit code {a.code}: {lines[-1][:300] if lines else 'no output'}"}
    row = {**row, "group": a.group, "case": a.case, "command": a.command} | ({"variant": a.variant} if a.variant else {})
    if a.lengths and "error" not in row:
        batches = json.loads(a.lengths.read_text())
        steps = int(row.get("steps", len(row.get("ms", [])) or len(batches)))
        timed = [batches[(a.warm + i) % len(batches)] for i in range(steps)]
        row["tokens"] = sum(s + t for b in timed for s, t in b)
        row["batch_tokens"] = [sum(s + t for s, t in b) for b in timed]
    path = a.results / "ours.json"
    rows = read(path, [])
    same = lambda r: (r["group"], r["case"], r.get("variant", "")) == (a.group, a.case, a.variant)
    # What an earlier call measured stays where this one had no time.
    if a.code != NOT_REACHED or not any(same(r) for r in rows):
        write(path, [r for r in rows if not same(r)] + [row])
    shown = {k: v for k, v in row.items() if k not in ("ms", "batch_tokens", "command", "group")}
    print(json.dumps(shown))
    sys.exit("error" in row)


def output(command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine(a):
    path = a.results / "machine.json"
    gpu = output(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,uuid", "--format=csv,noheader"]).splitlines()
    name, driver, memory, uuid = (gpu[0].split(", ") if gpu else ["", "", "", ""])
    if read(path, {}).get("uuid", "") == uuid and path.exists():
        return  # more stages of the same run
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version() if torch.cuda.is_available() else '')"
    now = datetime.datetime.now()
    write(path, {"gpu": name, "driver": driver, "memory": memory, "uuid": uuid, "date": now.date().isoformat(), "run": now.isoformat(timespec="seconds"),
                 "torch_cuda_cudnn": output([sys.executable, "-c", code]), "frit": output([a.frit, "--version"]) if a.frit else "",
                 "clocks": output(["nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,temperature.gpu,power.limit", "--format=csv,noheader"])})


def mean_ms(row):
    """Of a row over batches that differ: the mean of its steps, or else what its tokens a second of the whole time say."""
    if row.get("ms"):
        return statistics.mean(row["ms"])
    if row.get("total_tokens_per_s") and row.get("tokens"):
        return 1e3 * row["tokens"] / row["steps"] / row["total_tokens_per_s"]
    return row["ms_per_step"]


def ours_mib(row):
    parts = [row[k] for k in ("workspace_mib", "arena_mib", "library_mib") if isinstance(row.get(k), (int, float))]
    return sum(parts) if len(parts) > 1 else row.get("peak_mib")


def brief(row):
    keys = ("variant", "precision", "parameters", "steps", "ms_per_step", "ms_min", "ms_q1", "ms_q3", "ms_max", "loop_ms", "forward_ms", "backward_ms", "update_ms",
            "floor_ms", "tokens", "tokens_per_s", "fill", "first_step_s", "warm_s", "products_tuned", "free_first_mib", "free_last_mib", "workspace_mib", "arena_mib", "library_mib", "peak_mib", "reserved_mib", "loss",
            "peer", "device", "run", "command", "error")
    return {k: row[k] for k in keys if k in row}


def our_figures(row, group):
    if "error" in row:
        return brief(row)
    r = brief(row)
    ms = sorted(row.get("ms") or [])
    if ms:
        at = lambda share: round(ms[round(share * (len(ms) - 1))], 4)
        r |= dict(ms_min=at(0), ms_q1=at(0.25), ms_q3=at(0.75), ms_max=at(1))
    r["ms_per_step"] = round(mean_ms(row) if group in ("real", "memory") else row["ms_per_step"], 4)
    if ours_mib(row) is not None:
        r["mib"] = round(ours_mib(row), 1)
    if row.get("floor_ms"):
        r["of_floor"] = round(row["floor_ms"] / r["ms_per_step"], 3)
    return r


def their_ms(peer, ours, group):
    """The peer's ms for the batches that ours ran."""
    ms = peer["ms_per_step"]
    if group in ("real", "memory") and ours and ours.get("tokens") and peer.get("tokens"):
        ms = ms * (ours["tokens"] / ours["steps"]) / (peer["tokens"] / peer["steps"])
    return ms


def join_rows(folders):
    ours, theirs, machines = {}, {}, []
    for folder in folders:
        m = read(folder / "machine.json", {})
        machines.append(m)
        stamp = lambda row: {**row, "run": m.get("run", str(folder))}
        for row in read(folder / "ours.json", []):
            if row["group"] in GROUPS and ("error" not in row or (row["group"], row["case"]) not in ours):
                ours[row["group"], row["case"]] = stamp(row)
        for group in GROUPS:
            for row in read(folder / f"torch_{group}.json", []):
                key = (group, row["case"], row["variant"])
                if "error" not in row or key not in theirs:
                    theirs[key] = stamp(row)
    cases = list(dict.fromkeys([(g, c) for g in GROUPS for (group, c) in ours if group == g] + [(g, c) for g in GROUPS for (group, c, _) in theirs if group == g]))
    rows = []
    for group, case in cases:
        mine = ours.get((group, case))
        peers = [row for (g, c, _), row in theirs.items() if (g, c) == (group, case)]
        row = {"group": group, "case": case, "frit": our_figures(mine, group) if mine else None, "torch": [brief(p) for p in peers]}
        good = [p for p in peers if "error" not in p]
        if good:
            best = min(good, key=lambda p: their_ms(p, mine, group))
            row["best"] = {"variant": best["variant"], "precision": best.get("precision"), "ms": round(their_ms(best, mine, group), 4), "peak_mib": best.get("peak_mib"),
                           "reserved_mib": best.get("reserved_mib"), "first_step_s": best.get("first_step_s"), "run": best["run"]}
            if mine and "error" not in mine:
                row["ratio"] = round(row["best"]["ms"] / row["frit"]["ms_per_step"], 3)
                row["same_run"] = mine["run"] == best["run"]
                if mine.get("parameters") and best.get("parameters") and mine["parameters"] != best["parameters"]:
                    row["remark"] = f"the models differ: {mine['parameters']} and {best['parameters']} parameters"
        if group == "memory":
            row["over_steps"] = {"torch": [{"variant": p["variant"], **p["memory"]} for p in good if "memory" in p]}
        rows.append(row)
    return rows, machines


def breakdown_rows(folders):
    """Each variant beside the one that has nothing switched off, of the same run."""
    found = {}
    for folder in folders:
        run = read(folder / "machine.json", {}).get("run", str(folder))
        rows = [r for r in read(folder / "ours.json", []) if r["group"] == BREAKDOWN]
        whole = {r["case"]: our_figures(r, group_of(r)) for r in rows if r["variant"] == "as-is" and "error" not in r}
        for r in rows:
            figures = our_figures({**r, "run": run}, group_of(r))
            if r["case"] in whole and "error" not in r:
                figures["times"] = round(figures["ms_per_step"] / whole[r["case"]]["ms_per_step"], 3)
            found[r["case"], r["variant"]] = {"case": r["case"], "off": r["variant"], "frit": figures}
    return list(found.values())


def first_steps(folders):
    """Seconds from making the model to the end of the first step: Frit with everything timed anew and with what timing found before; PyTorch while its compiler's
    cache was empty (all rows compiling at once), and with the cache."""
    found = {}
    for folder in folders:
        row = lambda case: found.setdefault(case, {"case": case, "torch": []})
        rows = [r for r in read(folder / "ours.json", []) if r.get("first_step_s")]
        for r in rows:
            if r["group"] == FIRST:
                row(r["case"])["known_s"] = r["first_step_s"]
            elif r["group"] in ("fixed", "sweep", "real") and r.get("products_tuned"):
                row(r["case"])["timed_anew_s"] = r["first_step_s"]
        # gpu_train.sh has all groups compile at the same time.
        at_once = sum(len(read(folder / f"torch_compile_{group}.json", [])) for group in ("fixed", "sweep", "real"))
        for group in ("fixed", "sweep", "real"):
            compiled = {(r["case"], r["variant"]): r for r in read(folder / f"torch_compile_{group}.json", [])}
            timed = {(r["case"], r["variant"]): r for r in read(folder / f"torch_{group}.json", [])}
            for key in {**compiled, **timed}:
                c, t = compiled.get(key, {}), timed.get(key, {})
                figures = {"compile_s": c.get("compile_s"), "at_once": at_once if "compile_s" in c else None, "first_step_s": t.get("first_step_s"), "error": c.get("error") or t.get("error")}
                row(key[0])["torch"].append({"variant": key[1], **{k: v for k, v in figures.items() if v is not None}})
    return list(found.values())


def group_of(row):
    return "real" if "-real-" in row["case"] else "fixed"


def title(case):
    model, rest = re.match(r"(mt-\w+?)-(.*)", case).groups()
    if rest.startswith("real-"):
        return f"{model}, real lengths, {int(rest[5:]):,} tokens a batch"
    sentences, length = rest.split("x")
    return f"{model}, {sentences} sentences of {length} -> {length}"


def table_rows(rows):
    table = []
    for r in rows:
        f, b, group = r["frit"], r.get("best"), r["group"]
        if not f or "error" in f:
            continue
        goal_ms, goal_mib = GOALS.get(r["case"], (None, None))
        order = 30 + GROUPS.index(group) * 2 + len(table) * 0.01
        peer = {"peer": b["ms"], "peer_name": f"PyTorch, {b['variant']}"} if b else {}
        if group != "memory":
            table.append({"order": round(order, 3), "what": f"training step on a GPU, {title(r['case'])}", "unit": "ms", "better": "lower", "frit": f["ms_per_step"], **peer,
                          "goal": f"{goal_ms} ms" if goal_ms else "", "readme": group in ("fixed", "real")})
        least = min((p["peak_mib"] for p in r["torch"] if p.get("variant") == (b or {}).get("variant") and p.get("peak_mib")), default=None)
        if group in ("fixed", "memory") and f.get("mib"):
            what = "its memory" if group == "fixed" else "memory over batches of changing shape"
            table.append({"order": round(order + 0.005, 3), "what": f"{what}, {title(r['case'])}", "unit": "MiB", "better": "lower", "frit": round(f["mib"]),
                          **({"peer": round(least), "peer_name": f"PyTorch's peak, {b['variant']}"} if least else {}), "goal": f"{goal_mib:,} MiB" if goal_mib else "",
                          "readme": group == "fixed" and r["case"] == "mt-base-128x32"})
    return table


def first_rows(first):
    """Rows of the table for the time to the first step; PyTorch's is that of the form that compiles, with its cache as Frit's with what timing found."""
    table = []
    for i, r in enumerate(first):
        for key, peer_key, what, goal, offset in (("timed_anew_s", "compile_s", "nothing timed before", "8 s", 0), ("known_s", "first_step_s", "with its caches", "3 s", 0.005)):
            if not r.get(key):
                continue
            peers = [p for p in r["torch"] if p.get(peer_key) and "compile" in p["variant"]]
            peer = {}
            if peers:
                at_once = f", {peers[0]['at_once']} compiling at once" if key == "timed_anew_s" else ""
                peer = {"peer": peers[0][peer_key], "peer_name": f"PyTorch, {peers[0]['variant']}{at_once}"}
            table.append({"order": round(38 + 0.01 * i + offset, 3), "what": f"time to the first training step, {what}, {title(r['case'])}", "unit": "s", "better": "lower",
                          "frit": round(r[key], 2), **peer, "goal": goal, "readme": r["case"] == "mt-base-128x32" and key == "known_s"})
    return table


def join(a):
    rows, machines = join_rows(a.results)
    broken_down = breakdown_rows(a.results)
    first = first_steps(a.results)
    if not rows and not broken_down:
        sys.exit("gpu_train_report: no results in " + ", ".join(map(str, a.results)))
    machine = next((m for m in machines if m), {})
    result = {"what": "training steps of the encoder-decoder Transformer on one GPU, Frit beside PyTorch", "date": machine.get("date", ""),
              "machine": machine.get("gpu", ""), "command": "tools/gpu_train.sh", "runs": machines, "rows": rows, "first_step": first, "breakdown": broken_down}
    result["table"] = table_rows(rows) + first_rows(first)
    write(a.out, result)
    table(result)


def number(x, digits=2):
    return "" if x is None else f"{x:,.{digits}f}"


def table(result):
    for m in result["runs"]:
        if m:
            print("{}, driver {}, {}; torch, CUDA, cuDNN {}; {}".format(*(m.get(k, "") for k in ("gpu", "driver", "date", "torch_cuda_cudnn", "frit"))))
    for group, heading in (("fixed", "Sentences of one length"), ("sweep", "Tokens a batch"), ("real", "Real lengths"), ("memory", "Memory over batches of changing shape")):
        rows = [r for r in result["rows"] if r["group"] == group]
        if group == "sweep":  # the fixed cases of the same model belong to the curve
            models = {r["case"].rsplit("-", 1)[0] for r in rows}
            rows += [r for r in result["rows"] if r["group"] == "fixed" and r["case"].rsplit("-", 1)[0] in models] if rows else []
            rows.sort(key=lambda r: int(r["case"].rsplit("-", 1)[1].split("x")[0]))
        if not rows:
            continue
        print(f"\n### {heading}\n")
        if group == "memory":
            print("| case | batches | Frit: arena + workspace + libraries, MiB | taken from the GPU after the first step, MiB | PyTorch | batches | allocated at most, MiB | "
                  "reserved at most, MiB | reserved / allocated |")
            print("|---|---|---|---|---|---|---|---|---|")
            for r in rows:
                f = r["frit"] or {}
                for p in r["torch"] or [{}]:
                    share = p["reserved_mib"] / p["peak_mib"] if p.get("peak_mib") and p.get("reserved_mib") else None
                    grown = f["free_first_mib"] - f["free_last_mib"] if "free_last_mib" in f else None
                    print(f"| {r['case']} | {f.get('steps', '')} | {f.get('error') or number(f.get('mib'), 0)} | {number(grown, 0)} | {p.get('variant', '')} | {p.get('steps', '')} | {p.get('error') or number(p.get('peak_mib'), 0)} | "
                          f"{number(p.get('reserved_mib'), 0)} | {number(share)} |")
            continue
        print("| case | Frit ms (quartiles) | forward, backward, update | of floor | MiB | best PyTorch | ms | MiB | ratio | goal ms | others |")
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        for r in rows:
            f, b = r["frit"] or {}, r.get("best") or {}
            spread = f" ({f['ms_q1']:.2f}-{f['ms_q3']:.2f})" if "ms_q1" in f else ""
            phases = ", ".join(number(f.get(k)) for k in ("forward_ms", "backward_ms", "update_ms"))
            others = "; ".join(f"{p['variant']} {p['error'] if 'error' in p else number(p['ms_per_step'])}" for p in r["torch"] if p["variant"] != b.get("variant"))
            ratio = f"{r['ratio']:.2f}x" + ("" if r["same_run"] else " (another run)") if "ratio" in r else ""
            print(f"| {r['case']} | {f.get('error') or number(f.get('ms_per_step'))}{spread} | {phases if f.get('forward_ms') else ''} | "
                  f"{number(f.get('of_floor'))} | {number(f.get('mib'), 0)} | {b.get('variant', '')} | {number(b.get('ms'))} | {number(b.get('peak_mib'), 0)} | {ratio} | "
                  f"{GOALS.get(r['case'], ('',))[0]} | {others}{'; ' + r['remark'] if 'remark' in r else ''} |")
    first_table(result.get("first_step", []))
    breakdown_table(result.get("breakdown", []))


def first_table(rows):
    if not rows:
        return
    print("\n### Seconds to the end of the first step\n")
    print("| case | Frit, everything timed anew | what timing found is there | PyTorch | compiling, with others at once | its cache is there |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        for p in r["torch"] or [{}]:
            compiled = f"{p['compile_s']:.1f} ({p['at_once']} at once)" if "compile_s" in p else p.get("error", "")
            print(f"| {r['case']} | {number(r.get('timed_anew_s'))} | {number(r.get('known_s'))} | {p.get('variant', '')} | {compiled} | {number(p.get('first_step_s'))} |")


def breakdown_table(rows):
    if not rows:
        return
    print("\n### Switched off, one at a time\n")
    print("| case | off | ms | times as it is | MiB | flags |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        f = r["frit"]
        flags = re.sub(r"--tuning \S+ ?", "", f.get("command", "").partition(" --warm ")[2].partition(" ")[2]).strip()
        print(f"| {r['case']} | {r['off']} | {f.get('error') or number(f.get('ms_per_step'))} | {number(f.get('times'), 3)} | {number(f.get('mib'), 0)} | "
              f"{f'`{flags}`' if flags else ''} |")


def main():
    if sys.argv[1:2] == ["--table"]:
        table(json.loads(pathlib.Path(sys.argv[2]).read_text()))
        return
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command_name", required=True)
    c = commands.add_parser("add")
    c.add_argument("--results", type=pathlib.Path, required=True)
    c.add_argument("--group", choices=(*GROUPS, FIRST, BREAKDOWN), required=True)
    c.add_argument("--case", required=True)
    c.add_argument("--log", type=pathlib.Path, required=True)
    c.add_argument("--code", type=int, required=True)
    c.add_argument("--lengths", type=pathlib.Path)
    c.add_argument("--variant", default="")
    c.add_argument("--warm", type=int, default=0)
    c.add_argument("--command", default="")
    c = commands.add_parser("machine")
    c.add_argument("--results", type=pathlib.Path, required=True)
    c.add_argument("--frit")
    c = commands.add_parser("join")
    c.add_argument("--results", type=pathlib.Path, nargs="+", required=True)
    c.add_argument("--out", type=pathlib.Path, required=True)
    a = p.parse_args()
    {"add": add, "machine": machine, "join": join}[a.command_name](a)


main()
