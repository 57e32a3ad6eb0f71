#!/usr/bin/env python3
"""Compares Frit's translation with CTranslate2's (fp32, the same model directory and sentences), side by side.

usage: translate_compare.py MODEL SENTENCES [--program build/cpu/bench_translate] [--beams 4,1] [--threads 1,2] [--batch-tokens 1,2048]
       [--sentences 64] [--max-length 256] [--rounds 3] [--out bench/results/translate.json]
Run it with a Python that has ctranslate2, transformers and sentencepiece. Every setting runs
ours, theirs, ours, theirs, ... in fresh processes, `rounds` times; figures are medians. batch-tokens 1: sentences one by one (of these a quarter
of the sentences). For each setting: output tokens a second, start-up time (process start to first translation; for CTranslate2 loading and first
translation, with its import beside it), and how many sentences have the same tokens. To be run on an idle machine.
"""
import argparse, json, pathlib, platform, statistics, subprocess, sys, tempfile, time

HERE = pathlib.Path(__file__).resolve().parent


def run(command):
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    result["process_s"] = time.perf_counter() - begin
    return result


def processor():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def table(about):
    """The rows of README.md and docs/benchmarks.md (tools/readme_numbers.py): the README shows the most threads and the widest beam."""
    m, found = about["model"], []
    name = f"translation, {m['encoder_layers']}+{m['decoder_layers']} layers, H {m['d_model']}, fp32"
    threads, beam = max(r["threads"] for r in about["rows"]), max(r["beam"] for r in about["rows"])
    for i, r in enumerate(about["rows"]):
        how = "a sentence at a time" if r["batch_tokens"] == 1 else f"batches of {r['batch_tokens']:,} tokens"
        found.append(dict(order=20 + i, what=f"{name}, beam {r['beam']}, {how}, {r['threads']} thread{'s' * (r['threads'] > 1)}", unit="tokens/s", better="higher",
                          frit=r["frit"]["tokens_per_s"], peer=r["ctranslate2"]["tokens_per_s"], peer_name=about["peer"], goal="1x",
                          readme=r["threads"] == threads and r["beam"] == beam))
    found.append(dict(order=60, what="start-up to the first translated sentence, the same model", unit="s", better="lower", goal="0.3 s",
                      frit=statistics.median(r["frit"]["startup_s"] for r in about["rows"]),
                      peer=statistics.median(r["ctranslate2"]["startup_s"] for r in about["rows"]), peer_name=about["peer"]))
    return found


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model", type=pathlib.Path)
    p.add_argument("sentences_file", type=pathlib.Path)
    p.add_argument("--program", type=pathlib.Path, default=HERE.parent / "build/cpu/bench_translate")
    p.add_argument("--beams", default="4,1")
    p.add_argument("--threads", default="1,2")
    p.add_argument("--batch-tokens", default="1,2048")
    p.add_argument("--sentences", type=int, default=64)
    p.add_argument("--max-length", type=int, default=256)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=pathlib.Path, default=HERE / "results/translate.json")
    a = p.parse_args()
    lines = a.sentences_file.read_text(encoding="utf-8").splitlines()[:a.sentences]
    numbers = lambda text: [int(x) for x in text.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        t = pathlib.Path(temporary)
        peer = HERE / "peers/ctranslate2_translate.py"
        for batch in numbers(a.batch_tokens):
            text = t / f"text{batch}"
            text.write_text("".join(l + "\n" for l in (lines[:max(1, len(lines) // 4)] if batch == 1 else lines)), encoding="utf-8")
            for beam in numbers(a.beams):
                for threads in numbers(a.threads):
                    common = ["--input", text, "--beam", beam, "--threads", threads, "--batch-tokens", batch, "--max-length", a.max_length, "--repeat", 1]
                    runs = {"frit": [], "ctranslate2": []}
                    for _ in range(a.rounds):
                        runs["frit"].append(run(list(map(str, [a.program, a.model, *common, "--out", t / "ours.json"]))))
                        runs["ctranslate2"].append(run(list(map(str, [
                            sys.executable, peer, a.model, *common, "--converted", t / "ct2", "--out", t / "theirs.json"]))))
                    ours, theirs = (json.loads((t / f).read_text())["outputs"] for f in ("ours.json", "theirs.json"))
                    # At the maximum length ours is forced to end, theirs just stops.
                    cut = lambda hypotheses: hypotheses[0]["tokens"][:a.max_length - 1] if hypotheses else []
                    same = sum(cut(x) == cut(y) for x, y in zip(ours, theirs))
                    middle = lambda who, key: statistics.median(r[key] for r in runs[who])
                    row = dict(beam=beam, threads=threads, batch_tokens=batch, sentences=len(ours), same_output=same)
                    for who in runs:
                        row[who] = {key: round(middle(who, key), 4) for key in ("tokens_per_s", "startup_s", "process_s", "peak_rss_mib", "target_tokens")}
                    row["ctranslate2"]["import_s"] = round(middle("ctranslate2", "import_s"), 4)
                    row["ratio"] = round(row["frit"]["tokens_per_s"] / row["ctranslate2"]["tokens_per_s"], 3)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
        about = dict(what="translation, output tokens a second, medians", peer=runs["ctranslate2"][0]["peer"], processor=processor(),
                     model=json.loads((a.model / "config.json").read_text()), max_length=a.max_length, rounds=a.rounds,
                     date=time.strftime("%Y-%m-%d"), rows=rows)
    about["model"] = {k: about["model"][k] for k in ("d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "vocab_size")}
    about["machine"] = about["processor"]
    about["table"] = table(about)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    new = a.out.with_suffix(".new")
    new.write_text(json.dumps(about, indent=1) + "\n")
    new.rename(a.out)


if __name__ == "__main__":
    main()
