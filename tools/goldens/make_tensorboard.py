#!/usr/bin/env python3
"""Writes tests/goldens/tensorboard.json: event records as the tensorboard package itself serialises them.

usage: pip install tensorboard==2.21.0 && python3 tools/goldens/make_tensorboard.py
       python3 tools/goldens/make_tensorboard.py DIR      prints what tensorboard reads from Frit's event files in DIR
"""
import io, json, pathlib, sys

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.record_writer import RecordWriter


def record(event):
    out = io.BytesIO()
    RecordWriter(out).write(event.SerializeToString(deterministic=True))
    return out.getvalue().hex()


def main():
    metadata = summary_pb2.SummaryMetadata(plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"))

    def text(step, tag, value):
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[value.encode()], tensor_shape=tensor_shape_pb2.TensorShapeProto(
            dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)]))
        summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])
        return event_pb2.Event(wall_time=1700000000.25, step=step, summary=summary)

    def scalar(step, tag, value):
        summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=value)])
        return event_pb2.Event(wall_time=1700000000.25, step=step, summary=summary)

    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    golden = {
        "version": record(event_pb2.Event(wall_time=1700000000.25, file_version="brain.Event:2")),
        "session_start": record(event_pb2.Event(wall_time=1700000000.25, step=201, session_log=start)),
        "scalar": record(scalar(300, "train/loss", 3.14159)),
        "scalar_step_0": record(scalar(0, "lr", -1e-30)),
        "scalar_large_step": record(scalar(1 << 40, "x" * 200, float("nan"))),
        "text": record(text(7, "sample", "Größe → 1,5 m")),
        "text_long": record(text(128, "config", "a" * 1000)),
    }
    path = pathlib.Path(__file__).resolve().parents[2] / "tests/goldens/tensorboard.json"
    path.write_text(json.dumps(golden, indent=1) + "\n")
    print(path)


def show(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(directory, size_guidance={"scalars": 0, "tensors": 0}).Reload()
    for tag in events.Tags()["scalars"]:
        print(tag, [(e.step, round(e.value, 6)) for e in events.Scalars(tag)])
    for tag in events.Tags()["tensors"]:
        print(tag, [(e.step, [s.decode() for s in e.tensor_proto.string_val]) for e in events.Tensors(tag)])


show(sys.argv[1]) if len(sys.argv) > 1 else main()
