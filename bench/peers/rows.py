"""Runs the rows of a benchmark in a worker process, each with a time limit, and writes the JSON file after every one.

A compile that does not end, a CUDA error that spoils the process, or a kill from outside costs the row in hand and nothing that was measured before it. The
worker is the same script started with --worker: it reads a row (a JSON object) a line and answers with its records. It is started again after a row that
broke it or ran over, and after one that left memory on the GPU behind. A row is told its limit_s and the
time.time() at which that is over (until), so that it may come to an end with less.
"""
import gc, json, os, pathlib, select, signal, subprocess, sys, tempfile, time

LEFT_MIB = 64  # a worker whose row left more than this allocated is not asked again


def write_json(path, value):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)


class Worker:
    def __init__(self, arguments):
        # A group of its own: the compiler's helper processes end with it.
        self.process = subprocess.Popen([sys.executable, sys.argv[0], *arguments, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.rest = b""

    def ask(self, row, limit_s):
        """Yields the row's answers up to {"end": ...}. Raises TimeoutError, or EOFError if the process ends."""
        self.process.stdin.write(json.dumps(row).encode() + b"\n")
        self.process.stdin.flush()
        end = time.monotonic() + limit_s
        while True:
            while b"\n" not in self.rest:
                left = end - time.monotonic()
                if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                    raise TimeoutError
                piece = os.read(self.process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise EOFError
                self.rest += piece
            line, self.rest = self.rest.split(b"\n", 1)
            answer = json.loads(line)
            yield answer
            if "end" in answer:
                return

    def stop(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def run_rows(rows, out, *, worker_arguments=(), row_s=150, total_s=540, show=lambda record: record):
    """Runs each row (a dict that names it) and returns the list of records, which `out` (optional) holds at any time. A record has the row's keys, and what the
    worker measured or "error"."""
    begin, records, worker = time.monotonic(), [], None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `timeout` leaves no worker on the GPU

    def add(record):
        records.append(record)
        print(json.dumps(show(record)), flush=True)
        if out:
            write_json(out, records)

    try:
        for row in rows:
            left = total_s - (time.monotonic() - begin)
            if left < 3:
                add({**row, "error": "not reached: the time given was over"})
                continue
            limit = min(row_s, left)
            worker = worker or Worker(worker_arguments)
            spoilt = True
            try:
                for answer in worker.ask({**row, "limit_s": limit, "until": time.time() + limit}, limit):
                    if "end" in answer:
                        spoilt = answer["end"] > LEFT_MIB
                    else:
                        add({**row, **answer})
            except TimeoutError:
                add({**row, "error": f"longer than {limit:.0f} s"})
            except (EOFError, BrokenPipeError):
                add({**row, "error": f"the process ended with {worker.process.wait()}"})
            if spoilt:
                worker.stop()
                worker = None
    finally:
        if worker:
            worker.stop()
    return records


def compile_apart(rows, out, *, arguments, seconds):
    """Runs the first steps of each row in a process of its own, all at once, so that the compiler's caches have what the rows need when they are timed. Nothing is
    timed but how long the first step took, while the others compiled too. arguments(row): of this script, for a run of that row alone. Records, which `out`
    (optional) holds at the end: the row's keys, compile_s and at_once (how many processes), or error."""
    begin, running, records = time.monotonic(), [], []
    with tempfile.TemporaryDirectory() as folder:
        for i, row in enumerate(rows):
            path = pathlib.Path(folder) / f"{i}.json"
            command = [sys.executable, sys.argv[0], *arguments(row), "--seconds", str(seconds), "--row-seconds", str(seconds), "--out", str(path)]
            running.append((row, path, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)))
        try:
            for row, path, process in running:
                try:
                    process.wait(max(0.1, seconds + 3 - (time.monotonic() - begin)))
                except subprocess.TimeoutExpired:
                    pass
        finally:
            for _, _, process in running:
                if process.poll() is None:
                    process.terminate()  # it ends its worker
            for _, _, process in running:
                process.wait()
        for row, path, process in running:
            found = json.loads(path.read_text())[-1] if path.exists() else {"error": f"the process ended with {process.returncode}"}
            what = {"error": found["error"]} if "error" in found else {"compile_s": found["first_step_s"], "at_once": len(rows)}
            records.append({**row, **what})
            print(json.dumps(records[-1]), flush=True)
    if out:
        write_json(out, records)
    return records


def serve(measure, release):
    """The worker's side. measure(row) yields records; release() frees what a row made and returns the MiB still allocated. Programs that print do so to
    standard error: standard output carries the answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    broken = False
    for line in sys.stdin:
        row = json.loads(line)
        try:
            for record in measure(row):
                answers.write(json.dumps(record) + "\n")
        except Exception as error:  # any: the next row goes on
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}) + "\n")
            broken = True
        gc.collect()
        answers.write(json.dumps({"end": 1e9 if broken else release()}) + "\n")
