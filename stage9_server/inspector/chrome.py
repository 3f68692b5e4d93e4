"""A trace as Chrome's trace format, to open in ui.perfetto.dev.

python -m stage9_server.inspector.chrome run.jsonl run.trace.json
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from common import cli
from stage9_server.inspector.reader import State, read

HOST, DEVICE, REQUESTS = 1, 2, 3  # as threads of one process


def events(lines: Iterable[dict]) -> list[dict]:
    """Slices of host and device, a bar per request from its arrival to its end, and counters. Times in microseconds."""
    names = {HOST: "host", DEVICE: "device", REQUESTS: "requests"}
    found: list[dict] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}} for tid, name in names.items()
    ]
    state, known, now = State(), set(), 0
    for line in lines:
        state.apply(line)
        for name, (start, end) in line.get("t", {}).items():
            found.append({"ph": "X", "name": name, "pid": 1, "tid": HOST, "ts": start, "dur": end - start})
            now = max(now, end)
        if "device" in line:
            number, start, end = line["device"]
            found.append(
                {"ph": "X", "name": f"step {number}", "pid": 1, "tid": DEVICE, "ts": start, "dur": end - start}
            )
        for uid, prompt_len, _, arrived, *_ in line.get("new", ()):
            if uid not in known:
                known.add(uid)
                args = {"prompt_len": prompt_len}
                found.append(bar("b", uid, arrived) | {"args": args})
        for uid, reason, late in line.get("ends", ()):
            found.append(bar("e", uid, now) | {"args": {"reason": reason, "late": bool(late)}})
        mark = {"ph": "i", "pid": 1, "tid": REQUESTS, "ts": now, "s": "t"}
        found += [mark | {"name": f"retracted {uid}"} for uid in line.get("retracted", ())]
        counts = {"running": len(state.running), "waiting": len(state.waiting)}
        found.append({"ph": "C", "name": "requests", "pid": 1, "ts": now, "args": counts})
    return found


def bar(phase: str, uid: int, moment: int) -> dict:
    return {"ph": phase, "cat": "request", "id": uid, "name": f"request {uid}", "pid": 1, "tid": REQUESTS, "ts": moment}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    _, lines = read(args.trace)
    args.out.write_text(json.dumps({"traceEvents": events(lines)}))
    print(f"wrote {args.out}; open it in https://ui.perfetto.dev")


if __name__ == "__main__":
    cli.run(main)
