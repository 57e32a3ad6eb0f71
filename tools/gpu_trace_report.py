#!/usr/bin/env python3
"""Checks and joins what libfrit_trace.so wrote (tools/trace/summary.h says what the fields mean).

gpu_trace_report.py check TRACE.json...    prints each; ends with 1 if in one of them a call waits for the GPU or allocates, a
                                           copy uses pageable memory (it waits, too), or records are missing
gpu_trace_report.py join --results FOLDER --out FILE [--command TEXT]
                                           the same for a folder of tools/gpu_trace.sh, with how long the steps take unwatched
"""
import argparse, datetime, json, pathlib, sys


def problems(trace):
    """What makes a trace fail, in words."""
    if "error" in trace:
        return [trace["error"]]
    found = [f"{what} call {name}: {call['count']} times, {call['us']:.0f} us in all"
             for what in ("synchronising", "allocating") for name, call in trace[what].items()]
    found += [f"copy {copy['name']}: {copy['count']} times" for copy in trace["copies"] if "pageable" in copy["name"]]
    if trace["dropped"] or trace["untimed"]:
        found.append(f"{trace['dropped']} records were dropped, {trace['untimed']} have no times")
    if not trace["calls"] or not trace["kernels"]:
        found.append("no calls or no kernels were recorded")
    return found


def show(name, trace, rows=12):
    print(f"\n### {name}\n")
    if "error" in trace:
        print("error:", trace["error"])
        return
    steps = trace["steps"]
    whole = trace["graph_records"] == "whole"
    print(f"{steps} updates in {trace['wall_us'] / 1e6:.3f} s, {trace['wall_us_per_step'] / 1e3:.3f} ms each; the GPU was busy for {100 * trace['busy_share']:.2f} %"
          + (", each graph taken as one piece" if whole else ""))
    print(f"longest pause {trace['longest_gap_us']:.1f} us; pauses an update: "
          + ", ".join(f"{k} {v['count'] / steps:.1f} ({v['us'] / steps:.1f} us)" for k, v in trace["gaps"].items() if v["count"]))
    print("\n| work | an update | us an update |\n|---|---|---|")
    work = [(label, w) for kind, label in (("graphs", ""), ("kernels", ""), ("copies", "copy "), ("fills", "fill ")) for w in trace[kind]]
    work.sort(key=lambda w: -w[1]["us"])
    for label, w in work[:rows]:
        print(f"| {label}{w['name'][:100]} | {w['count'] / steps:.2f} | {w['us'] / steps:.1f} |")
    if len(work) > rows:
        print(f"| {len(work) - rows} others | {sum(w['count'] for _, w in work[rows:]) / steps:.2f} | {sum(w['us'] for _, w in work[rows:]) / steps:.1f} |")
    for p in trace["idle_between"][:6]:
        print(f"pauses: {p['us'] / steps:.1f} us an update between {p['after'][:70]} and {p['before'][:70]} ({p['count'] / steps:.2f} times)")
    print("calls: " + ", ".join(f"{n} {c['count'] / steps:.2f}" for n, c in sorted(trace["calls"].items(), key=lambda c: -c[1]["count"])[:14]) + " an update")
    if trace["making"]:
        print("graphs made or changed, code loaded: " + ", ".join(f"{n} {c['count']}" for n, c in trace["making"].items()))


def verdict(name, trace):
    found = problems(trace)
    print(f"\n{name}: " + ("no call waits for the GPU, none allocates" if not found else "FAILED\n  " + "\n  ".join(found)))
    return not found


def unwatched_ms(folder, stage, skip, steps):
    """Milliseconds an update of the run without a trace; None if it did not get there."""
    try:
        if stage == "step":
            return json.loads((folder / "step_plain.log").read_text().splitlines()[-1])["ms_per_step"]
        if stage == "decode":
            return json.loads((folder / "decode_plain.log").read_text().splitlines()[-1])["us_per_step"] / 1e3
        lines = [json.loads(line) for line in (folder / "train_plain/metrics.jsonl").read_text().splitlines()]
        at = {m["step"]: m["time_s"] for m in lines if m["kind"] == "train" and skip <= m["step"] <= skip + steps}
        return 1e3 * (at[max(at)] - at[min(at)]) / (max(at) - min(at))
    except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError):
        return None


def read(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as e:
        return {"error": f"{path}: {e}"}


def check(a):
    traces = [(str(path), read(path)) for path in a.traces]
    for name, trace in traces:
        show(name, trace)
    return all([verdict(name, trace) for name, trace in traces])


def join(a):
    stages, good = {}, True
    for stage in ("train", "step", "decode"):
        traces = {how: read(a.results / f"{stage}_{how}.json") for how in ("nodes", "whole") if (a.results / f"{stage}_{how}.json").exists()}
        if not traces:
            continue
        some = next(iter(traces.values()))
        stages[stage] = {"unwatched_ms_per_step": unwatched_ms(a.results, stage, some.get("skip", 0), some.get("steps", 0)), **traces}
        for how, trace in traces.items():
            trace["problems"] = problems(trace)
            show(f"{stage}, {how}", trace)
    if not stages:
        sys.exit(f"gpu_trace_report: no traces in {a.results}")
    print("\n| run | ms unwatched | kernels recorded: ms | busy | graphs recorded: ms | busy | kernels' work / time unwatched |\n|---|---|---|---|---|---|---|")
    for stage, s in stages.items():
        plain, cells = s["unwatched_ms_per_step"], []
        for how in ("nodes", "whole"):
            t = s.get(how, {})
            cells += ["", ""] if "busy_share" not in t else [f"{t['wall_us_per_step'] / 1e3:.3f}", f"{100 * t['busy_share']:.2f} %"]
        # Recording kernels slows them down somewhat: this may come out above 1.
        share = s["nodes"]["busy_us_per_step"] / 1e3 / plain if plain and "busy_share" in s.get("nodes", {}) else None
        if share:
            s["busy_of_unwatched"] = share
        print(f"| {stage} | {'' if plain is None else f'{plain:.3f}'} | {' | '.join(cells)} | {'' if share is None else f'{share:.4f}'} |")
    for stage, s in stages.items():
        for how in ("nodes", "whole"):
            good &= how not in s or verdict(f"{stage}, {how}", s[how])
    gpu = a.results / "gpu.txt"
    result = {"what": "GPU work and calls of the host while training and decoding, by libfrit_trace.so", "date": datetime.date.today().isoformat(),
              "gpu": gpu.read_text().strip() if gpu.exists() else "", "command": a.command, "stages": stages}
    a.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = a.out.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.rename(a.out)
    return good


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command_name", required=True)
    c = commands.add_parser("check")
    c.add_argument("traces", type=pathlib.Path, nargs="+")
    c = commands.add_parser("join")
    c.add_argument("--results", type=pathlib.Path, required=True)
    c.add_argument("--out", type=pathlib.Path, required=True)
    c.add_argument("--command", default="")
    a = p.parse_args()
    sys.exit(0 if {"check": check, "join": join}[a.command_name](a) else 1)


main()
