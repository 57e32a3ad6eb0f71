#!/usr/bin/env python3
"""Peer: PyTorch's time for every operator of Frit's GPU operator table, on one NVIDIA GPU.

usage: torch_ops.py [--out FILE.json] [--rows REGEX] [--budget-seconds 240] [--device cuda|cpu] [--small] [--list] [--no-compile | --compile-only]
--rows selects among the lines that --list prints. --compile-only times nothing: it compiles the rows of torch.compile in several processes at once, so that a
later run finds them in inductor's cache (TORCHINDUCTOR_CACHE_DIR). --device cpu --small runs the same rows at tiny shapes without a GPU, to test this script.

Each row is timed eagerly and, the table's own rows, by torch.compile (default mode, dynamic=False, fullgraph=True), and each of these in two ways:
  events  as users see it: event pairs around a few back-to-back calls, host and all
  graph   replays of a CUDA graph of at least 10 calls, which leaves the host out
Calls rotate over sets of inputs and outputs that hold at least 256 MB together, so that none of a call's data is still in the L2 cache. Beside each figure
stands a plain copy (copy_ of half the bytes, read and written) timed in the same way, a moment later. Forward runs without autograd's record; backward is
autograd.grad(retain_graph=True) of a recorded forward. `bytes` counts the big tensors as the table does: each input read once and each output written once
(4 bytes an element for bf16 LayerNorm forward, 6 for its backward, ...); no dropout mask, no row or column vectors.

--out is a list of objects, one a figure, rewritten after each row:
  row, shape, dtype   "layer_norm backward", "65536x1024", "bf16"
  group               table: a row of the table; extra: attention, column sums, gradient norm, other forms; awkward: a row at an odd width
  how                 variant and timing: "eager events", "eager graph", "compiled graph", "fused graph", "sort events", ...; also apart as variant, timing
  us_median, us_min, us_q1, us_q3, us_max   microseconds a call over `samples` samples of `calls` calls each
  bytes, copy_us      see above; copy_us is the copy's median
  sets                how many sets of buffers rotate (1: Adam, whose 6 GB pass through the cache by themselves)
  first_call_s        of a variant's first call of this pass: torch.compile's time is in it
  peer, device        versions
or, for what could not be run, row, shape, dtype, group, how and `error`; the other rows go on. A row's process may die or hang (a CUDA error is sticky): rows
run in one worker process, which is killed after 100 s in one row or 15 s past the budget, and started again after the row that broke it.
Order: the table's rows eagerly and compiled, the extra rows, the awkward rows; compiling stops at three quarters of the budget and is taken up
again at the end if time is left. What was not reached is listed with the error "budget spent".
"""
import argparse, collections, contextlib, dataclasses, gc, json, math, os, pathlib, re, signal, statistics, subprocess, sys, time

COLD_BYTES = 256 << 20  # what rotating buffers hold together, at least: several times the 60 MB of an H200's L2
MAX_SETS = 64
GRACE_S, HANGS_S = 15, 100  # a worker is killed so long past the budget, or after so long in one row
BROKEN = 75  # the worker's exit code when its CUDA context is of no more use


# --------------------------------------------------------------------------------------------------------------------------------------- timing


class Device:
    """How things are timed: CUDA events and graphs, or a clock and a plain loop on the CPU (for testing this script only)."""

    def __init__(self, name, small):
        self.name, self.small, self.cuda = name, small, name == "cuda"
        self.windows = 3 if small else 20
        self.replays = 2 if small else 20

    @contextlib.contextmanager
    def stream(self):
        """A stream of its own for a row: a graph's capture, the forward whose backward it captures and all warm-up must share one."""
        if not self.cuda:
            yield
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.synchronize()

    def sync(self):
        if self.cuda:
            torch.cuda.synchronize()

    def sets(self, n_bytes):
        return 2 if self.small else min(MAX_SETS, max(2, math.ceil(COLD_BYTES / max(1, n_bytes))))

    def release(self):
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def timed(self, samples, body):
        """Microseconds of each of `samples` runs of body(), queued without waiting in between; one more run goes ahead so that the queue is never empty."""
        if not self.cuda:
            times = []
            for _ in range(samples):
                begin = time.perf_counter()
                body()
                times.append((time.perf_counter() - begin) * 1e6)
            return times
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
        body()
        marks[0].record()
        for mark in marks[1:]:
            body()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1e3 for a, b in zip(marks, marks[1:])]

    def measure(self, call, sets, timing):
        """call(i) runs the operator on set i. Returns the figures of one record."""
        ring = [None] * sets  # results stay until their set comes round again, so that outputs rotate too
        at = 0

        def once():
            nonlocal at
            ring[at % sets] = call(at % sets)
            at += 1

        begin = time.perf_counter()
        once()
        self.sync()
        first_call_s = time.perf_counter() - begin
        for _ in range(2):
            once()
        self.sync()
        begin = time.perf_counter()
        for _ in range(3):
            once()
        self.sync()
        estimate_us = max(0.5, (time.perf_counter() - begin) / 3 * 1e6)

        if timing == "events":
            calls = 2 if self.small else max(1, min(10, int(5e5 / self.windows / estimate_us)))

            def window():
                for _ in range(calls):
                    once()

            times = self.timed(self.windows, window)
        else:
            # A graph's start costs a few microseconds: small operators get more calls, about a millisecond of them.
            calls = 4 if self.small else max(10, min(60, math.ceil(1000 / estimate_us)))
            calls = sets * math.ceil(calls / sets)
            if self.cuda:
                times = self.replayed(once, calls)
            else:
                times = self.timed(self.replays, lambda: [once() for _ in range(calls)])
        times = [t / calls for t in times]
        quartiles = statistics.quantiles(times, n=4, method="inclusive")
        return dict(us_median=statistics.median(times), us_min=min(times), us_q1=quartiles[0], us_q3=quartiles[2], us_max=max(times), calls=calls,
                    samples=len(times), sets=sets, first_call_s=first_call_s)

    def replayed(self, once, calls):
        graph = torch.cuda.CUDAGraph()
        self.release()
        gc.disable()  # freeing another graph or event in the middle of a capture would break it
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                for _ in range(calls):
                    once()
        finally:
            gc.enable()
        graph.replay()
        times = self.timed(self.replays, graph.replay)
        graph.reset()
        return times

    def copy(self, n_bytes, timing):
        half = max(512, n_bytes // 2 // 512 * 512)
        sets = self.sets(2 * half)
        pairs = [(torch.randint(0, 256, (half,), dtype=torch.uint8, device=self.name), torch.empty(half, dtype=torch.uint8, device=self.name))
                 for _ in range(sets)]
        return self.measure(lambda i: pairs[i][1].copy_(pairs[i][0]), sets, timing)["us_median"]

    def usable(self):
        """Whether the process can still run the next row: not after an illegal access, nor with a capture left half open."""
        if not self.cuda:
            return True
        try:
            with self.stream():
                x = F.dropout(torch.randn(64, device="cuda"), 0.5, True)
                return math.isfinite(x.sum().item())
        except Exception:
            return False


# ----------------------------------------------------------------------------------------------------------------------------------------- rows


@dataclasses.dataclass
class Pass:
    """What one figure is of. call(i) runs it on set i; graph_call, if other, is what a graph captures."""
    name: str
    bytes: int
    sets: int
    call: object
    graph_call: object = None


@dataclasses.dataclass
class Job:
    row: str  # of its passes the first word(s); a pass's name is added
    shape: str
    dtype: str
    group: str
    variant: str
    passes: list  # their names: what an error is recorded for
    run: object  # run(device, variant) yields each Pass in turn

    def label(self):
        return f"{self.group}: {self.row} {'|'.join(p for p in self.passes if p)} {self.shape} {self.dtype} {self.variant}"


def compiled(variant, f):
    if variant != "compiled":
        return f
    torch._dynamo.reset()
    return torch.compile(f, dynamic=False, fullgraph=True)


def differentiable(f, make, wrt, forward_bytes, backward_bytes):
    """f(*make()) forward and backward; wrt are the arguments that get gradients."""

    def run(device, variant):
        g = compiled(variant, f)
        sets = device.sets(min(forward_bytes, backward_bytes) or backward_bytes)
        data = [make() for _ in range(sets)]

        def forward(i):
            with torch.no_grad():
                return g(*data[i])

        if forward_bytes:
            yield Pass("forward", forward_bytes, sets, forward)
        for d in data:
            for j in wrt:
                d[j].requires_grad_()
        begin = time.perf_counter()
        outs = [g(*d) for d in data]
        device.sync()
        recorded_s = time.perf_counter() - begin
        dys = [torch.randn_like(o) for o in outs]

        def backward(i):
            return torch.autograd.grad(outs[i], [data[i][j] for j in wrt], dys[i], retain_graph=True)

        step = Pass("backward", backward_bytes, sets, backward)
        step.recorded_s = recorded_s  # the forward with autograd's record is a compilation of its own
        yield step

    return run


def plain(make_call, make, n_bytes, name=""):
    """make_call(f of the variant) gives call(*inputs); one pass."""

    def run(device, variant):
        call = make_call(variant)
        sets = device.sets(n_bytes)
        data = [make() for _ in range(sets)]
        yield Pass(name, n_bytes, sets, lambda i: call(*data[i]))

    return run


def transformer_big(H=1024, ffn=4096, V=32768):
    """The 193 tensors of Transformer-big with q, k and v (of cross attention k and v) joined: 210M numbers."""
    linear = lambda o, i: [(o, i), (o,)]
    norm = [(H,), (H,)]
    attention = linear(3 * H, H) + linear(H, H) + norm
    cross = linear(H, H) + linear(2 * H, H) + linear(H, H) + norm
    feed = linear(ffn, H) + linear(H, ffn) + norm
    return [(V, H)] + (attention + feed) * 6 + (attention + cross + feed) * 6


def adam(shapes, dtype, n_bytes):

    def run(device, variant):
        params = [torch.nn.Parameter(torch.randn(s, device=device.name, dtype=dtype)) for s in shapes]
        for p in params:
            p.grad = torch.randn_like(p)

        def steps(**options):
            return torch.optim.Adam(params, lr=1e-4, betas=(0.9, 0.98), eps=1e-9, foreach=variant == "foreach", fused=variant == "fused", **options)

        # In a graph the step count has to be on the device, which is an option of its own; users without graphs do not set it.
        eager = steps()
        in_graph = steps(capturable=True) if device.cuda else eager
        yield Pass("", n_bytes, 1, lambda i: eager.step(), lambda i: in_graph.step())

    return run


def all_jobs(device):
    """Every job, in the order of the table."""
    d, bf16 = device.name, torch.bfloat16
    n = (lambda full, tiny: tiny) if device.small else (lambda full, tiny: full)
    rnd = lambda *shape, dtype=bf16: torch.randn(*shape, device=d, dtype=dtype)
    ids = lambda V, *shape: torch.randint(0, V, shape, device=d)
    jobs = []

    def add(group, row, shape, passes, run, variants=("eager", "compiled"), dtype="bf16"):
        for variant in variants:
            if variant != "compiled" or group == "table":
                jobs.append(Job(row, shape, dtype, group, variant, passes, run))

    both = ["forward", "backward"]
    p_drop = 0.1

    def layer_norm(group, rows, cols):
        e = rows * cols
        add(group, "layer_norm", f"{rows}x{cols}", both,
            differentiable(lambda x, g, b: F.layer_norm(x, (cols,), g, b), lambda: [rnd(rows, cols), rnd(cols), rnd(cols)], (0, 1, 2), 4 * e, 6 * e))

    def softmax_dropout(group, B, N, L, cols):
        e = B * N * L * cols
        add(group, "softmax_dropout", f"{B}x{N}x{L}x{cols}", both,
            differentiable(lambda x: F.dropout(F.softmax(x, -1), p_drop, True), lambda: [rnd(B, N, L, cols)], (0,), 4 * e, 6 * e))

    def bias_dropout_residual(group, rows, cols):
        e = rows * cols
        add(group, "bias_dropout_residual", f"{rows}x{cols}", both,
            differentiable(lambda x, b, r: F.dropout(x + b, p_drop, True) + r, lambda: [rnd(rows, cols), rnd(cols), rnd(rows, cols)], (0, 1, 2), 6 * e,
                           4 * e))

    def bias_dropout_residual_norm(group, rows, cols):
        e = rows * cols
        add(group, "bias_dropout_residual_norm", f"{rows}x{cols}", both,
            differentiable(lambda x, b, r, g, beta: F.layer_norm(F.dropout(x + b, p_drop, True) + r, (cols,), g, beta),
                           lambda: [rnd(rows, cols), rnd(cols), rnd(rows, cols), rnd(cols), rnd(cols)], (0, 1, 2, 3, 4), 8 * e, 8 * e))

    def bias_gelu_dropout(group, rows, cols, approximate="tanh"):
        e = rows * cols
        add(group, "bias_gelu_dropout" if approximate == "tanh" else "bias_gelu_erf_dropout", f"{rows}x{cols}", both,
            differentiable(lambda x, b: F.dropout(F.gelu(x + b, approximate=approximate), p_drop, True), lambda: [rnd(rows, cols), rnd(cols)], (0, 1),
                           4 * e, 6 * e))

    def criterion(group, rows, V, variants=("eager", "compiled")):

        def make_call(variant):
            # "bf16" leaves the logits as they are; its loss and its log-softmax are rounded to 16 bits. The others work in fp32, as autocast does.
            f = compiled(variant, lambda x, y: F.cross_entropy(x if variant == "bf16" else x.float(), y, label_smoothing=0.1))

            def call(x, y):
                loss = f(x, y)
                return loss.detach(), torch.autograd.grad(loss, x)

            return call

        add(group, "criterion", f"{rows}x{V}", ["forward+backward"],
            plain(make_call, lambda: [rnd(rows, V).requires_grad_(), ids(V, rows)], 4 * rows * V, "forward+backward"), variants)

    def embedding(group, B, L, H, V, equal=False):
        e, scale = B * L * H, math.sqrt(H)
        f = lambda w, i, p: F.dropout(F.embedding(i, w) * scale + p, p_drop, True)
        make = lambda: [rnd(V, H), torch.full((B, L), V // 3, device=d) if equal else ids(V, B, L), rnd(L, H)]
        add(group, "embedding_equal_ids" if equal else "embedding", f"{B * L}x{H} V{V}", both[equal:],
            differentiable(f, make, (0,), 0 if equal else 4 * e, 2 * e + 2 * V * H))

    def beam_step(group, rows, V, variants=("eager", "compiled")):
        k = 4  # beams; 2k candidates a sentence

        def make_call(variant):
            if variant == "sort":
                return lambda x: [t[:, :2 * k] for t in torch.log_softmax(x, -1).view(rows // k, -1).sort(-1, descending=True)]
            return compiled(variant, lambda x: torch.log_softmax(x, -1).view(rows // k, -1).topk(2 * k, -1))

        def on(x, call):
            with torch.no_grad():
                return call(x)

        def make(variant):
            call = make_call(variant)
            return lambda x: on(x, call)

        add(group, "beam_step", f"{rows}x{V}", [""], plain(make, lambda: [rnd(rows, V, dtype=torch.float32)], 4 * rows * V), variants, "f32")

    def attention(B, N, L, D, causal):
        e, shape, row = B * N * L * D, f"{B}x{N}x{L}x{D}", "attention_causal" if causal else "attention"
        backends = dict(flash=SDPBackend.FLASH_ATTENTION, efficient=SDPBackend.EFFICIENT_ATTENTION, cudnn=SDPBackend.CUDNN_ATTENTION)

        def f_of(variant):

            def f(q, k, v):
                with sdpa_kernel(backends[variant]) if variant in backends else contextlib.nullcontext():
                    return F.scaled_dot_product_attention(q, k, v, dropout_p=p_drop, is_causal=causal)

            return f

        make = lambda: [rnd(B, N, L, D) for _ in range(3)]

        def run(device, variant):
            yield from differentiable(f_of(variant), make, (0, 1, 2), 8 * e, 16 * e)(device, variant)

        def make_step(variant):
            f = f_of(variant)

            def step(q, k, v, dy):
                return torch.autograd.grad(f(q, k, v), (q, k, v), dy)

            return step

        make_all = lambda: [t.requires_grad_() for t in make()] + [rnd(B, N, L, D)]
        variants = ("eager", "flash", "efficient", "cudnn") if device.cuda else ("eager",)  # eager: the backend that PyTorch chooses
        add("extra", row, shape, both, run, variants)
        add("extra", row, shape, ["forward+backward"], plain(make_step, make_all, 24 * e, "forward+backward"), variants)

    def column_sum(group, rows, cols):
        add(group, "column_sum", f"{rows}x{cols}", [""], plain(lambda variant: lambda x: x.sum(0), lambda: [rnd(rows, cols)], 2 * rows * cols), ("eager",))

    def gradient_norm():
        shapes = transformer_big(*n((1024, 4096, 32768), (16, 32, 40)))
        count = sum(math.prod(s) for s in shapes)

        def make_call(variant):
            if variant == "flat":
                return lambda *gradients: torch.linalg.vector_norm(gradients[0], dtype=torch.float32)
            return lambda *gradients: torch.nn.utils.get_total_norm(gradients)

        add("extra", "gradient_norm", f"{len(shapes)} tensors", [""], plain(make_call, lambda: [rnd(*s) for s in shapes], 2 * count), ("foreach",))
        add("extra", "gradient_norm", "1 tensor", [""], plain(make_call, lambda: [rnd(count)], 2 * count), ("flat",))

    def optimizer():
        shapes = transformer_big(*n((1024, 4096, 32768), (16, 32, 40)))
        count = sum(math.prod(s) for s in shapes)
        assert len(shapes) == 193 and (device.small or 209e6 < count < 211e6)
        shape = f"{len(shapes)} tensors {count}"
        # The second row's bytes are those of a 16-bit workspace with fp32 moments; PyTorch's, moments in bf16 too, moves 14 a parameter.
        add("table", "adam", shape, [""], adam(shapes, torch.float32, 28 * count), ("fused", "foreach", "loop"), "f32")
        add("table", "adam_16bit", shape, [""], adam(shapes, bf16, 22 * count), ("fused",))

    # The table.
    norms = [(n(65536, 24), n(1024, 32)), (n(32768, 16), n(768, 24)), (n(16384, 8), n(4096, 64))]
    scores = [(n(8, 2), n(16, 3), n(512, 16)), (n(4, 1), n(16, 3), n(2048, 32))]
    rows, H, V = n(65536, 24), n(1024, 32), n(32768, 96)
    criteria = [(n(4096, 8), V), (n(16384, 12), n(50304, 128))]
    beams = [(n(512, 8), n(50304, 128)), (n(2048, 16), V)]
    B, L = n(16, 2), n(1024, 12)
    for r, c in norms:
        layer_norm("table", r, c)
    for b, heads, l in scores:
        softmax_dropout("table", b, heads, l, l)
    bias_dropout_residual("table", rows, H)
    bias_dropout_residual_norm("table", rows, H)
    bias_dropout_residual_norm("table", n(4096, 16), n(512, 32))
    bias_gelu_dropout("table", rows, H)
    for r, v in criteria:
        criterion("table", r, v)
    embedding("table", B, L, H, V)
    for r, v in beams:
        beam_step("table", r, v)
    optimizer()
    # Beside it.
    embedding("extra", B, L, H, V, equal=True)
    for causal in (False, True):
        attention(n(32, 2), n(8, 2), n(128, 8), n(64, 16), causal)
        attention(n(128, 2), n(8, 2), n(32, 6), n(64, 16), causal)
    column_sum("extra", rows, H)
    gradient_norm()
    for r, v in criteria:
        criterion("extra", r, v, ("bf16",))
    for r, v in beams:
        beam_step("extra", r, v, ("sort",))
    bias_gelu_dropout("extra", rows, H, "none")
    # At widths that leave tails.
    odd = n(50257, 113)
    for add_columns in (1, -1):
        for r, c in norms:
            layer_norm("awkward", r, c + add_columns)
        for b, heads, l in scores:
            softmax_dropout("awkward", b, heads, l, l + add_columns)
        bias_dropout_residual("awkward", rows, H + add_columns)
        bias_gelu_dropout("awkward", rows, H + add_columns)
        embedding("awkward", B, L, H + add_columns, V)
        embedding("awkward", B, L, H + add_columns, V, equal=True)
        column_sum("awkward", rows, H + add_columns)
    for r, _ in criteria:
        criterion("awkward", r, odd)
    for r, _ in beams:
        beam_step("awkward", r, odd)
    embedding("awkward", B, L, H, odd)
    return jobs


# ------------------------------------------------------------------------------------------------------------------------------------ processes


class Store:
    """The records so far and the jobs begun, in files that outlive the worker."""

    def __init__(self, out):
        self.out, self.state = pathlib.Path(out), pathlib.Path(out + ".state")
        self.records, self.begun = [], []

    def load(self):
        if self.state.exists():
            kept = json.loads(self.state.read_text())
            self.records, self.begun = kept["records"], kept["begun"]
        return self

    def save(self):
        lines = ",\n".join(json.dumps(r) for r in self.records)
        for path, text in ((self.state, json.dumps(dict(records=self.records, begun=self.begun))), (self.out, f"[\n{lines}\n]\n")):
            temporary = path.with_name(path.name + ".new")
            temporary.write_text(text)
            os.replace(temporary, path)


def record_of(job, pass_name, timing, **rest):
    row = f"{job.row} {pass_name}" if pass_name else job.row
    how = f"{job.variant} {timing}" if timing else job.variant
    return dict(row=row, shape=job.shape, dtype=job.dtype, group=job.group, how=how, variant=job.variant, timing=timing, **rest)


def message_of(error):
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__  # the first cause: a failed capture ends in a second error that says little
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]


def run_job(device, job, records, peer):
    """Appends the job's records. Returns whether the process may go on."""
    done = set()

    def failed(pass_name, timing, error):
        records.append(record_of(job, pass_name, timing, error=message_of(error), **peer))
        print(f"{records[-1]['row']:34} {job.shape:24} {records[-1]['how']:18} {records[-1]['error']}", flush=True)
        return device.usable()

    try:
        with device.stream():
            for step in job.run(device, job.variant):
                done.add(step.name)
                first_call_s = None
                for timing in ("events", "graph"):
                    try:
                        call = step.graph_call if timing == "graph" and step.graph_call else step.call
                        r = device.measure(call, step.sets, timing)
                        if first_call_s is None:
                            first_call_s = r["first_call_s"] + getattr(step, "recorded_s", 0)
                        copy_us = device.copy(step.bytes, timing)
                    except Exception as error:
                        if not failed(step.name, timing, error):
                            return False
                        continue
                    for key in ("us_median", "us_min", "us_q1", "us_q3", "us_max"):
                        r[key] = round(r[key], 3)
                    r["first_call_s"] = round(first_call_s, 3)
                    records.append(record_of(job, step.name, timing, **r, bytes=step.bytes, copy_us=round(copy_us, 3), **peer))
                    print(f"{records[-1]['row']:34} {job.shape:24} {records[-1]['how']:18} {r['us_median']:10.2f} us ({r['us_min']:.2f}-{r['us_max']:.2f})"
                          f"  copy {copy_us:9.2f}  first {first_call_s:.1f} s", flush=True)
    except Exception as error:
        going = True
        for name in [p for p in job.passes if p not in done] or job.passes[-1:]:
            going = failed(name, "", error) and going
        return going
    return True


def allow_retained_graphs():
    if hasattr(torch._functorch.config, "donated_buffer"):
        torch._functorch.config.donated_buffer = False  # compiled backward would refuse retain_graph


def compile_rows(args):
    """A process of compile_only."""
    device = Device(args.device, args.small)
    allow_retained_graphs()
    for job in selected(args, device):
        begin, error = time.time(), ""
        try:
            with device.stream():
                for step in job.run(device, job.variant):
                    (step.graph_call or step.call)(0)
                    device.sync()
        except Exception as e:
            error = message_of(e)
        print(f"{job.label():90} {time.time() - begin:5.1f} s {error}", flush=True)
        if error and not device.usable():
            return 1
        device.release()
    return 0


def compile_only(args):
    labels = [j.label() for j in selected(args, Device(args.device, args.small)) if j.variant == "compiled"]
    count = min(len(labels), 7, max(1, (os.cpu_count() or 1) // 2))
    command = [sys.executable, os.path.abspath(__file__), "--compile-worker", "--device", args.device] + ["--small"] * args.small
    workers = [subprocess.Popen(command + ["--rows", "^(?:" + "|".join(map(re.escape, labels[i::count])) + ")$"], start_new_session=True) for i in range(count)]
    deadline, codes = time.time() + args.budget_seconds, []
    for worker in workers:
        try:
            codes.append(worker.wait(timeout=max(0.1, deadline - time.time())))
        except subprocess.TimeoutExpired:
            codes.append(None)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    print(f"{len(labels)} rows, {count} processes" + (f", {codes.count(None)} cut off after {args.budget_seconds:g} s" if None in codes else ""))
    return int(any(c != 0 for c in codes))


def work(args, store):
    device = Device(args.device, args.small)
    peer = dict(peer=f"torch {torch.__version__}", device=torch.cuda.get_device_name() if device.cuda else "cpu")
    allow_retained_graphs()
    jobs = selected(args, device)
    if not device.cuda:
        torch.set_num_threads(1)
    if device.cuda:  # the clocks rise
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        for _ in range(200):
            a @ a
        torch.cuda.synchronize()
        del a
    begin = args.deadline - args.budget_seconds
    order = {"table": 0, "extra": 2, "awkward": 3}
    queue = collections.deque(sorted(jobs, key=lambda j: 1 if j.variant == "compiled" else order[j.group]))
    waited = set()
    while queue:
        job = queue.popleft()
        key = job.label()
        if key in store.begun:
            continue
        now = time.time()
        if job.variant == "compiled" and key not in waited and now > begin + 0.75 * args.budget_seconds:
            waited.add(key)
            queue.append(job)
            continue
        if now > args.deadline:
            break  # the supervisor lists the rest
        store.begun.append(key)
        store.save()
        going = run_job(device, job, store.records, peer)
        store.save()
        if not going:
            sys.exit(BROKEN)
        device.release()


def selected(args, device):
    return [j for j in all_jobs(device) if re.search(args.rows, j.label()) and not (args.no_compile and j.variant == "compiled")]


def supervise(args, store):
    """Runs workers until every job was begun or the budget is spent; then fills in what is missing."""
    deadline = time.time() + args.budget_seconds
    command = [sys.executable, os.path.abspath(__file__), "--worker", "--deadline", str(deadline), "--out", args.out, "--rows", args.rows,
               "--budget-seconds", str(args.budget_seconds), "--device", args.device]
    command += ["--small"] * args.small + ["--no-compile"] * args.no_compile
    jobs = {j.label(): j for j in selected(args, Device(args.device, args.small))}
    unstarted = 0
    while True:
        before = len(store.begun)
        started = time.time()
        worker = subprocess.Popen(command, start_new_session=True)
        code = None
        try:
            while code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = worker.wait(timeout=0.5)
                last = max(started, store.state.stat().st_mtime if store.state.exists() else 0)  # a row began or ended
                if code is None and time.time() > deadline + GRACE_S:
                    code = f"was killed {GRACE_S} s past the budget"
                elif code is None and time.time() - last > HANGS_S:
                    code = f"was killed: nothing for {HANGS_S} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)  # also what it started: the compilers of torch.compile
            worker.wait()
        store.load()
        if code == 0:
            break
        if code != BROKEN:  # it died or hung in the job it had begun last
            said = f"the worker {code}" if isinstance(code, str) else f"the worker ended with code {code}"
            print(said, flush=True)
            if len(store.begun) > before:
                job = jobs[store.begun[-1]]
                told = {(r["row"], r["timing"]) for r in store.records if (r["shape"], r["dtype"], r["group"], r["variant"]) ==
                        (job.shape, job.dtype, job.group, job.variant)}
                for name in job.passes:
                    if not any((record_of(job, name, t)["row"], t) in told for t in ("", "graph")):
                        store.records.append(record_of(job, name, "", error=said))
                store.save()  # the next worker begins with these
        unstarted = unstarted + 1 if len(store.begun) == before else 0
        if unstarted == 2 or time.time() > deadline - 10:
            break
    missing = [j for label, j in jobs.items() if label not in store.begun]
    for job in missing:
        for name in job.passes:
            store.records.append(record_of(job, name, "", error="budget spent" if not unstarted else "the worker did not start"))
    store.save()
    store.state.unlink()
    summary(store.records)
    print(f"{len(store.records)} records in {args.out}; {sum('error' in r for r in store.records)} errors; "
          f"{time.time() - deadline + args.budget_seconds:.0f} s of {args.budget_seconds:g}", flush=True)
    return 1 if unstarted or all("error" in r for r in store.records) else 0


def summary(records):
    """The best of each row by graph replay, and what users see of it."""
    rows = collections.OrderedDict()
    for r in records:
        if "error" not in r:
            rows.setdefault((r["group"], r["row"], r["shape"], r["dtype"]), []).append(r)
    print(f"\n{'row':34} {'shape':24} {'as users see':>20} {'by graph':>20} {'copy':>9} {'of copy':>8}")
    for (group, row, shape, dtype), found in sorted(rows.items(), key=lambda kv: ("table", "extra", "awkward").index(kv[0][0])):
        best = {t: min((r for r in found if r["timing"] == t), key=lambda r: r["us_median"], default=None) for t in ("events", "graph")}
        text = {t: f"{b['us_median']:.1f} {b['variant']}" if b else "-" for t, b in best.items()}
        g = best["graph"]
        print(f"{row:34} {shape:24} {text['events']:>20} {text['graph']:>20} " + (f"{g['copy_us']:9.1f} {g['copy_us'] / g['us_median']:8.2f}" if g else ""))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default="torch_ops.json")
    p.add_argument("--rows", default="")
    p.add_argument("--budget-seconds", type=float, default=240)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--small", action="store_true")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--list", action="store_true")
    p.add_argument("--compile-only", action="store_true")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--compile-worker", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = p.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(16, os.cpu_count() or 1)))  # before torch is imported
    global torch, F, sdpa_kernel, SDPBackend
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    if args.list:
        for job in selected(args, Device(args.device, args.small)):
            print(job.label())
        return 0
    if args.worker or args.compile_worker:
        import torch._dynamo, torch._functorch.config
        if args.compile_worker:
            return compile_rows(args)
        work(args, Store(args.out).load())
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch_ops.py: PyTorch finds no GPU; --device cpu --small tests this script", file=sys.stderr)
        return 2
    if args.compile_only:
        return compile_only(args)
    store = Store(args.out)
    store.state.unlink(missing_ok=True)
    return supervise(args, store)


if __name__ == "__main__":
    sys.exit(main())
